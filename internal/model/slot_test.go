package model_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// Of a limit of 3, a holds 2. The big job b waits, and c does not pass it although 1 is free. When a is released, both
// get their slots.
func TestBigTicketStopsTheLine(t *testing.T) {
	t.Parallel()

	m, key := model.Concurrency{Limit: 3}, model.Key{}
	want := func(id, units int64) model.Want {
		return model.Want{ID: id, Units: units, TTL: 1000, Weight: 1, Wait: true}
	}
	key, a := key.Acquire(m, 0, want(1, 2))
	require.EqualValues(t, 1, a.Decision.Granted)
	require.Equal(t, model.Live, a.Hold.Status)
	require.EqualValues(t, 1, a.Hold.Fence)
	key, b := key.Acquire(m, 10, want(2, 2))
	require.Zero(t, b.Decision.Granted)
	require.Equal(t, model.Waiting, b.Hold.Status)
	require.EqualValues(t, 990, b.Decision.RetryAfter)
	key, c := key.Acquire(m, 20, want(3, 1))
	require.Equal(t, model.Waiting, c.Hold.Status)
	key, _, err := key.Release(30, 1)
	require.NoError(t, err)
	require.EqualValues(t, 3, key.Held(30))
	_, live := key.Renew(40, map[int64]int64{1: 0, 2: 0, 3: 0}, 1000)
	require.Len(t, live, 2)
	require.Equal(t, []int64{4, 5}, []int64{live[0].Fence, live[1].Fence})
	require.EqualValues(t, 1040, live[0].End)
}

// One group has many waiters, and another has one. Of two slots, each group gets one.
func TestNextIsTheGroupThatHoldsLeast(t *testing.T) {
	t.Parallel()

	m, key := model.Concurrency{Limit: 2}, model.Key{}
	for id := range int64(6) {
		key, _ = key.Acquire(m, 0, model.Want{ID: 1 + id, Units: 1, TTL: 1000, Group: "many", Weight: 1, Wait: true})
	}
	key, _ = key.Acquire(m, 0, model.Want{ID: 9, Units: 1, TTL: 1000, Group: "one", Weight: 1, Wait: true})
	key, _, err := key.Release(1, 1)
	require.NoError(t, err)
	_, live := key.Renew(1, map[int64]int64{2: 0, 3: 0, 9: 0}, 1)
	require.Equal(t, []model.HoldStatus{model.Live, model.Waiting, model.Live},
		[]model.HoldStatus{live[0].Status, live[1].Status, live[2].Status})
}

// A raised limit reaches a line with a renewal, and serves by it the tickets that were renewed.
func TestRenewalBringsTheNewLimit(t *testing.T) {
	t.Parallel()

	key := model.Key{}
	for id := range int64(4) {
		key, _ = key.Acquire(model.Concurrency{Limit: 1}, 0, model.Want{ID: 1 + id, Units: 1, TTL: 9, Weight: 1, Wait: true})
	}
	key, live := key.Renew(1, map[int64]int64{3: 0, 4: 0}, 1)
	require.Equal(t, []model.HoldStatus{model.Waiting, model.Waiting}, []model.HoldStatus{live[0].Status, live[1].Status})
	key, live = key.Renew(1, map[int64]int64{2: 3, 3: 3}, 1)
	require.Equal(t, []model.HoldStatus{model.Live, model.Live}, []model.HoldStatus{live[0].Status, live[1].Status})
	_, live = key.Renew(1, map[int64]int64{4: 3}, 1)
	require.Equal(t, model.Waiting, live[0].Status)
}

// A slot that has ended stays ended when the clock is set back, and a renewal does not revive it.
func TestNoSlotIsRevived(t *testing.T) {
	t.Parallel()

	m, key := model.Concurrency{Limit: 1}, model.Key{}
	key, _ = key.Acquire(m, 0, model.Want{ID: 1, Units: 1, TTL: 10, Weight: 1})
	key, second := key.Acquire(m, 10, model.Want{ID: 2, Units: 1, TTL: 10, Weight: 1})
	require.EqualValues(t, 2, second.Hold.Fence)
	_, live := key.Renew(5, map[int64]int64{1: 0}, 100)
	require.Empty(t, live)
	_, _, err := key.Release(5, 1)
	require.ErrorIs(t, err, model.ErrHoldUnknown)
}

// Concurrency alone counts nothing.
func TestConcurrencyCountsNothing(t *testing.T) {
	t.Parallel()

	m := model.Concurrency{Limit: 3}
	for n, want := range map[int64]model.Decision{
		0: {Remaining: 3},
		3: {Remaining: 3, Granted: 1},
		4: {Remaining: 3, RetryAfter: model.Never},
	} {
		s, d := m.Decide(model.State{}, 7, n)
		require.Equal(t, want, d)
		require.Zero(t, s)
	}
	require.Zero(t, model.MaxOwed(m))
}
