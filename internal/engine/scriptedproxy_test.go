package engine_test

import (
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/shardkey"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// scriptedProxy is a schema whose functions return the errors of a proxy for shards and of failing shards. Without an
// error, they call the functions in the schema public. So tests of shards need no PL/Proxy.
type scriptedProxy struct {
	*pgtest.DB

	pool *pgxpool.Pool
}

func newProxy(t *testing.T, shards int) *scriptedProxy {
	t.Helper()
	p := &scriptedProxy{DB: pgtest.New(t)}
	pgtest.Exec(t, p.Pool, `
		CREATE SCHEMA proxy;
		CREATE TABLE proxy.map (shards integer, refusals integer);
		CREATE TABLE proxy.broken (place integer, code text, message text, detail text, pattern text);
		CREATE SEQUENCE proxy.refused;
		CREATE FUNCTION proxy.rate_limit_shards() RETURNS integer LANGUAGE sql AS 'SELECT shards FROM proxy.map';
		CREATE FUNCTION proxy._rate_limit_shard(key text, shards integer) RETURNS integer LANGUAGE sql AS $$
			SELECT (('x' || left(encode(sha256(convert_to(coalesce(substring(key, '^[^{]*[{]([^}]+)[}]'), key), 'UTF8')), 'hex'), 8))
				::bit(32)::bigint & (shards - 1))::integer
		$$;
		CREATE FUNCTION proxy.pass(keys text[], requests integer[], names text[], lock_timeout_ms integer) RETURNS void
		LANGUAGE plpgsql AS $$
		DECLARE
			map proxy.map;
			places integer[];
			wrong proxy.broken;
		BEGIN
			SELECT * INTO map FROM proxy.map;
			SELECT array_agg(DISTINCT proxy._rate_limit_shard(k, map.shards)) INTO places FROM unnest(keys) AS k;
			IF lock_timeout_ms < 0 THEN
				RAISE EXCEPTION 'rate_limit: part of a transaction' USING ERRCODE = 'RLS02';
			ELSIF EXISTS (SELECT FROM unnest(requests, keys) AS e (r, k)
				GROUP BY r HAVING count(DISTINCT proxy._rate_limit_shard(k, map.shards)) > 1)
			THEN
				RAISE EXCEPTION 'rate_limit: a request on several shards' USING ERRCODE = 'RLS04', DETAIL = map.shards;
			ELSIF cardinality(places) > 1 AND lock_timeout_ms IS NOT NULL THEN
				RAISE EXCEPTION 'rate_limit: several shards' USING ERRCODE = 'RLS01', DETAIL = map.shards;
			END IF;
			SELECT * INTO wrong FROM proxy.broken AS b
			WHERE b.place = ANY (places) AND EXISTS (SELECT FROM unnest(names) AS n WHERE n LIKE b.pattern);
			IF found THEN
				RAISE EXCEPTION USING ERRCODE = wrong.code, MESSAGE = wrong.message, DETAIL = coalesce(wrong.detail, '');
			END IF;
			IF map.refusals > 0 THEN
				IF nextval('proxy.refused') <= map.refusals THEN
					RAISE EXCEPTION 'f(13): [limits_1] REMOTE ERROR: rate_limit: this database is shard 1 of 8, and was asked for '
						'keys of shard 1 of 4' USING ERRCODE = 'RLS03';
				END IF;
			END IF;
		END
		$$;
		DO $do$
		DECLARE
			f record;
		BEGIN
			FOR f IN
				SELECT proname, pg_get_function_arguments(oid) AS declared, pg_get_function_result(oid) AS result,
					(SELECT string_agg('$' || i, ', ' ORDER BY i) FROM generate_series(1, pronargs) AS i) AS passed
				FROM pg_proc
				WHERE pronamespace = 'public'::regnamespace AND 'lock_timeout_ms' = ANY (proargnames)
					AND proname ~ '^rate_limit_.*(window|bucket|log|all|reset)$'
			LOOP
				EXECUTE format(
					'CREATE FUNCTION proxy.%1$I(%2$s) RETURNS %3$s LANGUAGE plpgsql AS $f$
						#variable_conflict use_variable
						BEGIN
							PERFORM proxy.pass(%4$s, lock_timeout_ms);
							%5$s public.%1$I(%6$s);
						END $f$',
					f.proname, f.declared, f.result,
					CASE f.proname
						WHEN 'rate_limit_all' THEN 'keys, requests, names'
						WHEN 'rate_limit_take_all' THEN 'keys, NULL, names'
						WHEN 'rate_limit_reset' THEN 'ARRAY[key], NULL, ARRAY[name]'
						ELSE 'keys, NULL, ARRAY[name]'
					END,
					CASE WHEN f.result LIKE 'SETOF%' THEN 'RETURN QUERY SELECT * FROM' ELSE 'RETURN' END, f.passed);
			END LOOP;
		END
		$do$;
		GRANT USAGE ON SCHEMA proxy TO PUBLIC; -- also to the application's role
		GRANT ALL ON ALL TABLES IN SCHEMA proxy TO PUBLIC;
		GRANT ALL ON ALL SEQUENCES IN SCHEMA proxy TO PUBLIC;`)
	pgtest.Exec(t, p.Pool, "INSERT INTO proxy.map VALUES ($1, 0)", shards)
	p.pool = p.NewPool(t, func(config *pgxpool.Config) { config.MaxConns = 10 })
	return p
}

func (p *scriptedProxy) grow(t *testing.T, shards int) {
	t.Helper()
	pgtest.Exec(t, p.Pool, "UPDATE proxy.map SET shards = $1", shards)
}

// fail makes a shard raise an error for limiters whose names match the LIKE pattern names.
func (p *scriptedProxy) fail(t *testing.T, shard int, code, message, detail, names string) {
	t.Helper()
	pgtest.Exec(t, p.Pool, "INSERT INTO proxy.broken VALUES ($1, $2, $3, $4, $5)", shard, code, message, detail, names)
}

// client returns a client of the proxy. The client does not know the number of shards yet.
func (p *scriptedProxy) client(t *testing.T, config ratelimit.ClientConfig) *ratelimit.Client {
	t.Helper()
	config.Schema = "proxy"
	return limitertest.NewClient(t, p.pool, config)
}

// keysOf returns n keys that belong to a shard.
func keysOf(shard, shards, n int) (keys []string) {
	for i := 0; len(keys) < n; i++ {
		if key := fmt.Sprint("user:", i); shardkey.Of(key, shards) == shard {
			keys = append(keys, key)
		}
	}
	return keys
}

// learns makes calls until the client knows the number of shards.
func learns(t *testing.T, c *ratelimit.Client, shards int) {
	t.Helper()
	l := limitertest.Of(t, c, ratelimit.Config{Name: "learns", Policy: ratelimit.FixedWindow{Limit: 1, Window: limitertest.Year}, NoDenialCache: true})
	testkit.WaitUntil(t, func() bool {
		testkit.Together(64, func(i int) {
			_, err := l.Allow(t.Context(), fmt.Sprint("user:", i))
			require.NoError(t, err)
		})
		return limitertest.EngineOf(c).Queues.Shards() == shards
	})
}
