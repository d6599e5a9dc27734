package ratelimit

import (
	_ "embed"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
)

var (
	//go:embed sql/call/fixed.sql
	fixedStatement string
	//go:embed sql/call/sliding.sql
	slidingStatement string
	//go:embed sql/call/tokenbucket.sql
	tokenBucketStatement string
	//go:embed sql/call/slidinglog.sql
	slidingLogStatement string
	//go:embed sql/call/calendar.sql
	calendarStatement string
	//go:embed sql/call/all.sql
	allStatement string
	//go:embed sql/call/takeall.sql
	takeAllStatement string
	//go:embed sql/call/reset.sql
	resetStatement string
	//go:embed sql/call/policies.sql
	policiesStatement string
	//go:embed sql/call/ban.sql
	banStatement string
	//go:embed sql/call/report.sql
	reportStatement string
)

// implementation is what only this package knows of an algorithm.
type implementation struct {
	statement string // that takes
	policy    func(algorithm.Numbers) single
}

// implementationOf has a line for each line of the table algorithm.All.
func implementationOf(code int16) implementation {
	type nums = algorithm.Numbers
	return [...]implementation{
		algorithm.FixedWindow:   {fixedStatement, func(n nums) single { return FixedWindow{n.Limit, n.Span} }},
		algorithm.SlidingWindow: {slidingStatement, func(n nums) single { return SlidingWindow{n.Limit, n.Span} }},
		algorithm.TokenBucket: {
			tokenBucketStatement, func(n nums) single { return TokenBucket{n.Limit, n.Refill, n.Span} },
		},
		algorithm.SlidingLog:     {slidingLogStatement, func(n nums) single { return SlidingLog{n.Limit, n.Span} }},
		algorithm.CalendarWindow: {calendarStatement, calendarOf},
	}[code]
}

// policyOf is the policy of these numbers.
func policyOf(n algorithm.Numbers) single { return implementationOf(n.Algorithm).policy(n) }

// argumentsOf are a policy's numbers, as the function of its algorithm takes them.
func argumentsOf(n algorithm.Numbers) []any {
	switch {
	case n.Refills():
		return []any{n.Limit, n.Refill, model.Micros(n.Span)}
	case n.Zoned():
		return []any{n.Limit, model.Micros(n.Span), n.Zone}
	}
	return []any{n.Limit, model.Micros(n.Span)}
}
