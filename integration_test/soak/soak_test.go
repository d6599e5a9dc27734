// Package soak runs all kinds of calls for minutes, on a server that keeps failing, and looks for wrong counts and
// leaks.
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
	// soakRounds is how often a soak is repeated on a busy machine, until all counters are positive.
	soakRounds = 6

	// soakBrief is the length of the soak in `make test`. Such a short soak is judged only by bounds.
	soakBrief = 10 * time.Second

	// A soak of at least soakLong is also checked for leaks. Each half then has a dozen of each fault.
	soakLong = 5 * time.Minute

	soakPools     = 3 // each pool stands for a process
	soakPoolSize  = 4 // fewer connections than the client and the transactions of a pool want
	soakCallers   = 16
	soakThinkTime = 10 * time.Millisecond // the longest pause of a caller: the load is steady, and leaves room to see a leak

	soakAccounts, soakHotAccounts = 20, 2 // for each limiter; the hot accounts get half of all requests
	soakLimit                     = 400   // the limit of an account
	soakAges                      = 60 * 24 * time.Hour
	soakRegulars                  = 10 // for each limiter
	soakRegularLimit              = 20
	soakWindow                    = 500 * time.Millisecond
	soakLeasedLimit               = 200
	soakLeasedWindow              = 2 * time.Second
)

// TestSoak runs all kinds of calls against a server that keeps failing: all algorithms on both tables, hot and cold
// keys, keys that are used once, rolled-back transactions, refunds, held rows, impatient callers, and sweepers. An
// attacker's decoys are in the schema. It records the callers' answers. TestSoak fails when a row or a later answer
// contradicts these records, or when rows or goroutines are left at the end.
//
// SOAK is the length of the soak; 10 s by default. SEED repeats the faults and the callers' choices of the run that
// printed it. SOAK_OUT is the folder for soak.svg and soak.json.
func TestSoak(t *testing.T) {
	t.Parallel()
	length, seed, out := soakBrief, testkit.Seed(t, "SEED"), os.Getenv("SOAK_OUT")
	var err error
	if text := os.Getenv("SOAK"); text != "" {
		length, err = time.ParseDuration(text)
		require.NoError(t, err)
		if out == "" {
			out, err = os.MkdirTemp("", "soak") //nolint:usetesting // the user who started the soak wants to read it
			require.NoError(t, err)
		}
	} else if out == "" {
		out = t.TempDir()
	}

	s := newSoak(t, seed, nil, 0)
	s.attack()
	t.Cleanup(func() { // the results are written even if the soak has failed
		require.NoError(t, s.write(out, length))
		t.Logf("%s/soak.svg and soak.json: %s", out, s.totals())
	})
	s.run(length, s.faults())
	s.settle()
	require.Empty(t, s.violations)
	for kind, count := range s.faultCounts() {
		require.Positive(t, count, kind)
	}
	require.Empty(t, s.missing(), "the soak was to have all of it")
	if length >= soakLong {
		require.Empty(t, soakLeaks(s.samples))
	}
}

// soak is a server with all its callers, and the records about them.
type soak struct {
	t      *testing.T
	seed   uint64
	server *pgserver.Server
	pools  []*pgxpool.Pool
	// Each pool has one client, so one statement decides for several limiters. The soak counts these statements.
	clients []*ratelimit.Client
	shared  atomic.Int64
	extra   *pgxpool.Pool // for audits, samples and faults, so that they do not wait for callers

	accounts  []*soakLimiter // keys with windows that outlast the soak: the row has all units ever taken
	passing   []*soakLimiter // keys with short windows, whose rows are swept
	leased    *soakRegular   // a key that processes lease from
	life      atomic.Int64   // how often the server has crashed
	offspring func() int     // returns how many goroutines of the run and of its limiters still run

	calls, granted, denied, failed, doubtful, rolledBack, audits, swept, visitors atomic.Int64

	held, heldAccounts, refunds, staleRefunds, leasedDecisions atomic.Int64

	mu         sync.Mutex
	stop       context.CancelFunc // ends the run
	violations []string
	archived   map[soakRowID]int64 // for each key that is no longer used, the units that late calls may still take
	events     []soakEvent
	samples    []soakSample
	began      time.Time
}

// soakRowID identifies a row in either table.
type soakRowID struct{ name, key string }

// soakLimiter is a limiter that each process has.
type soakLimiter struct {
	ratelimit.Config
	limiters []*ratelimit.Limiter // one for each pool
	accounts []*soakAccount
	regulars []*soakRegular
}

// newSoak starts a server with these settings, and clients with this Timeout. 0 is the default.
func newSoak(t *testing.T, seed uint64, settings map[string]string, timeout time.Duration) *soak {
	t.Helper()
	// The server has Postgres's defaults, except that autovacuum runs every second instead of every minute. The soak
	// then sees within minutes the work of autovacuum that takes hours elsewhere.
	all := map[string]string{"autovacuum_naptime": "1s"}
	maps.Copy(all, settings)
	s := &soak{t: t, seed: seed, archived: map[soakRowID]int64{}, stop: func() {}, began: time.Now()}
	s.server = pgtest.Server(t, pgserver.Config{Fsync: true, Settings: all})
	s.extra = s.newPool(4)
	require.NoError(t, migrations.Up(t.Context(), s.extra))
	for range soakPools {
		pool := s.newPool(soakPoolSize)
		client, err := ratelimit.NewClient(pool, ratelimit.ClientConfig{Timeout: timeout, Observer: &ratelimit.Observer{
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
		config.NoDenialCache = i == 0 // with a cache of denials, the test could miss that too much is allowed
		limiter, err := client.Limiter(config)
		require.NoError(s.t, err)
		l.limiters = append(l.limiters, limiter)
	}
	return l
}

// rng returns a source of random choices. The same seed and stream repeat them.
func (s *soak) rng(stream uint64) *rand.Rand { return rand.New(rand.NewPCG(s.seed, stream)) }

// run runs callers, sweepers and faults until the time is over, or until the first violation.
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
	for range soakRounds {
		until := time.Now().Add(length)
		s.happen(ctx, faults, until)
		if !soakWait(ctx, time.Until(until)) || s.missing() == "" {
			break
		}
	}
	stop()
	callers.Wait()
	end()
	others.Wait()
}

// sweep sweeps until the context ends. It deletes rows as soon as they expire, so that callers and sweepers meet more
// often. (rate_limit_sweep keeps rows for another minute.) The server and the callers have the same clock.
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

// settle ends the soak. All callers stop. Then every row that remains must be in the records.
func (s *soak) settle() {
	s.t.Helper()
	s.waitUntil("the limiters come to rest", func() bool { return s.offspring() == 0 })
	for _, l := range s.accounts { // refunds of takes from deleted rows must change nothing
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

	// From now on, no call takes anything.
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

	// All rows that can expire do so within two seconds, and are deleted. Only the accounts' rows stay.
	sweep := func(config cleanup.Config) {
		config.Share = 1
		sweeper, err := cleanup.New(s.extra, config)
		require.NoError(s.t, err)
		for range 2 { // the first pass may begin where an earlier pass stopped
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

// explainRows reports rows that are not in the records.
func (s *soak) explainRows() {
	s.t.Helper()
	rows, err := s.extra.Query(s.t.Context(), `
		SELECT prefix, key, CASE algorithm WHEN 3 THEN (count + scale / 2) / scale ELSE count END FROM rate_limit_ephemeral
		UNION ALL
		SELECT prefix, key, CASE algorithm WHEN 3 THEN (count + scale / 2) / scale ELSE count END FROM rate_limit_durable`)
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

// violate records a violation, and ends the run.
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

// missing returns the name of a counter that is 0, or "".
func (s *soak) missing() string {
	for name, count := range s.counters() {
		if count == 0 {
			return name
		}
	}
	return ""
}

func (s *soak) totals() string {
	var text strings.Builder
	for _, name := range sortedKeys(s.counters()) {
		fmt.Fprintf(&text, "%s %s, ", svg.Thousands(int(s.counters()[name])), name)
	}
	fmt.Fprintf(&text, "%d crashes", s.life.Load())
	return text.String()
}

// waitUntil waits until the function condition returns true, which is certain to happen.
func (s *soak) waitUntil(what string, condition func() bool) {
	s.t.Helper()
	testkit.WaitUntil(s.t, condition, "what does not happen: %s", what)
}

// soakWait waits for the time d, or until the context ends. It returns whether this time has passed.
func soakWait(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	return ctx.Err() == nil
}
