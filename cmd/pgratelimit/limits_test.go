package main

import (
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/keys"
)

type limitsOutput struct {
	Tables   []cli.TableSize
	Limiters []keys.LimiterRows
}

func TestLimits(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	require.Contains(t, invoke(t, db.URL, "limits").done(t), "\nno limiter has rows\n")
	require.Empty(t, decode[limitsOutput](t, invoke(t, db.URL, "limits", "--json")).Limiters)

	fill(t, db, "rate_limit_ephemeral", "login", keys.BatchSize+20, 5)
	fill(t, db, "rate_limit_durable", "login", 3, 1)
	fill(t, db, "rate_limit_durable", "api", 2, 1)
	pgtest.Exec(t, db.Pool, "UPDATE rate_limit_ephemeral SET count = 4 WHERE key IN ('key 1', 'key 2')")
	pgtest.Exec(
		t,
		db.Pool,
		"UPDATE rate_limit_ephemeral SET expires_at = 1700000000 * 1000000::bigint WHERE key IN ('key 3', 'key 4', 'key 5')",
	)

	out := decode[limitsOutput](t, invoke(t, db.URL, "limits", "--json", "--policy", "login=fixed 5/365d"))
	require.Len(t, out.Limiters, 3)
	api, ephemeral, durable := out.Limiters[0], out.Limiters[1], out.Limiters[2]
	require.Equal(t, "api", api.Limiter)
	require.EqualValues(t, 2, api.Live)
	require.Nil(t, api.DeniedNow)
	require.Equal(t, "rate_limit_ephemeral", ephemeral.Table)
	require.EqualValues(t, keys.BatchSize+20, ephemeral.Rows)
	require.EqualValues(t, keys.BatchSize+17, ephemeral.Live)
	require.Equal(t, &keys.DeniedNow{Keys: keys.BatchSize + 15, Complete: true}, ephemeral.DeniedNow)
	require.False(t, ephemeral.Estimated)
	require.EqualValues(t, 1_700_000_000, ephemeral.OldestExpiry.Unix())
	require.InEpsilon(
		t,
		pgtest.Scalar[int64](t, db.Pool, "SELECT sum(pg_column_size(r.*)) FROM rate_limit_ephemeral AS r"),
		ephemeral.Bytes,
		0.001,
	)
	require.Equal(t, &keys.DeniedNow{Complete: true}, durable.DeniedNow)
	require.Equal(
		t,
		pgtest.Scalar[int64](t, db.Pool, "SELECT pg_total_relation_size('rate_limit_durable')"),
		out.Tables[1].TotalBytes,
	)

	text := invoke(t, db.URL, "limits", "--policy", "login=fixed 5/365d", "--max-rows", "1000").done(t)
	require.Regexp(t, `(?m)^LIMITER  TABLE                 ALGORITHM  ROWS  LIVE  HELD  DENIED NOW  BYTES +OLDEST EXPIRY$`, text)
	require.Regexp(t, `(?m)^login    rate_limit_ephemeral  fixed      1020  1017  0     ~\d{4} +\S+ kB +2023-11-14 22:13:20Z$`, text)
	require.Regexp(t, `(?m)^login    rate_limit_durable    fixed      3     3     0     0 `, text)
	require.Regexp(t, `(?m)^api      rate_limit_durable    fixed      2     2     0     \? `, text)
	require.Contains(t, text, "\n? depends on the policy")
	require.Contains(t, text, "\n~ under DENIED NOW is estimated from a sample; --max-rows reads more\n")
	require.NotContains(t, text, "--exact")
	text = invoke(t, db.URL, "limits", "--policy", "login=fixed 5/365d").done(t)
	require.Regexp(t, `(?m)^login    rate_limit_ephemeral  fixed      1020  1017  0     1015 `, text)
	require.NotContains(t, text, "~")
}

// limits and top do not completely read a table that is larger than a sample, and their output says so.
func TestLargeTablesAreSampled(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	// Each block has one row, so that a small table has many blocks.
	pgtest.Exec(t, db.Pool, "ALTER TABLE rate_limit_ephemeral SET (fillfactor = 10)")
	const blocks = 5 * cli.SampleBlocks / 4
	const rows = blocks / 8
	pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_ephemeral (prefix, key, algorithm, count, window_start, expires_at)
		SELECT CASE i % 8 WHEN 0 THEN 'login' ELSE 'others' END, i || repeat('k', 500), 1 + i / 8 % 2, 1, 9e14, 9e15
		FROM generate_series(1, $1) AS i`, blocks)

	estimate := decode[limitsOutput](t, invoke(t, db.URL, "limits", "--json")).Limiters[0]
	require.True(t, estimate.Estimated)
	require.InEpsilon(t, rows, estimate.Rows, 0.12) // 12 % are more than ten standard deviations
	require.InEpsilon(t, rows, estimate.Live, 0.12)
	text := invoke(t, db.URL, "limits").done(t)
	require.Regexp(t, `(?m)^login +rate_limit_ephemeral +fixed, sliding +~\d{4} +~\d{4} +~0 +\? +~[\d.]+ MB +~`, text)
	require.Contains(t, text, "\n~ is estimated from a sample of 104.9 MB; --exact counts\n")

	exact := decode[limitsOutput](t, invoke(t, db.URL, "limits", "--json", "--exact")).Limiters[0]
	require.False(t, exact.Estimated)
	require.EqualValues(t, rows, exact.Rows)

	// --timeout ends statements that take too long.
	o := invoke(t, db.URL, "limits", "--exact", "--timeout", "1ms")
	o.complains(t, exitFailed, "SQLSTATE 57014", "--timeout allows a statement more than 1ms")

	top := func(maxRows int) keys.TopResult {
		return decode[keys.TopResult](t, invoke(t, db.URL,
			"top", "login", "--policy", "fixed 5/365d", "--max-rows", strconv.Itoa(maxRows), "--json"))
	}
	for maxRows, looked := range map[int]float64{500: 500, rows - 1: cli.SampleBlocks / 8} {
		some := top(maxRows)
		require.False(t, some.Complete)
		require.InEpsilon(t, looked, some.Looked, 0.12)
		require.InEpsilon(t, float64(some.Looked)/rows, some.Share, 0.12)
	}
	all := top(rows)
	require.True(t, all.Complete)
	require.EqualValues(t, rows, all.Looked)
}
