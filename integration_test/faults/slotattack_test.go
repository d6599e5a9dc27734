package faults

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// Processes with slots are killed, stopped and cut off at random. Never are more units live than the limit, all slots
// of a process that was killed end in time, nobody waits for ever, and a resource that checks fences accepts no write
// of a holder that has lost its slot. SLOTS_FOR makes the test longer, and SLOTS_PROCESSES the fleet smaller.
func TestSlotsOfUnluckyProcesses(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the rows of one database")

	random := random(t)
	db := pgtest.New(t)
	f := &slotFleet{slotWork: slotWork{
		Callers: 3, Go: true, SQL: true, TTL: time.Second, SQLTTL: 300 * time.Millisecond,
	}}
	f.observer = newSlotObserver(t, db.OwnerPool(t, nil), 2*f.TTL)
	ctx, cancel := context.WithCancel(t.Context())
	errs := make([]error, testkit.Rounds(t, "SLOTS_PROCESSES", 16))
	var lives sync.WaitGroup
	for i := range errs {
		proxy := newWireProxy(t, db.URL)
		mine := rand.New(rand.NewPCG(random.Uint64(), 0))
		lives.Go(func() {
			if errs[i] = f.live(ctx, mine, proxy); errs[i] != nil {
				cancel()
			}
		})
	}
	const own = "waiting"
	pool := db.OwnerPool(t, func(config *pgxpool.Config) {
		config.ConnConfig.RuntimeParams["application_name"] = own
	})
	client := limitertest.NewClient(t, pool, ratelimit.ClientConfig{
		Timeout: amply, Logger: slog.New(slog.DiscardHandler),
	})
	var limiters []*ratelimit.Limiter
	for _, l := range slotLimits() {
		limiters = append(limiters, limitertest.Of(t, client, l.config()))
	}
	served := f.waitAlways(ctx, pool, limiters)
	seconds := testkit.Rounds(t, "SLOTS_FOR", 4)
	end := time.Now().Add(time.Duration(seconds) * time.Second)
	audits, most := 0, int64(0)
	enough := func() bool {
		return f.uses.Load() >= 100 && f.kills.Load() >= 3 && f.pauses.Load() >= 3 && time.Now().After(end)
	}
	var err error
	for err == nil && ctx.Err() == nil && !enough() {
		var live int64
		live, err = f.observer.audits(t.Context())
		most = max(most, live)
		audits++
	}
	cancel()
	lives.Wait()
	require.NoError(t, errors.Join(append(errs, err, served())...), "SEED, audit %d", audits)
	require.Equal(t, slotLimits()[0].limit, most)
	for i, l := range slotLimits() { // nothing is left
		for key := range l.keys {
			slot, err := limiters[i].Acquire(t.Context(), l.key(key), ratelimit.SlotOptions{N: l.limit, TTL: 2 * f.TTL, Holder: own})
			require.NoError(t, err)
			require.NoError(t, slot.Release(t.Context()))
		}
	}
	_, err = f.observer.audits(t.Context())
	require.NoError(t, err)
	t.Logf("%d slots, %d audits, %d processes were killed and %d stopped, %d writes",
		f.uses.Load(), audits, f.kills.Load(), f.pauses.Load(),
		pgtest.Scalar[int](t, db.Pool, "SELECT count(*)::int FROM writes"))
}

// waitAlways waits for slots in all lines, without giving up, until ctx ends. The returned function waits until all
// callers have been served.
func (f *slotFleet) waitAlways(ctx context.Context, pool *pgxpool.Pool, limiters []*ratelimit.Limiter) (served func() error) {
	always, giveUp := context.WithCancel(context.Background())
	var callers sync.WaitGroup
	errs := make([]error, len(limiters))
	for i, l := range slotLimits() {
		callers.Go(func() {
			for n := 0; ctx.Err() == nil && errs[i] == nil; n++ {
				slot, err := limiters[i].Acquire(always, l.key(n%l.keys), ratelimit.SlotOptions{
					N: l.limit, TTL: 2 * f.TTL, Holder: pool.Config().ConnConfig.RuntimeParams["application_name"],
				})
				if err == nil {
					err = slot.Release(always)
				}
				if !errors.Is(err, ratelimit.ErrSlotLost) && !leaseFails(err) {
					errs[i] = err
				}
				pause(ctx, f.TTL/10)
			}
		})
	}
	return func() error {
		defer time.AfterFunc(amply, giveUp).Stop()
		callers.Wait()
		return errors.Join(errs...)
	}
}

// This is a negative control: the observer finds the faults of broken variants.
func TestObserverOfSlotsCatches(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the rows of one database")

	const (
		one, renew = "_rate_limit_slot_ephemeral", "_rate_limit_renew_ephemeral"
		all, fence = "rate_limit_renew_all", "_rate_limit_next_fence"
	)
	type rewrite struct{ function, old, mistake string }
	random := random(t)
	for name, c := range map[string]struct {
		rewrites []rewrite
		finds    string
	}{
		"a release that frees another's slot": {[]rewrite{{
			one, "WHERE h.id = slot AND h.key = key AND h.prefix = name AND h.fence > 0",
			"WHERE h.id = (SELECT o.id FROM public.rate_limit_ephemeral_hold AS o WHERE o.key = key AND o.prefix = name " +
				"AND o.status = 0 ORDER BY o.id = slot LIMIT 1)",
		}}, "a slot that somebody else has freed"},
		"a counter that drifts": {[]rewrite{{
			one, "s.held := nullif(s.held - units, 0);", "s.held := nullif(s.held - 1, 0);",
		}}, "and the list"},
		"a counter that is too small": {[]rewrite{{
			one, "s.held := coalesce(s.held, 0) + cost;", "s.held := cost;",
		}}, "are "},
		"a renewal that revives a slot": {[]rewrite{
			{renew, "SET ends_at = greatest(h.ends_at, clock + ttl_us)", "SET ends_at = clock + ttl_us, status = CASE h.status WHEN 1 THEN 0 ELSE h.status END"},
			{renew, "h.status IN (0, 3)", "h.status IN (0, 1, 3)"},
			{renew, "AND h.ends_at > clock AND", "AND"},
			{all, "h.status IN (0, 3)", "h.status IN (0, 1, 3)"},
		}, " are live"},
		"a renewal of all slots of a key": {[]rewrite{{
			renew, "WHERE h.id = e.id AND h.key = e.key", "WHERE h.key = e.key",
		}}, "is dead and has a slot"},
		"a renewal for too long": {[]rewrite{{
			renew, "SET ends_at = greatest(h.ends_at, clock + ttl_us)", "SET ends_at = clock + 10 * ttl_us",
		}}, "a slot lasts for"},
		"fences that descend": {[]rewrite{{fence, "RETURN nextval(", "RETURN 1000000000 - nextval("}}, "a fence that does not ascend"},
	} {
		seed := random.Uint64()
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			work := slotWork{SQL: true, Callers: 4, SQLTTL: 80 * time.Millisecond}
			o := newSlotObserver(t, db.OwnerPool(t, nil), work.SQLTTL)
			for _, r := range c.rewrites {
				if r.function == renew || r.function == one {
					pgtest.RewriteTwins(t, db.Pool, r.function, r.old, r.mistake)
				} else {
					pgtest.Rewrite(t, db.Pool, r.function, r.old, r.mistake)
				}
			}
			ctx, cancel := context.WithCancel(t.Context())
			var users sync.WaitGroup
			for i := range 3 {
				u := &slotUser{slotWork: work, uses: func() {}, died: func(holder string) {
					_ = o.bury(ctx, holder, work.SQLTTL)
				}}
				u.Name, u.Seed = fmt.Sprint("user ", i), seed+uint64(i)
				pool := db.OwnerPool(t, nil)
				require.NoError(t, u.open(pool.Config()))
				users.Go(func() {
					defer u.pool.Close()
					for ctx.Err() == nil {
						_ = u.run(ctx) // the mistake may surprise a caller too
					}
				})
			}
			var err error
			for err == nil || !strings.Contains(err.Error(), c.finds) {
				_, err = o.audits(t.Context())
				require.NoError(t, t.Context().Err())
			}
			cancel()
			users.Wait()
			t.Log(err)
		})
	}
}

// A holder writes after the end of its slot, and after a write of the next holder. Fences that ascend let the resource
// refuse that. In the negative control they descend, and the judge notices the stale write.
func TestStaleWrites(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the rows of one database")
	for _, descend := range []bool{false, true} {
		db := pgtest.New(t)
		o := newSlotObserver(t, db.OwnerPool(t, nil), time.Hour)
		if descend {
			pgtest.Rewrite(t, db.Pool, "_rate_limit_next_fence", "RETURN nextval(", "RETURN 1000000000 - nextval(")
		}
		acquire := func() (fence int64) {
			testkit.WaitUntil(t, func() bool {
				var allowed bool
				var told *int64
				require.NoError(t, o.pool.QueryRow(t.Context(), `SELECT allowed, fence FROM rate_limit_acquire(
					'single', 'single 0', 'concurrent 1', ttl => '50 ms')`).Scan(&allowed, &told))
				if allowed {
					fence = *told
				}
				return allowed
			})
			return fence
		}
		write := func(fence int64) (accepted bool) {
			require.NoError(t, o.pool.QueryRow(t.Context(), writeToResource, "single 0", fence).Scan(&accepted))
			return accepted
		}
		stale := acquire()
		next := acquire()
		require.True(t, write(next))
		require.Equal(t, descend, write(stale))
		err := o.judge(t.Context())
		if descend {
			require.ErrorContains(t, err, "a stale write")
		} else {
			require.NoError(t, err)
		}
	}
}
