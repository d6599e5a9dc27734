package command

import (
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// TestNodeOfTheCookbook runs the Node programs in docs/cookbook.md unchanged.
func TestNodeOfTheCookbook(t *testing.T) {
	t.Parallel()

	for _, program := range []string{"node", "npm"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skip(program + ": install it (Debian: nodejs, npm)")
		}
	}
	text, err := os.ReadFile(filepath.Join(repository, "docs/cookbook.md"))
	require.NoError(t, err)
	programs := regexp.MustCompile("(?ms)^```js\n(.*?)^```").FindAllSubmatch(text, -1)
	require.Len(t, programs, 2)

	dir := t.TempDir()
	for i, name := range []string{"server.mjs", "tokens.mjs"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), programs[i][1], 0o600))
	}
	install := exec.CommandContext(t.Context(), "npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "pg@8")
	install.Dir = dir
	if output, err := install.CombinedOutput(); err != nil {
		t.Skipf("the npm package pg: let npm reach a registry: %v: %s", err, output)
	}

	db := pgtest.New(t)
	limitsByAddress(t, db, dir)
	countsTokens(t, db, dir)
}

// node returns a process that will run a program in the folder dir.
func node(t *testing.T, db *pgtest.DB, dir, program string, environment ...string) *exec.Cmd {
	t.Helper()
	node := exec.CommandContext(t.Context(), "node", program)
	node.Dir = dir
	node.Env = append(append(os.Environ(), "DATABASE_URL="+db.URL), environment...)
	return node
}

// countsTokens checks that the program holds tokens, and that only those that were used count.
func countsTokens(t *testing.T, db *pgtest.DB, dir string) {
	t.Helper()
	remaining := func() int64 {
		return pgtest.Scalar[int64](t, db.Pool, "SELECT remaining FROM rate_limit_peek('tokens', 'acme', 'fixed 100000/1d')")
	}
	output, err := node(t, db, dir, "tokens.mjs").CombinedOutput()
	require.NoError(t, err, string(output))
	require.Equal(t, "the answer of a model\n", string(output))
	require.EqualValues(t, 100_000-2719, remaining())

	pgtest.Exec(t, db.Pool, "SELECT rate_limit_allow('tokens', 'acme', 'fixed 100000/1d', $1)", remaining()-3999)
	output, err = node(t, db, dir, "tokens.mjs").CombinedOutput()
	require.ErrorAs(t, err, new(*exec.ExitError))
	require.Regexp(t, `too few tokens are left, try again in \d+ s`, string(output))
	require.EqualValues(t, 3999, remaining())
}

// limitsByAddress checks that the program answers a request above the limit with a status and the time to wait.
func limitsByAddress(t *testing.T, db *pgtest.DB, dir string) {
	t.Helper()
	address := testkit.FreeAddress(t)
	_, port, err := net.SplitHostPort(address)
	require.NoError(t, err)
	server := node(t, db, dir, "server.mjs", "PORT="+port)
	server.Stderr = os.Stderr
	require.NoError(t, server.Start())
	t.Cleanup(func() { _ = server.Wait() })
	testkit.WaitUntil(t, func() bool {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			return false
		}
		require.NoError(t, conn.Close())
		return true
	})
	ask := func() (status int, retryAfter string) {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address, nil)
		require.NoError(t, err)
		response, err := http.DefaultClient.Do(request)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		return response.StatusCode, response.Header.Get("Retry-After")
	}
	status, _ := ask()
	require.Equal(t, http.StatusOK, status)
	// This moves a full window so that it begins in an hour. A request makes the window begin now, so that even a slow
	// machine stays within the window.
	pgtest.Exec(t, db.Pool, `UPDATE rate_limit_ephemeral SET count = 10, window_start = window_start + 3600000000,
		expires_at = expires_at + 3600000000`)
	status, retryAfter := ask()
	require.Equal(t, http.StatusTooManyRequests, status)
	seconds, err := strconv.Atoi(retryAfter)
	require.NoError(t, err)
	require.Positive(t, seconds)
}
