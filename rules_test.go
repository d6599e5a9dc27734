package ratelimit

import (
	"context"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
)

// ruled is a policy of one row with its rules, for tests that need both.
type ruled interface {
	single
	model.Rules
}

func (p FixedWindow) Numbers() algorithm.Numbers { return p.one().Numbers() }
func (p FixedWindow) Lasts() int64               { return p.one().Lasts() }
func (p FixedWindow) Roll(s model.State, clock int64) (model.State, bool) {
	return p.one().Roll(s, clock)
}
func (p FixedWindow) Decide(s model.State, clock, n int64) (model.State, model.Decision) {
	return p.one().Decide(s, clock, n)
}
func (p FixedWindow) Refund(s model.State, clock int64, k model.Take) (model.State, model.Decision) {
	return p.one().Refund(s, clock, k)
}
func (p FixedWindow) LeaseOf(s model.State, clock, longest int64) (spare, lasts int64) {
	return p.one().LeaseOf(s, clock, longest)
}
func (p FixedWindow) ResetAfter(last model.Decision, units int64) int64 {
	return p.one().ResetAfter(last, units)
}

func (p SlidingWindow) Numbers() algorithm.Numbers { return p.one().Numbers() }
func (p SlidingWindow) Lasts() int64               { return p.one().Lasts() }
func (p SlidingWindow) Roll(s model.State, clock int64) (model.State, bool) {
	return p.one().Roll(s, clock)
}
func (p SlidingWindow) Decide(s model.State, clock, n int64) (model.State, model.Decision) {
	return p.one().Decide(s, clock, n)
}
func (p SlidingWindow) Refund(s model.State, clock int64, k model.Take) (model.State, model.Decision) {
	return p.one().Refund(s, clock, k)
}
func (p SlidingWindow) LeaseOf(s model.State, clock, longest int64) (spare, lasts int64) {
	return p.one().LeaseOf(s, clock, longest)
}
func (p SlidingWindow) ResetAfter(last model.Decision, units int64) int64 {
	return p.one().ResetAfter(last, units)
}

func (p TokenBucket) Numbers() algorithm.Numbers { return p.one().Numbers() }
func (p TokenBucket) Lasts() int64               { return p.one().Lasts() }
func (p TokenBucket) Roll(s model.State, clock int64) (model.State, bool) {
	return p.one().Roll(s, clock)
}
func (p TokenBucket) Decide(s model.State, clock, n int64) (model.State, model.Decision) {
	return p.one().Decide(s, clock, n)
}
func (p TokenBucket) Refund(s model.State, clock int64, k model.Take) (model.State, model.Decision) {
	return p.one().Refund(s, clock, k)
}
func (p TokenBucket) LeaseOf(s model.State, clock, longest int64) (spare, lasts int64) {
	return p.one().LeaseOf(s, clock, longest)
}
func (p TokenBucket) ResetAfter(last model.Decision, units int64) int64 {
	return p.one().ResetAfter(last, units)
}

func (p SlidingLog) Numbers() algorithm.Numbers { return p.one().Numbers() }
func (p SlidingLog) Lasts() int64               { return p.one().Lasts() }
func (p SlidingLog) Roll(s model.State, clock int64) (model.State, bool) {
	return p.one().Roll(s, clock)
}
func (p SlidingLog) Decide(s model.State, clock, n int64) (model.State, model.Decision) {
	return p.one().Decide(s, clock, n)
}
func (p SlidingLog) Refund(s model.State, clock int64, k model.Take) (model.State, model.Decision) {
	return p.one().Refund(s, clock, k)
}
func (p SlidingLog) LeaseOf(s model.State, clock, longest int64) (spare, lasts int64) {
	return p.one().LeaseOf(s, clock, longest)
}
func (p SlidingLog) ResetAfter(last model.Decision, units int64) int64 {
	return p.one().ResetAfter(last, units)
}

func (p CalendarWindow) Numbers() algorithm.Numbers { return p.one().Numbers() }
func (p CalendarWindow) Lasts() int64               { return p.one().Lasts() }
func (p CalendarWindow) Roll(s model.State, clock int64) (model.State, bool) {
	return p.one().Roll(s, clock)
}
func (p CalendarWindow) Decide(s model.State, clock, n int64) (model.State, model.Decision) {
	return p.one().Decide(s, clock, n)
}
func (p CalendarWindow) Refund(s model.State, clock int64, k model.Take) (model.State, model.Decision) {
	return p.one().Refund(s, clock, k)
}
func (p CalendarWindow) LeaseOf(s model.State, clock, longest int64) (spare, lasts int64) {
	return p.one().LeaseOf(s, clock, longest)
}
func (p CalendarWindow) ResetAfter(last model.Decision, units int64) int64 {
	return p.one().ResetAfter(last, units)
}

func (p TokenBucket) full() int64 { return p.one().(model.TokenBucket).Full() }
func (p TokenBucket) lend(s model.State, units int64) model.State {
	return p.one().(model.TokenBucket).Lend(s, units)
}
func (p CalendarWindow) spanMicros() int64     { return p.one().(model.CalendarWindow).SpanMicros() }
func (p CalendarWindow) end(clock int64) int64 { return p.one().(model.CalendarWindow).End(clock) }

// modelOf is the policy that has these rules.
func modelOf(r model.Rules) ruled { return policyOf(r.Numbers()).(ruled) }

// rulesOf are the rules of policies.
func rulesOf(policies ...ruled) (several []model.Rules) {
	for _, p := range policies {
		several = append(several, p.one())
	}
	return several
}

// allowAllTx is AllowAll of requests within a transaction.
func allowAllTx(ctx context.Context, tx pgx.Tx, requests ...Request) (Results, error) {
	requests = slices.Clone(requests) // which the caller may ask without a transaction, too
	for i := range requests {
		requests[i].inTx, requests[i].tx = true, tx
	}
	return AllowAll(ctx, requests...)
}
