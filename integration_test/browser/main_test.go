// Package browser tests the pages in a real browser: the live page and the report of a replay.
package browser

import (
	"context"
	_ "embed"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// screenshotsVariable names a folder in which the tests leave pictures of the pages, for people to look at.
const screenshotsVariable = "RATELIMIT_TEST_SCREENSHOTS"

// look is how a page is looked at.
type look struct {
	dark  bool
	width int64 // pixels
}

func (l look) String() string {
	return fmt.Sprintf("%s-%d", map[bool]string{false: "light", true: "dark"}[l.dark], l.width)
}

// inAllLooks runs a test in light and in dark, on a phone and on a screen.
func inAllLooks(t *testing.T, test func(t *testing.T, b *browser, l look)) {
	t.Helper()
	b := start(t)
	for _, dark := range []bool{false, true} {
		for _, width := range []int64{360, 1280} {
			l := look{dark, width}
			t.Run(l.String(), func(t *testing.T) { test(t, b, l) })
		}
	}
}

// browser is a Chromium.
type browser struct{ ctx context.Context } //nolint:containedctx // chromedp keeps its browsers and tabs in contexts

// start starts a Chromium that reaches no other machine.
func start(t *testing.T) *browser {
	t.Helper()
	path := testkit.Program("chromium")
	if path == "" {
		t.Skip("Chromium: install it (Debian: chromium)")
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(path),
		chromedp.NoSandbox, // which Chromium needs to run as root
		chromedp.Flag("host-resolver-rules", "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"),
		chromedp.UserDataDir(t.TempDir()), chromedp.WSURLReadTimeout(testkit.Amply))
	ctx, end := chromedp.NewExecAllocator(context.Background(), options...)
	ctx, _ = chromedp.NewContext(ctx) // Cancel ends it
	t.Cleanup(func() {
		_ = chromedp.Cancel(ctx) // waits until Chromium has ended
		end()
	})
	require.NoError(t, chromedp.Do(ctx))
	return &browser{ctx}
}

// tab is a tab of a browser.
type tab struct {
	t    *testing.T
	look look
	ctx  context.Context //nolint:containedctx // see browser

	mu       sync.Mutex
	requests []string // what the page has asked for
	problems []string // what the page has logged
}

// step is what can be done in a tab.
type step = chromedp.Action[chromedp.Void]

// command returns a step that sends a command to the browser.
func command[P any](command cdp.Command[P, cdp.Empty], params P) step {
	return func(ctx context.Context, _ *chromedp.Target) (chromedp.Void, error) {
		_, err := chromedp.Call(ctx, command, params)
		return chromedp.Void{}, err
	}
}

// open opens a page in a tab of its own, after some steps.
func (b *browser) open(t *testing.T, l look, address string, first ...step) *tab {
	t.Helper()
	ctx, cancel := chromedp.NewContext(b.ctx, chromedp.WithNewBrowserContext())
	t.Cleanup(cancel)
	p := &tab{t: t, look: l, ctx: ctx}
	require.NoError(t, chromedp.Listen(ctx, func(event any) {
		p.mu.Lock()
		defer p.mu.Unlock()
		switch e := event.(type) {
		case *network.EventRequestWillBeSent:
			p.requests = append(p.requests, e.Request.URL)
		case *runtime.EventExceptionThrown:
			p.problems = append(p.problems, e.ExceptionDetails.Text)
		case *log.EventEntryAdded:
			if e.Entry.Level == log.EntryLevelError {
				p.problems = append(p.problems, e.Entry.Text)
			}
		}
	}))
	scheme := map[bool]string{false: "light", true: "dark"}[l.dark]
	p.do(command(network.Enable, network.EnableParams{}), command(runtime.Enable, cdp.Empty{}),
		command(log.Enable, cdp.Empty{}),
		command(emulation.SetDeviceMetricsOverride, emulation.SetDeviceMetricsOverrideParams{
			Width: l.width, Height: 800, DeviceScaleFactor: 1, Mobile: l.width < 500,
		}),
		command(emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
			Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}},
		}))
	p.do(first...)
	p.do(chromedp.Navigate(address))
	return p
}

func (p *tab) do(steps ...step) {
	p.t.Helper()
	require.NoError(p.t, chromedp.Do(p.ctx, steps...))
}

// value returns the value of a JavaScript expression.
func value[T any](p *tab, expression string) T {
	p.t.Helper()
	result, err := chromedp.Run(p.ctx, chromedp.Evaluate[T](expression))
	require.NoError(p.t, err)
	return result
}

// until waits until a JavaScript expression has a value.
func until[T comparable](p *tab, expression string, want T) {
	p.t.Helper()
	ticker := time.NewTicker(20 * time.Millisecond) // to ask more often would keep the browser from its work
	defer ticker.Stop()
	for deadline := time.Now().Add(testkit.Amply); ; <-ticker.C {
		// While a page is replaced by the next one, nothing can be evaluated.
		got, err := chromedp.Run(p.ctx, chromedp.Evaluate[T](expression))
		if err == nil && got == want {
			return
		}
		require.True(p.t, time.Now().Before(deadline), "%s does not become %v: %v, %v", expression, want, got, err)
	}
}

// checks are functions of JavaScript.
//
//go:embed checks.js
var checks string

// requireReadable requires that a page is readable: nothing lies outside its width, each text is large enough and has
// enough contrast, and the page is as light or dark as was asked for.
func (p *tab) requireReadable(name string) {
	p.t.Helper()
	p.screenshot(name)
	require.Empty(p.t, value[[]string](p, checks+"; outside()"), "wider than the page")
	require.Empty(p.t, value[[]string](p, checks+"; pale()"), "too little contrast")
	require.Empty(p.t, value[[]string](p, checks+"; tiny()"), "too small")
	require.Equal(p.t, p.look.dark, value[bool](p, checks+"; luminance(background(document.body)) < 0.2"))
	require.NotZero(p.t, value[int](p, checks+"; texts().length"))
}

// requireKeyboard requires that the Tab key reaches all links, buttons and fields, and that each of them shows it.
func (p *tab) requireKeyboard() {
	p.t.Helper()
	const all = `document.querySelectorAll("a, button, select")`
	n := value[int](p, all+".length")
	require.Positive(p.t, n)
	// The next Tab leads to what follows the element that had the focus last.
	value[any](p, `document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute("tabindex")`)
	for i := range n {
		p.do(chromedp.KeyEvent(kb.Tab))
		until(p, fmt.Sprintf("%s[%d] === document.activeElement", all, i), true)
		require.Empty(p.t, value[string](p, checks+"; hiddenFocus()"), "the focus cannot be seen")
	}
	p.screenshot("focus")
}

// requireAlone requires that the page has asked for nothing but what is below an address, and has logged no error.
func (p *tab) requireAlone(address string) {
	p.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	require.NotEmpty(p.t, p.requests)
	for _, request := range p.requests {
		parsed, err := url.Parse(request)
		require.NoError(p.t, err)
		require.True(p.t, parsed.Scheme == "data" || strings.HasPrefix(request, address), request)
	}
	require.Empty(p.t, p.problems)
}

func (p *tab) screenshot(name string) {
	p.t.Helper()
	dir := os.Getenv(screenshotsVariable)
	if dir == "" {
		return
	}
	picture, err := chromedp.Run(p.ctx, chromedp.FullScreenshot(100))
	require.NoError(p.t, err)
	file := filepath.Join(dir, strings.ReplaceAll(p.t.Name(), "/", "-")+"-"+name+".png")
	require.NoError(p.t, os.WriteFile(file, picture, 0o600))
}

// hostile are keys that try to be more than text.
func hostile() []string {
	return []string{
		`<script>window.hacked = 1</script>`,
		`<img src="http://192.0.2.1/x" onerror="window.hacked = 1">`,
		`"'></bdi></td></table><b id="hacked">`,
		"user\u202e\u2066gnp.exe", "\u200f\u05d0\u05d1\u05d2 12", "line\r\n\r\ndata: x\n\nevent: y",
		strings.Repeat("k", 512), strings.Repeat("\u00e9", 256),
	}
}

// requireHarmless requires that the hostile keys are text, and that some of them can be seen.
func (p *tab) requireHarmless(seen []string) {
	p.t.Helper()
	require.False(p.t, value[bool](p, `"hacked" in window || !!document.querySelector("main img, #hacked, main script")`))
	text := value[string](p, "document.body.innerText")
	for _, key := range seen {
		require.Contains(p.t, text, key)
	}
	require.NotContains(p.t, text, "\u202e")
	require.NotContains(p.t, text, "\u2066")
}
