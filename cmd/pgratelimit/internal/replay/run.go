package replay

import (
	"fmt"
	"slices"
	"strings"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/policies"
)

// Policy is a policy that can be replayed.
type Policy struct {
	Text   string
	mode   string           // policies.ModeOff and ModeDeny allow or deny everything, and have no rules
	parsed ratelimit.Policy // nil without rules
	rules  []model.Rules
}

// ParsePolicy reads a policy as ratelimit.ParsePolicy does. Policies that all have to allow a request may also be
// joined by a plus with spaces around it.
func ParsePolicy(text string) (Policy, error) {
	parsed, err := ratelimit.ParsePolicy(strings.ReplaceAll(text, " + ", ", "))
	if err != nil {
		return Policy{}, err
	}
	p := Policy{Text: parsed.String(), mode: policies.ModeEnforce, parsed: parsed}
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
	table           *table
	allowed, denied int64
	byRows          int64 // requests that a row for their key or for a prefix decided
	longest         int64 // the longest RetryAfter of a denial
	never           int64 // how many requests cost more than the limit
	keys            []runKey
	forgotten       int64 // keys that were denied and are forgotten
	free            [][]model.State
	live, swept     int // states in use, and how many there were after the last sweep
	next            []model.State
	over            timeline
}

// runKey is what a run knows of a key.
type runKey struct {
	policy *Policy       // nil before the first request
	state  []model.State // nil if the key counts nothing
	denied int64
}

// newRun returns a run. If t is not nil, its rows for a key or a prefix decide their keys instead of p.
func newRun(p Policy, t *table) *run {
	return &run{Policy: p, table: t, next: make([]model.State, max(len(p.rules), t.longest()))}
}

// decide decides a request as a limiter does: a request takes from all rows, or from none. The times of requests never
// go back, so a denial does not change a row.
func (r *run) decide(q request, name string) (allowed bool) {
	for int(q.key) >= len(r.keys) {
		r.keys = append(r.keys, runKey{})
	}
	k := &r.keys[q.key]
	if k.policy == nil {
		k.policy = r.table.policyOf(name, &r.Policy)
	}
	if k.policy != &r.Policy {
		r.byRows++
	}
	if len(k.policy.rules) > 0 {
		allowed = r.take(q, k)
	} else {
		allowed = k.policy.mode == policies.ModeOff
	}
	r.over.count(q.at, allowed)
	if allowed {
		r.allowed++
	} else {
		r.denied++
		k.denied++
	}
	return allowed
}

// take decides by the rules of the key's policy.
func (r *run) take(q request, k *runKey) bool {
	if k.state == nil {
		k.state = r.newState(q.at)
	}
	allowed, wait := true, int64(0)
	for i, rule := range k.policy.rules {
		var d model.Decision
		if r.next[i], d = rule.Decide(k.state[i], q.at, q.cost); d.Granted == 0 {
			allowed, wait = false, max(wait, d.RetryAfter)
		}
	}
	switch {
	case allowed:
		copy(k.state, r.next[:len(k.policy.rules)])
	case wait == model.Never:
		r.never++
	default:
		r.longest = max(r.longest, wait)
	}
	return allowed
}

// newState returns the state of a key that counts nothing. From time to time, it drops the states of all keys that
// count nothing any more.
func (r *run) newState(now int64) []model.State {
	if r.live >= 2*r.swept+1024 {
		for i := range r.keys {
			if !r.keys[i].counts(now) {
				r.drop(&r.keys[i])
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
	return make([]model.State, len(r.next))
}

// counts tells whether a state still counts something.
func (k *runKey) counts(now int64) bool {
	return slices.ContainsFunc(k.state, func(s model.State) bool { return s.ExpiresAt > now })
}

func (r *run) drop(k *runKey) {
	if k.state != nil {
		clear(k.state)
		r.free = append(r.free, k.state)
		k.state = nil
		r.live--
	}
}

// isIdle tells whether a key counts nothing, so that it may be forgotten.
func (r *run) isIdle(key int, now int64) bool { return key >= len(r.keys) || !r.keys[key].counts(now) }

// forget makes a key's number free for another key.
func (r *run) forget(key int) {
	if key < len(r.keys) {
		k := &r.keys[key]
		if k.denied > 0 {
			r.forgotten++
		}
		r.drop(k)
		*k = runKey{}
	}
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
	// ByRows is how many requests were decided by a row of rate_limit_policy for their key or for a prefix of it.
	ByRows int64 `json:"decided_by_rows"`
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

func (r *run) totals(keys *keyring, name func(key int) string, n int) Totals {
	t := Totals{
		Policy: r.Text, Requests: r.allowed + r.denied, Allowed: r.allowed, Denied: r.denied,
		Keys: keys.count(), KeysDenied: r.forgotten, NeverFits: r.never, ByRows: r.byRows,
		LongestSeconds: model.Duration(r.longest).Seconds(), Most: []Denied{}, Over: r.over.spans(),
	}
	if t.Requests > 0 {
		t.DeniedShare = float64(t.Denied) / float64(t.Requests)
	}
	for i := range r.keys {
		if r.keys[i].denied > 0 {
			t.KeysDenied++
		}
	}
	for _, key := range r.most(n) {
		t.Most = append(t.Most, Denied{name(key), keys.requests[key], r.keys[key].denied})
	}
	return t
}

// most returns the n keys that were denied most.
func (r *run) most(n int) []int {
	return largest(len(r.keys), n, func(key int) int64 { return r.keys[key].denied })
}
