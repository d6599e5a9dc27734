package browser

import (
	"bytes"
	"context"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// building is locked during a build, so that a second one finds everything in Go's cache.
var building sync.Mutex

// build builds the command, and returns its path.
func build(t *testing.T) string {
	t.Helper()
	building.Lock()
	defer building.Unlock()
	binary := filepath.Join(testkit.OpenDir(t), "pgratelimit")
	output, err := exec.CommandContext(t.Context(), "go", "build", "-o", binary,
		"github.com/pgratelimit/ratelimit/cmd/pgratelimit").CombinedOutput()
	require.NoError(t, err, string(output))
	return binary
}

// serve starts a command that serves, and returns the text in its output that matches the group of a pattern.
func serve(t *testing.T, pattern, program string, args ...string) string {
	t.Helper()
	var output testkit.Journal
	cmd := exec.CommandContext(context.Background(), program, args...)
	cmd.Stdout, cmd.Stderr = &output, &output
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt) // so that the demo removes what it has made
		_ = cmd.Wait()
	})
	var found []string
	testkit.WaitUntil(t, func() bool {
		found = regexp.MustCompile(pattern).FindStringSubmatch(output.String())
		return found != nil
	}, "%s", &output)
	return found[1]
}

// The report of a replay needs nothing but its file, and has the numbers of the command's JSON.
func TestReplayReport(t *testing.T) {
	t.Parallel()

	var log bytes.Buffer
	w := csv.NewWriter(&log)
	require.NoError(t, w.Write([]string{"time", "key"}))
	for i := range 3000 {
		keys := append(hostile()[:5:5], hostile()[6:]...) // a record of CSV is one line
		key := "user:" + strconv.Itoa(i%37)
		if i%3 == 0 { // more often than the others, so that the report lists them
			key = keys[i/3%len(keys)]
		}
		require.NoError(t, w.Write([]string{strconv.Itoa(1_700_000_000 + i + i/500*300), key}))
	}
	w.Flush()
	dir := t.TempDir()
	file, report := filepath.Join(dir, "log.csv"), filepath.Join(dir, "report.html")
	require.NoError(t, os.WriteFile(file, log.Bytes(), 0o600))
	output, err := exec.CommandContext(t.Context(), build(t), "replay", file, "--current", "fixed 1/1m", "--policy", "sliding 2/2m",
		"--policy", "bucket 3 1/20s + every 30/hour", "--sweep", "sliding N/1m", "--show-keys", "-n", "8", "--html", report,
		"--json").Output()
	require.NoError(t, err)
	var want struct {
		Policies []struct {
			Policy           string
			Allowed, Denied  int
			Most             []struct{ Key string } `json:"most_denied"`
			DeniedShare      float64                `json:"denied_share"`
			KeysDenied, Keys int
		}
	}
	require.NoError(t, json.Unmarshal(output, &want))

	inAllLooks(t, func(t *testing.T, b *browser, l look) {
		p := b.open(t, l, "file://"+report)
		text := value[string](p, "document.body.innerText")
		require.Len(t, want.Policies, 3)
		for _, policy := range want.Policies {
			require.Positive(t, policy.Denied)
			require.Contains(t, text, policy.Policy)
			require.Contains(t, text, fmt.Sprintf("Denied %d of 3000 requests", policy.Denied))
			require.Contains(t, text, strconv.Itoa(policy.Denied))
		}
		require.Equal(t, 4, value[int](p, `document.querySelectorAll("svg").length`))
		p.requireReadable("report")
		p.requireHarmless(hostile()[:1]) // longer keys are shortened
		p.requireAlone("file://" + report)
	})
}

// The demo's pages draw what was sent to them.
func TestDemo(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	address := serve(t, `(http://127\.0\.0\.1:\d+)/debug/ratelimit`, build(t), "demo", "--serve", "--database-url", db.URL)
	inAllLooks(t, func(t *testing.T, b *browser, l look) {
		p := b.open(t, l, address)
		count := func(class string) string {
			return `Number(document.querySelector("section .count:has(.` + class + `)").textContent.match(/\d+/)[0])`
		}
		sent := count("allowed") + " + " + count("denied")
		p.do(chromedp.Click(chromedp.CSS(`button[value="5"]`)))
		until(p, sent+" >= 5", true)
		p.requireReadable("demo")
		p.requireKeyboard()
		p.requireAlone(address)
	})
}

// The service shows its live page at its root.
func TestServe(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "limiters.yaml"), []byte(
		"limiters:\n  - name: login\n    policy: fixed 5/1h\n    on_failure: deny\n"), 0o600))
	address := "http://" + serve(t, `http=(127\.0\.0\.1:\d+)`, build(t), "serve", "--database-url", db.URL, "--config", dir,
		"--http", "127.0.0.1:0", "--grpc", "", "--timeout", testkit.Amply.String())
	p := start(t).open(t, look{width: 1280}, address)
	until(p, live, "live")
	for range 7 {
		answer, err := http.Post(address+"/v1/ask", "application/json", strings.NewReader(`{"limiter": "login", "key": "user:123"}`))
		require.NoError(t, err)
		require.NoError(t, answer.Body.Close())
	}
	until(p, numbers, "5,2")
	require.NotContains(t, value[string](p, "document.body.innerText"), "user:123") // keys are masked
	p.requireReadable("serve")
	p.requireAlone(address)
}
