package limitertest

import (
	"slices"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
)

// ArgumentsOfAll returns the arguments of rate_limit_all for one request of 1 unit for each key.
func ArgumentsOfAll(name string, keys []string, of algorithm.Numbers) []any {
	n := len(keys)
	requests, zones := make([]int32, n), []string(nil)
	for i := range requests {
		requests[i] = int32(i)
	}
	if of.Zone != "" {
		zones = slices.Repeat([]string{of.Zone}, n)
	}
	return AllArguments(
		requests, slices.Repeat([]string{name}, n), keys, make([]bool, n), slices.Repeat([]int16{of.Algorithm}, n),
		slices.Repeat([]int64{of.Limit}, n), slices.Repeat([]int64{model.Micros(of.Span)}, n),
		slices.Repeat([]int64{of.Refill}, n), nil, nil, nil, nil, nil, nil, nil, nil, nil, false, zones,
	)
}

// AllArrays returns the arguments $1 to $10 of rate_limit_all.
func AllArrays(requests []modeltest.Request) []any {
	var owners []int32
	var names, keys []string
	var durables []bool
	var algorithms []int16
	var limits, spans, refills, costs, counts []int64
	for i, request := range requests {
		for _, p := range request.Parts {
			numbers := p.Policy.Numbers()
			owners, names, keys = append(owners, int32(i)), append(names, p.ID.Name), append(keys, p.ID.Key)
			durables, algorithms = append(durables, p.Durable), append(algorithms, numbers.Algorithm)
			limits, spans, refills = append(
				limits,
				numbers.Limit,
			), append(
				spans,
				model.Micros(numbers.Span),
			), append(
				refills,
				numbers.Refill,
			)
			costs, counts = append(costs, p.Cost), append(counts, request.Count)
		}
	}
	return []any{owners, names, keys, durables, algorithms, limits, spans, refills, costs, counts}
}

// AllArguments appends the arguments of rate_limit_all that are missing in args, for a statement that has all of them.
func AllArguments(args ...any) []any {
	defaults := make([]any, 24)
	defaults[17] = false // skip_held
	return append(args, defaults[len(args):]...)
}
