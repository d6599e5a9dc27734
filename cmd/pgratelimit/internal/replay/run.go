package replay

import (
	"fmt"
	"slices"
	"strings"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
)

// Policy is a policy that can be replayed.
type Policy struct {
	Text  string
	rules []model.Rules
}

// ParsePolicy reads a policy as ratelimit.ParsePolicy does. Policies that all have to allow a request may also be
// joined by a plus with spaces around it.
func ParsePolicy(text string) (Policy, error) {
	parsed, err := ratelimit.ParsePolicy(strings.ReplaceAll(text, " + ", ", "))
	if err != nil {
		return Policy{}, err
	}
	p := Policy{Text: parsed.String()}
	numbers, err := algorithm.Parse(p.Text)
	if err != nil {
		return Policy{}, err
	}
	for _, n := range numbers {
		if n.HasSlots() {
			return Policy{}, fmt.Errorf("%q cannot be replayed, because a log does not say when a request ended", n)
		}
		if n.Zoned() {
			if _, err := model.Location(n.Zone); err != nil {
				return Policy{}, fmt.Errorf("%q: %w", n, err)
			}
		}
		p.rules = append(p.rules, model.Of(n))
	}
	return p, nil
}

// run is the replay of one policy. It keeps the state of a key until the key counts nothing any more, and how often
// each key was denied.
type run struct {
	Policy
	allowed, denied int64
	longest         int64   // the longest RetryAfter of a denial
	never           int64   // how many requests cost more than the limit
	deniedOf        []int64 // by the key's number
	states          [][]model.State
	free            [][]model.State
	live, swept     int // states in use, and how many there were after the last sweep
	next            []model.State
	over            timeline
}

func newRun(p Policy) *run { return &run{Policy: p, next: make([]model.State, len(p.rules))} }

// decide decides a request as a limiter does: a request takes from all rows, or from none. The times of requests never
// go back, so a denial does not change a row.
func (r *run) decide(q request) (allowed bool) {
	for int(q.key) >= len(r.states) {
		r.states, r.deniedOf = append(r.states, nil), append(r.deniedOf, 0)
	}
	state := r.states[q.key]
	if state == nil {
		state = r.newState(q.at)
		r.states[q.key] = state
	}
	allowed = true
	wait := int64(0)
	for i, rule := range r.rules {
		var d model.Decision
		if r.next[i], d = rule.Decide(state[i], q.at, q.cost); d.Granted == 0 {
			allowed, wait = false, max(wait, d.RetryAfter)
		}
	}
	if allowed {
		copy(state, r.next)
		r.allowed++
		r.over.count(q.at, true)
		return true
	}
	r.denied++
	r.over.count(q.at, false)
	r.deniedOf[q.key]++
	if wait == model.Never {
		r.never++
	} else {
		r.longest = max(r.longest, wait)
	}
	return false
}

// newState returns the state of a key that counts nothing. From time to time, it drops the states of all keys that
// count nothing any more.
func (r *run) newState(now int64) []model.State {
	if r.live >= 2*r.swept+1024 {
		for i, state := range r.states {
			if state != nil && !slices.ContainsFunc(state, func(s model.State) bool { return s.ExpiresAt > now }) {
				clear(state)
				r.free = append(r.free, state)
				r.states[i] = nil
				r.live--
			}
		}
		r.swept = r.live
	}
	r.live++
	if last := len(r.free) - 1; last >= 0 {
		state := r.free[last]
		r.free = r.free[:last]
		return state
	}
	return make([]model.State, len(r.rules))
}

// Totals are the results of one policy.
type Totals struct {
	Policy      string  `json:"policy"`
	Current     bool    `json:"current,omitempty"`
	Requests    int64   `json:"requests"`
	Allowed     int64   `json:"allowed"`
	Denied      int64   `json:"denied"`
	DeniedShare float64 `json:"denied_share"` // from 0 to 1
	Keys        int64   `json:"keys"`
	KeysDenied  int64   `json:"keys_denied"`
	NeverFits   int64   `json:"never_fits"` // requests that cost more than the limit
	// LongestSeconds is the longest time for which a request was denied: its RetryAfter.
	LongestSeconds float64  `json:"longest_denial_seconds"`
	Most           []Denied `json:"most_denied"`
	Over           []Span   `json:"over_time"`
	Change         *Change  `json:"change,omitempty"` // from the current policy
}

// Denied is how often a key was denied.
type Denied struct {
	Key      string `json:"key"`
	Requests int64  `json:"requests"`
	Denied   int64  `json:"denied"`
}

func (r *run) totals(requests []int64, name func(key int) string, n int) Totals {
	t := Totals{
		Policy: r.Text, Requests: r.allowed + r.denied, Allowed: r.allowed, Denied: r.denied,
		Keys: int64(len(requests)), NeverFits: r.never, LongestSeconds: model.Duration(r.longest).Seconds(),
		Most: []Denied{}, Over: r.over.spans(),
	}
	if t.Requests > 0 {
		t.DeniedShare = float64(t.Denied) / float64(t.Requests)
	}
	for _, denied := range r.deniedOf {
		if denied > 0 {
			t.KeysDenied++
		}
	}
	for _, key := range largest(r.deniedOf, n) {
		t.Most = append(t.Most, Denied{name(key), requests[key], r.deniedOf[key]})
	}
	return t
}

// largest returns the indices of the n largest positive numbers, with the largest first.
func largest(numbers []int64, n int) (indices []int) {
	for i, number := range numbers {
		if number <= 0 || n == 0 || len(indices) == n && number <= numbers[indices[n-1]] {
			continue
		}
		at := len(indices)
		for at > 0 && numbers[indices[at-1]] < number {
			at--
		}
		indices = slices.Insert(indices, at, i)
		indices = indices[:min(len(indices), n)]
	}
	return indices
}
