package policytable_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/policytable"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// A key that is denied often enough is banned in all processes. Each further ban is longer.
func TestBan(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	ban := &ratelimit.Ban{Denials: 5, Within: time.Hour, First: time.Hour, Longest: 3 * time.Hour, ForgivenAfter: time.Hour}
	config := ratelimit.Config{Name: "login", Policy: ratelimit.FixedWindow{Limit: 1, Window: time.Hour}, Ban: ban}
	limiters := make([]*ratelimit.Limiter, 2)
	for i := range limiters {
		config.Policies = limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{})
		limiters[i] = limitertest.New(t, db.Pool, config)
	}
	require.Equal(t, ban, limiters[0].Config().Ban)
	banned := func(l *ratelimit.Limiter) (ratelimit.Result, bool) {
		result, err := l.Peek(t.Context(), "key")
		require.NoError(t, err)
		return result, result.Source == ratelimit.SourcePolicy
	}
	taken, err := limiters[0].Allow(t.Context(), "key")
	require.NoError(t, err)
	require.True(t, taken.Allowed)
	allow := func() (ratelimit.Result, error) { return limiters[0].Allow(t.Context(), "key") }
	allowTx := func() (result ratelimit.Result, err error) {
		err = pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
			result, err = limiters[0].WithTx(tx).Allow(t.Context(), "key")
			return err
		})
		return result, err
	}
	for _, round := range []struct {
		ask  func() (ratelimit.Result, error)
		want time.Duration
	}{
		{allow, time.Hour}, {allowTx, 2 * time.Hour}, {allow, 3 * time.Hour}, {allow, 3 * time.Hour},
	} {
		for denied := range ban.Denials {
			_, isBanned := banned(limiters[0]) // Peek counts no denial
			require.False(t, isBanned)
			looked, err := limiters[0].AllowN(t.Context(), "key", 0)
			require.NoError(t, err)
			require.False(t, looked.Allowed)
			require.Equal(t, denied, counted(limitertest.View(limiters[0]).Strikes, "key"))
			result, err := round.ask()
			require.NoError(t, err)
			require.False(t, result.Allowed)
		}
		for _, l := range limiters {
			testkit.WaitUntil(t, func() bool { _, isBanned := banned(l); return isBanned })
		}
		result, err := limiters[1].Allow(t.Context(), "key")
		require.NoError(t, err)
		require.False(t, result.Allowed)
		require.Equal(t, ratelimit.SourcePolicy, result.Source)
		require.InDelta(t, round.want, result.RetryAfter, float64(time.Minute))
		require.Equal(t, round.want, pgtest.BanLasts(t, db.Pool, "key"))
		require.True(t, pgtest.Scalar[bool](t, db.Pool, `SELECT name = 'login' AND mode = 'deny' AND automatic
			AND comment = '5 denials within 1h0m0s' FROM rate_limit_policy WHERE key = 'key'`))
		for range 10 { // denials by a ban do not count
			_, err := limiters[0].Allow(t.Context(), "key")
			require.NoError(t, err)
		}
		testkit.WaitUntil(t, func() bool { return counted(limitertest.View(limiters[0]).Strikes, "key") == 0 })

		pgtest.AgeBans(t, db.Pool, (round.want + 30*time.Minute).String()) // makes the ban end half an hour ago
		for _, l := range limiters {
			testkit.WaitUntil(t, func() bool { _, isBanned := banned(l); return !isBanned })
		}
	}
}

// counted returns how many denials of a key have been counted.
func counted(s *policytable.Strikes, key string) (n int) {
	for i := range s.Shards {
		shard := &s.Shards[i]
		shard.Mu.Lock()
		n += shard.Keys[key].N
		shard.Mu.Unlock()
	}
	return n
}

// Denials count within BanTerms.Within from the first one, until the key is banned. Denials count for at most
// MaxStrikes keys.
func TestStrikes(t *testing.T) {
	t.Parallel()

	s := policytable.NewStrikes("login", policytable.BanTerms{Denials: 3, Within: time.Minute, First: time.Hour})
	later := func() { s.Begin = s.Begin.Add(-time.Minute - time.Second) }
	require.False(t, s.Count("a"))
	require.False(t, s.Count("a"))
	later()
	require.False(t, s.Count("a"))
	require.False(t, s.Count("a"))
	require.True(t, s.Count("a"))
	later()
	require.True(t, s.Count("a")) // still true, because the key is not banned yet
	require.Equal(t, 4, counted(s, "a"))
	s.Banned("a")
	require.Zero(t, counted(s, "a"))
	require.False(t, s.Count("a"))

	// Many keys with one denial do not push out a key that was denied more often.
	require.False(t, s.Count("b"))
	require.False(t, s.Count("b"))
	for range 3 {
		s.Count("due")
	}
	for i := range 3 * policytable.MaxStrikes {
		require.False(t, s.Count(fmt.Sprint(i)))
	}
	keys := 0
	for i := range s.Shards {
		keys += len(s.Shards[i].Keys)
	}
	require.LessOrEqual(t, keys, policytable.MaxStrikes)
	require.Greater(t, keys, policytable.MaxStrikes*9/10)
	require.True(t, s.Count("due"))
	require.True(t, s.Count("b"))

	// Keys whose period is over are dropped first.
	later()
	require.False(t, s.Count("c"))
	for i := range 3 * policytable.MaxStrikes {
		s.Count(fmt.Sprint("other", i%(policytable.MaxStrikes/8)))
	}
	require.Equal(t, 1, counted(s, "c"))
	require.True(t, s.Count("due"))
}

// However many keys are to be banned, a key that goes on being denied is banned next. In the end all keys are banned,
// without another denial. All keys are banned even if a ban fails.
func TestBansOfACrowd(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	var journal testkit.Journal
	p, err := ratelimit.NewPolicies(db.Pool, ratelimit.PoliciesConfig{Logger: journal.Logger()})
	require.NoError(t, err)
	limiters := make([]*ratelimit.Limiter, 2)
	for i := range limiters {
		limiters[i] = limitertest.New(t, db.Pool, ratelimit.Config{
			Name: fmt.Sprint("login", i), Policy: ratelimit.FixedWindow{Limit: 1, Window: time.Hour}, Policies: p,
			Ban: &ratelimit.Ban{Denials: 2 + i, Within: time.Hour, First: time.Hour},
		})
	}
	deny := func(l *ratelimit.Limiter, key string, times int) {
		for range times {
			limitertest.View(l).Strike(key)
		}
	}
	for i := range 2 * policytable.MaxBans {
		deny(limiters[i%2], fmt.Sprint(i), 3)
		deny(limiters[0], fmt.Sprint("once", i), 1)
	}
	deny(limiters[1], "loud", 7)
	bans := limitertest.Table(p).NextBans()
	require.Len(t, bans, policytable.MaxBans)
	require.Equal(t, "loud", bans[0].Key)
	for _, b := range bans {
		limitertest.Table(p).List(b.Strikes)
	}

	pgtest.Exec(t, db.Pool, "ALTER FUNCTION rate_limit_ban RENAME TO rate_limit_away")
	limitertest.Table(p).Patience = testkit.Amply
	limitertest.Run(t, p)
	testkit.WaitUntil(t, func() bool { return journal.String() != "" })
	pgtest.Exec(t, db.Pool, "ALTER FUNCTION rate_limit_away RENAME TO rate_limit_ban")
	testkit.WaitUntil(t, func() bool {
		return pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM rate_limit_policy") == 2*policytable.MaxBans+1
	})
	testkit.WaitUntil(t, func() bool { return counted(limitertest.View(limiters[1]).Strikes, "loud") == 0 })
	require.Equal(t, 1, counted(limitertest.View(limiters[0]).Strikes, "once1"))
	require.Len(t, journal.Lines(), 1, journal.String())
	require.Equal(t, "3 denials within 1h0m0s login1", pgtest.Scalar[string](t, db.Pool,
		"SELECT comment || ' ' || name FROM rate_limit_policy WHERE key = 'loud'"))
}

// A ban that the database refuses does not prevent other bans, and is dropped.
func TestBanThatIsRefused(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
		$$ BEGIN RAISE EXCEPTION 'no'; END $$`)
	pgtest.Exec(t, db.Pool, `CREATE TRIGGER refuse BEFORE INSERT ON rate_limit_policy FOR EACH ROW
		WHEN (NEW.key = 'secret') EXECUTE FUNCTION refuse()`)
	var journal testkit.Journal
	p, err := ratelimit.NewPolicies(db.Pool, ratelimit.PoliciesConfig{Logger: journal.Logger()})
	require.NoError(t, err)
	l := limitertest.New(t, db.Pool, ratelimit.Config{
		Name: "login", Policy: ratelimit.FixedWindow{Limit: 1, Window: time.Hour}, Policies: p,
		Ban: &ratelimit.Ban{Denials: 1, Within: time.Hour, First: 90 * time.Minute},
	})
	for _, key := range []string{"a", "secret", "b"} {
		limitertest.View(l).Strike(key)
	}
	limitertest.Table(p).Patience = testkit.Amply
	limitertest.Run(t, p)
	testkit.WaitUntil(t, func() bool { return counted(limitertest.View(l).Strikes, "secret") == 0 && journal.String() != "" })
	require.Equal(t, []string{"a", "b"}, pgtest.Scalar[[]string](t, db.Pool,
		"SELECT array_agg(key ORDER BY key) FROM rate_limit_policy"))
	require.Equal(t, 90*time.Minute, pgtest.BanLasts(t, db.Pool, "a"))
	require.NotContains(t, journal.String(), "secret")
}

// If a ban cannot be made, that is logged once, without the key. Decisions go on.
func TestBanThatCannotBeMade(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, "DROP FUNCTION rate_limit_ban")
	var journal testkit.Journal
	l := limitertest.New(t, db.Pool, ratelimit.Config{
		Name: "login", Policy: ratelimit.FixedWindow{Limit: 1, Window: time.Hour},
		Policies: limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{Logger: journal.Logger()}),
		Ban:      &ratelimit.Ban{Denials: 1, Within: time.Hour, First: time.Hour},
	})
	for range 20 {
		_, err := l.Allow(t.Context(), "secret")
		require.NoError(t, err)
	}
	testkit.WaitUntil(t, func() bool { return journal.String() != "" })
	require.Contains(t, journal.String(), "a key cannot be banned")
	require.NotContains(t, journal.String(), "secret")
	require.Len(t, journal.Lines(), 1)
}
