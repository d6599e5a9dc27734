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

// TestNodeOfTheCookbook runs the Node program in docs/cookbook.md unchanged.
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
	require.Len(t, programs, 1)

	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "server.mjs"), programs[0][1], 0o600))
	install := exec.CommandContext(t.Context(), "npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "pg@8")
	install.Dir = dir
	if output, err := install.CombinedOutput(); err != nil {
		t.Skipf("the npm package pg: let npm reach a registry: %v: %s", err, output)
	}

	db := pgtest.New(t)
	address := testkit.FreeAddress(t)
	_, port, err := net.SplitHostPort(address)
	require.NoError(t, err)
	node := exec.CommandContext(t.Context(), "node", "server.mjs")
	node.Dir, node.Stderr = dir, os.Stderr
	node.Env = append(os.Environ(), "DATABASE_URL="+db.URL, "PORT="+port)
	require.NoError(t, node.Start())
	t.Cleanup(func() { _ = node.Wait() })
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
