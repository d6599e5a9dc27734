package ratelimit

import (
	"fmt"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// Concurrency admits at most Limit units at a time, such as 5 jobs of a tenant in all processes. It has slots: work
// acquires one, renews it while it goes on, and releases it at the end. A slot that is not renewed ends by itself, so a
// crash keeps none. Nothing is counted over time. [All] may have one Concurrency beside policies that count, such as 5
// at a time and 1,000 a day.
//
// [Limiter.Acquire] waits for a slot, and [Limiter.TryAcquire] does not. The SQL functions rate_limit_acquire,
// rate_limit_renew and rate_limit_release do the same for other languages. [Limiter.Peek] shows how many are free, and
// [Limiter.Reset] ends all slots of a key. Calls that take, charge, hold, reserve or grant units return a [*SlotError],
// because there is nothing to take. A slot is not bound to a transaction: acquire it before the transaction begins.
type Concurrency struct {
	Limit int64 // in units: from 1 to 1,000,000
}

func (p Concurrency) String() string { return p.one().Numbers().String() }

func (p Concurrency) one() model.Rules     { return model.Concurrency(p) }
func (p Concurrency) rules() []model.Rules { return []model.Rules{p.one()} }

func (p Concurrency) validate() error {
	if p.Limit < 1 || p.Limit > model.MaxSlots {
		return &ConfigError{Field: "Config.Policy.Limit", Reason: fmt.Sprintf(
			"is %d, and must be from 1 to %d", p.Limit, model.MaxSlots)}
	}
	return nil
}

// SlotError says why a slot cannot be acquired as it was asked, or why a call cannot take units of a policy with slots.
// Nothing was taken.
type SlotError struct {
	Reason string // completes a sentence
}

func (e *SlotError) Error() string { return "ratelimit: " + e.Reason }

// checkTakes returns an error for a policy with slots, of which nothing can be taken.
func checkTakes(policy *model.Policy) error {
	if policy.HasSlots {
		return &SlotError{fmt.Sprintf("the policy %q has slots, of which nothing can be taken; call Acquire or "+
			"TryAcquire, or give the work another policy", policyFrom(policy))}
	}
	return nil
}
