package faults

import (
	"context"
	"log/slog"
	"net/url"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// named returns a URL of the database with which a session has the name application.
func named(t *testing.T, databaseURL, application string) string {
	t.Helper()
	u, err := url.Parse(databaseURL)
	require.NoError(t, err)
	query := u.Query()
	query.Set("application_name", application)
	u.RawQuery = query.Encode()
	return u.String()
}

// oneSlot is a limiter of one slot, as the puppets have it.
func oneSlot(t *testing.T, pool *pgxpool.Pool, durable bool) *ratelimit.Limiter {
	t.Helper()
	return limitertest.New(t, pool, ratelimit.Config{
		Name: "test", Policy: ratelimit.Concurrency{Limit: 1}, Durable: durable,
	}, ratelimit.ClientConfig{Timeout: amply, Logger: slog.New(slog.DiscardHandler)})
}

func eachTable(t *testing.T, test func(t *testing.T, durable bool)) {
	t.Helper()
	for _, durable := range []bool{false, true} {
		t.Run(pgtest.Table(durable), func(t *testing.T) {
			t.Parallel()
			test(t, durable)
		})
	}
}

// A process is stopped for longer than its slot lasts. Another gets the slot meanwhile. When the process goes on, its
// context ends, its late writes are refused, and its late release changes nothing.
func TestHolderThatWasStopped(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the rows of one database")
	eachTable(t, func(t *testing.T, durable bool) {
		db := pgtest.New(t)
		pool := db.OwnerPool(t, nil)
		newResource(t, pool)
		limiter := oneSlot(t, pool, durable)
		puppet := newSlotPuppet(t, puppetSettings{URL: db.URL, Limit: 1, Durable: durable})
		stale, staleFence := puppet.acquire(t, ratelimit.SlotOptions{TTL: 3 * time.Second})
		require.True(t, puppet.do(t, puppetCommand{Do: "write", Key: "resource", Slot: stale}).OK)
		require.Empty(t, puppet.do(t, puppetCommand{Do: "look", Slot: stale}).Error)

		puppet.stop(t)
		next, err := limiter.Acquire(t.Context(), "key", ratelimit.SlotOptions{TTL: 30 * time.Second})
		require.NoError(t, err)
		require.Greater(t, next.Fence(), staleFence)
		var accepted bool
		require.NoError(t, pool.QueryRow(t.Context(), writeToResource, "resource", next.Fence()).Scan(&accepted))
		require.True(t, accepted)

		puppet.wake(t)
		require.Equal(t, "lost", puppet.do(t, puppetCommand{Do: "await", Slot: stale}).Error)
		require.False(t, puppet.do(t, puppetCommand{Do: "write", Key: "resource", Slot: stale}).OK)
		for range 2 {
			require.Equal(t, "lost", puppet.do(t, puppetCommand{Do: "release", Slot: stale}).Error)
		}
		require.Equal(t, "lost", puppet.do(t, puppetCommand{Do: "look", Slot: stale}).Error)
		require.Zero(t, slotOf(t, pool, durable, next.Fence()).Status, "it is a live slot")
		require.NoError(t, next.Release(t.Context()))
		_, fence := puppet.acquire(t, ratelimit.SlotOptions{TTL: time.Second}) // the puppet is as good as new
		require.Greater(t, fence, next.Fence())
	})
}

// A process is stopped while it stands in line. It gets a slot, and the slot ends. When the process goes on, it hears of
// the slot, but stands in line again.
func TestWaiterThatWasStopped(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the rows of one database")
	eachTable(t, func(t *testing.T, durable bool) {
		db := pgtest.New(t)
		limiter := oneSlot(t, db.OwnerPool(t, nil), durable)
		puppet := newSlotPuppet(t, puppetSettings{URL: db.URL, Limit: 1, Durable: durable})
		for range 3 {
			first, err := limiter.Acquire(t.Context(), "key", ratelimit.SlotOptions{TTL: time.Minute})
			require.NoError(t, err)
			slot, reply := puppet.begin(t, puppetCommand{
				Do: "acquire", Key: "key", Options: ratelimit.SlotOptions{TTL: time.Second},
			})
			testkit.WaitUntil(t, func() bool { // it was renewed, so the puppet knows that it stands in line
				return pgtest.Scalar[int](t, db.Pool, "SELECT count(*)::int FROM "+pgtest.Table(durable)+
					"_hold WHERE status = 3 AND ends_at > made_at + 1000000") == 1
			})
			puppet.stop(t)
			require.NoError(t, first.Release(t.Context()))
			next, err := limiter.Acquire(t.Context(), "key", ratelimit.SlotOptions{TTL: 3 * time.Second})
			require.NoError(t, err)
			puppet.wake(t)
			require.NoError(t, next.Release(t.Context()))
			r := reply()
			require.Empty(t, r.Error)
			require.Greater(t, r.Fence, next.Fence())
			puppet.do(t, puppetCommand{Do: "release", Slot: slot})
		}
	})
}

// waitForPlace waits until a caller stands in line.
func waitForPlace(t *testing.T, db pgtest.Querier, durable bool) {
	t.Helper()
	testkit.WaitUntil(t, func() bool {
		return pgtest.Scalar[int](t, db, "SELECT count(*)::int FROM "+pgtest.Table(durable)+"_hold WHERE status = 3") == 1
	})
}

// A process is killed that has a slot, and one that stands in line. By the database's clock, the slot is free at its
// end: not earlier, and not later. The dead process in line holds nobody up for longer than its place lasts.
func TestHolderAndWaiterThatWereKilled(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the rows of one database")
	eachTable(t, func(t *testing.T, durable bool) {
		db := pgtest.New(t)
		pool := db.OwnerPool(t, nil)
		limiter := oneSlot(t, pool, durable)
		settings := puppetSettings{URL: named(t, db.URL, "unlucky"), Limit: 1, Durable: durable}
		holder, waiter := newSlotPuppet(t, settings), newSlotPuppet(t, settings)
		for range 3 {
			short := ratelimit.SlotOptions{TTL: 3 * time.Second}
			_, fence := holder.acquire(t, short)
			_, reply := holder.begin(t, puppetCommand{Do: "acquire", Key: "alone", Options: short})
			aloneFence := reply().Fence
			_, _ = waiter.begin(t, puppetCommand{Do: "acquire", Key: "key", Options: short})
			waitForPlace(t, pool, durable)
			next := testkit.Later(func() (*ratelimit.Slot, error) {
				return limiter.Acquire(t.Context(), "key", ratelimit.SlotOptions{TTL: 30 * time.Second})
			})
			require.NoError(t, holder.Process.Kill())
			require.NoError(t, waiter.Process.Kill())
			waitForNoSession(t, pool, "unlucky")

			ends := slotOf(t, pool, durable, aloneFence).Ends
			for {
				result, err := limiter.TryAcquire(t.Context(), "alone", ratelimit.SlotOptions{})
				require.NoError(t, err)
				require.Equal(t, result.DecidedAt.UnixMicro() >= ends, result.Allowed)
				if result.Allowed {
					require.NoError(t, result.Slot.Release(t.Context()))
					break
				}
				require.LessOrEqual(t, result.RetryAfter, short.TTL)
				pause(t.Context(), result.RetryAfter)
			}
			slot, err := next()
			require.NoError(t, err)
			require.Greater(t, slot.Fence(), fence)
			require.NoError(t, slot.Release(t.Context()))
			holder, waiter = newSlotPuppet(t, settings), newSlotPuppet(t, settings)
		}
	})
}

// Nobody announces that the slot of a process has ended that was killed. A caller in line finds it all the same, long
// before the caller's own place is renewed.
func TestWaiterForASlotThatEnds(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	puppet := newSlotPuppet(t, puppetSettings{URL: db.URL, Limit: 1})
	puppet.acquire(t, ratelimit.SlotOptions{TTL: time.Second})
	limiter := oneSlot(t, db.OwnerPool(t, nil), false)
	next := testkit.Later(func() (*ratelimit.Slot, error) {
		return limiter.Acquire(t.Context(), "key", ratelimit.SlotOptions{TTL: 24 * time.Hour})
	})
	require.NoError(t, puppet.Process.Kill())
	slot, err := next()
	require.NoError(t, err)
	require.NoError(t, slot.Release(t.Context()))
}

// renewals returns a limiter of one slot, and what it tells of its renewals.
func renewals(t *testing.T, pool *pgxpool.Pool, durable bool) (*ratelimit.Limiter, <-chan ratelimit.RenewalEvent) {
	t.Helper()
	events := make(chan ratelimit.RenewalEvent, 1000)
	client := limitertest.NewClient(t, pool, ratelimit.ClientConfig{
		Logger:   slog.New(slog.DiscardHandler),
		Observer: &ratelimit.Observer{Renewal: func(e ratelimit.RenewalEvent) { events <- e }},
	})
	return limitertest.Of(t, client, ratelimit.Config{
		Name: "test", Policy: ratelimit.Concurrency{Limit: 1}, Durable: durable,
	}), events
}

// waitForRenewal waits for a renewal that fails or does not fail.
func waitForRenewal(t *testing.T, events <-chan ratelimit.RenewalEvent, fails bool) ratelimit.RenewalEvent {
	t.Helper()
	for {
		select {
		case e := <-events:
			if (e.Err != nil) == fails {
				return e
			}
		case <-time.After(testkit.Amply):
			require.FailNow(t, "there is no such renewal")
		}
	}
}

// Connections are cut, and cannot be made for a while that is shorter than the slot lasts. The slot is kept.
func TestSlotsSurviveAShortCut(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	other := oneSlot(t, db.OwnerPool(t, nil), false)
	for name, begin := range map[string]func(p *wireProxy){
		"refused":           func(p *wireProxy) { p.refuse(true) },
		"a lost reply":      func(p *wireProxy) { p.fail(&fault{reply: anyReply}) },
		"a request too few": func(p *wireProxy) { p.fail(&fault{request: anyRequest}) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			proxy := newWireProxy(t, db.URL)
			limiter, events := renewals(t, newPool(t, proxy.url, func(config *pgxpool.Config) {
				// Without this, a ping of the pool would be the next statement.
				config.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false }
			}), false)
			result, err := limiter.TryAcquire(t.Context(), name, ratelimit.SlotOptions{TTL: 15 * time.Second})
			require.NoError(t, err)
			during := result.Slot.Context(t.Context())
			begin(proxy)
			waitForRenewal(t, events, true)
			proxy.refuse(false)
			waitForRenewal(t, events, false)
			require.NoError(t, during.Err())
			denied, err := other.TryAcquire(t.Context(), name, ratelimit.SlotOptions{})
			require.NoError(t, err)
			require.False(t, denied.Allowed)
			require.NoError(t, result.Slot.Release(t.Context()))
		})
	}
}

// heldTooLong cuts off a holder for ever. It returns how long after the slot's end, by the database's clock, the holder
// still believed in it. That is negative if all is right.
func heldTooLong(t *testing.T, db *pgtest.DB, durable bool) time.Duration {
	t.Helper()
	const ttl = 4 * time.Second
	for {
		proxy := newWireProxy(t, db.URL)
		pool := db.OwnerPool(t, nil)
		puppet := newSlotPuppet(t, puppetSettings{URL: proxy.url, Limit: 1, Durable: durable})
		slot, fence := puppet.acquire(t, ratelimit.SlotOptions{TTL: ttl})
		begins := slotOf(t, pool, durable, fence).Ends
		_, ended := puppet.begin(t, puppetCommand{Do: "await", Slot: slot})
		testkit.WaitUntil(t, func() bool { return slotOf(t, pool, durable, fence).Ends > begins }) // it was renewed
		proxy.refuse(true)
		limiter := oneSlot(t, pool, durable)
		next, err := limiter.Acquire(t.Context(), "key", ratelimit.SlotOptions{TTL: time.Second})
		require.NoError(t, err)
		require.Greater(t, next.Fence(), fence)
		require.NoError(t, next.Release(t.Context()))
		end := ended()
		require.Equal(t, "lost", end.Error)
		over := end.Last - slotOf(t, pool, durable, fence).Ends
		require.NoError(t, puppet.Process.Kill())
		// A process that did not run for long may notice the end too late, as a stopped process does.
		if over < 0 || end.Gap < (ttl/20).Microseconds() {
			return time.Duration(over) * time.Microsecond
		}
	}
}

// Connections are cut for long. The holder's context ends before anybody else can have the slot.
func TestSlotsEndInALongCut(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the rows of one database")
	eachTable(t, func(t *testing.T, durable bool) {
		require.Negative(t, heldTooLong(t, pgtest.New(t), durable))
	})
}

// This is a negative control: the test above notices slots that end before their holders expect it.
func TestSlotsThatEndTooEarlyAreCaught(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the rows of one database")
	db := pgtest.New(t)
	pgtest.Rewrite(t, db.Pool, "_rate_limit_renew_ephemeral", "SET ends_at = greatest(h.ends_at, clock + ttl_us)",
		"SET ends_at = clock + ttl_us * 4 / 5", "AND (h.ends_at < clock + ttl_us OR h.max_count <> e.max_count)", "")
	for heldTooLong(t, db, false) < 0 { // the last renewal was answered too late for the holder
		require.NoError(t, t.Context().Err())
	}
}

// A restart of the server keeps the slots, except that a crash forgets those of an ephemeral limiter. Their holders
// hear of it at their next renewal. A caller in line stands in line again.
func TestSlotsOverARestart(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		durable, crash bool
	}{
		"ephemeral, restarted": {false, false}, "ephemeral, crashed": {false, true},
		"durable, restarted": {true, false}, "durable, crashed": {true, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server, pool := newServer(t, pgserver.Config{Fsync: true})
			limiter, events := renewals(t, newPool(t, server.URL(), nil), c.durable)
			other := oneSlot(t, newPool(t, server.URL(), nil), c.durable)
			slot, err := limiter.Acquire(t.Context(), "key", ratelimit.SlotOptions{TTL: 45 * time.Second})
			require.NoError(t, err)
			during := slot.Context(t.Context())
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			next := testkit.Later(func() (slot *ratelimit.Slot, err error) {
				for again := true; again; again = leaseFails(err) { // each old connection of the pool may fail once
					slot, err = other.Acquire(ctx, "key", ratelimit.SlotOptions{TTL: 45 * time.Second})
				}
				return slot, err
			})
			waitForPlace(t, pool, c.durable)
			if c.crash {
				require.NoError(t, server.Kill())
			} else {
				require.NoError(t, server.Stop(t.Context(), pgserver.Fast))
			}
			require.NoError(t, server.Restart(t.Context()))
			if c.crash && !c.durable {
				waiting, err := next()
				require.NoError(t, err)
				require.Greater(t, waiting.Fence(), slot.Fence())
				e := waitForRenewal(t, events, false)
				require.Equal(t, 1, e.Lost)
				<-during.Done()
				require.ErrorIs(t, context.Cause(during), ratelimit.ErrSlotLost)
				require.ErrorIs(t, slot.Release(t.Context()), ratelimit.ErrSlotLost)
				require.NoError(t, waiting.Context(t.Context()).Err())
				require.NoError(t, waiting.Release(t.Context()))
				return
			}
			e := waitForRenewal(t, events, false)
			require.Zero(t, e.Lost)
			require.NoError(t, during.Err())
			testkit.WaitUntil(t, func() bool {
				denied, err := other.TryAcquire(t.Context(), "key", ratelimit.SlotOptions{})
				require.False(t, denied.Allowed)
				return err == nil
			})
			require.NoError(t, slot.Release(t.Context()))
			waiting, err := next()
			require.NoError(t, err)
			require.Greater(t, waiting.Fence(), slot.Fence())
			require.NoError(t, waiting.Release(t.Context()))
		})
	}
}

// A crash of the server takes no fence back, so a holder from before the crash has a smaller fence than all after it.
func TestFencesAscendOverCrashes(t *testing.T) {
	t.Parallel()
	eachTable(t, func(t *testing.T, durable bool) {
		server, _ := newServer(t, pgserver.Config{Fsync: true})
		limiter := limitertest.New(t, newPool(t, server.URL(), nil), ratelimit.Config{
			Name: "test", Policy: ratelimit.Concurrency{Limit: 10}, Durable: durable,
		})
		largest := int64(0)
		for range testkit.Rounds(t, "ROUNDS", 2) {
			for range 100 { // Postgres logs every 32nd value of a sequence
				result, err := limiter.TryAcquire(t.Context(), "key", ratelimit.SlotOptions{})
				require.NoError(t, err)
				require.Greater(t, result.Slot.Fence(), largest)
				largest = result.Slot.Fence()
				require.NoError(t, result.Slot.Release(t.Context()))
			}
			require.NoError(t, server.Kill())
			require.NoError(t, server.Restart(t.Context()))
			testkit.WaitUntil(t, func() bool {
				_, err := limiter.Peek(t.Context(), "key")
				return err == nil
			})
		}
	})
}
