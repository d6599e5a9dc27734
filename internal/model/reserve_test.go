package model_test

import (
	"cmp"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
)

func TestReserveBooksAPlaceInTheFuture(t *testing.T) {
	t.Parallel()
	p := model.TokenBucket{1, 1, time.Second}
	var k model.Key
	reserve := func(clock, n, maxDelay int64) (model.Decision, int64) {
		next, d, readyAfter := k.Reserve(p, clock, n, maxDelay)
		k = next
		return d, readyAfter
	}
	for i := range int64(4) {
		d, readyAfter := reserve(c0, 1, 3*second)
		require.EqualValues(t, 1, d.Granted)
		require.Equal(t, i*second, readyAfter)
	}
	third := k
	d, _ := reserve(c0, 1, 3*second)
	require.Equal(t, denied(0, second, 4*second), bare(d))
	_, d = k.Decide(p, c0, 1) // a take comes after all bookings
	require.Equal(t, denied(0, 4*second, 4*second), bare(d))
	d, readyAfter := reserve(c1, 1, 3*second)
	require.EqualValues(t, 1, d.Granted)
	require.Equal(t, 3*second, readyAfter)
	require.Equal(t, denied(0, model.Never, 4*second), func() model.Decision { d, _ := reserve(c1, 2, hour); return bare(d) }())

	// A booking is given back as a take is. The bucket then owes as much as without the booking.
	_, back := k.Refund(p, c1, d.Taken)
	require.Equal(t, granted(0, 3*second), bare(back))
	require.Equal(t, third.State.Count, back.State.Count+second)

	// A bucket can be booked for as long as maxDelay says.
	for i := range int64(1000) {
		if d, _ := reserve(c1, 1, 100*second); d.Granted == 0 {
			require.Equal(t, denied(0, second, 101*second), bare(d))
			require.EqualValues(t, 97, i)
			return
		}
	}
	require.Fail(t, "it owes more")
}

func TestMaxBookedStaysWithinTheExactRange(t *testing.T) {
	t.Parallel()
	const week = 7 * 24 * 3600
	for _, test := range []struct {
		policy model.TokenBucket
		want   int64
	}{
		{model.TokenBucket{1, 1, time.Second}, week + 1},
		{model.TokenBucket{1, 20, time.Second}, 20*week + 1},
		{model.TokenBucket{week, 1, time.Second}, 10 * week},
		{model.TokenBucket{2, 1, 100 * week * time.Second}, 20},
		{model.TokenBucket{5, 1, model.MaxSpan / 10 * time.Microsecond}, 5},
		{model.TokenBucket{1, 2048, time.Microsecond}, 2048*week*1e6 + 1},
		{model.TokenBucket{1, math.MaxInt64, time.Microsecond}, model.MaxProduct/(week*1_000_000)*(week*1_000_000) + 1},
		{model.TokenBucket{model.MaxProduct, math.MaxInt64, time.Microsecond}, 0},
	} {
		require.Equal(t, test.want, test.policy.MaxBooked(), "%+v", test.policy)
		// The whole of it can be booked.
		p, k := test.policy, model.Key{}
		for range 1000 {
			next, d, readyAfter := k.Reserve(p, c0, p.Capacity, model.Never)
			require.LessOrEqual(t, readyAfter, max(model.MaxSpan, model.Micros(model.BookedAhead)))
			if k = next; d.Granted == 0 {
				break
			}
		}
		require.LessOrEqual(t, k.State.Count, p.Full()+p.MaxBooked()*k.State.Scale)
		if p.MaxBooked() <= 900*p.Capacity {
			require.Greater(t, k.State.Count, p.MaxBooked()*k.State.Scale)
		}
	}
}

func TestReserveBesideHolds(t *testing.T) {
	t.Parallel()
	p := model.TokenBucket{10, 1, time.Second}
	k, _ := model.Key{}.Hold(p, c0, 1, 8, 30*second)
	// 2 of 10 tokens are free. The third token flows in after the booking has made room for it.
	booked, d, readyAfter := k.Reserve(p, c0, 3, second)
	require.EqualValues(t, 1, d.Granted)
	require.Equal(t, second, readyAfter)
	require.Equal(t, 3*second, booked.State.Count)
	// In a full bucket nothing flows in, so 4 tokens are free only when the hold has ended.
	_, d, _ = k.Reserve(p, c0, 4, second)
	require.Equal(t, 30*second, d.RetryAfter)
	// After the booking, one token flows in within a second, and one more a second later.
	_, d, _ = booked.Reserve(p, c0, 1, second)
	require.Equal(t, second, d.RetryAfter)
}

// A Reserve that may not wait is the same as a take. A denied Reserve returns exactly when it would be booked.
func TestReserveProperties(t *testing.T) {
	t.Parallel()
	d := modeltest.RandomDice(t)
	booked, refused := 0, 0
	for range 400 {
		p := d.Bucket()
		var k model.Key
		var last model.Decision
		clock := d.Magnitude(1<<51, 1<<52)
		for id := range int64(25) {
			clock = d.Forwards(p, k.State, clock, last)
			if d(4) == 0 {
				clock -= d.Magnitude(0, modeltest.Reach(p))
			}
			n, maxDelay := max(d.Cost(p.Capacity, last.Remaining), 1), d.Magnitude(0, 12*modeltest.Reach(p))
			switch d(5) {
			case 0:
				k, _ = k.Hold(p, clock, id, n, d.Magnitude(1, min(modeltest.Reach(p), model.Micros(model.MaxHold))))
			case 1:
				k, _ = k.Grant(p, clock, min(n, model.MaxCredit)) // callers may not grant more
			}
			took, asTake := k.Decide(p, clock, n)
			asBooking, got, readyAfter := k.Reserve(p, clock, n, 0)
			require.Equal(t, bare(asTake), bare(got), "%+v: %d at %d from %+v", p, n, clock, k)
			require.Equal(t, took, asBooking)
			require.Zero(t, readyAfter)

			next, got, readyAfter := k.Reserve(p, clock, n, maxDelay)
			switch {
			case got.Granted == 1:
				require.LessOrEqual(t, readyAfter, maxDelay)
				require.LessOrEqual(t, next.State.Count, p.Full()+p.MaxBooked()*next.State.Scale)
				if readyAfter > 0 {
					booked++
					_, _, early := k.Reserve(p, clock, n, readyAfter-1)
					require.Zero(t, early, "booked within less than its delay")
				}
			case n <= p.Capacity:
				refused++
				require.Positive(t, got.RetryAfter)
				require.NotEqual(t, int64(model.Never), got.RetryAfter)
				_, later, _ := next.Reserve(p, clock+got.RetryAfter, n, maxDelay)
				require.EqualValues(t, 1, later.Granted, "%+v: %d within %d at %d from %+v: %+v", p, n, maxDelay, clock, k, got)
				_, later, _ = next.Reserve(p, clock+got.RetryAfter-1, n, maxDelay)
				require.Zero(t, later.Granted, "%+v: %d within %d at %d from %+v: %+v", p, n, maxDelay, clock, k, got)
			default:
				require.Equal(t, int64(model.Never), got.RetryAfter)
			}
			k, last = next, got
		}
	}
	require.Greater(t, booked, 50)
	require.Greater(t, refused, 50)
}

// Bookings that are not given back are never ready faster than the bucket allows. If a bucket pays for each booking
// when the booking is ready, it always has the tokens.
func TestBookingsAreReadyWithinThePolicy(t *testing.T) {
	t.Parallel()
	type booking struct {
		model.Take
		ready int64
	}
	d := modeltest.RandomDice(t)
	back := 0
	for range 400 {
		p := model.TokenBucket{1 + d(10), 1, model.Duration(1 + d(50))} // a Refill of 1, so that no delay is rounded
		var k model.Key
		var bookings []booking
		clock := int64(1 << 51)
		for range 40 {
			clock += d(2 * model.Micros(p.Every))
			if len(bookings) > 0 && d(3) == 0 {
				i := d(int64(len(bookings)))
				if clock < bookings[i].ready { // nobody has used this booking yet
					k, _ = k.Refund(p, clock, bookings[i].Take)
					bookings = slices.Delete(bookings, int(i), int(i)+1)
					back++
				}
				continue
			}
			next, got, readyAfter := k.Reserve(p, clock, 1+d(p.Capacity), d(6*modeltest.Reach(p)))
			if k = next; got.Granted == 1 {
				bookings = append(bookings, booking{got.Taken, clock + readyAfter})
			}
		}
		slices.SortStableFunc(bookings, func(a, b booking) int { return cmp.Compare(a.ready, b.ready) })
		var s model.State
		for _, b := range bookings {
			next, paid := p.Decide(s, b.ready, b.Units)
			require.EqualValues(t, 1, paid.Granted, "%+v: %+v", p, bookings)
			s = next
		}
	}
	require.Greater(t, back, 50)
}
