package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/keys"
)

// top finds keys without room, even if they are last by name and on disk.
func TestTopFindsKeysThatComeLast(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	fill(t, db, "rate_limit_ephemeral", "login", 5000, 1)
	pgtest.Exec(t, db.Pool, "UPDATE rate_limit_ephemeral SET key = 'z' || key, count = 5 WHERE substr(key, 5)::int > 2500")
	pgtest.Exec(t, db.Pool, "VACUUM FULL rate_limit_ephemeral")
	top := decode[keys.TopResult](t,
		invoke(t, db.URL, "top", "login", "--policy", "fixed 5/365d", "--max-rows", "500", "--json"))
	require.EqualValues(t, 500, top.Looked)
	require.False(t, top.Complete)
	require.InDelta(t, 0.1, top.Share, 0.0001)
	require.Len(t, top.Keys, 10)
	for _, key := range top.Keys {
		require.Zero(t, key.Remaining)
		require.True(t, strings.HasPrefix(key.Key, "z"))
	}
}

// All batches of top use the same time, so equal keys have equal states.
func TestTopTellsOneMoment(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	fill(t, db, "rate_limit_ephemeral", "login", 5*keys.BatchSize, 5)
	began := pgtest.Scalar[time.Time](t, db.Pool, "SELECT clock_timestamp()")
	top := decode[keys.TopResult](t, invoke(t, db.URL, "top", "login", "--policy", "fixed 5/365d", "-n", "5000", "--json"))
	require.True(t, top.At.After(began))
	require.Len(t, top.Keys, 5*keys.BatchSize)
	ends := pgtest.Scalar[int64](t, db.Pool, "SELECT max(expires_at) FROM rate_limit_ephemeral")
	for _, key := range top.Keys {
		require.Equal(t, ends, top.At.UnixMicro()+key.RetryAfterUS)
		require.Equal(t, key.RetryAfterUS, key.ResetAfterUS)
	}
}

func TestBarOfLongWorkOnATerminal(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	fill(t, db, "rate_limit_ephemeral", "login", longWork, 1)
	testBar(t, db, "looking", "", "limits", "--policy", "login=fixed 5/365d")
	testBar(t, db, "looking", lookedAt, "top", "login", "--policy", "fixed 5/365d", "-n", "1")
	testNoBar(t, db, "top", "login", "--policy", "fixed 5/365d", "-n", "1")
	testBar(t, db, "resetting", fmt.Sprintf("reset %d in rate_limit_ephemeral\n", longWork), "reset", "login", "--all", "--yes")
	require.Zero(t, pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM rate_limit_ephemeral"))
}

func TestThoroughBarOfLongWorkOnATerminal(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	fill(t, db, "rate_limit_ephemeral", "login", longWork, 1)
	testBar(t, db, "looking", lookedAt, "top", "login", "--policy", "every 5/month Asia/Tokyo", "-n", "1")
	testNoBar(t, db, "limits", "--policy", "login=fixed 5/365d")
	testNoBar(t, db, "reset", "login", "--all", "--yes")
	require.Zero(t, pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM rate_limit_ephemeral"))
}

// longWork is a number of rows that takes a command several batches.
const longWork = 5 * keys.BatchSize

var lookedAt = fmt.Sprintf("\n%d rows of limiter login in rate_limit_ephemeral looked at\n", longWork)

// testBar requires that the command shows a bar, which is gone at the end.
func testBar(t *testing.T, db *pgtest.DB, shows, end string, args ...string) {
	t.Helper()
	code, shown := onTerminal(t, command(t, db.URL, args...)).wait()
	require.Zero(t, code, shown)
	require.Regexp(t, shows+` +\d+% \|█+ *\|`, shown)
	require.NotContains(t, shown[strings.LastIndex(shown, "\r")+1:], "█", "the bar stays")
	require.True(t, strings.HasSuffix(shown, end), shown)
}

// testNoBar requires that the command shows no bar with --json.
func testNoBar(t *testing.T, db *pgtest.DB, args ...string) {
	t.Helper()
	code, shown := onTerminal(t, command(t, db.URL, append(args, "--json")...)).wait()
	require.Zero(t, code, shown)
	require.True(t, strings.HasPrefix(shown, "{\n"), shown)
}

// On a terminal, --watch draws again in place. In a pipe, it writes plain lines.
func TestWatchTop(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	take := func(key string, n int) {
		pgtest.Exec(t, db.Pool, "SELECT rate_limit_allow('login', $1, 'sliding 10/1h', $2)", key, n)
	}
	take("alice", 5)
	args := []string{"top", "login", "--policy", "sliding 10/1h", "--watch"}
	p := onTerminal(t, command(t, db.URL, args...))
	p.waitFor("alice")
	take("bob", 9)
	p.waitFor("bob")
	p.typeIn("\x03")
	code, shown := p.wait()
	require.Zero(t, code, shown)
	last := shown[strings.LastIndex(shown, "\x1b[H\x1b[J"):]
	require.Regexp(t, `(?s)bob +1 .*alice +5 `, last)
	require.NotContains(t, shown, "interrupted")

	piped := start(t, command(t, db.URL, args...))
	piped.readTo("bob")
	piped.readTo("bob")
	require.NoError(t, piped.interrupt())
	require.NotContains(t, piped.out.String(), "\x1b")
}
