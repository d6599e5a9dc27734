package ratelimit

import (
	"fmt"
	"reflect"
	"strings"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
)

const maxPolicies = algorithm.MaxPolicies

// All is 2 to 8 policies for one key. A request is allowed if each of them allows it. Then it takes from all of
// them, or else from none. The order is part of what is stored. With
//
//	All(SlidingWindow{Limit: 10, Window: time.Second}, SlidingWindow{Limit: 3000, Window: 10 * time.Minute})
//
// a key may ask 10 times a second, and 3,000 times in ten minutes. A [Result] has the Limit and Remaining of the
// policy with the least left, and the longest RetryAfter and ResetAfter. [Result.Each] has what each policy says.
// Denials are not remembered: every call asks the database. A limiter named api keeps its rows under the names api,
// api/2, api/3 and so on, so give these names to no other.
func All(policies ...Policy) Policy {
	p := all{n: len(policies)}
	copy(p.list[:], policies)
	return p
}

// all is comparable, as every Policy is.
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
	for _, policy := range p.policies() {
		if _, nested := policy.(all); nested {
			return &ConfigError{Field: "Config.Policy", Reason: "is All within All; name all policies in one"}
		}
		if err := validatePolicy(policy); err != nil {
			return err
		}
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
			Reason: "is required: a FixedWindow, SlidingWindow, TokenBucket, SlidingLog or CalendarWindow " +
				"(not a pointer to one)",
		}
	}
	switch p := policy.(type) {
	case single:
		return p.validate()
	case all:
		return p.validate()
	}
	for _, r := range policy.rules() { // of a type of the caller's that embeds a Policy
		if err := policyOf(r.Numbers()).validate(); err != nil {
			return err
		}
	}
	return nil
}
