package ratelimit_test

import (
	"context"
	"encoding/json"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/doortest"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/ratelimittest"
)

// every50ms lets one pass every 50 ms.
func every50ms() ratelimit.Config {
	return ratelimit.Config{
		Name: "partner", Policy: ratelimit.TokenBucket{Capacity: 1, Refill: 20, Every: time.Second},
	}
}

// reserving is a database in which clients of several processes reserve.
type reserving struct {
	db    ratelimit.DBTX
	table *pgtest.DB // nil for a database in memory
}

// eachReserving runs a test with Postgres and with a database in memory.
func eachReserving(t *testing.T, test func(t *testing.T, in reserving)) {
	t.Helper()
	t.Run("Postgres", func(t *testing.T) {
		t.Parallel()
		db := pgtest.New(t)
		test(t, reserving{db.NewPool(t, nil), db})
	})
	t.Run("in memory", func(t *testing.T) {
		t.Parallel()
		test(t, reserving{ratelimittest.NewDB(), nil})
	})
}

// frozen is a client whose clock stands still.
func frozen() ratelimit.ClientConfig {
	return ratelimit.ClientConfig{Test: limitertest.Frozen(limitertest.T0)}
}

// Three clients share the places of a bucket. A place is given to one caller only, and the times are exact.
func TestReserveOrdersClients(t *testing.T) {
	t.Parallel()
	eachReserving(t, func(t *testing.T, in reserving) {
		clients := make([]*ratelimit.Limiter, 3)
		for i := range clients {
			clients[i] = limitertest.New(t, in.db, every50ms(), frozen())
		}
		for i := range 4 {
			r, err := clients[i%3].Reserve(t.Context(), "acme", 1, time.Second)
			require.NoError(t, err)
			require.True(t, r.Allowed)
			require.Equal(t, time.Duration(i)*50*time.Millisecond, r.ReadyAfter)
			require.Zero(t, r.RetryAfter)
			require.Equal(t, limitertest.T0, r.DecidedAt.UTC())
		}
		denied, err := clients[1].Reserve(t.Context(), "acme", 1, 120*time.Millisecond)
		require.NoError(t, err)
		require.False(t, denied.Allowed)
		require.Zero(t, denied.ReadyAfter)
		require.Equal(t, 80*time.Millisecond, denied.RetryAfter)
		take, err := clients[2].Allow(t.Context(), "acme") // it comes after all bookings
		require.NoError(t, err)
		require.Equal(t, 200*time.Millisecond, take.RetryAfter)

		// Many callers at once get different places.
		times := make([]time.Duration, 40)
		testkit.Together(len(times), func(i int) {
			r, err := clients[i%3].Reserve(context.Background(), "acme", 1, time.Second)
			if times[i] = r.ReadyAfter; err != nil || r.Allowed != (r.ReadyAfter > 0) {
				t.Error(err, r)
			}
		})
		slices.Sort(times)
		var want []time.Duration
		for i := 4; i <= 20; i++ {
			want = append(want, time.Duration(i)*50*time.Millisecond)
		}
		require.Equal(t, want, slices.DeleteFunc(times, func(d time.Duration) bool { return d == 0 }))
	})
}

// Bookings may owe more than a charge may. Then a charge is refused until the bucket owes less.
func TestChargeBehindBookings(t *testing.T) {
	t.Parallel()
	eachReserving(t, func(t *testing.T, in reserving) {
		now := limitertest.T0
		limiter := limitertest.New(t, in.db, every50ms(), ratelimit.ClientConfig{
			Test: ratelimit.TestConfig{Now: func() time.Time { return now }},
		})
		for range 13 {
			r, err := limiter.Reserve(t.Context(), "acme", 1, time.Hour)
			require.NoError(t, err)
			require.True(t, r.Allowed)
		}
		_, err := limiter.Charge(t.Context(), "acme", 1)
		require.Equal(t, &ratelimit.ChargeError{Charge: 1, Accepted: 0}, err)
		now = now.Add(150 * time.Millisecond)
		_, err = limiter.Charge(t.Context(), "acme", 1)
		require.NoError(t, err)
	})
}

// RetryAfter of a denied reservation is exact.
func TestRetryAfterOfAReservationIsExact(t *testing.T) {
	t.Parallel()
	eachReserving(t, func(t *testing.T, in reserving) {
		now := limitertest.T0
		limiter := limitertest.New(t, in.db, ratelimit.Config{
			Name: "test", Policy: ratelimit.TokenBucket{Capacity: 5, Refill: 3, Every: time.Second},
		}, ratelimit.ClientConfig{Test: ratelimit.TestConfig{Now: func() time.Time { return now }}})
		reserve := func() ratelimit.Reservation {
			t.Helper()
			r, err := limiter.Reserve(t.Context(), "key", 4, 700*time.Millisecond)
			require.NoError(t, err)
			return r
		}
		require.True(t, reserve().Allowed)
		for range 3 {
			denied := reserve()
			require.False(t, denied.Allowed)
			now = now.Add(denied.RetryAfter - time.Microsecond)
			require.Equal(t, time.Microsecond, reserve().RetryAfter)
			now = now.Add(time.Microsecond)
			booked := reserve()
			require.True(t, booked.Allowed)
			require.Equal(t, 700*time.Millisecond, booked.ReadyAfter)
		}
	})
}

// The last booking can be given back, also by its receipt in another process. Then the next caller gets its place.
func TestRefundOfABooking(t *testing.T) {
	t.Parallel()
	eachReserving(t, func(t *testing.T, in reserving) {
		limiter, there := limitertest.New(t, in.db, every50ms(), frozen()), limitertest.New(t, in.db, every50ms(), frozen())
		reserve := func() ratelimit.Reservation {
			t.Helper()
			r, err := limiter.Reserve(t.Context(), "acme", 1, time.Second)
			require.NoError(t, err)
			require.True(t, r.Allowed)
			return r
		}
		reserve()
		second, third := reserve(), reserve()
		require.Equal(t, 100*time.Millisecond, third.ReadyAfter)
		_, err := limiter.Refund(t.Context(), third.Result)
		require.NoError(t, err)
		third = reserve()
		require.Equal(t, 100*time.Millisecond, third.ReadyAfter)
		text, err := third.Receipt()
		require.NoError(t, err)
		parsed, err := there.ParseReceipt(text)
		require.NoError(t, err)
		_, err = there.Refund(t.Context(), parsed)
		require.NoError(t, err)
		require.Equal(t, 100*time.Millisecond, reserve().ReadyAfter)

		// The booking in the middle cannot be given back: those behind it keep their times.
		_, err = limiter.Refund(t.Context(), second.Result)
		require.NoError(t, err)
		require.Equal(t, 150*time.Millisecond, reserve().ReadyAfter)
	})
}

// With All, the slowest bucket decides, and all buckets book or none.
func TestReserveFromSeveralBuckets(t *testing.T) {
	t.Parallel()
	eachReserving(t, func(t *testing.T, in reserving) {
		limiter := limitertest.New(t, in.db, ratelimit.Config{Name: "test", Policy: ratelimit.All(
			ratelimit.TokenBucket{Capacity: 1, Refill: 20, Every: time.Second},
			ratelimit.TokenBucket{Capacity: 3, Refill: 1, Every: time.Second},
		)}, frozen())
		for _, want := range []time.Duration{0, 50 * time.Millisecond, 100 * time.Millisecond, time.Second, 2 * time.Second} {
			r, err := limiter.Reserve(t.Context(), "key", 1, 2*time.Second)
			require.NoError(t, err)
			require.True(t, r.Allowed)
			require.Equal(t, want, r.ReadyAfter)
			require.Len(t, r.Each(), 2)
		}
		r, err := limiter.Reserve(t.Context(), "key", 1, 2*time.Second)
		require.NoError(t, err)
		require.False(t, r.Allowed)
		require.Equal(t, time.Second, r.RetryAfter)
		require.Zero(t, r.Each()[0].RetryAfter) // this bucket had room
	})
}

func TestReservationIsKeptOrUndoneWithTheTransaction(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")
	db := pgtest.New(t)
	limiter := limitertest.New(t, db.NewPool(t, nil), every50ms(), frozen())
	for _, commits := range []bool{false, true} {
		tx := pgtest.Begin(t, db)
		for i := range 2 {
			r, err := limiter.WithTx(tx).Reserve(t.Context(), "acme", 1, time.Second)
			require.NoError(t, err)
			require.Equal(t, time.Duration(i)*50*time.Millisecond, r.ReadyAfter)
		}
		if !commits {
			require.NoError(t, tx.Rollback(t.Context()))
			continue
		}
		require.NoError(t, tx.Commit(t.Context()))
	}
	r, err := limiter.Reserve(t.Context(), "acme", 1, time.Second)
	require.NoError(t, err)
	require.Equal(t, 100*time.Millisecond, r.ReadyAfter)
	_, err = limiter.WithTx(nil).Reserve(t.Context(), "acme", 1, time.Second)
	require.ErrorContains(t, err, "tx is nil")
}

func TestReserveRefusesBadArguments(t *testing.T) {
	t.Parallel()
	limiter := limitertest.New(t, ratelimittest.NewDB(), every50ms())
	reserve := func(l *ratelimit.Limiter, key string, n int64, maxDelay time.Duration) error {
		r, err := l.Reserve(t.Context(), key, n, maxDelay)
		require.Equal(t, ratelimit.Reservation{}, r)
		return err
	}
	require.Equal(t, &ratelimit.CostError{Cost: 2, Limit: 1}, reserve(limiter, "k", 2, time.Second))
	require.Equal(t, &ratelimit.CostError{Cost: 0, Limit: 1, Least: 1}, reserve(limiter, "k", 0, time.Second))
	require.ErrorIs(t, reserve(limiter, "", 1, time.Second), ratelimit.ErrInvalidKey)
	require.EqualError(t, reserve(limiter, "k", 1, -1), "ratelimit: maxDelay is -1ns, and must be at least 0")
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := limiter.Reserve(ended, "k", 1, 0)
	require.ErrorIs(t, err, context.Canceled)
	for _, policy := range []ratelimit.Policy{
		ratelimit.SlidingLog{Limit: 5, Window: time.Second},
		ratelimit.All(ratelimit.TokenBucket{Capacity: 1, Refill: 1, Every: time.Second}, ratelimit.FixedWindow{Limit: 5, Window: time.Minute}),
	} {
		other := limitertest.New(t, ratelimittest.NewDB(), ratelimit.Config{Name: "other", Policy: policy})
		err := reserve(other, "personal", 1, time.Second)
		require.Equal(t, &ratelimit.ReserveError{Policy: policy}, err)
		require.EqualError(t, err, `ratelimit: the policy "`+policy.String()+`" has no places in the future; `+
			`reserve from a TokenBucket, such as "bucket 1 20/1s", which lets one pass every 50 ms`)
	}
}

// Policies in the table decide too.
func TestReservationsUnderPoliciesOfTheTable(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")
	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, key, mode, policy, comment) VALUES
		('partner', 'slow', 'enforce', 'bucket 1 1/1m', 'why'),
		('partner', 'window', 'enforce', 'fixed 20/1d', 'why'), -- of another kind than the limiter's, so it does not count
		('partner', 'off', 'off', NULL, 'why'), ('partner', 'banned', 'deny', NULL, 'why')`)
	policies := limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{})
	config := every50ms()
	config.Policies = policies
	limiter := limitertest.New(t, db.Pool, config, frozen())
	limitertest.WaitUntilKnown(t, policies, db.Pool)
	for key, want := range map[string]time.Duration{"slow": time.Minute, "window": 50 * time.Millisecond, "off": 0, "acme": 50 * time.Millisecond} {
		for i := range 2 {
			r, err := limiter.Reserve(t.Context(), key, 1, time.Hour)
			require.NoError(t, err)
			require.True(t, r.Allowed, key)
			require.Equal(t, time.Duration(i)*want, r.ReadyAfter, key)
		}
	}
	banned, err := limiter.Reserve(t.Context(), "banned", 1, time.Hour)
	require.NoError(t, err)
	require.False(t, banned.Allowed)
	require.Equal(t, ratelimit.SourcePolicy, banned.Source)
}

// While the database is away, a reservation is an error, whatever OnFailure says: no process knows the places of others.
func TestReserveIsNotAnsweredByOnFailure(t *testing.T) {
	t.Parallel()
	for name, mode := range map[string]ratelimit.FailureMode{
		"open": ratelimit.FailOpen(), "closed": ratelimit.FailClosed(), "local": ratelimit.FallbackLocal(1),
	} {
		db := limitertest.NewModelDB()
		config := every50ms()
		config.OnFailure = mode
		limiter := limitertest.New(t, db, config)
		for range 2 {
			r, err := limiter.Reserve(t.Context(), "acme", 1, time.Second)
			require.NoError(t, err)
			require.True(t, r.Allowed)
		}
		db.Set(limitertest.TurnedAway)
		for range 10 { // the breaker opens meanwhile
			_, err := limiter.Reserve(t.Context(), "acme", 1, time.Second)
			require.ErrorIs(t, err, ratelimit.ErrUnavailable, name)
		}
	}
}

// A reservation asks the database even if a denial is remembered, and its denial is not remembered for takes.
func TestReserveAndRememberedDenials(t *testing.T) {
	t.Parallel()
	limiter := limitertest.New(t, pgtest.New(t).Pool, every50ms(), frozen())
	_, err := limiter.Allow(t.Context(), "acme")
	require.NoError(t, err)
	for _, source := range []ratelimit.Source{ratelimit.SourceDatabase, ratelimit.SourceCachedDenial} {
		take, err := limiter.Allow(t.Context(), "acme")
		require.NoError(t, err)
		require.Equal(t, source, take.Source)
		require.Equal(t, 50*time.Millisecond, take.RetryAfter)
	}
	denied, err := limiter.Reserve(t.Context(), "acme", 1, 10*time.Millisecond)
	require.NoError(t, err)
	require.Equal(t, ratelimit.SourceDatabase, denied.Source)
	require.Equal(t, 40*time.Millisecond, denied.RetryAfter)
	booked, err := limiter.Reserve(t.Context(), "acme", 1, time.Second)
	require.NoError(t, err)
	require.Equal(t, 50*time.Millisecond, booked.ReadyAfter)
	take, err := limiter.Allow(t.Context(), "acme")
	require.NoError(t, err)
	require.Equal(t, ratelimit.SourceDatabase, take.Source)
	require.Equal(t, 100*time.Millisecond, take.RetryAfter)
}

// Reservations are decided in few statements, together with takes.
func TestReservationsCoalesce(t *testing.T) {
	t.Parallel()
	doortest.Not(t, "how one process coalesces")
	db := pgtest.New(t)
	config := ratelimit.Config{Name: "test", Policy: ratelimit.TokenBucket{Capacity: 64, Refill: 1, Every: time.Hour}}
	sizes := make(chan int, 1000)
	client := frozen()
	client.Observer = &ratelimit.Observer{Statement: func(e ratelimit.StatementEvent) { sizes <- e.Size }}
	client.MaxInFlight = 1
	limiter := limitertest.New(t, db.NewPool(t, nil), config, client)
	for len(sizes) == 0 || len(sizes) > 500 || !largerThan1(sizes) {
		testkit.Together(64, func(i int) {
			if i%4 == 0 {
				if _, err := limiter.AllowN(context.Background(), "key", 64); err != nil {
					t.Error(err)
				}
				return
			}
			if r, err := limiter.Reserve(context.Background(), "key", 1, 24*time.Hour); err != nil || !r.Allowed && r.RetryAfter == 0 {
				t.Error(err, r)
			}
		})
	}
}

func largerThan1(sizes chan int) bool {
	for range len(sizes) {
		if <-sizes > 1 {
			return true
		}
	}
	return false
}

func TestReservationInJSON(t *testing.T) {
	t.Parallel()
	limiter := limitertest.New(t, ratelimittest.NewDB(), every50ms(), frozen())
	var booked ratelimit.Reservation
	for range 2 {
		var err error
		booked, err = limiter.Reserve(t.Context(), "acme", 1, time.Second)
		require.NoError(t, err)
	}
	text, err := json.Marshal(booked)
	require.NoError(t, err)
	var read ratelimit.Reservation
	require.NoError(t, json.Unmarshal(text, &read))
	require.Equal(t, 50*time.Millisecond, read.ReadyAfter)
	require.True(t, read.Allowed)
	_, err = limiter.Refund(t.Context(), read.Result)
	require.ErrorIs(t, err, ratelimit.ErrNoReceipt)
}
