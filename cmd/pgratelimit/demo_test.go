package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/demo"
)

func TestDemoInADatabaseOfSomebody(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	_, err := db.Pool.Exec(t.Context(), "CREATE TABLE rate_limit_ephemeral AS SELECT 'is the application''s' AS note")
	require.NoError(t, err)
	before := pgtest.Objects(t, db.Pool)

	var out bytes.Buffer
	require.NoError(t, demo.Run(t.Context(), &out, db.URL, false))
	requireStory(t, out.String())
	require.Regexp(t, `a schema of its own, pgratelimit_demo_\w{8}, `, out.String())
	require.Contains(t, out.String(), "SELECT * FROM pgratelimit_demo_")
	require.Equal(t, before, pgtest.Objects(t, db.Pool))
}

// TestServeAndInterrupt shows the same for a demo that goes on.
func TestThoroughDemoOnAServerOfItsOwn(t *testing.T) {
	t.Parallel()
	pgtest.OwnServer(t)

	cmd := command(t, "", "demo")
	tempDir := testkit.OpenDir(t) // the server's user must be able to enter the folder
	cmd.Env = append(cmd.Env, "TMPDIR="+tempDir)
	out, err := cmd.Output()
	require.NoError(t, err)
	requireStory(t, string(out))
	requireServerGone(t, string(out), tempDir)
}

func TestServeAndInterrupt(t *testing.T) {
	t.Parallel()
	pgtest.OwnServer(t)

	cmd := command(t, "", "demo", "--serve")
	tempDir := testkit.OpenDir(t) // the server's user must be able to enter the folder
	cmd.Env = append(cmd.Env, "TMPDIR="+tempDir)
	process := start(t, cmd)
	process.readTo("psql 'postgres")

	address := find(t, `curl .* (http://\S+)`, process.out.String())
	response, err := http.PostForm(address, url.Values{"url": {"https://go.dev/"}})
	require.NoError(t, err)
	defer response.Body.Close()
	require.Equal(t, http.StatusCreated, response.StatusCode)
	require.Equal(t, "9", response.Header.Get("X-RateLimit-Remaining"))
	var body struct{ Short, URL string }
	require.NoError(t, json.NewDecoder(response.Body).Decode(&body))
	require.Equal(t, "https://go.dev/", body.URL)
	require.Equal(t, response.Header.Get("Location"), body.Short)

	// The pages draw the same requests for two windows, and what the process decides.
	base := strings.TrimSuffix(address, "/shorten")
	get := func(path string) string {
		response, err := http.Get(base + path)
		require.NoError(t, err)
		defer response.Body.Close()
		require.Equal(t, http.StatusOK, response.StatusCode)
		page, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		return string(page)
	}
	require.Contains(t, get("/debug/ratelimit"), "No decision since then")
	for range 3 {
		response, err := http.PostForm(base+"/page/send", url.Values{"requests": {"5"}})
		require.NoError(t, err)
		response.Body.Close()
		require.Equal(t, "/", response.Request.URL.Path)
	}
	for _, path := range []string{"/", "/page/picture"} {
		require.Equal(t, 2, strings.Count(get(path), `"10 requests allowed and 5 denied in the last 30 seconds"`))
	}
	require.Contains(t, get("/page/page.css"), "prefers-color-scheme")
	require.Contains(t, get("/page/page.js"), "/page/send")
	require.Regexp(t, `(?s)picture-fixed.*<i>10</i>.*<i>5</i>.*picture-sliding.*<i>10</i>.*<i>5</i>`, get("/debug/ratelimit"))

	require.NoError(t, process.interrupt())
	require.Empty(t, process.stderr.String())
	requireStory(t, process.out.String())
	requireServerGone(t, process.out.String(), tempDir)
	_, err = http.PostForm(address, nil) //nolint:bodyclose // the response is nil
	require.Error(t, err, "the web server still answers")
}

func TestInterruptAtAnyTime(t *testing.T) {
	t.Parallel()
	testInterrupts(t, "   The demo works in a schema", "15  429", "6.")
}

func TestThoroughInterruptAtAnyTime(t *testing.T) {
	t.Parallel()
	testInterrupts(t, "1.", "   PostgreSQL", "2.", " 3  201", "   12:00:00", "5.")
}

func testInterrupts(t *testing.T, moments ...string) {
	t.Helper()
	for _, moment := range moments {
		t.Run(strings.TrimSpace(moment), func(t *testing.T) {
			t.Parallel()

			db := pgtest.Empty(t)
			before := pgtest.Objects(t, db.Pool)
			process := start(t, command(t, db.URL, "demo", "--serve"))
			process.readTo(moment)
			if err := process.interrupt(); err != nil {
				var exit *exec.ExitError
				require.ErrorAs(t, err, &exit)
				require.Equal(t, 1, exit.ExitCode())
				require.Equal(t, "pgratelimit demo: interrupted\n", process.stderr.String())
			} else { // the demo ended before the interrupt
				require.Contains(t, process.out.String(), "\n6. ")
				require.Empty(t, process.stderr.String())
			}
			require.Equal(t, before, pgtest.Objects(t, db.Pool))
		})
	}
}

func TestInterruptWhileTheServerStarts(t *testing.T) {
	t.Parallel()

	cmd := command(t, "", "demo")
	tempDir := testkit.OpenDir(t) // the server's user must be able to enter the folder
	cmd.Env = append(cmd.Env, "TMPDIR="+tempDir)
	process := start(t, cmd)
	process.readTo("1.")
	require.Error(t, process.interrupt())
	require.Equal(t, "pgratelimit demo: interrupted\n", process.stderr.String())
	requireEmpty(t, tempDir)
}

// A reader such as head closes the pipe early. The next write to the pipe must not end the command.
func TestReaderLeaves(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	before := pgtest.Objects(t, db.Pool)
	process := start(t, command(t, db.URL, "demo", "--serve"))
	process.readTo("   The demo works in a schema")
	require.NoError(t, process.stdout.Close())
	require.Error(t, process.cmd.Wait())
	require.Contains(t, process.stderr.String(), "broken pipe")
	require.Equal(t, before, pgtest.Objects(t, db.Pool))
}

func TestUnreachableDatabase(t *testing.T) {
	t.Parallel()

	_, err := command(t, "postgres://me:secret@"+testkit.FreeAddress(t)+"/app", "demo").Output()
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	require.Equal(t, 1, exit.ExitCode())
	stderr := string(exit.Stderr)
	require.Regexp(t, `^pgratelimit demo: DATABASE_URL: .*refused.*\n$`, stderr)
	require.Equal(t, 1, strings.Count(stderr, "\n"))
	require.NotContains(t, stderr, "secret")
}

func TestDatabaseThatIsNotOurs(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	_, err := db.Pool.Exec(
		t.Context(),
		`DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_read_only = on', current_database()); END $$`,
	)
	require.NoError(t, err)

	var out bytes.Buffer
	err = demo.Run(t.Context(), &out, db.URL, false)
	require.ErrorContains(t, err, "make a schema in the database of DATABASE_URL")
	require.ErrorContains(t, err, "SQLSTATE 25006")
}

// requireStory checks that the output shows everything that the demo promises.
func requireStory(t *testing.T, out string) {
	t.Helper()
	created := regexp.MustCompile(`(?m)^ ?\d+  201 Created            remaining \d$`).FindAllString(out, -1)
	require.Len(t, created, 10)
	denied := regexp.MustCompile(`(?m)^\d+  429 Too Many Requests  remaining 0  Retry-After (\d+)s$`).
		FindAllStringSubmatch(out, -1)
	require.Len(t, denied, 5)
	for _, match := range denied {
		seconds, err := strconv.Atoi(match[1])
		require.NoError(t, err)
		require.GreaterOrEqual(t, seconds, 1)
		require.LessOrEqual(t, seconds, 66)
	}
	require.Regexp(t, `(?m)^   total +20 +20 +10$`, out)
	require.Regexp(t, `(?m)^key          \| 127\.0\.0\.1$`, out)
	require.Regexp(t, `(?m)^count        \| 10$`, out)
	require.Regexp(t, `(?m)^window_start \| \d{4}-\d\d-\d\d \d\d:\d\d:\d\d`, out)
	require.NotContains(t, out, "\x1b", "no colours")
}

func requireServerGone(t *testing.T, out, tempDir string) {
	t.Helper()
	address := find(t, `started on (\S+)`, out)
	_, err := net.Dial("tcp", address)
	require.Error(t, err, "Postgres still answers")
	requireEmpty(t, tempDir)
}

func requireEmpty(t *testing.T, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, entries)
}

func find(t *testing.T, pattern, text string) string {
	t.Helper()
	match := regexp.MustCompile(pattern).FindStringSubmatch(text)
	require.NotNil(t, match, "%s in %s", pattern, text)
	return match[1]
}

// process is a running command.
type process struct {
	t      *testing.T
	cmd    *exec.Cmd
	stdout io.ReadCloser
	lines  *bufio.Reader
	out    strings.Builder // the part of stdout that the test has read
	stderr bytes.Buffer
}

func start(t *testing.T, cmd *exec.Cmd) *process {
	t.Helper()
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	p := &process{t: t, cmd: cmd, stdout: stdout, lines: bufio.NewReader(stdout)}
	cmd.Stderr = &p.stderr
	// If the test fails, the interrupt lets the command clean up.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		if err := cmd.Wait(); err != nil && t.Failed() {
			t.Logf("the process: %v\n%s\n%s", err, p.out.String(), p.stderr.String())
		}
	})
	return p
}

// readTo reads up to a line that begins with prefix.
func (p *process) readTo(prefix string) {
	p.t.Helper()
	for {
		line, err := p.lines.ReadString('\n')
		p.out.WriteString(line)
		require.NoError(p.t, err, "no line begins with %q", prefix)
		if strings.HasPrefix(line, prefix) {
			return
		}
	}
}

// interrupt sends Ctrl-C, and returns when the process has ended.
func (p *process) interrupt() error {
	p.t.Helper()
	require.NoError(p.t, p.cmd.Process.Signal(os.Interrupt))
	_, err := io.Copy(&p.out, p.lines)
	require.NoError(p.t, err)
	return p.cmd.Wait()
}
