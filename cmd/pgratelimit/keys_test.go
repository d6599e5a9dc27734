package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/keys"
)

func TestTakePeekAndReset(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	ask := func(verb string, args ...string) outcome {
		return invoke(t, db.URL, append([]string{verb, "login", "user:123", "--policy", "fixed 3/365d"}, args...)...)
	}
	fresh := decode[keys.Answer](t, ask("peek", "--json"))
	require.True(t, fresh.Allowed)
	require.EqualValues(t, 3, fresh.Remaining)
	require.False(t, fresh.DecidedAt.IsZero())
	require.Equal(t, "allowed: 3 of 3 remaining, as good as new after 0s\n", ask("peek").done(t))

	require.Regexp(t, `^allowed: 2 of 3 remaining, as good as new after \S+\n$`, ask("take").done(t))
	taken := decode[keys.Answer](t, ask("take", "--cost", "2", "--json"))
	require.Equal(t, keys.Answer{
		Decision: &keys.Decision{Allowed: true}, Limit: 3, ResetAfterUS: taken.ResetAfterUS, DecidedAt: taken.DecidedAt,
	}, taken)
	require.Positive(t, taken.ResetAfterUS)

	denied := ask("take")
	require.Equal(t, exitDenied, denied.code)
	require.Regexp(t, `^denied: 0 of 3 remaining, retry after \S+, as good as new after \S+\n$`, denied.stdout)
	require.Empty(t, denied.stderr)
	peeked := decode[keys.Answer](t, ask("peek", "--json"))
	require.False(t, peeked.Allowed)
	require.Positive(t, peeked.RetryAfterUS)

	reset := []string{"reset", "login", "user:123"}
	require.Equal(t, "reset 1 in rate_limit_ephemeral\n", invoke(t, db.URL, reset...).done(t))
	require.Contains(t, invoke(t, db.URL, reset...).done(t), "nothing to reset in rate_limit_ephemeral; ")
	require.EqualValues(t, 3, decode[keys.Answer](t, ask("peek", "--json")).Remaining)
}

// The tables are only in the schema of --schema.
func TestTakePeekAndResetOfDurableKeysInASchema(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	pgtest.Exec(t, db.Pool, `CREATE SCHEMA "my limits"`)
	schema := []string{"--schema", "my limits"}
	invoke(t, db.URL, append([]string{"migrate", "up"}, schema...)...).done(t)
	ask := func(verb string, args ...string) outcome {
		return invoke(t, db.URL, slices.Concat([]string{verb, "login", "user:123", "--durable"}, args, schema)...)
	}
	const policy = "--policy=bucket 3 1/365d"
	require.Contains(t, ask("take", policy, "--cost=2").done(t), "allowed: 1 of 3 remaining")
	require.Contains(t, ask("peek", policy).done(t), "allowed: 1 of 3 remaining")
	require.Equal(t, "reset 1 in rate_limit_durable\n", ask("reset").done(t))
	require.Zero(t, pgtest.Scalar[int](t, db.Pool, `SELECT count(*) FROM "my limits".rate_limit_durable`))
}

// A text that the encoding cannot represent is an error in the command line. The message does not contain the text.
func TestTextThatTheEncodingRefuses(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	latin1 := pgtest.Scalar[string](t, db.Pool, "SELECT current_database()") + "_latin1"
	pgtest.Exec(t, db.Pool, "CREATE DATABASE "+latin1+" ENCODING LATIN1 LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
	t.Cleanup(func() {
		_, err := db.Pool.Exec(context.Background(), "DROP DATABASE "+latin1)
		require.NoError(t, err)
	})
	parsed, err := url.Parse(urlWith(t, db, "client_encoding=UTF8"))
	require.NoError(t, err)
	parsed.Path = latin1
	invoke(t, parsed.String(), "migrate", "up").done(t)
	for _, args := range [][]string{
		{"take", "n", "k\U0001F600", "--policy", "fixed 5/1m"},
		{"take", "n\U0001F600", "k", "--policy", "fixed 5/1m"},
		{"reset", "n", "k\xff"},
		{"reset", "n\U0001F600", "--all", "--yes"},
		{"top", "n\U0001F600", "--policy", "fixed 5/1m"},
		{"limits", "--schema", "s\U0001F600"},
	} {
		o := invoke(t, parsed.String(), args...)
		o.complains(t, exitUsage, "encoding")
		require.NotContains(t, o.stderr, "0x", args)
		require.NotContains(t, o.stderr, "\U0001F600", args)
	}
	invoke(t, parsed.String(), "reset", "n", strings.Repeat("k", 513)).complains(t, exitUsage, "1 to 512 bytes")
	invoke(t, parsed.String(), "reset", strings.Repeat("n", 129), "k").complains(t, exitUsage, "1 to 128 bytes")
}

// fill inserts rows of a limiter for the keys "key 1" to "key n", each with usage in a window of a year.
func fill(t *testing.T, db *pgtest.DB, table, name string, n, taken int) {
	t.Helper()
	pgtest.Exec(t, db.Pool, `INSERT INTO `+table+` (prefix, key, algorithm, count, window_start, expires_at)
		SELECT $1, 'key ' || i, 1, $3, now_us, now_us + 365 * 86400 * 1000000::bigint
		FROM generate_series(1, $2) AS i, (SELECT (extract(epoch FROM now()) * 1000000)::bigint AS now_us) AS clock`, name, n, taken)
}

func TestResetAll(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	for _, table := range []string{"rate_limit_ephemeral", "rate_limit_durable"} {
		fill(t, db, table, "login", 2*keys.BatchSize+500, 1)
		fill(t, db, table, "logins", 7, 1)
	}
	rows := func() string {
		return pgtest.Scalar[string](
			t,
			db.Pool,
			`SELECT string_agg(concat_ws(' ', prefix, t, n), ', ' ORDER BY prefix, t) FROM (
			SELECT prefix, 'ephemeral' AS t, count(*) AS n FROM rate_limit_ephemeral GROUP BY 1
			UNION ALL SELECT prefix, 'durable', count(*) FROM rate_limit_durable GROUP BY 1) AS counts`,
		)
	}
	invoke(t, db.URL, "reset", "login", "--all").complains(t, exitUsage, "--yes")
	require.Equal(t, "login durable 2500, login ephemeral 2500, logins durable 7, logins ephemeral 7", rows())

	// The command skips a locked row, waits for it at the end, and then fails.
	var held string
	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, tx.QueryRow(t.Context(), `SELECT key FROM rate_limit_ephemeral WHERE prefix = 'login'
		ORDER BY key LIMIT 1 FOR UPDATE`).Scan(&held))
	o := invoke(t, db.URL, "reset", "login", "--all", "--yes", "--timeout", "5s")
	require.Equal(t, exitFailed, o.code)
	require.Equal(t, "reset 2499 in rate_limit_ephemeral\n", o.stdout)
	require.Contains(t, o.stderr, "--timeout allows a statement more than 5s")
	require.Contains(t, o.stderr, "waiting for a lock of")
	require.Equal(t, 2, strings.Count(o.stderr, "\n"))
	require.NotContains(t, o.stderr, held)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, "login durable 2500, login ephemeral 1, logins durable 7, logins ephemeral 7", rows())

	require.Equal(t, "reset 1 in rate_limit_ephemeral\n", invoke(t, db.URL, "reset", "login", "--all", "-y").done(t))
	require.Equal(t, "login durable 2500, logins durable 7, logins ephemeral 7", rows())
	reset := decode[struct {
		Table string
		Reset int
	}](t, invoke(t, db.URL, "reset", "login", "--all", "--yes", "--durable", "--json"))
	require.Equal(t, 2500, reset.Reset)
	require.Equal(t, "logins durable 7, logins ephemeral 7", rows())
	require.Contains(t, invoke(t, db.URL, "reset", "login", "--all", "--yes").done(t), "nothing to reset")
}

// A function locks longer keys first. A reset of all keys uses another order, so it must not wait for a lock while it
// holds row locks. If the role may only read and call functions, a function deletes each row, and waits only for the
// locked key.
func TestResetAllByARoleThatMayNotDelete(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	fill(t, db, "rate_limit_ephemeral", "login", keys.BatchSize+20, 1) // more than a batch
	pgtest.Exec(t, db.Pool, `GRANT SELECT ON rate_limit_ephemeral TO pg_monitor;
		GRANT EXECUTE ON FUNCTION rate_limit_reset TO pg_monitor`)
	holder := pgtest.Begin(t, db)
	pgtest.Exec(t, holder, "SELECT FROM rate_limit_ephemeral WHERE prefix = 'login' ORDER BY key LIMIT 1 FOR UPDATE")
	reset := testkit.Later(func() (outcome, error) {
		return invoke(t, urlWith(t, db, "role=pg_monitor"), "reset", "login", "--all", "--yes"), nil
	})
	pgtest.WaitUntilBlocked(t, db.Pool, 1)
	require.NoError(t, holder.Rollback(t.Context()))
	o, err := reset()
	require.NoError(t, err)
	require.Equal(t, "reset 1020 in rate_limit_ephemeral\n", o.afterWaiting().done(t))
}

// A limiter with several policies has a row for each policy.
func TestResetOfSeveralPolicies(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	take := func() bool {
		return pgtest.Scalar[bool](t, db.Pool, "SELECT allowed FROM rate_limit_allow('mp', 'alice', 'sliding 10/1h, fixed 1/365d')")
	}
	for _, args := range [][]string{{"alice"}, {"--all", "--yes"}} {
		require.True(t, take())
		require.False(t, take())
		require.Equal(t, "reset 2 in rate_limit_ephemeral\n",
			invoke(t, db.URL, append([]string{"reset", "mp"}, args...)...).done(t))
	}
	require.True(t, take())
}

func TestResetAllDeadlocksWithNobody(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		reset    func(t *testing.T, db *pgtest.DB) error
		deadlock bool
	}{
		"reset --all": {reset: func(t *testing.T, db *pgtest.DB) error {
			a := &cli.App{DatabaseURL: db.URL, Timeout: patience}
			pool, err := a.Open(t.Context())
			require.NoError(t, err)
			defer pool.Close()
			n, err := keys.ResetAll(t.Context(), cli.DB{App: a, Pool: pool}, cli.DB{}, "login", false)
			require.EqualValues(t, 2, n)
			return err
		}},
		"control: all keys in the order of their bytes, in one transaction": {deadlock: true, reset: func(t *testing.T, db *pgtest.DB) error {
			_, err := db.Pool.Exec(t.Context(), "SELECT count(*) FROM unnest(ARRAY['a', 'bb']) AS k (key) WHERE rate_limit_reset('login', k.key)")
			return err
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			policy := ratelimit.FixedWindow{Limit: 10, Window: time.Hour}
			limiter := limitertest.New(t, db.Pool, ratelimit.Config{Name: "login", Policy: policy})
			for _, key := range []string{"a", "bb"} {
				_, err := limiter.Allow(t.Context(), key)
				require.NoError(t, err)
			}

			// Another session locks the key bb first, and then the key a, as a function does.
			tx, err := db.Pool.Begin(t.Context())
			require.NoError(t, err)
			defer tx.Rollback(context.WithoutCancel(t.Context()))
			_, err = limiter.WithTx(tx).Allow(t.Context(), "bb")
			require.NoError(t, err)
			reset := make(chan error, 1)
			go func() { reset <- test.reset(t, db) }()
			testkit.WaitUntil(t, func() bool {
				return pgtest.Scalar[int](
					t,
					db.Pool,
					"SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
				) == 1
			})
			_, err = limiter.WithTx(tx).Allow(t.Context(), "a")
			if err == nil {
				err = tx.Commit(t.Context())
			} else {
				require.NoError(t, tx.Rollback(t.Context()))
			}
			err = errors.Join(err, <-reset)
			if test.deadlock {
				require.ErrorContains(t, err, "40P01")
			} else {
				require.NoError(t, err)
			}
		})
	}
}

// If all keys are reset under load, the server counts no deadlock.
func TestResetAllUnderLoad(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	policy := ratelimit.FixedWindow{Limit: 1_000_000, Window: time.Hour}
	limiter := limitertest.New(t, db.Pool, ratelimit.Config{Name: "login", Policy: policy})
	a := &cli.App{DatabaseURL: db.URL, Timeout: patience}
	pool, err := a.Open(t.Context())
	require.NoError(t, err)
	defer pool.Close()
	errs := make(chan error, 4)
	for range cap(errs) {
		go func() {
			var err error
			for i := 0; i < 150 && err == nil; i++ {
				var requests []ratelimit.Request
				for j := range 20 {
					requests = append(requests, limiter.Request(strings.Repeat("k", 1+(i+j)%20), 1))
				}
				_, err = ratelimit.AllowAll(t.Context(), requests...)
			}
			errs <- err
		}()
	}
	for done := 0; done < cap(errs); {
		_, err := keys.ResetAll(t.Context(), cli.DB{App: a, Pool: pool}, cli.DB{}, "login", false)
		require.NoError(t, err)
		select {
		case err := <-errs:
			require.NoError(t, err)
			done++
		default:
		}
	}
	require.Zero(
		t,
		pgtest.Scalar[int](t, db.Pool, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"),
	)
}

func TestTop(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	const policy = "sliding 10/365d"
	parsed, err := ratelimit.ParsePolicy(policy)
	require.NoError(t, err)
	limiter := limitertest.New(t, db.Pool, ratelimit.Config{Name: "login", Policy: parsed})
	for key, n := range map[string]int64{"a": 3, "b": 10, "c": 9, "d": 10, "e": 1} {
		result, err := limiter.AllowN(t.Context(), key, n)
		require.NoError(t, err)
		require.True(t, result.Allowed)
	}
	fill(t, db, "rate_limit_ephemeral", "other", 3, 1)
	pgtest.Exec(t, db.Pool,
		"INSERT INTO rate_limit_ephemeral (prefix, key, algorithm, count) VALUES ('login', 'expired', 2, 10)")

	top := decode[keys.TopResult](t, invoke(t, db.URL, "top", "login", "--policy", policy, "--json"))
	require.Equal(
		t,
		keys.TopResult{Limiter: "login", Table: "rate_limit_ephemeral", Looked: 6, Complete: true, Share: 1, At: top.At, Keys: top.Keys},
		top,
	)
	var order []string
	for _, key := range top.Keys {
		order = append(order, fmt.Sprint(key.Key, key.Remaining))
		peek, err := limiter.Peek(t.Context(), key.Key)
		require.NoError(t, err)
		require.Equal(t, peek.Remaining, key.Remaining)
		require.Equal(t, peek.Remaining == 0, key.RetryAfterUS > 0)
		require.LessOrEqual(t, peek.RetryAfter.Microseconds(), key.RetryAfterUS)
		require.LessOrEqual(t, peek.ResetAfter.Microseconds(), key.ResetAfterUS)
	}
	require.Equal(t, []string{"c1", "a7", "e9"}, order[2:])
	require.ElementsMatch(t, []string{"b0", "d0"}, order[:2])

	out := invoke(t, db.URL, "top", "login", "--policy", policy, "-n", "3").done(t)
	require.Regexp(t, `(?m)^[bd]    0          0     \S+ +\S+$`, out)
	require.Regexp(t, `(?m)^c    1          0     now `, out)
	require.NotContains(t, out, "\na ")
	require.Contains(t, out, "\n6 rows of limiter login in rate_limit_ephemeral looked at\n")

	// The usage is greater than the limit, because the limit was lowered.
	out = invoke(t, db.URL, "top", "login", "--policy", "sliding 2/365d", "-n", "1").done(t)
	require.Regexp(t, `(?m)^[abcd]    0 `, out)
}

func TestTopOfAnotherTableAndAlgorithm(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	fill(t, db, "rate_limit_durable", "api", 2*keys.BatchSize+1, 4)
	pgtest.Exec(t, db.Pool, "UPDATE rate_limit_durable SET count = 5 WHERE key = 'key 99'") // key 99 is not in the first batch
	top := decode[keys.TopResult](
		t,
		invoke(t, db.URL, "top", "api", "--policy", "fixed 5/365d", "--durable", "--json", "-n", "2"),
	)
	require.EqualValues(t, 2*keys.BatchSize+1, top.Looked)
	require.True(t, top.Complete)
	require.Equal(t, "key 99", top.Keys[0].Key)
	require.EqualValues(t, 1, top.Keys[1].Remaining)

	for maxRows, complete := range map[string]bool{"1000": false, "2000": false, "2001": true} {
		top := decode[keys.TopResult](
			t,
			invoke(t, db.URL, "top", "api", "--policy", "fixed 5/365d", "--durable", "--json", "--max-rows", maxRows),
		)
		require.Equal(t, complete, top.Complete, maxRows)
		if !complete {
			require.Equal(t, maxRows, fmt.Sprint(top.Looked))
		}
	}
	require.Contains(
		t,
		invoke(t, db.URL, "top", "api", "--policy", "fixed 5/365d", "--durable", "--max-rows", "10").done(t),
		"10 rows of limiter api in rate_limit_durable looked at, chosen at random, "+
			"which is about 0.5 % of them: see --max-rows\n",
	)

	// Under a policy of another algorithm, the keys are as good as new.
	require.Empty(t,
		decode[keys.TopResult](t, invoke(t, db.URL, "top", "api", "--policy", "sliding 5/365d", "--durable", "--json")).Keys)
	require.Zero(t, decode[keys.TopResult](t, invoke(t, db.URL, "top", "api", "--policy", "fixed 5/365d", "--json")).Looked)
}

func TestTopOfALog(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, "SELECT rate_limit_allow('login', key, 'log 3/365d') FROM unnest('{busy,busy,busy,idle}'::text[]) AS key")
	require.Equal(t, exitDenied, invoke(t, db.URL, "take", "login", "busy", "--policy", "log 3/365d").code)
	keys := decode[keys.TopResult](t, invoke(t, db.URL, "top", "login", "--policy", "log 3/365d", "--json")).Keys
	require.Len(t, keys, 2)
	require.Equal(t, "busy", keys[0].Key)
	require.Zero(t, keys[0].Remaining)
	require.Greater(t, keys[0].ResetAfterUS, keys[0].RetryAfterUS)
	require.EqualValues(t, 2, keys[1].Remaining)
}

// Keys with control characters must not control the terminal of the person who looks at them.
func TestKeysAreShownHarmlessly(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	hostile := []string{
		"\x1b]0;title\a",
		"tab\there",
		"line\nbreak",
		"\u202eright to left",
		"  spaces ",
		`"quoted"`,
		"\u009b2J",
		"schön",
	}
	pgtest.Exec(t, db.Pool, "SELECT rate_limit_allow('login', key, 'fixed 5/365d') FROM unnest($1::text[]) AS key", hostile)
	out := invoke(t, db.URL, "top", "login", "--policy", "fixed 5/365d").done(t)
	require.NotContains(t, out, "\x1b")
	require.NotContains(t, out, "\u202e")
	require.NotContains(t, out, "\u009b")
	require.Equal(t, 1+len(hostile)+2, strings.Count(out, "\n"), out)
	for _, shown := range []string{`"\x1b]0;title\a"`, `"tab\there"`, `"line\nbreak"`, `"\u202eright to left"`, `"  spaces "`, `"\"quoted\""`, "\nschön "} {
		require.Contains(t, out, shown)
	}
	shown := map[string]bool{}
	for _, key := range decode[keys.TopResult](t, invoke(t, db.URL, "top", "login", "--policy", "fixed 5/365d", "--json")).Keys {
		shown[key.Key] = true
	}
	for _, key := range hostile {
		require.True(t, shown[key])
	}
}

func TestNothingThatReadsCanWrite(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	a := &cli.App{DatabaseURL: db.URL, Timeout: patience}
	pool, err := a.Open(t.Context())
	require.NoError(t, err)
	defer pool.Close()
	err = cli.DB{App: a, Pool: pool}.Read(t.Context(), func(tx cli.Tx) error {
		_, err := tx.Exec(t.Context(), "SELECT public.rate_limit_take_fixed_window('login', ARRAY['user:123'], 1, 1)")
		return err
	})
	require.ErrorContains(t, err, "SQLSTATE 25006")
}
