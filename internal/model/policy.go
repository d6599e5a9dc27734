package model

import (
	"reflect"
	"slices"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
)

// Policy has the rules that decide a key. Each rule has its own row. A Policy never changes.
type Policy struct {
	Rules []Rules
	Limit int64 // the largest cost that can ever be allowed
	// HasSlots tells whether a rule is Concurrency, of which nothing can be taken.
	HasSlots bool
	same     any // comparable; policies with the same value in this field are equal
}

// NewPolicy returns a policy of 1 to 8 rules.
func NewPolicy(rules ...Rules) *Policy {
	p := &Policy{Rules: rules, Limit: rules[0].Numbers().Limit, same: rules[0]}
	p.HasSlots = slices.ContainsFunc(rules, func(r Rules) bool { return r.Numbers().HasSlots() })
	for _, one := range rules[1:] {
		p.Limit = min(p.Limit, one.Numbers().Limit)
	}
	if len(rules) > 1 {
		var all [algorithm.MaxPolicies]Rules
		copy(all[:], rules)
		p.same = all
	}
	return p
}

// Slots returns the limit of the rule with slots, or 0 without such a rule.
func (p *Policy) Slots() int64 {
	for _, r := range p.Rules {
		if n := r.Numbers(); n.HasSlots() {
			return n.Limit
		}
	}
	return 0
}

// Is returns whether two policies are equal. A nil policy equals only nil.
func (p *Policy) Is(other *Policy) bool {
	return p == other || p != nil && other != nil && p.same == other.same
}

// KindsDiffer returns whether two policies cannot share rows. If so, it also returns the types of the first two rules
// that differ.
func (p *Policy) KindsDiffer(other *Policy) (kind, otherKind string, differ bool) {
	for i := range min(len(p.Rules), len(other.Rules)) {
		kind, otherKind = kindOf(p.Rules[i]), kindOf(other.Rules[i])
		if kind != otherKind {
			return kind, otherKind, true
		}
	}
	return "", "", false
}

// kindOf returns the name of the rule's type.
func kindOf(r Rules) string { return reflect.TypeOf(r).Name() }

// Of returns the rules of the algorithm and numbers in n.
func Of(n algorithm.Numbers) Rules {
	switch n.Algorithm {
	case algorithm.FixedWindow:
		return FixedWindow{n.Limit, n.Span}
	case algorithm.SlidingWindow:
		return SlidingWindow{n.Limit, n.Span}
	case algorithm.TokenBucket:
		return TokenBucket{n.Limit, n.Refill, n.Span}
	case algorithm.SlidingLog:
		return SlidingLog{n.Limit, n.Span}
	case algorithm.CalendarWindow:
		return CalendarWindow{n.Limit, n.Span, n.Zone}
	case algorithm.Concurrency:
		return Concurrency{n.Limit}
	}
	return nil
}
