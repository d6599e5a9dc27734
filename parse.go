package ratelimit

import "github.com/pgratelimit/ratelimit/internal/algorithm"

// ParsePolicy reads a policy from a text, for configuration files and command lines. A policy's String writes it.
//
//	fixed 100/1m      FixedWindow{Limit: 100, Window: time.Minute}
//	sliding 100/1m    SlidingWindow{Limit: 100, Window: time.Minute}
//	log 100/1m        SlidingLog{Limit: 100, Window: time.Minute}
//	bucket 20 5/10s   TokenBucket{Capacity: 20, Refill: 5, Every: 10 * time.Second}
//	every 1000/month  CalendarWindow{Limit: 1000, Unit: Month}
//	every 1000/month Europe/Berlin
//	                  CalendarWindow{Limit: 1000, Unit: Month, Zone: "Europe/Berlin"}
//
// Several, with commas between them, are [All] of them: sliding 10/1s, sliding 3000/10m. Durations are those of
// [time.ParseDuration], and may begin with days of 24 hours: 1d, 1d12h. Errors: a [*PolicyError], which shows what
// is accepted, for any other text and for a policy that [New] would refuse.
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
