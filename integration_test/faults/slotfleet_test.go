package faults

import (
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

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// slotWorkVariable is the environment variable with the work of a child process that uses slots at random.
const slotWorkVariable = "RATELIMIT_TEST_SLOTS"

// slotWork describes what each of several processes with slots does.
type slotWork struct {
	URL     string
	Name    string // the process, in the holders of its slots and as the name of its sessions
	Callers int
	Go, SQL bool          // use slots by this library, by the SQL functions, or both
	TTL     time.Duration // of the slots of this library; up to twice as long
	SQLTTL  time.Duration // the longest of the SQL functions
	Seed    uint64
}

// slotLimit is a limit that all processes use.
type slotLimit struct {
	name    string
	limit   int64
	durable bool
	keys    int
}

// slotLimits returns all limits. The resource with fences is behind the single slots.
func slotLimits() []slotLimit {
	return []slotLimit{{"many", 5, false, 2}, {"single", 1, true, 1}, {"single, ephemeral", 1, false, 1}}
}

func (l slotLimit) key(i int) string { return fmt.Sprint(l.name, " ", i) }

func (l slotLimit) config() ratelimit.Config {
	return ratelimit.Config{Name: l.name, Policy: ratelimit.Concurrency{Limit: l.limit}, Durable: l.durable}
}

// slotUser is a process that uses slots at random.
type slotUser struct {
	slotWork

	pool     *pgxpool.Pool
	limiters []*ratelimit.Limiter
	serial   atomic.Int64
	uses     func()              // called for each slot that was acquired
	died     func(holder string) // called for each slot that is neither released nor renewed any more
}

// slotsInChild uses slots until its standard input ends. It returns the exit status.
func slotsInChild(text string) int {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	u := &slotUser{died: func(string) {}}
	if err := json.Unmarshal([]byte(text), &u.slotWork); err != nil {
		return 2
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	var mu sync.Mutex
	u.uses = func() {
		mu.Lock()
		defer mu.Unlock()
		_, _ = os.Stdout.Write([]byte{'.'})
	}
	config, err := pgxpool.ParseConfig(u.URL)
	if err != nil {
		return 2
	}
	config.MaxConns = 3
	if err := u.open(config); err != nil {
		return 2
	}
	if err := u.run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func (u *slotUser) open(config *pgxpool.Config) (err error) {
	config.ConnConfig.RuntimeParams["application_name"] = u.Name
	if u.pool, err = pgxpool.NewWithConfig(context.Background(), config); err != nil {
		return err
	}
	client, err := ratelimit.NewClient(u.pool, ratelimit.ClientConfig{
		Timeout: amply, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	for _, l := range slotLimits() {
		limiter, err := client.Limiter(l.config())
		if err != nil {
			return err
		}
		u.limiters = append(u.limiters, limiter)
	}
	return nil
}

// run uses slots until ctx ends.
func (u *slotUser) run(ctx context.Context) error {
	var callers sync.WaitGroup
	errs := make([]error, u.Callers)
	for i := range errs {
		callers.Go(func() {
			random := rand.New(rand.NewPCG(u.Seed, uint64(i)))
			for ctx.Err() == nil && errs[i] == nil {
				errs[i] = u.use(ctx, random)
				if ctx.Err() != nil || leaseFails(errs[i]) || pgxConnectionLost(errs[i]) {
					errs[i] = nil
				}
			}
		})
	}
	callers.Wait()
	return errors.Join(errs...)
}

// pgxConnectionLost tells whether an error is none of the server's.
func pgxConnectionLost(err error) bool {
	if err == nil {
		return false
	}
	var told interface{ SQLState() string }
	return !errors.Is(err, errWrongSlot) && !errors.As(err, &told)
}

var errWrongSlot = errors.New("a slot that this caller does not have")

func (u *slotUser) use(ctx context.Context, random *rand.Rand) error {
	i := random.IntN(len(u.limiters))
	l := slotLimits()[i]
	key := l.key(random.IntN(l.keys))
	n := 1 + random.Int64N(min(3, l.limit))
	if u.Go && (!u.SQL || random.IntN(2) == 0) {
		return u.useByGo(ctx, random, u.limiters[i], key, n)
	}
	return u.useBySQL(ctx, random, l, key, n)
}

// useByGo acquires a slot, perhaps waits for it or gives up, and writes to the resource until it releases the slot.
func (u *slotUser) useByGo(ctx context.Context, random *rand.Rand, l *ratelimit.Limiter, key string, n int64) error {
	options := ratelimit.SlotOptions{
		N: n, TTL: u.TTL + time.Duration(random.IntN(2))*u.TTL, Holder: u.Name,
		Group: fmt.Sprint("group ", random.IntN(3)), Weight: random.IntN(3), Strict: random.IntN(4) == 0,
	}
	var slot *ratelimit.Slot
	if random.IntN(2) == 0 {
		result, err := l.TryAcquire(ctx, key, options)
		if err != nil || !result.Allowed {
			pause(ctx, 10*time.Millisecond)
			return err
		}
		slot = result.Slot
	} else {
		patience, cancel := context.WithTimeout(ctx, time.Duration(random.Int64N(int64(2*u.TTL))))
		defer cancel()
		var err error
		if slot, err = l.Acquire(patience, key, options); err != nil {
			if patience.Err() != nil {
				return nil
			}
			return err
		}
	}
	u.uses()
	during := slot.Context(ctx)
	long := u.TTL / 5
	if random.IntN(8) == 0 {
		long = 2 * u.TTL // the slot has to be renewed
	}
	for range 3 {
		pause(during, time.Duration(random.Int64N(int64(long)))/3)
		if during.Err() == nil {
			if _, err := u.write(during, key, slot.Fence()); err != nil && during.Err() == nil {
				return err
			}
		}
	}
	err := slot.Release(context.WithoutCancel(ctx))
	if errors.Is(err, ratelimit.ErrSlotLost) {
		return nil
	}
	if again := slot.Release(ctx); !errors.Is(again, ratelimit.ErrSlotReleased) {
		return fmt.Errorf("%w: released again: %w", errWrongSlot, again)
	}
	return err
}

func (u *slotUser) write(ctx context.Context, key string, fence int64) (accepted bool, err error) {
	err = u.pool.QueryRow(ctx, writeToResource, key, fence).Scan(&accepted)
	return accepted, err
}

// useBySQL does the same by the SQL functions, as a program without a clock: it believes that it has a slot until the
// database says otherwise. Its slots are short, so many end while it believes in them. It stops renewing some, as a
// program that dies.
func (u *slotUser) useBySQL(ctx context.Context, random *rand.Rand, l slotLimit, key string, n int64) error {
	holder := fmt.Sprint(u.Name, " #", u.serial.Add(1))
	ttl := u.SQLTTL/10 + time.Duration(random.Int64N(int64(u.SQLTTL*9/10)))
	var allowed bool
	var slot *string
	var fence *int64
	err := u.pool.QueryRow(ctx, `SELECT allowed, slot::text, fence
		FROM rate_limit_acquire($1, $2, $3, cost => $4, ttl => $5, durable => $6, holder => $7, wait => $8)`,
		l.name, key, fmt.Sprint("concurrent ", l.limit), n, ttl, l.durable, holder, random.IntN(2) == 0).
		Scan(&allowed, &slot, &fence)
	if err != nil || slot == nil {
		pause(ctx, 10*time.Millisecond)
		return err
	}
	died := random.IntN(5) == 0
	for tries := 0; tries < 20 && ctx.Err() == nil; tries++ {
		if allowed {
			u.uses()
			break
		}
		if died && random.IntN(10) == 0 {
			u.died(holder)
			return nil
		}
		pause(ctx, ttl/5)
		var ends *time.Time
		if allowed, fence, ends, err = u.renew(ctx, *slot, ttl); err != nil || ends == nil {
			return err
		}
	}
	for range random.IntN(4) {
		if !allowed {
			break
		}
		pause(ctx, time.Duration(random.Int64N(2*int64(ttl))))
		if _, err := u.write(ctx, key, *fence); err != nil {
			return err
		}
		if random.IntN(2) == 0 {
			live, again, _, err := u.renew(ctx, *slot, ttl)
			if err != nil {
				return err
			}
			if live && *again != *fence {
				return fmt.Errorf("%w: the fence changed from %d to %d", errWrongSlot, *fence, *again)
			}
		}
	}
	if died {
		u.died(holder)
		return nil
	}
	for try := range 2 {
		var released bool
		if err = u.pool.QueryRow(ctx, "SELECT rate_limit_release($1::uuid)", *slot).Scan(&released); err != nil {
			return err
		}
		if try > 0 && released {
			return fmt.Errorf("%w: released twice", errWrongSlot)
		}
	}
	return nil
}

func (u *slotUser) renew(ctx context.Context, slot string, ttl time.Duration) (allowed bool, fence *int64, ends *time.Time, err error) {
	err = u.pool.QueryRow(ctx, "SELECT allowed, fence, ends_at FROM rate_limit_renew($1::uuid, $2)", slot, ttl).
		Scan(&allowed, &fence, &ends)
	return allowed, fence, ends, err
}

// slotObserver checks the slots of all processes by the database's clock.
type slotObserver struct {
	pool *pgxpool.Pool
	most time.Duration // no slot lasts longer after a renewal

	mu   sync.Mutex
	dead map[string]int64 // when the slots and places of a holder that has died must have ended
}

// newSlotObserver makes a resource with fences, and lists of all slots that are granted, and of those that somebody
// else than their holder frees. Triggers write the lists while the key is locked, so their order is the order in the
// database.
func newSlotObserver(t *testing.T, pool *pgxpool.Pool, most time.Duration) *slotObserver {
	t.Helper()
	newResource(t, pool)
	schema := pgtest.Scalar[string](t, pool, "SELECT current_schema()::text")
	pgtest.Exec(t, pool, "CREATE TABLE grants (n bigserial PRIMARY KEY, key text NOT NULL, fence bigint NOT NULL)")
	pgtest.Exec(t, pool, "CREATE TABLE freed (holder text, application text)")
	pgtest.Exec(t, pool, `CREATE FUNCTION note_grant() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
		SET search_path = `+schema+` AS 'BEGIN
			INSERT INTO grants (key, fence) VALUES (NEW.key, NEW.fence);
			RETURN NULL;
		END'`)
	pgtest.Exec(t, pool, `CREATE FUNCTION note_freed() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
		SET search_path = `+schema+` AS $$ BEGIN
			INSERT INTO freed VALUES (OLD.holder, current_setting('application_name'));
			RETURN NULL;
		END $$`)
	for _, table := range []string{"rate_limit_ephemeral_hold", "rate_limit_durable_hold"} {
		pgtest.Exec(t, pool, "CREATE TRIGGER granted AFTER INSERT ON "+table+
			" FOR EACH ROW WHEN (NEW.status = 0) EXECUTE FUNCTION note_grant()")
		pgtest.Exec(t, pool, "CREATE TRIGGER handed_over AFTER UPDATE ON "+table+
			" FOR EACH ROW WHEN (NEW.status = 0 AND OLD.status <> 0) EXECUTE FUNCTION note_grant()")
		pgtest.Exec(t, pool, "CREATE TRIGGER freed AFTER DELETE ON "+table+` FOR EACH ROW
			WHEN (OLD.status = 0 AND OLD.ends_at > extract(epoch FROM clock_timestamp()) * 1000000
				AND OLD.holder <> current_setting('application_name')
				AND OLD.holder NOT LIKE current_setting('application_name') || ' #%')
			EXECUTE FUNCTION note_freed()`)
	}
	return &slotObserver{pool: pool, most: most, dead: map[string]int64{}}
}

// bury notes that a holder has died. Its slots and its places may last for ttl from now.
func (o *slotObserver) bury(ctx context.Context, holder string, ttl time.Duration) error {
	var clock int64
	err := o.pool.QueryRow(ctx, "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint").Scan(&clock)
	o.mu.Lock()
	defer o.mu.Unlock()
	o.dead[holder] = clock + ttl.Microseconds()
	return err
}

// audit checks one key while its row is locked.
func (o *slotObserver) audit(ctx context.Context, l slotLimit, key string) (live int64, err error) {
	table := pgtest.Table(l.durable)
	o.mu.Lock()
	var holders []string
	var deadlines []int64
	for holder, deadline := range o.dead {
		holders, deadlines = append(holders, holder), append(deadlines, deadline)
	}
	o.mu.Unlock()
	err = pgx.BeginFunc(ctx, o.pool, func(tx pgx.Tx) error {
		var held, next, until int64
		err := tx.QueryRow(ctx, "SELECT coalesce(held, 0), coalesce(held_next, 0), coalesce(held_until, 0) FROM "+table+
			" WHERE prefix = $1 AND key = $2 FOR UPDATE", l.name, key).Scan(&held, &next, &until)
		missing := errors.Is(err, pgx.ErrNoRows)
		if err != nil && !missing {
			return err
		}
		var clock, listed, first, last, longest int64
		err = tx.QueryRow(ctx, `
			WITH c AS MATERIALIZED (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS clock)
			SELECT clock,
				coalesce(sum(units) FILTER (WHERE status = 0 AND ends_at > clock), 0)::bigint,
				coalesce(sum(units) FILTER (WHERE status = 0), 0)::bigint,
				coalesce(min(ends_at) FILTER (WHERE status = 0), 0),
				coalesce(max(ends_at) FILTER (WHERE status = 0), 0),
				coalesce(max(ends_at) FILTER (WHERE status IN (0, 3)), clock) - clock
			FROM c LEFT JOIN `+table+`_hold ON prefix = $1 AND key = $2 GROUP BY clock`, l.name, key).
			Scan(&clock, &live, &listed, &first, &last, &longest)
		switch {
		case err != nil || missing: // without the lock of the row, the list may change meanwhile
			return err
		case live > l.limit:
			return fmt.Errorf("%d of %d are live", live, l.limit)
		case held != listed || next != first || until != last:
			return fmt.Errorf("the row says that %d are held from %d to %d, and the list %d from %d to %d",
				held, next, until, listed, first, last)
		case longest > o.most.Microseconds():
			return fmt.Errorf("a slot lasts for %d µs", longest)
		}
		var ghost *string
		err = tx.QueryRow(ctx, `SELECT min(d.holder) FROM unnest($1::text[], $2::bigint[]) AS d (holder, deadline)
			JOIN `+table+`_hold AS h ON h.holder = d.holder
			WHERE d.deadline <= $3 AND h.status IN (0, 3) AND h.ends_at > $3 AND h.prefix = $4 AND h.key = $5`,
			holders, deadlines, clock, l.name, key).Scan(&ghost)
		if err == nil && ghost != nil {
			err = fmt.Errorf("%s is dead and has a slot", *ghost)
		}
		return err
	})
	if err != nil {
		return live, fmt.Errorf("%s: %w", key, err)
	}
	return live, nil
}

// audits checks all keys.
func (o *slotObserver) audits(ctx context.Context) (live int64, err error) {
	for _, l := range slotLimits() {
		for i := range l.keys {
			units, err := o.audit(ctx, l, l.key(i))
			if err != nil {
				return 0, errors.Join(err, o.judge(ctx))
			}
			live = max(live, units)
		}
	}
	return live, o.judge(ctx)
}

// judge checks the lists: the fences of a key ascend, nobody frees a slot of somebody else, and the resource behind a
// single slot accepts no write of a holder after a write of a later holder.
func (o *slotObserver) judge(ctx context.Context) (all error) {
	for _, check := range []struct{ what, sql string }{
		{"a fence that does not ascend", `SELECT min(format('%s: %s after %s', key, fence, before)) FROM (
			SELECT key, fence, max(fence) OVER (PARTITION BY key ORDER BY n ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
				AS before FROM grants) AS g WHERE fence <= before`},
		{"a slot that somebody else has freed", "SELECT min(format('%s, by %s', holder, application)) FROM freed"},
		{"a stale write", `SELECT min(format('%s: %s', key, fence)) FROM (
			SELECT w.key, w.fence, g.n, max(g.n) OVER (PARTITION BY w.key ORDER BY w.n) AS newest
			FROM writes AS w LEFT JOIN grants AS g USING (key, fence) WHERE w.key LIKE 'single%') AS w
			WHERE n < newest OR n IS NULL`},
	} {
		var found *string
		if err := o.pool.QueryRow(ctx, check.sql).Scan(&found); err != nil {
			return err
		}
		if found != nil {
			all = errors.Join(all, fmt.Errorf("%s: %s", check.what, *found))
		}
	}
	return all
}

// slotFleet is a group of processes that use slots at random, and are killed, stopped and cut off.
type slotFleet struct {
	slotWork

	observer      *slotObserver
	uses          atomic.Int64
	lives         atomic.Int64 // the number of processes that were started
	kills, pauses atomic.Int64
}

type slotChild struct {
	*exec.Cmd

	name   string
	stdin  io.Closer
	stderr strings.Builder
	heard  chan struct{}
	uses   atomic.Int64
}

func (f *slotFleet) start(ctx context.Context, proxyURL string, seed uint64) (*slotChild, error) {
	w := f.slotWork
	w.URL, w.Seed, w.Name = proxyURL, seed, fmt.Sprint("process ", f.lives.Add(1))
	text, err := json.Marshal(w)
	if err != nil {
		return nil, err
	}
	c := &slotChild{Cmd: exec.CommandContext(ctx, os.Args[0]), name: w.Name, heard: make(chan struct{})}
	c.Env = append(os.Environ(), slotWorkVariable+"="+string(text))
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
		buffer := make([]byte, 64)
		for {
			n, err := stdout.Read(buffer)
			c.uses.Add(int64(n))
			f.uses.Add(int64(n))
			if err != nil {
				return
			}
		}
	}()
	return c, nil
}

// kill kills a process. When the server has no session of it any more, its slots must end within their time.
func (f *slotFleet) kill(ctx context.Context, c *slotChild) error {
	if err := c.Process.Kill(); err != nil {
		return err
	}
	<-c.heard
	_ = c.Wait() // it was killed
	for sessions := 1; sessions > 0; {
		err := f.observer.pool.QueryRow(ctx, "SELECT count(*)::int FROM pg_stat_activity WHERE application_name = $1", c.name).
			Scan(&sessions)
		if err != nil {
			return err
		}
	}
	f.kills.Add(1)
	return f.observer.bury(ctx, c.name, 2*f.TTL)
}

// live runs processes one after another until ctx ends.
func (f *slotFleet) live(ctx context.Context, random *rand.Rand, proxy *wireProxy) error {
	always := context.WithoutCancel(ctx)
	child, err := f.start(always, proxy.url, random.Uint64())
	if err != nil {
		return err
	}
	for err == nil {
		for enough := child.uses.Load() + 3; ctx.Err() == nil && child.uses.Load() < enough; {
			select {
			case <-child.heard: // it has failed
				return fmt.Errorf("%s: %w: %s", child.name, child.Wait(), &child.stderr)
			default:
				pause(ctx, time.Duration(random.Int64N(int64(f.TTL/2))))
			}
		}
		if ctx.Err() != nil {
			break
		}
		switch random.IntN(4) {
		case 0:
			if err = f.kill(always, child); err == nil {
				child, err = f.start(always, proxy.url, random.Uint64())
			}
		case 1:
			err = child.Process.Signal(syscall.SIGSTOP)
			pause(ctx, time.Duration(random.Int64N(int64(3*f.TTL))))
			err = errors.Join(err, child.Process.Signal(syscall.SIGCONT))
			f.pauses.Add(1)
		case 2:
			proxy.cutAll()
		case 3:
			proxy.fail(&fault{reply: anyReply})
		}
	}
	if err != nil {
		return err
	}
	_ = child.stdin.Close()
	<-child.heard
	if err := child.Wait(); err != nil {
		return fmt.Errorf("%s: %w: %s", child.name, err, &child.stderr)
	}
	return nil
}
