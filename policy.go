package ratelimit

import (
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
)

// Policy says how much a key may take: a [FixedWindow], [SlidingWindow], [TokenBucket], [SlidingLog], [CalendarWindow]
// or [Concurrency], or [All] of several. [ParsePolicy] reads what String returns. ([Policies] is a table of policies.)
//
// A policy may change while its keys are in use. What was taken stays taken, and the new numbers apply at once. A
// raised limit helps immediately, and a lowered limit denies until enough usage has expired. A bucket keeps its tokens,
// up to its new capacity. Under another kind of policy, a key starts with nothing taken, so each change of kind admits
// another whole limit.
type Policy interface {
	fmt.Stringer

	// rules returns one element for each row of a key. [All] has several rows for each key.
	rules() []model.Rules
}

// single is a policy that has one row for each key.
type single interface {
	Policy

	one() model.Rules
	// validate returns a *ConfigError for a policy outside the exact range.
	validate() error
}

// validateWindow checks the numbers of a window or a log.
func validateWindow(limit int64, window time.Duration) error {
	if limit < 1 {
		return &ConfigError{Field: "Config.Policy.Limit", Reason: fmt.Sprintf("is %d, and must be at least 1", limit)}
	}
	if err := validateSpan("Config.Policy.Window", window); err != nil {
		return err
	}
	if limit > model.MaxProduct/model.Micros(window) {
		return &ConfigError{Field: "Config.Policy.Limit", Reason: fmt.Sprintf(
			"is %d with a Window of %v, outside the exact range: for this Window it may be at most %d",
			limit, window, model.MaxProduct/model.Micros(window))}
	}
	return nil
}

func validateSpan(field string, d time.Duration) error {
	switch {
	case d < time.Microsecond:
		return &ConfigError{Field: field, Reason: fmt.Sprintf("is %v, and must be at least 1µs", d)}
	case d%time.Microsecond != 0:
		return &ConfigError{Field: field, Reason: fmt.Sprintf(
			"is %v, and must be whole microseconds, the resolution of Postgres's clock", d)}
	case model.Micros(d) > model.MaxSpan:
		return &ConfigError{Field: field, Reason: fmt.Sprintf(
			"is %v, and may be at most %v (71 years)", d, model.Duration(model.MaxSpan))}
	}
	return nil
}

// policyModel returns the model of policy, which the engine uses.
func policyModel(policy Policy) *model.Policy { return model.NewPolicy(policy.rules()...) }

// policyFrom returns the policy of a model, or nil if m is nil.
func policyFrom(m *model.Policy) Policy {
	switch {
	case m == nil:
		return nil
	case len(m.Rules) == 1:
		return policyOf(m.Rules[0].Numbers())
	}
	several := make([]Policy, len(m.Rules))
	for i, r := range m.Rules {
		several[i] = policyOf(r.Numbers())
	}
	return All(several...)
}

func policyOf(n algorithm.Numbers) single {
	switch n.Algorithm {
	case algorithm.FixedWindow:
		return FixedWindow{Limit: n.Limit, Window: n.Span}
	case algorithm.SlidingWindow:
		return SlidingWindow{n.Limit, n.Span}
	case algorithm.TokenBucket:
		return TokenBucket{n.Limit, n.Refill, n.Span}
	case algorithm.SlidingLog:
		return SlidingLog{n.Limit, n.Span}
	case algorithm.CalendarWindow:
		return calendarOf(n)
	case algorithm.Concurrency:
		return Concurrency{n.Limit}
	}
	return nil // TestEveryAlgorithmIsComplete fails in this case
}

const maxPolicies = algorithm.MaxPolicies

// All joins 2 to 8 policies into one. If each policy allows a request, All takes from all of them, otherwise from none.
// With
//
//	All(SlidingWindow{Limit: 10, Window: time.Second}, SlidingWindow{Limit: 3000, Window: 10 * time.Minute})
//
// a key may ask 10 times a second, and 3,000 times in ten minutes. A [Result] has the Limit and Remaining of the policy
// with the least left, and the longest RetryAfter and ResetAfter. [Result.Each] has the result of each policy. Denials
// are not remembered, so every call asks the database. Keep the order of the policies: a limiter named api names its
// rows api, api/2, api/3 and so on. Give these names to no other limiter.
func All(policies ...Policy) Policy {
	p := all{n: len(policies)}
	copy(p.list[:], policies)
	return p
}

// all has an array instead of a slice, so that it is comparable like every other Policy.
type all struct {
	n    int
	list [maxPolicies]Policy
}

func (p all) policies() []Policy { return p.list[:p.n] }

func (p all) String() string {
	texts := make([]string, p.n)
	for i, policy := range p.policies() {
		texts[i] = policy.String()
	}
	return strings.Join(texts, ", ")
}

func (p all) validate() error {
	if p.n < 2 || p.n > maxPolicies {
		return &ConfigError{
			Field: "Config.Policy", Reason: fmt.Sprintf("is All of %d policies, and needs 2 to %d", p.n, maxPolicies),
		}
	}
	slots := 0
	for _, policy := range p.policies() {
		if _, nested := policy.(all); nested {
			return &ConfigError{Field: "Config.Policy", Reason: "is All within All; name all policies in one"}
		}
		if err := validatePolicy(policy); err != nil {
			return err
		}
		if policyModel(policy).HasSlots {
			slots++
		}
	}
	if slots > 1 {
		return &ConfigError{Field: "Config.Policy", Reason: fmt.Sprintf(
			"is All with %d times Concurrency, and may have one; the smallest Limit is enough", slots)}
	}
	return nil
}

func (p all) rules() []model.Rules {
	several := make([]model.Rules, 0, p.n)
	for _, policy := range p.policies() {
		several = append(several, policy.rules()...)
	}
	return several
}

func validatePolicy(policy Policy) error {
	if policy == nil || reflect.TypeOf(policy).Kind() == reflect.Pointer {
		return &ConfigError{
			Field: "Config.Policy",
			Reason: "is required: a FixedWindow, SlidingWindow, TokenBucket, SlidingLog, CalendarWindow or " +
				"Concurrency (not a pointer to one)",
		}
	}
	switch p := policy.(type) {
	case single:
		return p.validate()
	case all:
		return p.validate()
	}
	for _, r := range policy.rules() { // a caller's type that embeds a Policy
		if err := policyOf(r.Numbers()).validate(); err != nil {
			return err
		}
	}
	return nil
}

// ParsePolicy reads a policy in the form that String returns.
//
//	fixed 100/1m      FixedWindow{Limit: 100, Window: time.Minute}
//	sliding 100/1m    SlidingWindow{Limit: 100, Window: time.Minute}
//	log 100/1m        SlidingLog{Limit: 100, Window: time.Minute}
//	bucket 20 5/10s   TokenBucket{Capacity: 20, Refill: 5, Every: 10 * time.Second}
//	every 100/1m      FixedWindow{Limit: 100, Window: time.Minute, Align: true}
//	every 1000/month  CalendarWindow{Limit: 1000, Unit: CalendarMonth}
//	concurrent 5      Concurrency{Limit: 5}
//
// A time zone may follow a unit of the calendar: every 1000/month Europe/Berlin. A comma makes [All]: sliding 10/1s,
// sliding 3000/10m. [time.ParseDuration] reads the durations, which may begin with days of 24 hours: 1d12h. Errors: a
// [*PolicyError], also for a policy that [New] would refuse.
func ParsePolicy(text string) (Policy, error) {
	numbers, err := algorithm.Parse(text)
	if err != nil {
		return nil, &PolicyError{Text: text, Err: err}
	}
	var policies []Policy
	for _, n := range numbers {
		policies = append(policies, policyOf(n))
	}
	policy := policies[0]
	if len(policies) > 1 {
		policy = All(policies...)
	}
	if err := validatePolicy(policy); err != nil {
		return nil, &PolicyError{Text: text, Err: err}
	}
	return policy, nil
}
