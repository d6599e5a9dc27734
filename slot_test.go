package ratelimit_test

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/memdb"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/receipttext"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// Each method of a limiter with slots works, or returns an error that says what to call instead. Nothing is taken.
func TestMethodsUnderConcurrency(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions")
	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	policies := limitertest.RunningPolicies(t, pool, ratelimit.PoliciesConfig{})
	for name, policy := range map[string]ratelimit.Policy{
		"alone":         ratelimit.Concurrency{Limit: 5},
		"beside a rate": ratelimit.All(ratelimit.FixedWindow{Limit: 10, Window: 24 * time.Hour}, ratelimit.Concurrency{Limit: 5}),
		"before a rate": ratelimit.All(ratelimit.Concurrency{Limit: 5}, ratelimit.TokenBucket{Capacity: 10, Refill: 1, Every: 24 * time.Hour}),
	} {
		l := limitertest.New(t, pool, ratelimit.Config{Name: name, Policy: policy, Policies: policies})
		ctx := t.Context()
		tx := pgtest.Begin(t, db)
		in := l.WithTx(tx)
		held := acquire(t, l, ratelimit.SlotOptions{N: 3})
		taken := tryAcquire(t, l, ratelimit.SlotOptions{})
		peeked := func(r ratelimit.Result, err error) error {
			if err == nil && (!r.Allowed || r.Remaining != 1) {
				err = fmt.Errorf("%+v", r)
			}
			return err
		}
		receipt := func(err error) error {
			_, taken := taken.Receipt()
			require.ErrorIs(t, taken, ratelimit.ErrNothingToRefund)
			return err
		}
		type call func(method string)
		works := func(do func() error) call {
			return func(method string) { require.NoError(t, do(), method) }
		}
		returns := func(want error, do func() error) call {
			return func(method string) { require.ErrorIs(t, do(), want, method) }
		}
		refuses := func(do func() error) call {
			return func(method string) {
				err := do()
				require.ErrorAs(t, err, new(*ratelimit.SlotError), method)
				require.ErrorContains(t, err, fmt.Sprintf("%q has slots, of which nothing can be taken; call Acquire", policy))
			}
		}
		limiter := map[string]call{
			"Allow":   refuses(func() error { _, err := l.Allow(ctx, "k"); return err }),
			"AllowN":  refuses(func() error { _, err := l.AllowN(ctx, "k", 5); return err }),
			"Wait":    refuses(func() error { _, err := l.Wait(ctx, "k"); return err }),
			"WaitN":   works(func() error { return peeked(l.WaitN(ctx, "k", 0)) }),
			"Charge":  refuses(func() error { _, err := l.Charge(ctx, "k", 0); return err }),
			"Hold":    refuses(func() error { _, err := l.Hold(ctx, "k", 1, time.Second); return err }),
			"Grant":   refuses(func() error { _, err := l.Grant(ctx, "k", 1); return err }),
			"Reserve": refuses(func() error { _, err := l.Reserve(ctx, "k", 1, time.Second); return err }),
			"Request": refuses(func() error {
				_, err := ratelimit.HoldAll(ctx, time.Second, l.Request("k", 1))
				require.ErrorAs(t, err, new(*ratelimit.SlotError))
				_, err = ratelimit.AllowAll(ctx, l.Request("k", 1))
				return err
			}),
			"Peek":    works(func() error { return peeked(l.Peek(ctx, "k")) }),
			"Refund":  returns(ratelimit.ErrNothingToRefund, func() error { _, err := l.Refund(ctx, taken.Result); return receipt(err) }),
			"RefundN": returns(ratelimit.ErrNothingToRefund, func() error { _, err := l.RefundN(ctx, taken.Result, 1); return err }),
			"ParseReceipt": works(func() error { // somebody has made it up
				policy := l.Config().Policy
				parts := make([]model.Take, strings.Count(policy.String(), ",")+1)
				for i := range parts {
					parts[i].Units = 1
				}
				_, err := l.ParseReceipt(receipttext.Receipt{Limiter: name, Policy: policy.String(), Key: "k", Units: 1, Parts: parts}.String())
				require.ErrorAs(t, err, new(*ratelimit.ReceiptError))
				return nil
			}),
			"HoldFromText": returns(ratelimit.ErrHoldUnknown, func() error { // of the id of a slot
				_, err := l.HoldFromText(ctx, pgtest.Scalar[string](t, db.Pool, `SELECT id::text FROM rate_limit_ephemeral_hold LIMIT 1`)+".e")
				return err
			}),
			"Explain": works(func() error {
				e, err := l.Explain(ctx, "k")
				require.Equal(t, policy, e.Policy)
				return peeked(e.State, err)
			}),
			"With":   works(func() error { _, err := l.With(l.Config().Policy); return err }),
			"Config": works(func() error { require.Equal(t, policy, l.Config().Policy); return nil }),
			"WithTx": works(func() error { return peeked(in.AllowN(ctx, "k", 0)) }),
			"TryAcquire": works(func() error {
				r, err := l.TryAcquire(ctx, "k", ratelimit.SlotOptions{})
				require.NoError(t, err)
				require.True(t, r.Allowed, "%v %+v", policy, r.Result)
				return r.Slot.Release(ctx)
			}),
			"Acquire": works(func() error {
				slot, err := l.Acquire(ctx, "k", ratelimit.SlotOptions{})
				require.NoError(t, err)
				return slot.Release(ctx)
			}),
			"Reset": works(func() error { return l.Reset(ctx, "another key") }),
		}
		inTx := map[string]call{
			"Allow":   refuses(func() error { _, err := in.Allow(ctx, "k"); return err }),
			"AllowN":  refuses(func() error { _, err := in.AllowN(ctx, "k", 1); return err }),
			"Charge":  refuses(func() error { _, err := in.Charge(ctx, "k", 1); return err }),
			"Hold":    refuses(func() error { _, err := in.Hold(ctx, "k", 1, time.Second); return err }),
			"Grant":   refuses(func() error { _, err := in.Grant(ctx, "k", 1); return err }),
			"Reserve": refuses(func() error { _, err := in.Reserve(ctx, "k", 1, time.Second); return err }),
			"Request": refuses(func() error { _, err := ratelimit.AllowAll(ctx, in.Request("k", 1)); return err }),
			"Refund":  returns(ratelimit.ErrNothingToRefund, func() error { _, err := in.Refund(ctx, taken.Result); return err }),
			"RefundN": returns(ratelimit.ErrNothingToRefund, func() error { _, err := in.RefundN(ctx, taken.Result, 1); return err }),
			"Reset":   works(func() error { return in.Reset(ctx, "another key") }),
		}
		for of, calls := range map[reflect.Type]map[string]call{
			reflect.TypeFor[*ratelimit.Limiter](): limiter, reflect.TypeFor[ratelimit.TxLimiter](): inTx,
		} {
			for method := range of.Methods() {
				call, ok := calls[method.Name]
				require.True(t, ok, "say what %v.%s does under a Concurrency", of, method.Name)
				call(method.Name)
			}
		}
		require.NoError(t, tx.Rollback(ctx))
		require.NoError(t, l.Reset(ctx, "k"))
		require.ErrorIs(t, held.Release(ctx), ratelimit.ErrSlotLost)
		require.ErrorIs(t, taken.Slot.Release(ctx), ratelimit.ErrSlotLost)
	}
}

// Rows of mode shadow do not decide slots, and slots are no shadows. A limiter passes such rows over, and logs that once.
func TestSlotsAndShadows(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")
	db := pgtest.New(t)
	var journal testkit.Journal
	p := limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{Logger: journal.Logger()})
	slots := limitertest.New(t, db.Pool, ratelimit.Config{Name: "jobs", Policy: ratelimit.Concurrency{Limit: 1}, Policies: p})
	rate := limitertest.New(t, db.Pool, ratelimit.Config{Name: "api", Policy: ratelimit.FixedWindow{Limit: 9, Window: time.Hour}, Policies: p})
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "jobs", "", "", "shadow", "fixed 5/1h")
	tx := pgtest.Begin(t, db)
	pgtest.Exec(t, tx, "SET LOCAL session_replication_role = replica") // no trigger refuses the row
	pgtest.Exec(t, tx, limitertest.AddPolicy, "api", "", "", "shadow", "concurrent 5")
	require.NoError(t, tx.Commit(t.Context()))
	limitertest.Table(p).Mu.Lock()
	limitertest.Table(p).Version = nil // the process reads all rows
	limitertest.Table(p).Mu.Unlock()
	testkit.WaitUntil(t, func() bool { return p.Status().Unreadable == 1 && p.Status().Rows == 1 })

	result, err := rate.Allow(t.Context(), "k")
	require.NoError(t, err)
	require.Nil(t, result.Shadow)
	for range 2 {
		result := tryAcquire(t, slots, ratelimit.SlotOptions{})
		require.True(t, result.Allowed)
		require.Nil(t, result.Shadow)
		release(t, result.Slot)
	}
	require.Contains(t, journal.String(), "a limiter with a Concurrency decides no policies of mode shadow")
	looked, err := slots.Peek(t.Context(), "k")
	require.NoError(t, err)
	require.Nil(t, looked.Shadow)
	for _, l := range []*ratelimit.Limiter{slots, rate} {
		e, err := l.Explain(t.Context(), "k")
		require.NoError(t, err)
		require.Nil(t, e.Shadow)
	}
	require.Len(t, journal.Lines(), 2, journal.String())
	require.Contains(t, journal.String(), "nobody would release the slots that it gives")
}

// A row that has slots does not decide for a limiter that has none, and the other way round: its calls would be refused.
func TestRowsNeitherGiveNorTakeSlots(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")
	db := pgtest.New(t)
	var journal testkit.Journal
	p := limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{Logger: journal.Logger()})
	day := ratelimit.FixedWindow{Limit: 9, Window: 24 * time.Hour}
	both := ratelimit.All(day, ratelimit.Concurrency{Limit: 1})
	slots := limitertest.New(t, db.Pool, ratelimit.Config{Name: "jobs", Policy: both, Policies: p})
	rate := limitertest.New(t, db.Pool, ratelimit.Config{Name: "api", Policy: day, Policies: p})
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "jobs", "", "", "enforce", "fixed 5/1d")
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "", "", "enforce", "fixed 5/1d, concurrent 5")
	limitertest.WaitUntilKnown(t, p, db.Pool)

	result, err := rate.Allow(t.Context(), "k")
	require.NoError(t, err)
	require.EqualValues(t, 9, result.Limit)
	release(t, acquire(t, slots, ratelimit.SlotOptions{}))
	require.Equal(t, 2, strings.Count(journal.String(), "only one of the row's policy and Config.Policy has a Concurrency"))

	// The code may do what a row may not.
	_, err = limitertest.With(t, slots, ratelimit.FixedWindow{Limit: 20, Window: 24 * time.Hour}).Allow(t.Context(), "k")
	require.NoError(t, err)
	release(t, acquire(t, limitertest.With(t, rate, both), ratelimit.SlotOptions{}))
}

// A limiter bans a key whose calls of TryAcquire are denied again and again. Acquire waits until the ban is over.
func TestBanOfSlots(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")
	db := pgtest.New(t)
	p := limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{})
	l := limitertest.New(t, db.Pool, ratelimit.Config{
		Name: "jobs", Policy: ratelimit.Concurrency{Limit: 1}, Policies: p,
		Ban: &ratelimit.Ban{Denials: 2, Within: time.Hour, First: time.Hour},
	})
	held := acquire(t, l, ratelimit.SlotOptions{})
	for range 2 {
		require.Equal(t, ratelimit.SourceDatabase, tryAcquire(t, l, ratelimit.SlotOptions{}).Source)
	}
	testkit.WaitUntil(t, func() bool { return tryAcquire(t, l, ratelimit.SlotOptions{}).Source == ratelimit.SourcePolicy })
	release(t, held)
	waiting := testkit.Later(func() (*ratelimit.Slot, error) { return l.Acquire(t.Context(), "k", ratelimit.SlotOptions{}) })
	require.False(t, tryAcquire(t, l, ratelimit.SlotOptions{}).Allowed)
	pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_policy")
	slot, err := waiting()
	require.NoError(t, err)
	release(t, slot)
}

// eachSlotConfig runs a test with limits of 3 slots, alone and beside a rate, on the tables of TablesFor, one after the
// other.
func eachSlotConfig(t *testing.T, test func(t *testing.T, config ratelimit.Config)) {
	t.Helper()
	alone, rate := ratelimit.Concurrency{Limit: 3}, ratelimit.FixedWindow{Limit: 1000, Window: limitertest.Year}
	for name, policy := range map[string]ratelimit.Policy{
		"alone":         alone,
		"beside a rate": ratelimit.All(rate, alone),
		"before a rate": ratelimit.All(alone, rate),
	} {
		for _, durable := range limitertest.TablesFor(t, name) {
			config := ratelimit.Config{Name: "jobs", Policy: policy, Durable: durable}
			t.Run(fmt.Sprintf("%s, durable %v", name, durable), func(t *testing.T) { test(t, config) })
		}
	}
}

func acquire(t *testing.T, l *ratelimit.Limiter, options ratelimit.SlotOptions) *ratelimit.Slot {
	t.Helper()
	slot, err := l.Acquire(t.Context(), "k", options)
	require.NoError(t, err)
	return slot
}

func tryAcquire(t *testing.T, l *ratelimit.Limiter, options ratelimit.SlotOptions) ratelimit.SlotResult {
	t.Helper()
	result, err := l.TryAcquire(t.Context(), "k", options)
	require.NoError(t, err)
	require.Equal(t, result.Allowed, result.Slot != nil)
	return result
}

func release(t *testing.T, s *ratelimit.Slot) {
	t.Helper()
	require.NoError(t, s.Release(t.Context()))
}

// waitInLine waits until so many callers of all processes are in a line.
func waitInLine(t *testing.T, db *pgtest.DB, callers int) {
	t.Helper()
	testkit.WaitUntil(t, func() bool {
		n := 0
		for _, shard := range db.All() {
			n += pgtest.Scalar[int](t, shard.Pool, `SELECT count(*) FILTER (WHERE status = 3)::int FROM (
				SELECT status FROM rate_limit_ephemeral_hold UNION ALL SELECT status FROM rate_limit_durable_hold) AS h`)
		}
		return n == callers
	})
}

// At most 3 units are held, by all processes together. A released slot is free at once, and each slot has a larger
// fence than those before.
func TestSlots(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	pool, otherPool := db.NewPool(t, nil), db.NewPool(t, nil)
	eachSlotConfig(t, func(t *testing.T, config ratelimit.Config) {
		t.Run("on Postgres", func(t *testing.T) {
			pgtest.Clear(t, db)
			testSlots(t, limitertest.New(t, pool, config), limitertest.New(t, otherPool, config))
		})
		t.Run("in memory", func(t *testing.T) {
			db := &memdb.DB{}
			testSlots(t, limitertest.New(t, db, config), limitertest.New(t, db, config))
		})
	})
}

func testSlots(t *testing.T, l, other *ratelimit.Limiter) {
	t.Helper()
	first := tryAcquire(t, l, ratelimit.SlotOptions{})
	require.EqualValues(t, 2, first.Remaining)
	second := tryAcquire(t, other, ratelimit.SlotOptions{N: 2, TTL: time.Minute})
	require.Zero(t, second.Remaining)
	require.Greater(t, second.Slot.Fence(), first.Slot.Fence())

	denied := tryAcquire(t, other, ratelimit.SlotOptions{})
	require.False(t, denied.Allowed)
	require.Greater(t, denied.RetryAfter, 10*time.Second)
	require.LessOrEqual(t, denied.RetryAfter, 30*time.Second) // when the first slot ends
	looked, err := l.Peek(t.Context(), "k")
	require.NoError(t, err)
	require.EqualValues(t, 3, looked.Held)
	elsewhere, err := l.TryAcquire(t.Context(), "another key", ratelimit.SlotOptions{})
	require.NoError(t, err)
	release(t, elsewhere.Slot)

	during := first.Slot.Context(t.Context())
	require.NoError(t, during.Err())
	release(t, first.Slot)
	require.ErrorIs(t, context.Cause(first.Slot.Context(t.Context())), ratelimit.ErrSlotReleased, "it has ended already")
	<-during.Done()
	require.ErrorIs(t, context.Cause(during), ratelimit.ErrSlotReleased)
	require.ErrorIs(t, first.Slot.Release(t.Context()), ratelimit.ErrSlotReleased)
	third := tryAcquire(t, other, ratelimit.SlotOptions{})
	require.True(t, third.Allowed)
	require.Greater(t, third.Slot.Fence(), second.Slot.Fence())
	ended, end := context.WithCancel(t.Context())
	end()
	require.NoError(t, second.Slot.Release(ended))
	require.NoError(t, third.Slot.Release(third.Slot.Context(t.Context())))
	looked, err = other.Peek(t.Context(), "k")
	require.NoError(t, err)
	require.Zero(t, looked.Held)
	for _, each := range looked.Each() {
		if each.Limit == 1000 {
			require.EqualValues(t, 996, each.Remaining, "the rate counts what the slots have taken")
		}
	}
}

// Callers wait in one line for all processes. A caller that leaves holds nobody up, and nobody passes the line.
func TestAcquireWaitsInLine(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	pools := limitertest.SmallPools(t, db, 3)
	eachSlotConfig(t, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		var processes []*ratelimit.Limiter
		for _, pool := range pools {
			processes = append(processes, limitertest.New(t, pool, config))
		}
		l := processes[0]
		all := acquire(t, l, ratelimit.SlotOptions{N: 3})
		ctx, leave := context.WithCancel(t.Context())
		leaving := testkit.Later(func() (*ratelimit.Slot, error) {
			return processes[1].Acquire(ctx, "k", ratelimit.SlotOptions{N: 3})
		})
		waitInLine(t, db, 1)
		served := make(chan int, 6)
		slots := make(chan *ratelimit.Slot, 6)
		for i := range 6 {
			go func() {
				slot, err := processes[i%3].Acquire(t.Context(), "k", ratelimit.SlotOptions{})
				if err != nil {
					t.Errorf("caller %d: %v", i, err)
				}
				served <- i
				slots <- slot
			}()
			waitInLine(t, db, i+2)
		}
		require.False(t, tryAcquire(t, processes[2], ratelimit.SlotOptions{}).Allowed)
		leave()
		_, err := leaving()
		require.ErrorIs(t, err, context.Canceled)
		waitInLine(t, db, 6)
		require.Empty(t, served)
		release(t, all)
		first := []*ratelimit.Slot{<-slots, <-slots, <-slots}
		require.ElementsMatch(t, []int{0, 1, 2}, []int{<-served, <-served, <-served})
		for i, slot := range first {
			release(t, slot)
			require.Equal(t, 3+i, <-served)
		}
		for range 3 {
			release(t, <-slots)
		}
		require.True(t, tryAcquire(t, l, ratelimit.SlotOptions{N: 3}).Allowed)
	})
}

// A slot goes to the group that holds the fewest units. (TestSlotsEqualTheModel has groups with weights.)
func TestGroupsShareSlots(t *testing.T) {
	t.Parallel()
	eachSlotConfig(t, func(t *testing.T, config ratelimit.Config) {
		db := pgtest.New(t)
		l, other := limitertest.New(t, db.NewPool(t, nil), config), limitertest.New(t, db.NewPool(t, nil), config)
		all := acquire(t, l, ratelimit.SlotOptions{N: 3})
		served := make(chan string, 9)
		for i, group := range []string{"many", "many", "many", "many", "one", "two", "two"} {
			go func() {
				_, err := other.Acquire(t.Context(), "k", ratelimit.SlotOptions{Group: group})
				if err == nil { // otherwise the test has ended
					served <- group
				}
			}()
			waitInLine(t, db, i+1)
		}
		release(t, all)
		require.ElementsMatch(t, []string{"many", "one", "two"}, []string{<-served, <-served, <-served})
	})
}

// While a process lives, its slot lasts. When somebody takes the slot away, its context ends, and a late release is
// told so. The clock of this test is simulated.
func TestSlotsAreRenewedUntilTheyAreTakenAway(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var events []ratelimit.RenewalEvent
		client := limitertest.NewClient(t, &memdb.DB{}, ratelimit.ClientConfig{
			Logger:   slog.New(slog.DiscardHandler),
			Observer: &ratelimit.Observer{Renewal: func(e ratelimit.RenewalEvent) { events = append(events, e) }},
		})
		l := limitertest.Of(t, client, ratelimit.Config{Name: "jobs", Policy: ratelimit.Concurrency{Limit: 1}})
		slot := acquire(t, l, ratelimit.SlotOptions{})
		during := slot.Context(t.Context())
		<-time.After(time.Hour + time.Second)
		synctest.Wait()
		require.NoError(t, during.Err())
		require.False(t, tryAcquire(t, l, ratelimit.SlotOptions{}).Allowed)
		require.Len(t, events, 3*120)
		require.Equal(t, ratelimit.RenewalEvent{Slots: 1, TTL: 30 * time.Second}, events[0])

		require.NoError(t, l.Reset(t.Context(), "k"))
		next := tryAcquire(t, l, ratelimit.SlotOptions{})
		require.True(t, next.Allowed)
		<-during.Done()
		require.ErrorIs(t, context.Cause(during), ratelimit.ErrSlotLost)
		require.ErrorIs(t, slot.Release(t.Context()), ratelimit.ErrSlotLost)
		synctest.Wait()
		require.Equal(t, 1, events[len(events)-1].Lost)
		require.False(t, tryAcquire(t, l, ratelimit.SlotOptions{}).Allowed, "the late release must not free the next slot")
		release(t, next.Slot)
	})
}

// A slot and the rates beside it are taken together, or not at all. What the rate has counted stays counted.
func TestSlotsBesideARate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		rate := ratelimit.FixedWindow{Limit: 3, Window: time.Hour}
		client := limitertest.NewClient(t, &memdb.DB{}, ratelimit.ClientConfig{})
		l := limitertest.Of(t, client, ratelimit.Config{
			Name: "jobs", Policy: ratelimit.All(rate, ratelimit.Concurrency{Limit: 2}),
		})
		<-time.After(time.Until(time.Now().Truncate(time.Hour).Add(time.Hour))) // the window begins
		first, second := acquire(t, l, ratelimit.SlotOptions{}), acquire(t, l, ratelimit.SlotOptions{})
		denied := tryAcquire(t, l, ratelimit.SlotOptions{})
		require.Equal(t, 30*time.Second, denied.RetryAfter)
		require.EqualValues(t, 1, denied.Each()[0].Remaining)
		require.True(t, denied.Each()[0].Allowed)
		waiting := testkit.Later(func() (*ratelimit.Slot, error) { return l.Acquire(t.Context(), "k", ratelimit.SlotOptions{}) })
		synctest.Wait()
		release(t, first)
		third, err := waiting()
		require.NoError(t, err)
		release(t, second)
		denied = tryAcquire(t, l, ratelimit.SlotOptions{})
		require.False(t, denied.Allowed)
		require.Greater(t, denied.RetryAfter, 50*time.Minute)
		require.True(t, denied.Each()[1].Allowed)

		began := time.Now()
		fourth := acquire(t, l, ratelimit.SlotOptions{}) // waits for the next window, without a slot
		require.Greater(t, time.Since(began), 50*time.Minute)
		release(t, third)
		release(t, fourth)
	})
}

// Somebody keeps the rows of some keys locked for long. The slots of other keys that the same statement renews must not
// end with them.
func TestLockedKeysKeepNoOtherSlotsFromRenewal(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "a transaction that locks a row")
	db := pgtest.New(t)
	config := ratelimit.Config{Name: "jobs", Policy: ratelimit.Concurrency{Limit: 1}}
	failed := make(chan ratelimit.RenewalEvent, 1000)
	client := limitertest.NewClient(t, db.NewPool(t, nil), ratelimit.ClientConfig{
		Logger:   slog.New(slog.DiscardHandler),
		Observer: &ratelimit.Observer{Renewal: func(e ratelimit.RenewalEvent) { failed <- e }},
	})
	l := limitertest.Of(t, client, config)
	var slots []*ratelimit.Slot
	for i := range 20 {
		result, err := l.TryAcquire(t.Context(), fmt.Sprint(i), ratelimit.SlotOptions{TTL: 15 * time.Second})
		require.NoError(t, err)
		slots = append(slots, result.Slot)
	}
	tx := pgtest.Begin(t, db)
	pgtest.Exec(t, tx, "SELECT FROM rate_limit_ephemeral WHERE key::int % 4 = 3 FOR UPDATE")
	for i := 3; i < len(slots); i += 4 {
		<-slots[i].Context(t.Context()).Done()
	}
	e := <-failed
	for e.Err == nil { // a renewal before the rows were locked
		e = <-failed
	}
	require.ErrorIs(t, e.Err, ratelimit.ErrTimeout)
	for i, slot := range slots {
		if i%4 != 3 {
			require.NoError(t, slot.Context(t.Context()).Err())
			release(t, slot)
		}
	}
	require.NoError(t, tx.Rollback(t.Context()))
	require.ErrorIs(t, slots[3].Release(t.Context()), ratelimit.ErrSlotLost)
}

// A strict slot is lost when a renewal fails. If it is released all the same, nobody has to wait for its end.
func TestStrictSlots(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "a transaction that locks a row")
	db := pgtest.New(t)
	client := limitertest.NewClient(t, db.NewPool(t, nil), ratelimit.ClientConfig{Logger: slog.New(slog.DiscardHandler)})
	l := limitertest.Of(t, client, ratelimit.Config{Name: "jobs", Policy: ratelimit.Concurrency{Limit: 1}})
	slot := acquire(t, l, ratelimit.SlotOptions{TTL: 30 * time.Second, Strict: true})
	during := slot.Context(t.Context())
	tx := pgtest.Begin(t, db)
	pgtest.Exec(t, tx, "SELECT FROM rate_limit_ephemeral FOR UPDATE")
	<-during.Done()
	require.ErrorIs(t, context.Cause(during), ratelimit.ErrSlotLost)
	require.ErrorIs(t, context.Cause(during), ratelimit.ErrTimeout) // the error of the renewal
	require.NoError(t, tx.Rollback(t.Context()))
	require.False(t, tryAcquire(t, l, ratelimit.SlotOptions{}).Allowed)
	require.ErrorIs(t, slot.Release(t.Context()), ratelimit.ErrSlotLost)
	release(t, tryAcquire(t, l, ratelimit.SlotOptions{}).Slot)
}

// While Postgres is away, OnFailure answers as its documentation says.
func TestSlotsWhilePostgresIsAway(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		mode    ratelimit.FailureMode
		allowed bool
		fails   bool
	}{
		{mode: ratelimit.ReturnError(), fails: true}, {mode: ratelimit.FailOpen(), allowed: true},
		{mode: ratelimit.FailClosed()}, {mode: ratelimit.FallbackLocal(0.5), fails: true},
	} {
		client := limitertest.NewClient(t, limitertest.PoolOf(t, func(net.Conn) {}), ratelimit.ClientConfig{Logger: slog.New(slog.DiscardHandler)})
		l := limitertest.Of(t, client, ratelimit.Config{Name: "jobs", Policy: ratelimit.Concurrency{Limit: 1}, OnFailure: c.mode})
		result, err := l.TryAcquire(t.Context(), "k", ratelimit.SlotOptions{})
		require.Equal(t, c.fails, err != nil, err)
		require.Equal(t, c.allowed, result.Allowed)
		slot, err := l.Acquire(t.Context(), "k", ratelimit.SlotOptions{})
		if !c.allowed {
			require.ErrorIs(t, err, ratelimit.ErrUnavailable)
			require.Nil(t, slot)
			continue
		}
		require.NoError(t, err)
		require.Zero(t, slot.Fence())
		require.NoError(t, slot.Context(t.Context()).Err())
		release(t, slot)
		release(t, result.Slot)
	}
}

// Rows of the table of policies open, close and change a limit of slots.
func TestSlotsObeyPolicies(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")
	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	l := limitertest.New(t, pool, ratelimit.Config{
		Name: "jobs", Policy: ratelimit.Concurrency{Limit: 1},
		Policies: limitertest.RunningPolicies(t, pool, ratelimit.PoliciesConfig{}),
	})
	set := func(mode, policy any) {
		t.Helper()
		pgtest.Exec(t, db.Pool, `WITH before AS (DELETE FROM rate_limit_policy)
			INSERT INTO rate_limit_policy (name, key, mode, policy, comment) VALUES ('jobs', 'k', $1, $2, 'why')`, mode, policy)
	}
	held := acquire(t, l, ratelimit.SlotOptions{})
	require.False(t, tryAcquire(t, l, ratelimit.SlotOptions{}).Allowed)
	set("off", nil)
	testkit.WaitUntil(t, func() bool { return tryAcquire(t, l, ratelimit.SlotOptions{}).Allowed })
	release(t, acquire(t, l, ratelimit.SlotOptions{}))
	set("deny", nil)
	testkit.WaitUntil(t, func() bool {
		return tryAcquire(t, l, ratelimit.SlotOptions{}).Source == ratelimit.SourcePolicy && !tryAcquire(t, l, ratelimit.SlotOptions{}).Allowed
	})
	waiting := testkit.Later(func() (*ratelimit.Slot, error) { return l.Acquire(t.Context(), "k", ratelimit.SlotOptions{}) })
	set("enforce", "concurrent 2")
	second, err := waiting()
	require.NoError(t, err)
	require.Greater(t, second.Fence(), held.Fence())
	release(t, second)
	release(t, held)
}

// A row that raises the limit, or takes it away, also serves those who wait in line already.
func TestNewLimitsReachTheLine(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")
	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	l := limitertest.New(t, pool, ratelimit.Config{
		Name: "jobs", Policy: ratelimit.Concurrency{Limit: 1},
		Policies: limitertest.RunningPolicies(t, pool, ratelimit.PoliciesConfig{}),
	})
	held := acquire(t, l, ratelimit.SlotOptions{})
	const waiters = 4
	served := make(chan *ratelimit.Slot, waiters)
	for range waiters {
		go func() {
			slot, err := l.Acquire(t.Context(), "k", ratelimit.SlotOptions{})
			if err == nil {
				served <- slot
			}
		}()
	}
	inLine := func() int64 {
		return pgtest.Scalar[int64](t, db.Pool, "SELECT count(*) FROM rate_limit_ephemeral_hold WHERE status = 3")
	}
	testkit.WaitUntil(t, func() bool { return inLine() == waiters })
	pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, key, mode, policy, comment)
		VALUES ('jobs', 'k', 'enforce', 'concurrent 3', 'why')`)
	slots := []*ratelimit.Slot{held, <-served, <-served}
	require.EqualValues(t, 2, inLine())
	pgtest.Exec(t, db.Pool, "UPDATE rate_limit_policy SET mode = 'off', policy = NULL")
	for _, slot := range append(slots, <-served, <-served) {
		release(t, slot)
	}
}

// Bad options are told with what to do, and nobody's slot is touched.
func TestSlotsRefuseBadOptions(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	l := limitertest.New(t, pool, ratelimit.Config{Name: "jobs", Policy: ratelimit.Concurrency{Limit: 5}})
	acquire(t, l, ratelimit.SlotOptions{N: 5})
	for what, c := range map[string]struct {
		limiter *ratelimit.Limiter
		key     string
		options ratelimit.SlotOptions
		want    error
		says    string
	}{
		"no key":         {l, "", ratelimit.SlotOptions{}, ratelimit.ErrInvalidKey, "at least 1 byte"},
		"N below 0":      {l, "k", ratelimit.SlotOptions{N: -1}, ratelimit.ErrInvalidCost, "at least 1"},
		"too large":      {l, "k", ratelimit.SlotOptions{N: 6}, ratelimit.ErrCostExceedsLimit, "raise the limit"},
		"short":          {l, "k", ratelimit.SlotOptions{TTL: time.Millisecond}, nil, "from 1s to 24h"},
		"TTL below 0":    {l, "k", ratelimit.SlotOptions{TTL: -time.Second}, nil, "from 1s to 24h"},
		"a century":      {l, "k", ratelimit.SlotOptions{TTL: 876_000 * time.Hour}, nil, "from 1s to 24h"},
		"weight":         {l, "k", ratelimit.SlotOptions{Weight: 1001}, nil, "from 1 to 1000"},
		"weight below 0": {l, "k", ratelimit.SlotOptions{Weight: -1}, nil, "from 1 to 1000"},
		"10 kB":          {l, "k", ratelimit.SlotOptions{Holder: strings.Repeat("x", 10_000)}, nil, "at most 256 bytes"},
		"control":        {l, "k", ratelimit.SlotOptions{Holder: "a\nb"}, nil, "without control characters"},
		"no UTF-8":       {l, "k", ratelimit.SlotOptions{Group: "\xff"}, nil, "of UTF-8"},
		"group":          {l, "k", ratelimit.SlotOptions{Group: "a\x00"}, nil, "the Group of a slot has 2 bytes"},
		"no slots": {
			limitertest.New(t, pool, ratelimit.Config{Name: "rate", Policy: ratelimit.SlidingLog{Limit: 5, Window: time.Second}}),
			"k", ratelimit.SlotOptions{}, nil, `"concurrent 5"`,
		},
		"a connection": {
			limitertest.New(t, pgtest.Connect(t, db), ratelimit.Config{Name: "jobs", Policy: ratelimit.Concurrency{Limit: 5}}),
			"k", ratelimit.SlotOptions{}, nil, "make the Client with a pool",
		},
	} {
		_, err := c.limiter.TryAcquire(t.Context(), c.key, c.options)
		_, waited := c.limiter.Acquire(t.Context(), c.key, c.options)
		require.Equal(t, err, waited, what)
		require.ErrorContains(t, err, c.says, what)
		if c.want == nil {
			var refused *ratelimit.SlotError
			require.ErrorAs(t, err, &refused, what)
			require.Equal(t, "invalid_slot", ratelimit.ErrorKind(err), what)
		} else {
			require.ErrorIs(t, err, c.want, what)
		}
		require.NotContains(t, err.Error(), "xxx")
	}
	looked, err := l.Peek(t.Context(), "k")
	require.NoError(t, err)
	require.EqualValues(t, 5, looked.Held)
}

// A caller whose context ends leaves no slot behind, whatever the database was doing at that moment.
func TestCallersThatGiveUpLeaveNoSlots(t *testing.T) {
	t.Parallel()
	const limit, callers, times = 4, 16, 20
	client := limitertest.NewClient(t, pgtest.New(t).NewPool(t, nil), ratelimit.ClientConfig{})
	l := limitertest.Of(t, client, ratelimit.Config{Name: "left", Policy: ratelimit.Concurrency{Limit: limit}})
	var all sync.WaitGroup
	for i := range callers {
		all.Go(func() {
			random := rand.New(rand.NewPCG(uint64(i), 0))
			for range times {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(random.IntN(3000))*time.Microsecond)
				slot, err := l.Acquire(ctx, "k", ratelimit.SlotOptions{TTL: time.Hour})
				cancel()
				if err == nil {
					require.NoError(t, slot.Release(t.Context()))
				}
			}
		})
	}
	all.Wait()
	require.Eventually(t, func() bool {
		slot, err := l.TryAcquire(t.Context(), "k", ratelimit.SlotOptions{N: limit})
		require.NoError(t, err)
		if slot.Slot == nil {
			return false
		}
		require.NoError(t, slot.Slot.Release(t.Context()))
		return true
	}, time.Minute, 10*time.Millisecond)
}
