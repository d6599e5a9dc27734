package ratelimit

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// policyForms is what an error of ParsePolicy shows.
const policyForms = `"fixed 100/1m", "sliding 100/1m", "log 100/1m" (100 a minute) or "bucket 20 5/10s" (20 at once, and 5 more every 10 seconds), or several with commas between them`

// ParsePolicy reads a policy from a text, for configuration files and command lines; the policies' String methods write it:
//
//	fixed 100/1m      FixedWindow{Limit: 100, Window: time.Minute}
//	sliding 100/1m    SlidingWindow{Limit: 100, Window: time.Minute}
//	log 100/1m        SlidingLog{Limit: 100, Window: time.Minute}
//	bucket 20 5/10s   TokenBucket{Capacity: 20, Refill: 5, Every: 10 * time.Second}
//
// Several, with commas between them, are [All] of them: sliding 10/1s, sliding 3000/10m.
//
// Durations are those of [time.ParseDuration], and may begin with days of 24 hours: 1d, 1d12h. It returns a [*PolicyError], which
// shows what is accepted, for any other text and for a policy that [New] would refuse.
func ParsePolicy(text string) (Policy, error) {
	var policies []Policy
	for one := range strings.SplitSeq(text, ",") {
		policy, err := parsePolicy(strings.Fields(one))
		if err != nil {
			return nil, &PolicyError{Text: text, Err: err}
		}
		policies = append(policies, policy)
	}
	policy := policies[0]
	if len(policies) > 1 {
		policy = All(policies...)
	}
	if err := policy.validate(); err != nil {
		return nil, &PolicyError{Text: text, Err: err}
	}
	return policy, nil
}

func parsePolicy(words []string) (Policy, error) {
	if len(words) == 0 {
		return nil, errors.New("is empty")
	}
	algorithm, words := words[0], words[1:]
	want := map[string]int{"fixed": 1, "sliding": 1, "log": 1, "bucket": 2}[algorithm]
	if want == 0 {
		return nil, fmt.Errorf("%q is no algorithm", algorithm)
	}
	if len(words) != want {
		return nil, fmt.Errorf("has %d words after %q, and needs %d", len(words), algorithm, want)
	}
	amount, span, err := parseRate(words[want-1])
	if err != nil {
		return nil, err
	}
	switch algorithm {
	case "fixed":
		return FixedWindow{Limit: amount, Window: span}, nil
	case "sliding":
		return SlidingWindow{Limit: amount, Window: span}, nil
	case "log":
		return SlidingLog{Limit: amount, Window: span}, nil
	}
	capacity, err := parseAmount(words[0])
	return TokenBucket{Capacity: capacity, Refill: amount, Every: span}, err
}

// parseRate reads 100/1m.
func parseRate(text string) (amount int64, span time.Duration, err error) {
	before, after, ok := strings.Cut(text, "/")
	if !ok {
		return 0, 0, fmt.Errorf("%q has no slash between amount and duration", text)
	}
	if amount, err = parseAmount(before); err != nil {
		return 0, 0, err
	}
	span, err = parseSpan(after)
	return amount, span, err
}

func parseAmount(text string) (int64, error) {
	amount, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%q is not a whole number of at most %d", text, math.MaxInt64)
	}
	return amount, nil
}

const day = 24 * time.Hour

func parseSpan(text string) (span time.Duration, err error) {
	bad := fmt.Errorf("%q is not a duration like 10s, 1m, 1h30m or 30d, of at most 292 years", text)
	days, rest, ok := strings.Cut(text, "d")
	if ok {
		n, err := strconv.ParseUint(days, 10, 64)
		if err != nil || n > uint64(math.MaxInt64/day) || strings.HasPrefix(rest, "-") || strings.HasPrefix(rest, "+") {
			return 0, bad
		}
		if span = time.Duration(n) * day; rest == "" {
			return span, nil
		}
	} else {
		rest = text
	}
	part, err := time.ParseDuration(rest)
	if err != nil || part > math.MaxInt64-span {
		return 0, bad
	}
	return span + part, nil
}

// spanText is a duration without parts that are zero: 1m rather than 1m0s, and whole days as 30d.
func spanText(span time.Duration) string {
	if span >= day && span%day == 0 {
		return strconv.FormatInt(int64(span/day), 10) + "d"
	}
	text := span.String()
	for _, zero := range []string{"m0s", "h0m"} {
		if strings.HasSuffix(text, zero) {
			text = text[:len(text)-2]
		}
	}
	return text
}
