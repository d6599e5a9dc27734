package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/keys"
)

// top finds keys without room, even if they are last by name and on disk.
func TestTopFindsKeysThatComeLast(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	fill(t, db, "rate_limit_ephemeral", "login", 20_000, 1)
	pgtest.Exec(t, db.Pool, "UPDATE rate_limit_ephemeral SET key = 'z' || key, count = 5 WHERE substr(key, 5)::int > 10000")
	pgtest.Exec(t, db.Pool, "VACUUM FULL rate_limit_ephemeral")
	top := decode[keys.TopResult](t,
		invoke(t, db.URL, "top", "login", "--policy", "fixed 5/365d", "--max-rows", "500", "--json"))
	require.EqualValues(t, 500, top.Looked)
	require.False(t, top.Complete)
	require.InDelta(t, 0.025, top.Share, 0.0001)
	require.Len(t, top.Keys, 10)
	for _, key := range top.Keys {
		require.Zero(t, key.Remaining)
		require.True(t, strings.HasPrefix(key.Key, "z"))
	}
}

// If a table is larger than a sample, top reads only a part of the table.
func TestTopOfALargeTable(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	// Each block has one row, so that a small table has many blocks.
	pgtest.Exec(t, db.Pool, "ALTER TABLE rate_limit_durable SET (fillfactor = 10)")
	const rows = 3 * cli.SampleBlocks / 2
	pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_durable (prefix, key, algorithm, count, window_start, expires_at)
		SELECT 'login', i || repeat('k', 500), 1, 1, 9e14, 9e15 FROM generate_series(1, $1) AS i`, rows)
	for maxRows, looked := range map[string]float64{"1000": 1000, "15000": cli.SampleBlocks} {
		top := decode[keys.TopResult](t, invoke(t, db.URL,
			"top", "login", "--policy", "fixed 5/365d", "--durable", "--max-rows", maxRows, "--json"))
		require.False(t, top.Complete)
		// The standard deviation is 31 rows for 1,000 and 65 for the others, so this is ten standard deviations or more.
		require.InEpsilon(t, looked, top.Looked, 0.31)
		require.InEpsilon(t, float64(top.Looked)/rows, top.Share, 0.31)
	}
	top := decode[keys.TopResult](t, invoke(t, db.URL,
		"top", "login", "--policy", "fixed 5/365d", "--durable", "--max-rows", "19200", "--json"))
	require.True(t, top.Complete)
	require.EqualValues(t, rows, top.Looked)
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
	const rows = 5 * keys.BatchSize
	fill(t, db, "rate_limit_ephemeral", "login", rows, 1)
	lookedAt := fmt.Sprintf("\n%d rows of limiter login in rate_limit_ephemeral looked at\n", rows)
	for _, test := range []struct {
		args       []string
		shows, end string
	}{
		{[]string{"top", "login", "--policy", "fixed 5/365d", "-n", "1"}, "looking", lookedAt},
		{[]string{"top", "login", "--policy", "every 5/month Asia/Tokyo", "-n", "1"}, "looking", lookedAt},
		{[]string{"limits", "--policy", "login=fixed 5/365d"}, "looking", ""},
		{[]string{"reset", "login", "--all", "--yes"}, "resetting", fmt.Sprintf("reset %d in rate_limit_ephemeral\n", rows)},
	} {
		code, shown := onTerminal(t, command(t, db.URL, append(test.args, "--json")...)).wait()
		require.Zero(t, code, shown)
		require.True(t, strings.HasPrefix(shown, "{\n"), shown)
		if test.args[0] == "reset" {
			fill(t, db, "rate_limit_ephemeral", "login", rows, 1)
		}

		code, shown = onTerminal(t, command(t, db.URL, test.args...)).wait()
		require.Zero(t, code, shown)
		require.Regexp(t, test.shows+` +\d+% \|█+ *\|`, shown)
		require.NotContains(t, shown[strings.LastIndex(shown, "\r")+1:], "█", "the bar stays")
		require.True(t, strings.HasSuffix(shown, test.end), shown)
	}
	require.Zero(t, pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM rate_limit_ephemeral"))
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
