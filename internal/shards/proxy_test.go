package shards_test

import (
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/shards"
)

// Times and intervals reach a shard unchanged, whatever DateStyle and IntervalStyle the proxy's session has.
func TestStylesOfTheSession(t *testing.T) {
	t.Parallel()

	c := newCluster(t, 2)
	for _, style := range []string{"ISO, DMY", "SQL, DMY", "German", "Postgres, MDY"} {
		t.Run(style, func(t *testing.T) {
			conn := connect(t, c.proxy)
			_, err := conn.Exec(t.Context(), "SELECT set_config('DateStyle', $1, false), "+
				"set_config('TimeZone', 'Asia/Kolkata', false), set_config('IntervalStyle', 'sql_standard', false)", style)
			require.NoError(t, err)
			var at int64
			require.NoError(t, conn.QueryRow(t.Context(), "SELECT extract(epoch FROM decided_at)::bigint FROM "+
				"rate_limit_all('{1}', '{api}', '{a}', '{f}', '{1}', '{5}', '{3600000000}', '{0}', now => to_timestamp(1793613600))").Scan(&at))
			require.EqualValues(t, 1793613600, at)
		})
	}
}

// Arrays must begin at 1, because a proxy uses the positions of their elements to divide a call.
func TestArraysOfOddShape(t *testing.T) {
	t.Parallel()

	c := newCluster(t, 2)
	for _, counts := range []string{"[0:3]={1,3,3,1}", "{{3,2,1,1}}"} {
		_, err := c.proxy.Pool.Exec(t.Context(), "SELECT * FROM "+
			pgtest.Each("'api'", "ARRAY['a', 'b', 'c', 'd']", "false", "2, 5, 3600000000, 0", ", counts => $1::text::bigint[]"), counts)
		pgErr := &pgconn.PgError{}
		require.ErrorAs(t, err, &pgErr)
		require.Equal(t, "22023", pgErr.Code)
		require.Equal(t, "rate_limit: counts must have one dimension, and begin at 1", pgErr.Message)
	}
}

// A shard that is in use can be prepared again, because its functions do not change.
func TestShardIsPreparedAgain(t *testing.T) {
	t.Parallel()

	c := newCluster(t, 1)
	functions := func() string {
		return pgtest.Scalar[string](t, c.shards[0].Pool, "SELECT string_agg(p.oid || ' ' || p.oid::regprocedure, ', ' "+
			"ORDER BY p.oid) FROM pg_proc AS p WHERE p.proname ~ '^_rate_limit' AND p.proargnames[1] = 'shard'")
	}
	before := functions()
	require.Contains(t, before, "_rate_limit_all(")
	pgtest.Exec(t, c.shards[0].Pool,
		"CREATE FUNCTION _rate_limit_old(shard integer, shards integer) RETURNS text LANGUAGE sql AS 'SELECT 1::text'")
	require.NoError(t, shards.Own(t.Context(), connect(t, c.shards[0]), "public", shards.Identity{Place: 0, Shards: 1, Cluster: "test"}))
	require.Equal(t, before, functions())
}

// Calls through a proxy must have a policy, because only the first shard has a table of policies.
func TestProxyWantsAPolicy(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 2)
	pgtest.Exec(t, c.shards[0].Pool, "INSERT INTO rate_limit_policy (name, policy, comment) VALUES ('n', 'fixed 5/1h', 'why')")
	for _, key := range []string{"a", "b", "c", "d"} {
		for _, call := range []string{"rate_limit_allow('n', $1)", "rate_limit_peek('n', $1, durable => true)"} {
			_, err := c.proxy.Pool.Exec(t.Context(), "SELECT "+call, key)
			require.ErrorContains(t, err, "rate_limit: no policy is given, and a proxy of shards looks for none (SQLSTATE 22023)")
		}
		require.Equal(t, 4, pgtest.Scalar[int](t, c.proxy.Pool, "SELECT remaining FROM rate_limit_allow('n', $1, 'fixed 5/1h')", key))
	}
	for _, allowed := range []bool{true, false} {
		require.Equal(t, !allowed, pgtest.Scalar[bool](t, c.proxy.Pool, `SELECT retry_after_seconds > 0
			AND retry_after_seconds = ceil(extract(epoch FROM retry_after)) FROM rate_limit_allow('m', 'k', 'fixed 1/1d')`))
	}
}
