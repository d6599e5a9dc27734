// Package soak has everything run at once for minutes, on a server that keeps failing, and looks for what was counted
// wrong or left behind.
package soak

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/cleanup"
	"github.com/pgratelimit/ratelimit/integration_test/svg"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/migrations"
)

const (
	// soakBrief is how long the soak of `make test` is. It is judged by bounds alone.
	soakBrief = 10 * time.Second

	// soakLong is the length from which a soak is judged by its plateaus too. Each half then has a dozen of all
	// faults.
	soakLong = 5 * time.Minute

	soakPools     = 3 // as of three processes
	soakPoolSize  = 4 // fewer connections than the client and the transactions of a pool would like to have
	soakCallers   = 16
	soakThinkTime = 10 * time.Millisecond // at most: the load is steady, and leaves room for a leak to show

	soakAccounts, soakHotAccounts = 20, 2 // for each limiter, of which half of all requests go to the hot ones
	soakLimit                     = 400   // of an account
	soakAges                      = 60 * 24 * time.Hour
	soakRegulars                  = 10 // for each limiter
	soakRegularLimit              = 20
	soakWindow                    = 500 * time.Millisecond
	soakLeasedLimit               = 200
	soakLeasedWindow              = 2 * time.Second
)

// TestSoak runs everything at once, against a server that keeps failing: all algorithms on both tables, hot and
// cold keys, keys that never come back, transactions that are rolled back, refunds, rows that are held, impatient
// callers, and sweepers, among the decoys of an attacker. It keeps books of what the callers were told. It fails
// when a row or a later answer contradicts them, or when something is left behind.
//
// SOAK is how long that goes on, 10 s if it is not set. SEED repeats the faults and the choices of the callers of
// an earlier run, which has printed it. SOAK_OUT is the folder for soak.svg and soak.json.
func TestSoak(t *testing.T) {
	t.Parallel()
	length, seed, out := soakBrief, testkit.Seed(t, "SEED"), os.Getenv("SOAK_OUT")
	var err error
	if text := os.Getenv("SOAK"); text != "" {
		length, err = time.ParseDuration(text)
		require.NoError(t, err)
		if out == "" {
			out, err = os.MkdirTemp("", "soak") //nolint:usetesting // it is for whoever asked for a soak to look at
			require.NoError(t, err)
		}
	} else if out == "" {
		out = t.TempDir()
	}

	s := newSoak(t, seed, nil)
	s.attack()
	t.Cleanup(func() { // also when it has failed
		require.NoError(t, s.write(out, length))
		t.Logf("%s/soak.svg and soak.json: %s", out, s.totals())
	})
	s.run(length, s.faults())
	s.settle()
	require.Empty(t, s.violations)
	for kind, count := range s.faultCounts() {
		require.Positive(t, count, kind)
	}
	for name, count := range s.counters() {
		require.Positive(t, count, "%s: the soak was to have all of it", name)
	}
	if length >= soakLong {
		require.Empty(t, soakLeaks(s.samples))
	}
}

// soak is a server, everybody who uses it, and the books about them.
type soak struct {
	t      *testing.T
	seed   uint64
	server *pgserver.Server
	pools  []*pgxpool.Pool
	// One on each pool, so that statements decide for several limiters. How many did is counted.
	clients []*ratelimit.Client
	shared  atomic.Int64
	extra   *pgxpool.Pool // for auditing, sampling and faults, so that they wait for no caller

	accounts  []*soakLimiter // with windows that outlast the soak: all that was ever taken is in the row
	passing   []*soakLimiter // with windows that end all the time, whose rows are swept
	leased    *soakRegular   // a key that processes lease from, the same else
	life      atomic.Int64   // of the server: how often it has crashed
	offspring func() int     // how many goroutines of the run, and of the limiters in it, have not ended

	calls, granted, denied, failed, doubtful, rolledBack, audits, swept, visitors atomic.Int64

	held, heldAccounts, refunds, staleRefunds, leasedDecisions atomic.Int64

	mu         sync.Mutex
	stop       context.CancelFunc // ends the run
	violations []string
	archived   map[soakRowID]int64 // keys that are not used any more, and what may still be taken from them
	events     []soakEvent
	samples    []soakSample
	began      time.Time
}

// soakRowID is where a row stands in either table.
type soakRowID struct{ name, key string }

// soakLimiter is a limiter that each of several processes has.
type soakLimiter struct {
	ratelimit.Config
	limiters []*ratelimit.Limiter // one on each pool
	accounts []*soakAccount
	regulars []*soakRegular
}

func newSoak(t *testing.T, seed uint64, settings map[string]string) *soak {
	t.Helper()
	// As Postgres comes, except that autovacuum looks every second instead of every minute. The soak has minutes
	// for what takes hours elsewhere.
	all := map[string]string{"autovacuum_naptime": "1s"}
	maps.Copy(all, settings)
	s := &soak{t: t, seed: seed, archived: map[soakRowID]int64{}, stop: func() {}, began: time.Now()}
	s.server = pgtest.Server(t, pgserver.Config{Fsync: true, Settings: all})
	s.extra = s.newPool(4)
	require.NoError(t, migrations.Up(t.Context(), s.extra))
	for range soakPools {
		pool := s.newPool(soakPoolSize)
		client, err := ratelimit.NewClient(pool, ratelimit.ClientConfig{Observer: &ratelimit.Observer{
			Statement: func(e ratelimit.StatementEvent) {
				if e.Limiter == "" && e.Err == nil {
					s.shared.Add(1)
				}
			},
		}})
		require.NoError(t, err)
		s.pools, s.clients = append(s.pools, pool), append(s.clients, client)
	}

	for _, table := range []ratelimit.Config{
		{Name: "ephemeral"}, {Name: "durable", Durable: true}, {Name: "synchronous", Durable: true, SynchronousCommit: true},
	} {
		for _, policy := range []ratelimit.Policy{
			ratelimit.FixedWindow{Limit: soakLimit, Window: soakAges},
			ratelimit.SlidingWindow{Limit: soakLimit, Window: soakAges},
			ratelimit.TokenBucket{Capacity: soakLimit, Refill: 1, Every: soakAges},
			ratelimit.SlidingLog{Limit: soakLimit, Window: soakAges},
		} {
			config := table
			config.Name, config.Policy = fmt.Sprintf("%s %T", table.Name, policy), policy
			l := s.newLimiter(config)
			for i := range soakAccounts {
				l.accounts = append(l.accounts, newAccount(l, i))
			}
			s.accounts = append(s.accounts, l)
		}
	}
	for _, durable := range []bool{false, true} {
		for _, policy := range []ratelimit.Policy{
			ratelimit.FixedWindow{Limit: soakRegularLimit, Window: soakWindow},
			ratelimit.SlidingWindow{Limit: soakRegularLimit, Window: soakWindow},
			ratelimit.TokenBucket{Capacity: soakRegularLimit, Refill: soakRegularLimit, Every: soakWindow},
			ratelimit.SlidingLog{Limit: soakRegularLimit, Window: soakWindow},
		} {
			l := s.newLimiter(ratelimit.Config{
				Name: fmt.Sprintf("passing %T, durable %v", policy, durable), Policy: policy, Durable: durable,
			})
			for i := range soakRegulars {
				l.regulars = append(l.regulars, newRegular(l, fmt.Sprintf("regular:%d", i)))
			}
			s.passing = append(s.passing, l)
		}
	}
	s.leased = newRegular(s.newLimiter(ratelimit.Config{
		Name: "leased", Policy: ratelimit.FixedWindow{Limit: soakLeasedLimit, Window: soakLeasedWindow},
		Durable: true, SynchronousCommit: true, Lease: &ratelimit.Lease{MaxShare: 0.1},
	}), "leased")
	return s
}

func (s *soak) newPool(size int32) *pgxpool.Pool {
	s.t.Helper()
	config, err := pgxpool.ParseConfig(s.server.URL())
	require.NoError(s.t, err)
	config.MaxConns = size
	pool, err := pgxpool.NewWithConfig(s.t.Context(), config)
	require.NoError(s.t, err)
	s.t.Cleanup(pool.Close)
	return pool
}

func (s *soak) newLimiter(config ratelimit.Config) *soakLimiter {
	s.t.Helper()
	l := &soakLimiter{Config: config}
	for i, client := range s.clients {
		config.NoDenialCache = i == 0 // or an over-admission could hide behind the cache
		limiter, err := client.Limiter(config)
		require.NoError(s.t, err)
		l.limiters = append(l.limiters, limiter)
	}
	return l
}

// rng is a source of choices that the seed repeats.
func (s *soak) rng(stream uint64) *rand.Rand { return rand.New(rand.NewPCG(s.seed, stream)) }

// run has callers ask, sweepers sweep and faults happen, until the time is up, or a violation is found.
func (s *soak) run(length time.Duration, faults []soakFault) {
	s.t.Helper()
	ctx, stop := context.WithCancel(s.t.Context())
	defer stop()
	s.mu.Lock()
	s.stop, s.began = stop, time.Now()
	s.mu.Unlock()

	var callers, others sync.WaitGroup
	background, end := context.WithCancel(s.t.Context())
	defer end()
	s.offspring = testkit.Offspring(s.t, func(context.Context) {
		for pool := range s.pools {
			for i := range soakCallers {
				callers.Go(func() { s.call(ctx, pool, s.rng(uint64(1+pool*soakCallers+i))) })
			}
			others.Go(func() { s.sweep(background, pool) })
		}
		others.Go(func() { s.sample(background, max(length/200, 250*time.Millisecond)) })
	})
	s.happen(ctx, faults, time.Now().Add(length))
	soakWait(ctx, time.Until(s.began.Add(length)))
	stop()
	callers.Wait()
	end()
	others.Wait()
}

// sweep sweeps until the context ends. Rows go as soon as they have expired, without the minute for which
// rate_limit_sweep spares them, so that callers and sweepers meet more often. Server and callers have the same
// clock.
func (s *soak) sweep(ctx context.Context, pool int) {
	sweeper, err := cleanup.New(
		s.pools[pool],
		cleanup.Config{Interval: time.Second, Test: ratelimit.TestConfig{Now: aMinuteAhead}},
	)
	if err == nil {
		err = sweeper.Run(ctx)
	}
	if err != nil {
		s.violate("a sweeper has given up: %v", err)
	}
}

func aMinuteAhead() time.Time { return time.Now().Add(time.Minute) }

// settle is the end. Everybody leaves, and nothing but what the books explain may be left.
func (s *soak) settle() {
	s.t.Helper()
	s.waitUntil("the limiters come to rest", func() bool { return s.offspring() == 0 })
	for _, l := range s.accounts { // what was taken from a row that is gone is given back, which changes nothing
		s.audit(s.t.Context(), l.accounts[0])
		s.giveBack(s.t.Context(), l.accounts[0], s.rng(0))
	}
	for _, pool := range append(s.pools, s.extra) {
		pool.Close()
	}
	s.extra = s.newPool(1)
	s.waitUntil("all connections are closed", func() bool {
		return pgtest.Scalar[int64](
			s.t,
			s.extra,
			"SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()",
		) == 0
	})

	// Nobody is left who could still take something.
	for _, l := range s.accounts {
		for _, a := range l.accounts {
			s.audit(s.t.Context(), a)
		}
	}
	for _, l := range s.passing {
		for _, r := range l.regulars {
			s.judge(r)
		}
	}
	s.judge(s.leased)

	// All that can expire has expired in two seconds, and goes. What stays are accounts.
	sweep := func(config cleanup.Config) {
		config.Share = 1
		sweeper, err := cleanup.New(s.extra, config)
		require.NoError(s.t, err)
		for range 2 { // the first one goes on where another one may have stopped
			s.waitUntil("a pass is complete", func() bool {
				result, err := sweeper.RunOnce(s.t.Context())
				require.NoError(s.t, err)
				s.swept.Add(result.Deleted)
				return result.Complete
			})
		}
	}
	later := func() time.Time { return time.Now().Add(time.Minute + soakLeasedWindow) }
	sweep(cleanup.Config{Test: ratelimit.TestConfig{Now: later}})
	s.explainRows()
	sweep(cleanup.Config{Names: []string{"nobody's"}})
	s.waitUntil("the tables are as small as they were", func() bool {
		for _, table := range []string{"rate_limit_ephemeral", "rate_limit_durable"} {
			_, err := s.extra.Exec(s.t.Context(), "VACUUM "+table)
			require.NoError(s.t, err)
		}
		return pgtest.Scalar[int64](
			s.t,
			s.extra,
			"SELECT pg_catalog.pg_relation_size('rate_limit_ephemeral') + pg_catalog.pg_relation_size('rate_limit_durable')",
		) == 0
	})
}

// explainRows looks for rows that the books do not explain.
func (s *soak) explainRows() {
	s.t.Helper()
	rows, err := s.extra.Query(s.t.Context(), `
		SELECT prefix, key, CASE algorithm WHEN 3 THEN $1 - (credit + scale / 2) / scale ELSE count END FROM rate_limit_ephemeral
		UNION ALL
		SELECT prefix, key, CASE algorithm WHEN 3 THEN $1 - (credit + scale / 2) / scale ELSE count END FROM rate_limit_durable`, int64(soakLimit))
	require.NoError(s.t, err)
	var id soakRowID
	var taken int64
	_, err = pgx.ForEachRow(rows, []any{&id.name, &id.key, &taken}, func() error {
		if most, ok := s.archived[id]; !ok || taken > most {
			s.violate(
				"%s, %s: a row says that %d were taken after the key was reset, and at most %d can have been",
				id.name,
				id.key,
				taken,
				most,
			)
		}
		return nil
	})
	require.NoError(s.t, err)
}

// violate notes that something was found that must not be, and ends the run.
func (s *soak) violate(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.violations) < 20 {
		s.violations = append(
			s.violations,
			fmt.Sprintf("after %.3f s: ", time.Since(s.began).Seconds())+fmt.Sprintf(format, args...),
		)
	}
	s.stop()
}

func (s *soak) counters() map[string]int64 {
	return map[string]int64{
		"calls": s.calls.Load(), "granted": s.granted.Load(), "denied": s.denied.Load(), "failed": s.failed.Load(),
		"unknown outcomes": s.doubtful.Load(), "rolled back": s.rolledBack.Load(), "accounts audited": s.audits.Load(),
		"keys that came once": s.visitors.Load(), "rows swept": s.swept.Load(),
		"statements of several limiters": s.shared.Load(),
		"told that the key is held":      s.held.Load(), "refunds": s.refunds.Load(),
		"refunds of what does not count any more": s.staleRefunds.Load(),
		"leased decisions":                        s.leasedDecisions.Load(),
	}
}

func (s *soak) totals() string {
	var text strings.Builder
	for _, name := range sortedKeys(s.counters()) {
		fmt.Fprintf(&text, "%s %s, ", svg.Thousands(int(s.counters()[name])), name)
	}
	fmt.Fprintf(&text, "%d crashes", s.life.Load())
	return text.String()
}

// waitUntil waits for what is certain to come.
func (s *soak) waitUntil(what string, condition func() bool) {
	s.t.Helper()
	testkit.WaitUntil(s.t, condition, "what does not happen: %s", what)
}

// soakWait waits, or until the context ends, and tells whether it has not.
func soakWait(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	return ctx.Err() == nil
}
