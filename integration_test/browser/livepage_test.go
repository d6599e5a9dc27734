package browser

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/livepage"
)

// setup returns the address of a live page, and a limiter of 5 an hour for each key.
func setup(t *testing.T) (address string, limiter *ratelimit.Limiter) {
	t.Helper()
	db := pgtest.New(t)
	page := livepage.New(livepage.Config{ShowKeys: true, DB: db.Pool})
	server := httptest.NewUnstartedServer(page)
	server.Config.ConnContext = func(ctx context.Context, conn net.Conn) context.Context {
		_ = conn.(*net.TCPConn).SetWriteBuffer(1) // the smallest there is, so that a slow reader is soon noticed
		return ctx
	}
	server.Start()
	t.Cleanup(server.Close)
	t.Cleanup(page.Close)
	limiter = limitertest.New(t, db.Pool, ratelimit.Config{
		Name: "login <by address>", Policy: ratelimit.FixedWindow{Limit: 5, Window: time.Hour}, OnFailure: ratelimit.ReturnError(),
	}, ratelimit.ClientConfig{Observer: page.Observer()})
	page.AddLimiters(limiter)
	return server.URL, limiter
}

func decide(t *testing.T, limiter *ratelimit.Limiter, key string, n int) {
	t.Helper()
	for range n {
		_, err := limiter.Allow(t.Context(), key)
		require.NoError(t, err)
	}
}

// numbers is an expression with what the page says of the only limiter: how many calls were allowed and denied.
const numbers = `["allowed", "denied"].map((label) =>
	document.querySelector('td[data-label="' + label + '"] i')?.textContent).join()`

const live = `document.getElementById("state").textContent`

func TestLivePage(t *testing.T) {
	t.Parallel()

	inAllLooks(t, func(t *testing.T, b *browser, l look) {
		address, limiter := setup(t)
		p := b.open(t, l, address)
		until(p, live, "live")
		decide(t, limiter, "user:123", 7)
		until(p, numbers, "5,2")
		for _, key := range hostile() {
			decide(t, limiter, key, 6)
		}
		until(p, numbers, fmt.Sprintf("%d,%d", 5+5*len(hostile()), 2+len(hostile())))
		p.requireReadable("numbers")
		p.requireHarmless(hostile()[:3])
		p.requireKeyboard()
		p.do(chromedp.Click(chromedp.CSS(`button[value="fullest keys"]`)))
		until(p, `document.querySelector("h2")?.textContent`, "fullest keys of login <by address>")
		require.Equal(t, 1+len(hostile()), value[int](p, `document.querySelectorAll("tbody tr").length`))
		p.requireReadable("answer")
		p.requireHarmless(hostile()[:3])
		p.requireKeyboard()
		p.requireAlone(address)
	})
}

// withoutJavaScript lets a page run no scripts.
func withoutJavaScript() step {
	return command(emulation.SetScriptExecutionDisabled, emulation.SetScriptExecutionDisabledParams{Value: true})
}

// Without JavaScript, the page is a table that is drawn anew when it is loaded.
func TestLivePageWithoutJavaScript(t *testing.T) {
	t.Parallel()

	inAllLooks(t, func(t *testing.T, b *browser, l look) {
		address, limiter := setup(t)
		address = withoutReloads(t, address)
		p := b.open(t, l, address, withoutJavaScript())
		decide(t, limiter, "user:123", 7)
		p.do(chromedp.Click(chromedp.CSS("header a")))
		until(p, numbers, "5,2")
		p.requireReadable("numbers")
		p.requireKeyboard()
		p.requireAlone(address)
		require.NotContains(t, p.requests, address+"/?events")
	})
}

// withoutReloads returns an address where the same page does not reload itself. A reload takes away the focus, and the
// link that is being clicked.
func withoutReloads(t *testing.T, address string) string {
	t.Helper()
	target, err := url.Parse(address)
	require.NoError(t, err)
	// The page refuses requests that say that a proxy has forwarded them. With Rewrite, they do not say so.
	proxy := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) }}
	proxy.ModifyResponse = func(r *http.Response) error {
		page, err := io.ReadAll(r.Body)
		page = bytes.Replace(page, []byte(`http-equiv="refresh" content="5"`), []byte(`http-equiv="refresh" content="600"`), 1)
		r.Body = io.NopCloser(bytes.NewReader(page))
		r.Header.Set("Content-Length", strconv.Itoa(len(page)))
		return err
	}
	server := httptest.NewServer(proxy)
	t.Cleanup(server.Close)
	return server.URL
}

// Without JavaScript, the page reloads itself.
func TestLivePageReloadsItself(t *testing.T) {
	t.Parallel()

	address, limiter := setup(t)
	p := start(t).open(t, look{width: 1280}, address, withoutJavaScript())
	decide(t, limiter, "user:123", 7)
	until(p, numbers, "5,2")
}

// Readers that read nothing hold up neither decisions nor a browser.
func TestSlowReaders(t *testing.T) {
	t.Parallel()

	address, limiter := setup(t)
	answer, err := http.Get(address) // so that denials are counted
	require.NoError(t, err)
	require.NoError(t, answer.Body.Close())
	for i := range 20 { // so that an event is larger than all buffers
		decide(t, limiter, strings.Repeat(string(rune('a'+i)), 512), 6)
	}
	for range 15 { // one stream is left for the browser
		conn, err := net.Dial("tcp", address[len("http://"):])
		require.NoError(t, err)
		t.Cleanup(func() { conn.Close() })
		require.NoError(t, conn.(*net.TCPConn).SetReadBuffer(1))
		_, err = conn.Write([]byte("GET /?events HTTP/1.1\r\nHost: localhost\r\n\r\n"))
		require.NoError(t, err)
	}
	p := start(t).open(t, look{width: 1280}, address)
	until(p, live, "live")
	decide(t, limiter, "user:123", 7)
	until(p, numbers, "105,22")
	decide(t, limiter, "user:123", 1)
	until(p, numbers, "105,23")
}
