package replay

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/policies"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// A log that is sent to Postgres gets the same answer for each line as in a replay.
func TestReplayAnswersLikePostgres(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for i, text := range []string{
		"fixed 5/10s", "sliding 5/10s", "bucket 5 2/3s", "log 5/10s", "every 5/10s", "every 5/minute Asia/Kolkata",
		"sliding 3/2s + bucket 8 1/2s + every 20/minute", "fixed 6/7s, log 9/20s",
	} {
		t.Run(text, func(t *testing.T) {
			t.Parallel()
			dice := rand.New(rand.NewPCG(9, uint64(i)))
			log, at := "time,key,cost\n", limitertest.C0
			for range 400 {
				at += dice.Int64N(1_500_000)
				if dice.IntN(40) == 0 {
					at += 30_000_000
				}
				log += fmt.Sprintf("%d,key %d,%d\n", at-dice.Int64N(2_000_000), dice.IntN(3), 1+dice.IntN(3)*dice.IntN(3))
			}
			policy, err := ParsePolicy(text)
			require.NoError(t, err)
			parsed, err := ratelimit.ParsePolicy(policy.Text)
			require.NoError(t, err)
			var now time.Time
			limiter := limitertest.New(t, db.Pool, ratelimit.Config{
				Name: fmt.Sprintf("replay %d", i), Policy: parsed, NoDenialCache: true,
			}, ratelimit.ClientConfig{Test: ratelimit.TestConfig{Now: func() time.Time { return now }}})

			r, keys := newRun(policy, nil), newKeyring()
			in := Input{
				Files: []string{"-"}, Stdin: strings.NewReader(log), Progress: func(int64) {}, Tolerance: 1_000_000,
				MaxBad: 1,
			}
			lines, err := in.each(t.Context(), keys, func(q request) {
				now = time.UnixMicro(q.at)
				want, err := limiter.AllowN(t.Context(), keys.names[q.key], q.cost)
				if !errors.As(err, new(*ratelimit.CostError)) { // a cost above the limit, which a replay denies
					require.NoError(t, err)
				}
				require.Equal(t, want.Allowed, r.decide(q, keys.names[q.key]), "%+v", q)
			})
			require.NoError(t, err)
			require.EqualValues(t, 400, lines.Read)
			require.Positive(t, lines.Late)
			require.Greater(t, r.denied, int64(40))
			require.Greater(t, r.allowed, int64(40))
		})
	}
}

// With the rows of a table, a log that is sent to Postgres also gets the same answer for each line as in a replay.
func TestReplayByRowsAnswersLikePostgres(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, key, key_prefix, mode, policy, valid_from, valid_until, comment) VALUES
		('api', 'one', NULL, 'enforce', 'sliding 3/5s', '-infinity', 'infinity', 'a key'),
		('api', 'two', NULL, 'enforce', 'fixed 1/1s', '-infinity', 'infinity', 'another kind'),
		('api', 'three', NULL, 'enforce', 'sliding 1/1s', '-infinity', now() - interval '1 day', 'over'),
		('api', 'three', NULL, 'enforce', 'sliding 2/1s', now() + interval '1 day', 'infinity', 'not yet'),
		('api', 'four', NULL, 'enforce', 'sliding 4/1m', now() - interval '2 days', 'infinity', 'older'),
		('api', 'four', NULL, 'enforce', 'sliding 5/10s, log 6/20s', now() - interval '1 day', 'infinity', 'newer'),
		('api', 'five', NULL, 'shadow', 'sliding 1/1m', '-infinity', 'infinity', 'a shadow'),
		('api', NULL, 'user:', 'enforce', 'sliding 8/10s', '-infinity', 'infinity', 'a prefix'),
		('api', NULL, 'user:a', 'deny', NULL, '-infinity', 'infinity', 'a longer prefix'),
		('api', NULL, 'user:an', 'off', NULL, '-infinity', 'infinity', 'the longest prefix'),
		('api', 'user:anna', NULL, 'enforce', 'sliding 2/10s', '-infinity', 'infinity', 'a key within them'),
		('api', 'banned', NULL, 'deny', NULL, '-infinity', 'infinity', 'a ban'),
		('api', NULL, NULL, 'enforce', 'sliding 6/10s', '-infinity', 'infinity', 'everybody'),
		('other', 'six', NULL, 'deny', NULL, '-infinity', 'infinity', 'another limiter')`)
	var rows *table
	require.NoError(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		found, err := policies.Deciding(t.Context(), tx, "api")
		if err != nil {
			return err
		}
		rows, err = newTable("api", found)
		return err
	}))
	code, err := ParsePolicy("sliding 7/10s")
	require.NoError(t, err)
	everybody := rows.forEverybody(&code)
	require.Equal(t, "sliding 6/10s", everybody.Text)

	table, err := ratelimit.NewPolicies(db.Pool, ratelimit.PoliciesConfig{Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	go table.Run(t.Context())
	var now time.Time
	limiter := limitertest.New(t, db.Pool, ratelimit.Config{
		Name: "api", Policy: code.parsed, Policies: table, NoDenialCache: true, OnFailure: ratelimit.ReturnError(),
	}, ratelimit.ClientConfig{Test: ratelimit.TestConfig{Now: func() time.Time { return now }}})
	r, keys, at := newRun(*everybody, rows), newKeyring(), limitertest.C0
	dice := rand.New(rand.NewPCG(10, 0))
	names := []string{
		"one", "two", "three", "four", "five", "six", "user:", "user:bob", "user:al", "user:an", "user:anna", "user:annab", "banned", "use",
	}
	for range 1500 {
		at += dice.Int64N(500_000)
		name := names[dice.IntN(len(names))]
		q := request{at: at, cost: 1 + dice.Int64N(2), key: keys.of([]byte(name))}
		now = time.UnixMicro(at)
		want, err := limiter.AllowN(t.Context(), name, q.cost)
		if !errors.As(err, new(*ratelimit.CostError)) {
			require.NoError(t, err)
		}
		require.Equal(t, want.Allowed, r.decide(q, name), "%s %+v", name, q)
	}
	require.Greater(t, r.allowed, int64(300))
	require.Greater(t, r.denied, int64(300))
	require.Greater(t, r.byRows, int64(500))
}
