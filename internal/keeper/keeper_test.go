package keeper_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/keeper"
)

const ttl = 30 * time.Second

// database is a stand-in with slots that end, and with a switch for an outage.
type database struct {
	mu      sync.Mutex
	ends    map[string]time.Time
	handed  map[string]int64 // the fences of places that have become slots
	away    bool
	renewed atomic.Int64 // the number of statements
	warned  atomic.Int64
	heard   func(keeper.Told)
}

// five is the limit of all keys.
func five() int64 { return 5 }

var errAway = errors.New("away")

func newDatabase() *database {
	return &database{ends: map[string]time.Time{}, handed: map[string]int64{}}
}

func (d *database) config(listens bool) keeper.Config {
	c := keeper.Config{Renew: d.renew, Told: func(r keeper.Renewal) {
		if r.Err != nil {
			d.warned.Add(1)
		}
	}}
	if listens {
		c.Listen = func(ctx context.Context, ready func(), heard func(keeper.Told)) error {
			d.mu.Lock()
			d.heard = heard
			d.mu.Unlock()
			ready()
			<-ctx.Done()
			return ctx.Err()
		}
	}
	return c
}

func (d *database) renew(_ context.Context, places []keeper.Place, ttl time.Duration) (told []keeper.Told, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.renewed.Add(1)
	if d.away {
		return nil, errAway
	}
	for _, p := range places {
		if end, known := d.ends[p.ID]; known && time.Now().Before(end) {
			d.ends[p.ID] = time.Now().Add(ttl)
			fence, slot := d.handed[p.ID]
			told = append(told, keeper.Told{ID: p.ID, Waiting: !slot, Fence: fence})
		}
	}
	return told, nil
}

// make makes a slot, or a place in line if the fence is 0.
func (d *database) make(k *keeper.Keeper, id string, fence int64, strict bool) *keeper.Slot {
	s := k.Expect(id, ttl, strict, five)
	sent := time.Now()
	d.made(id, sent)
	if fence > 0 {
		d.mu.Lock()
		d.handed[id] = fence
		d.mu.Unlock()
	}
	s.Confirm(keeper.Told{ID: id, Waiting: fence == 0, Fence: fence}, sent)
	return s
}

// made makes a place in line.
func (d *database) made(id string, sent time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ends[id] = sent.Add(ttl)
}

// handOver makes a place in line a slot, and announces it if somebody listens.
func (d *database) handOver(id string, fence int64) {
	d.mu.Lock()
	d.handed[id] = fence
	heard := d.heard
	d.mu.Unlock()
	if heard != nil {
		heard(keeper.Told{ID: id, Fence: fence})
	}
}

func (d *database) set(away bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.away = away
}

func gotten(s *keeper.Slot) bool {
	select {
	case <-s.Got():
		return true
	default:
		return false
	}
}

// One statement renews a thousand slots, three times in each ttl. Without slots, no goroutine is left.
func TestOneStatementRenewsAllSlots(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDatabase()
		k := keeper.New(d.config(true))
		var slots []*keeper.Slot
		for i := range 1000 {
			slots = append(slots, d.make(k, fmt.Sprint(i), int64(i+1), false))
			<-time.After(time.Millisecond)
		}
		<-time.After(10*ttl - 2*time.Second)
		require.EqualValues(t, 29, d.renewed.Load()) // the next one is due in a second
		for i, s := range slots {
			require.NoError(t, s.Context().Err())
			require.EqualValues(t, i+1, s.Fence())
			require.True(t, gotten(s))
			require.True(t, s.Drop(keeper.ErrReleased))
			require.False(t, s.Drop(keeper.ErrReleased))
			require.ErrorIs(t, context.Cause(s.Context()), keeper.ErrReleased)
		}
		synctest.Wait() // the bubble ends only if all goroutines have ended
		<-time.After(10 * ttl)
		require.EqualValues(t, 29, d.renewed.Load())
	})
}

// A slot that cannot be renewed is lost a tenth before its end. A slot that can be renewed in time is kept.
func TestSlotsInAnOutage(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		outage time.Duration // it begins just before the first renewal
		strict bool
		lost   time.Duration // after the slot was made; 0 if it is kept
	}{
		{outage: 15 * time.Second},
		{outage: 16500 * time.Millisecond},
		{outage: time.Hour, lost: ttl - ttl/10},
		{outage: 15 * time.Second, strict: true, lost: ttl / 3},
	} {
		t.Run(fmt.Sprintf("%v, strict %v", c.outage, c.strict), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				d := newDatabase()
				k := keeper.New(d.config(true))
				s, began := d.make(k, "a", 7, c.strict), time.Now()
				<-time.After(ttl/3 - time.Second)
				d.set(true)
				time.AfterFunc(c.outage, func() { d.set(false) })
				var lost time.Duration
				stop := context.AfterFunc(s.Context(), func() { lost = time.Since(began) })
				<-time.After(5 * ttl)
				synctest.Wait()
				require.Equal(t, c.lost, lost)
				require.Positive(t, d.warned.Load())
				if c.lost > 0 {
					require.ErrorIs(t, context.Cause(s.Context()), keeper.ErrLost)
				}
				require.Equal(t, c.lost == 0, stop())
				require.Equal(t, c.lost == 0, s.Drop(keeper.ErrReleased))
			})
		})
	}
}

// The database may answer so late that the slot is due to be renewed at once.
func TestSlotsThatAreMadeSlowlyAreRenewed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDatabase()
		k := keeper.New(d.config(true))
		s, sent := k.Expect("a", ttl, false, five), time.Now()
		d.made("a", sent)
		d.handOver("a", 1)
		<-time.After(ttl * 7 / 10)
		s.Confirm(keeper.Told{ID: "a", Fence: 1}, sent)
		<-time.After(5 * ttl)
		require.NoError(t, s.Context().Err())
		require.True(t, s.Drop(keeper.ErrReleased))
	})
}

// A slot that the database has no more is lost at the next renewal.
func TestSlotThatWasTakenAway(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDatabase()
		k := keeper.New(d.config(true))
		began := time.Now()
		s, other := d.make(k, "a", 7, false), d.make(k, "b", 8, false)
		<-time.After(time.Second)
		d.mu.Lock()
		delete(d.ends, "a")
		d.mu.Unlock()
		<-s.Context().Done()
		require.Equal(t, ttl/3, time.Since(began))
		require.ErrorIs(t, context.Cause(s.Context()), keeper.ErrLost)
		require.NoError(t, other.Context().Err())
		require.False(t, s.Drop(keeper.ErrReleased))
		other.Drop(keeper.ErrReleased)
	})
}

// A place in line becomes a slot as soon as a notification says so, or when the keeper asks.
func TestPlaceInLineBecomesASlot(t *testing.T) {
	t.Parallel()
	for listens, within := range map[bool]time.Duration{true: 0, false: 500 * time.Millisecond} {
		t.Run(fmt.Sprintf("listens %v", listens), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				d := newDatabase()
				k := keeper.New(d.config(listens))
				s := d.make(k, "a", 0, false)
				<-time.After(2*ttl + 3*time.Second/4)
				require.False(t, gotten(s))
				require.NoError(t, s.Context().Err())
				require.Zero(t, s.Fence())
				handed := time.Now()
				d.handOver("a", 9)
				<-s.Got()
				require.LessOrEqual(t, time.Since(handed), within)
				require.EqualValues(t, 9, s.Fence())
				before := d.renewed.Load()
				<-time.After(3 * ttl)
				synctest.Wait()
				require.LessOrEqual(t, d.renewed.Load()-before, int64(10)) // the slot is only renewed
				require.NoError(t, s.Context().Err())
				require.True(t, s.Drop(keeper.ErrReleased))
			})
		})
	}
}

// A place may become a slot before this process has read that it is in line, and before it listens.
func TestHandOverBeforeTheAnswer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDatabase()
		k := keeper.New(d.config(true))
		first := d.make(k, "first", 0, false)
		synctest.Wait() // it listens

		s, sent := k.Expect("a", ttl, false, five), time.Now()
		d.made("a", sent)
		d.handOver("a", 9)
		s.Confirm(keeper.Told{ID: "a", Waiting: true, Fence: 3}, sent)
		require.True(t, gotten(s))
		require.EqualValues(t, 9, s.Fence())
		first.Drop(keeper.ErrReleased)
		s.Drop(keeper.ErrReleased)
		synctest.Wait()

		// This time nobody listens yet. The keeper asks when it has begun to.
		s, sent = k.Expect("b", ttl, false, five), time.Now()
		d.made("b", sent)
		d.heard = nil
		d.handOver("b", 10)
		s.Confirm(keeper.Told{ID: "b", Waiting: true, Fence: 4}, sent)
		<-s.Got()
		require.Zero(t, time.Since(sent))
		require.EqualValues(t, 10, s.Fence())
		s.Drop(keeper.ErrReleased)
	})
}

// When the keeper has begun to listen, it asks once for what was announced before.
func TestHandOverBeforeListening(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDatabase()
		c := d.config(true)
		c.Listen = func(ctx context.Context, ready func(), _ func(keeper.Told)) error {
			<-time.After(200 * time.Millisecond)
			ready()
			<-ctx.Done()
			return ctx.Err()
		}
		began := time.Now()
		s := d.make(keeper.New(c), "a", 0, false)
		<-time.After(100 * time.Millisecond)
		d.handOver("a", 9)
		<-s.Got()
		require.Equal(t, 200*time.Millisecond, time.Since(began))
		s.Drop(keeper.ErrReleased)
	})
}

// A failover to a standby that lags behind can forget that a place has become a slot. Then the slot is lost. But the
// answer to a renewal that was sent before the place became a slot says nothing of that kind.
func TestSlotThatIsAPlaceAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDatabase()
		c := d.config(true)
		var handsOver atomic.Bool
		c.Renew = func(ctx context.Context, places []keeper.Place, ttl time.Duration) ([]keeper.Told, error) {
			told, err := d.renew(ctx, places, ttl)
			<-time.After(time.Millisecond)
			if handsOver.CompareAndSwap(true, false) {
				d.handOver("a", 9)
				<-time.After(time.Millisecond)
			}
			return told, err
		}
		s := d.make(keeper.New(c), "a", 0, false)
		<-time.After(time.Second)
		handsOver.Store(true)
		<-time.After(ttl / 3)
		synctest.Wait()
		require.True(t, gotten(s))
		require.NoError(t, s.Context().Err())
		<-time.After(ttl / 3)
		require.NoError(t, s.Context().Err())
		d.mu.Lock()
		delete(d.handed, "a")
		d.mu.Unlock()
		<-time.After(ttl / 3)
		require.ErrorIs(t, context.Cause(s.Context()), keeper.ErrLost)
	})
}

// A holder that dies announces nothing. A keeper that listens asks all the same, long before it renews its places. One
// statement asks for all of them.
func TestPlacesBehindADeadHolder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDatabase()
		k := keeper.New(d.config(true))
		var places []*keeper.Slot
		for i := range 100 {
			id := fmt.Sprint(i)
			s, sent := k.Expect(id, 24*time.Hour, false, five), time.Now()
			d.made(id, sent)
			s.Confirm(keeper.Told{ID: id, Waiting: true}, sent)
			places = append(places, s)
		}
		synctest.Wait()
		began := d.renewed.Load()
		<-time.After(time.Minute + time.Second)
		require.Equal(t, began+60/5, d.renewed.Load())
		d.mu.Lock()
		d.handed["7"] = 1
		d.mu.Unlock()
		<-time.After(6 * time.Second)
		for i, s := range places {
			require.Equal(t, i == 7, gotten(s))
			require.True(t, s.Drop(keeper.ErrReleased))
		}
	})
}

// While a slot is expected, it is not renewed, because the database may not have it yet.
func TestExpectedSlotIsNotRenewed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDatabase()
		k := keeper.New(d.config(true))
		other := d.make(k, "other", 1, false)
		s := k.Expect("a", ttl, false, five)
		sent := time.Now()
		<-time.After(ttl / 2)
		require.NoError(t, s.Context().Err())
		d.made("a", sent)
		d.handOver("a", 2)
		s.Confirm(keeper.Told{ID: "a", Fence: 2}, sent)
		<-time.After(3 * ttl)
		require.NoError(t, s.Context().Err())
		require.True(t, s.Drop(keeper.ErrReleased))
		require.True(t, other.Drop(keeper.ErrReleased))
		require.True(t, k.Expect("b", ttl, false, five).Drop(keeper.ErrReleased))
	})
}

// After a pause longer than the ttl, such as that of a stopped process, the slot is lost at once.
func TestConfirmedTooLate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDatabase()
		k := keeper.New(d.config(true))
		s, sent := k.Expect("a", ttl, false, five), time.Now()
		<-time.After(ttl)
		s.Confirm(keeper.Told{ID: "a", Fence: 2}, sent)
		synctest.Wait()
		require.ErrorIs(t, context.Cause(s.Context()), keeper.ErrLost)
	})
}
