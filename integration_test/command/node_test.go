package command

import (
	"bytes"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// TestNodePrograms runs the programs of examples/node.
func TestNodePrograms(t *testing.T) {
	t.Parallel()

	for _, program := range []string{"node", "npm"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skip(program + ": install it (Debian: nodejs, npm)")
		}
	}
	dir := t.TempDir()
	require.NoError(t, os.CopyFS(dir, os.DirFS(filepath.Join(repository, "examples/node"))))
	install := exec.CommandContext(t.Context(), "npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "pg@8")
	install.Dir = dir
	if output, err := install.CombinedOutput(); err != nil {
		t.Skipf("the npm package pg: let npm reach a registry: %v: %s", err, output)
	}

	db := pgtest.New(t)
	limitsByAddress(t, db, dir)
	countsTokens(t, db, dir)
	hasASlot(t, db, dir)
}

// node returns a process that will run a program in the folder dir, with arguments.
func node(t *testing.T, db *pgtest.DB, dir string, program ...string) *exec.Cmd {
	t.Helper()
	node := exec.CommandContext(t.Context(), "node", program...)
	node.Dir = dir
	node.Env = append(os.Environ(), "DATABASE_URL="+db.URL)
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

// hasASlot checks that the program waits in line for a slot, renews it, stops when the slot is lost, and releases it.
func hasASlot(t *testing.T, db *pgtest.DB, dir string) {
	t.Helper()
	const (
		slots   = "SELECT count(*)::int FROM rate_limit_ephemeral_hold WHERE status = 0 AND key = $1"
		tickets = "SELECT count(*)::int FROM rate_limit_ephemeral_hold WHERE status = 3 AND key = $1"
		acquire = "SELECT slot::text FROM rate_limit_acquire('imports', $1, 'concurrent 5', 5, '1 hour')"
	)
	until := func(query, key string) {
		t.Helper()
		testkit.WaitUntil(t, func() bool { return pgtest.Scalar[int](t, db.Pool, query, key) == 1 })
	}
	var lost bytes.Buffer
	long := node(t, db, dir, "imports.mjs", "tenant:7", "3600")
	long.Stderr = &lost
	require.NoError(t, long.Start())
	until(slots, "tenant:7")

	all := pgtest.Scalar[string](t, db.Pool, acquire, "tenant:8")
	waiting := testkit.Later(func() ([]byte, error) {
		return node(t, db, dir, "imports.mjs", "tenant:8", "0").CombinedOutput()
	})
	until(tickets, "tenant:8")
	pgtest.Exec(t, db.Pool, "SELECT rate_limit_release($1)", all)
	output, err := waiting()
	require.NoError(t, err, string(output))
	require.Equal(t, "imported\n", string(output))
	require.NotEmpty(t, pgtest.Scalar[string](t, db.Pool, acquire, "tenant:8"), "the program has released its slot")

	testkit.WaitUntil(t, func() bool { // the program has renewed its slot
		return pgtest.Scalar[bool](t, db.Pool,
			"SELECT ends_at - made_at > 30500000 FROM rate_limit_ephemeral_hold WHERE status = 0 AND key = 'tenant:7'")
	})
	pgtest.Exec(t, db.Pool, "SELECT rate_limit_reset('imports', 'tenant:7')")
	require.ErrorAs(t, long.Wait(), new(*exec.ExitError))
	require.Contains(t, lost.String(), "the slot is lost")
}

// limitsByAddress checks that the program answers a request above the limit with a status and the time to wait.
func limitsByAddress(t *testing.T, db *pgtest.DB, dir string) {
	t.Helper()
	address := testkit.FreeAddress(t)
	_, port, err := net.SplitHostPort(address)
	require.NoError(t, err)
	server := node(t, db, dir, "server.mjs")
	server.Env = append(server.Env, "PORT="+port)
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
