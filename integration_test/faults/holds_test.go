package faults

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// holdWorkVariable is the environment variable with the work of a child process that holds and settles.
const holdWorkVariable = "RATELIMIT_TEST_HOLDS"

// holdWork describes what each of several processes does. All of them use the same keys.
type holdWork struct {
	URL     string
	Durable bool
	Keys    int
	Limit   int64
	Window  time.Duration
	TTL     time.Duration // the longest
	Callers int
	Seed    uint64
}

func (w holdWork) config() ratelimit.Config {
	return ratelimit.Config{
		Name: "held", Policy: ratelimit.FixedWindow{Limit: w.Limit, Window: w.Window}, Durable: w.Durable,
		SynchronousCommit: w.Durable,
	}
}

// settled is a process's report of a settlement that was answered.
type settled struct {
	Hold string
	Used int64
	Late bool
}

// holdInChild holds and settles until its standard input ends. It returns the exit status.
func holdInChild(text string) int {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	var w holdWork
	if err := json.Unmarshal([]byte(text), &w); err != nil {
		return 2
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	pool, err := pgxpool.New(ctx, w.URL)
	if err != nil {
		return 2
	}
	limiter, err := ratelimit.New(pool, w.config())
	if err != nil {
		return 2
	}
	reports := json.NewEncoder(os.Stdout)
	var mu sync.Mutex
	var callers sync.WaitGroup
	for i := range w.Callers {
		callers.Go(func() {
			random := rand.New(rand.NewPCG(w.Seed, uint64(i)))
			for ctx.Err() == nil {
				report, ok := w.holdOnce(ctx, limiter, random)
				if ok {
					mu.Lock()
					_ = reports.Encode(report)
					mu.Unlock()
				}
			}
		})
	}
	callers.Wait()
	return 0
}

// holdOnce makes a hold, perhaps extends it, and perhaps settles it. The result ok tells whether the report is complete.
func (w holdWork) holdOnce(ctx context.Context, limiter *ratelimit.Limiter, random *rand.Rand) (s settled, ok bool) {
	ttl := time.Millisecond + time.Duration(random.Int64N(int64(w.TTL)))
	n := 1 + random.Int64N(w.Limit/4)
	held, err := limiter.Hold(ctx, fmt.Sprint("key ", random.IntN(w.Keys)), n, ttl)
	if err != nil || !held.Allowed {
		pause(ctx, 2*time.Millisecond)
		return s, false
	}
	hold := held.Hold
	if random.IntN(4) == 0 {
		if hold, err = limiter.HoldFromText(ctx, hold.String()); err != nil {
			return s, false
		}
	}
	pause(ctx, time.Duration(random.Int64N(int64(ttl)*5/4)))
	if random.IntN(4) == 0 {
		_ = hold.Extend(ctx, ttl)
	}
	if random.IntN(8) == 0 {
		return s, false // nobody settles it
	}
	used := max(0, random.Int64N(2*n)-n) // half of the holds are cancelled
	var settlement ratelimit.Settlement
	for range 3 {
		if settlement, err = hold.Settle(ctx, used); err == nil {
			break
		}
	}
	if err == nil && random.IntN(4) == 0 {
		again, err := hold.Settle(ctx, used+1)
		if err == nil && (again.Used != settlement.Used || again.Late != settlement.Late || !again.At.Equal(settlement.At)) {
			panic(fmt.Sprintf("settled twice: %+v and %+v", settlement, again))
		}
	}
	return settled{hold.String(), settlement.Used, settlement.Late}, err == nil
}

// holdFleet is a group of processes that hold and settle, and their reports.
type holdFleet struct {
	holdWork

	mu      sync.Mutex
	reports []settled
}

type holdChild struct {
	*exec.Cmd

	stdin  io.Closer
	stderr strings.Builder
	heard  chan struct{} // closed when all reports were read
	count  atomic.Int64  // the number of reports
}

func (f *holdFleet) start(ctx context.Context, url string, seed uint64) (*holdChild, error) {
	w := f.holdWork
	w.URL, w.Seed = url, seed
	text, err := json.Marshal(w)
	if err != nil {
		return nil, err
	}
	c := &holdChild{Cmd: exec.CommandContext(ctx, os.Args[0]), heard: make(chan struct{})}
	c.Env = append(os.Environ(), holdWorkVariable+"="+string(text))
	c.Stderr = &c.stderr
	if c.stdin, err = c.StdinPipe(); err != nil {
		return nil, err
	}
	stdout, err := c.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(c.heard)
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			var report settled
			if json.Unmarshal(lines.Bytes(), &report) != nil {
				return // the process was killed while it wrote
			}
			f.mu.Lock()
			f.reports = append(f.reports, report)
			f.mu.Unlock()
			c.count.Add(1)
		}
	}()
	return c, nil
}

// live runs processes one after another until ctx ends. They are killed, frozen for longer than their holds last, and
// cut off after a request was sent.
func (f *holdFleet) live(ctx context.Context, random *rand.Rand, proxy *wireProxy) error {
	child, err := f.start(context.WithoutCancel(ctx), proxy.url, random.Uint64())
	if err != nil {
		return err
	}
	for err == nil {
		for enough := child.count.Load() + 5; ctx.Err() == nil && child.count.Load() < enough; {
			pause(ctx, time.Duration(random.Int64N(int64(2*f.TTL)))) // even on a busy machine something is settled
		}
		if ctx.Err() != nil {
			break
		}
		switch random.IntN(5) {
		case 0:
			err = child.Process.Kill()
			<-child.heard
			_ = child.Wait() // it was killed
			if err == nil {
				child, err = f.start(context.WithoutCancel(ctx), proxy.url, random.Uint64())
			}
		case 1:
			err = child.Process.Signal(syscall.SIGSTOP)
			pause(ctx, f.TTL+time.Duration(random.Int64N(int64(f.TTL))))
			err = errors.Join(err, child.Process.Signal(syscall.SIGCONT))
		case 2:
			proxy.cutAll()
		case 3:
			proxy.fail(&fault{reply: anyReply, then: swallow})
		}
	}
	if err != nil {
		return err
	}
	_ = child.stdin.Close()
	<-child.heard
	if err := child.Wait(); err != nil {
		return fmt.Errorf("a child: %w: %s", err, &child.stderr)
	}
	return nil
}

// audit checks one key by the database's clock, while the key's row is locked: the row has counted exactly what the
// settlements of its window say, its sum of live holds is that of the list, and what was admitted fits the limit. A
// settlement after the end of a hold counts although others may have got its units, so it may exceed the limit.
func (f *holdFleet) audit(ctx context.Context, pool *pgxpool.Pool, key string) (live int64, err error) {
	table := "rate_limit_ephemeral"
	if f.Durable {
		table = "rate_limit_durable"
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		var start, expires, count, held, next, until int64
		err := tx.QueryRow(ctx, `SELECT window_start, expires_at, count, coalesce(held, 0), coalesce(held_next, 0),
			coalesce(held_until, 0) FROM `+table+` WHERE prefix = 'held' AND key = $1 FOR UPDATE`, key).
			Scan(&start, &expires, &count, &held, &next, &until)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		if err != nil {
			return err
		}
		var clock, used, late, listed, first, last int64
		err = tx.QueryRow(ctx, `
			WITH c AS MATERIALIZED (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS clock)
			SELECT clock,
				coalesce(sum(used) FILTER (WHERE status = 2 AND settled_at >= $2), 0)::bigint,
				coalesce(sum(used) FILTER (WHERE status = 2 AND settled_at >= $2 AND late), 0)::bigint,
				coalesce(sum(units) FILTER (WHERE status = 0 AND ends_at > clock), 0)::bigint,
				coalesce(sum(units) FILTER (WHERE status = 0), 0)::bigint,
				coalesce(min(ends_at) FILTER (WHERE status = 0), 0),
				coalesce(max(ends_at) FILTER (WHERE status = 0), 0)
			FROM c LEFT JOIN `+table+`_hold ON prefix = 'held' AND key = $1 GROUP BY clock`, key, start).
			Scan(&clock, &used, &late, &live, &listed, &first, &last)
		switch {
		case err != nil:
			return err
		case held != listed || next != first || until != last:
			return fmt.Errorf("the row says that %d are held from %d to %d, and the list %d from %d to %d",
				held, next, until, listed, first, last)
		case clock < expires && count != used:
			return fmt.Errorf("%d are counted, and %d were settled", count, used)
		case clock < expires && count-late+live > f.Limit, live > f.Limit:
			return fmt.Errorf("%d are counted (%d of them late) and %d held of %d", count, late, live, f.Limit)
		}
		return nil
	})
	return live, err
}

// Processes that hold units are killed, frozen and cut off. What they have settled counts exactly once, nothing is held
// for longer than its time, and the limit is never exceeded. HOLDS_FOR makes the test longer, and HOLDS_PROCESSES the
// fleet larger.
func TestHoldsOfUnluckyProcesses(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the rows of one database")

	random := random(t)
	for round := range testkit.Rounds(t, "ROUNDS", 1) {
		f := &holdFleet{holdWork: holdWork{
			Durable: round%2 == 1, Keys: 3, Limit: 60, Window: 700 * time.Millisecond, TTL: 120 * time.Millisecond, Callers: 4,
		}}
		db := pgtest.New(t)
		ctx, cancel := context.WithCancel(t.Context())
		processes := testkit.Rounds(t, "HOLDS_PROCESSES", 4)
		errs := make([]error, processes)
		var lives sync.WaitGroup
		for i := range errs {
			proxy := newWireProxy(t, db.URL)
			mine := rand.New(rand.NewPCG(random.Uint64(), 0))
			lives.Go(func() { errs[i] = f.live(ctx, mine, proxy) })
		}
		pool := db.OwnerPool(t, nil)
		seconds := testkit.Rounds(t, "HOLDS_FOR", 3)
		end := time.Now().Add(time.Duration(seconds) * time.Second)
		held := int64(0)
		audits := 0
		for f.settlements() < 100 || time.Now().Before(end) {
			for key := range f.Keys {
				live, err := f.audit(t.Context(), pool, fmt.Sprint("key ", key))
				require.NoError(t, err, "SEED, round %d, audit %d", round, audits)
				held = max(held, live)
				audits++
			}
		}
		cancel()
		lives.Wait()
		require.NoError(t, errors.Join(errs...))
		require.Positive(t, held)
		f.checkReports(t, pool)
		t.Logf("%d settlements were reported, %d audits, at most %d of %d held", f.settlements(), audits, held, f.Limit)
	}
}

// A server that is killed forgets no settlement that was acknowledged, and counts none twice.
func TestKilledServerForgetsNoSettlement(t *testing.T) {
	t.Parallel()

	random := random(t)
	server, pool := newServer(t, pgserver.Config{Fsync: true})
	f := &holdFleet{holdWork: holdWork{
		Durable: true, Keys: 2, Limit: 200, Window: 3 * time.Second, TTL: 80 * time.Millisecond,
	}}
	for range testkit.Rounds(t, "ROUNDS", 3) {
		limiter := limitertest.New(t, newPool(t, server.URL(), nil), f.config())
		ctx, cancel := context.WithCancel(t.Context())
		var callers sync.WaitGroup
		before := f.settlements()
		for range 8 {
			mine := rand.New(rand.NewPCG(random.Uint64(), 0))
			callers.Go(func() {
				for ctx.Err() == nil {
					if report, ok := f.holdOnce(ctx, limiter, mine); ok {
						f.mu.Lock()
						f.reports = append(f.reports, report)
						f.mu.Unlock()
					}
				}
			})
		}
		testkit.WaitUntil(t, func() bool { return f.settlements() >= before+20 })
		pause(t.Context(), time.Duration(random.Int64N(int64(f.TTL))))
		require.NoError(t, server.Kill())
		cancel()
		callers.Wait()

		require.NoError(t, server.Restart(t.Context()))
		pool.Reset()
		for key := range f.Keys {
			_, err := f.audit(t.Context(), pool, fmt.Sprint("key ", key))
			require.NoError(t, err)
		}
		f.checkReports(t, pool)
	}
}

func (f *holdFleet) settlements() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.reports)
}

// checkReports compares all reports with the database, and waits until no hold is live any more.
func (f *holdFleet) checkReports(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	rows, err := pool.Query(t.Context(), `SELECT id::text, used, late FROM (
		SELECT * FROM rate_limit_ephemeral_hold UNION ALL SELECT * FROM rate_limit_durable_hold) AS h WHERE status = 2`)
	require.NoError(t, err)
	known := map[string]settled{}
	var s settled
	_, err = pgx.ForEachRow(rows, []any{&s.Hold, &s.Used, &s.Late}, func() error {
		known[s.Hold] = s
		return nil
	})
	require.NoError(t, err)
	for _, report := range f.reports {
		report.Hold, _, _ = strings.Cut(report.Hold, ".")
		require.Equal(t, known[report.Hold], report)
	}
	limiter := limitertest.New(t, pool, f.config())
	for key := range f.Keys {
		for { // the holds of processes that were killed end by themselves
			result, err := limiter.Peek(t.Context(), fmt.Sprint("key ", key))
			require.NoError(t, err)
			if result.Held == 0 {
				break
			}
			require.LessOrEqual(t, result.ResetAfter, f.Window+f.TTL)
			pause(t.Context(), result.RetryAfter)
		}
	}
}

// This is a negative control: the audit finds the faults of broken variants.
func TestAuditOfHoldsCatches(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the rows of one database")

	random := random(t)
	for name, broken := range map[string]struct{ function, old, mistake string }{
		"a settlement that counts twice": {
			"_rate_limit_beside_ephemeral", "IF NOT known OR status = 2 OR most < asked", "IF NOT known OR most < asked",
		},
		"a sum that drifts":             {"_rate_limit_beside_ephemeral", "coalesce(s.held, 0) + cost", "coalesce(s.held, 0) + cost + 1"},
		"a hold that is never in a sum": {"_rate_limit_beside_ephemeral", "s.held := coalesce(s.held, 0) + cost", "s.held := cost"},
		"a hold that lives again":       {"_rate_limit_note_ends_ephemeral", "AND (h.ends_at <= clock", "AND (h.ends_at <= clock - 100000"},
	} {
		seed := random.Uint64()
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := &holdFleet{holdWork: holdWork{Keys: 1, Limit: 60, Window: 700 * time.Millisecond, TTL: 50 * time.Millisecond}}
			db := pgtest.New(t)
			pgtest.Rewrite(t, db.Pool, broken.function, broken.old, broken.mistake)
			pool := db.OwnerPool(t, nil)
			limiter := limitertest.New(t, pool, f.config())
			ctx, cancel := context.WithCancel(t.Context())
			var callers sync.WaitGroup
			for i := range 6 {
				callers.Go(func() {
					random := rand.New(rand.NewPCG(seed, uint64(i)))
					for ctx.Err() == nil {
						f.holdOnce(ctx, limiter, random)
					}
				})
			}
			var err error
			for err == nil {
				_, err = f.audit(t.Context(), pool, "key 0")
			}
			cancel()
			callers.Wait()
			t.Log(err)
		})
	}
}
