package faults

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/doortest"
)

// books are the accounts of all rows that the calls of one space use.
type books [8]account

// mixJudge checks whether sequential calls can explain a history of a mix.
type mixJudge struct {
	mix
	rules map[ratelimit.Policy]rule
}

func (m mix) judge(t *testing.T) mixJudge {
	t.Helper()
	j := mixJudge{mix: m, rules: map[ratelimit.Policy]rule{}}
	rows := 0
	for i, l := range m.limits {
		for _, policies := range l.policies {
			for _, policy := range policies {
				j.rules[policy] = ruleOf(policy, m.month)
			}
		}
		rows = max(rows, m.row(i, m.width(i)-1, l.keys-1)+1)
	}
	require.LessOrEqual(t, rows, len(books{}))
	return j
}

// width returns the number of rows for a limiter's key.
func (m mix) width(limit int) int {
	width := 0
	for _, policies := range m.limits[limit].policies {
		width = max(width, len(policies))
	}
	return width
}

// row returns the index of a policy's account in the books.
func (m mix) row(limit, part, key int) int {
	row := part*m.limits[limit].keys + key
	for i := range limit {
		row += m.width(i) * m.limits[i].keys
	}
	return row
}

// step returns the books after an operation, and whether it is possible at this point.
func (j mixJudge) step(before books, op mixedOperation) (bool, books) {
	after := before
	if op.kind == reset {
		a := op.asks[0]
		for part := range j.limits[a.limit].policies[a.policy] {
			row := j.row(a.limit, part, a.key)
			after[row] = account{}
		}
		return true, after
	}

	at := op.at()
	if at != 0 && (at < op.call || at > op.end) {
		return false, before
	}
	if op.kind == settle || op.kind == extend {
		return j.stepOfHold(before, op, at)
	}
	fits := true
	for _, a := range op.asks {
		for part, policy := range j.limits[a.limit].policies[a.policy] {
			fits = fits && (op.kind == charge || a.cost <= j.rules[policy].roomAt(before[j.row(a.limit, part, a.key)], at))
		}
	}
	want := ratelimit.Results{Allowed: true}
	owed := int64(0)
	// A denial of several rows locks none of them if one does not exist, and a Peek never does. Then its RetryAfter
	// beside holds is that of a later moment: see docs/guarantees.md.
	unlocked := op.kind == peek || !fits && (len(op.asks) > 1 || len(j.limits[op.asks[0].limit].policies[op.asks[0].policy]) > 1)
	for i, a := range op.asks {
		var of ratelimit.Result
		for part, policy := range j.limits[a.limit].policies[a.policy] {
			row, rule, cost := j.row(a.limit, part, a.key), j.rules[policy], a.cost
			if at < before[row].clock {
				return false, before // the clock advances under a row's lock
			}
			if !fits && cost <= rule.roomAt(before[row], at) {
				cost = 0 // this limiter has room, but the call takes nothing
			}
			var back *portion
			if op.kind == refund {
				back = &op.of[part]
			}
			next, one := rule.decide(before[row], at, cost, back)
			if op.kind == charge {
				next, one = rule.charge(before[row], at, cost)
				owed = max(owed, rule.owed(next, at))
			}
			if op.kind == hold && fits {
				next = before[row].hold(op.id, cost, at, at+op.ttl.Microseconds())
				_, one = rule.decide(next, at, 0, nil)
				one.Allowed, one.RetryAfter = true, 0
			}
			nothing := cost == 0 || op.kind == refund && next == before[row]
			next.clock = at
			if fits && !nothing && op.kind != rolledBack {
				after[row], _ = next.without(0, at)
			}
			held, _ := next.held(at)
			if op.kind == peek || op.kind == hold {
				one.Held = held
			}
			if got := &op.results.Each[i]; unlocked && got.RetryAfter > 0 && one.RetryAfter > 0 &&
				(held > 0 || op.kind == hold) {
				one.RetryAfter = got.RetryAfter
			}
			// Calls that one statement allows beside holds may get the ResetAfter of the last of them.
			if (op.kind == allow || op.kind == wait) && fits && held > 0 {
				one.ResetAfter = max(one.ResetAfter, op.results.Each[i].ResetAfter)
			}
			of = combine(of, one, part == 0)
		}
		of.Allowed = of.Allowed && fits // if the call took nothing, no policy reports that it was allowed
		got := op.results.Each[i]
		if op.followed {
			of.ResetAfter = got.ResetAfter // the value of the last call that was allowed together with this one
		}
		if !same(of, got) {
			return false, before
		}
		want.Allowed = want.Allowed && of.Allowed
		want.RetryAfter = max(want.RetryAfter, of.RetryAfter)
	}
	return want.Allowed == op.results.Allowed && want.RetryAfter == op.results.RetryAfter && owed == op.owed, after
}

// stepOfHold returns the books after a settlement or an extension of a hold.
func (j mixJudge) stepOfHold(before books, op mixedOperation, at int64) (bool, books) {
	after, live, now := before, true, at
	if at == 0 { // a hold that has ended stays ended, so the latest possible time is enough
		now = op.end
	}
	for _, a := range op.asks {
		for part, policy := range j.limits[a.limit].policies[a.policy] {
			row, rule := j.row(a.limit, part, a.key), j.rules[policy]
			next, found := before[row].without(op.id, now)
			live = live && found
			if at < before[row].clock && at != 0 {
				return false, before
			}
			switch {
			case op.kind == extend:
				next = next.hold(op.id, a.cost, at, op.until)
			case a.cost > 0:
				next, _ = rule.charge(next, at, a.cost)
			}
			// A settlement of nothing may come between the two readings of the clock of a take that begins a window.
			if op.kind == extend || a.cost > 0 {
				next.clock = at
			}
			after[row] = next
		}
	}
	switch {
	case op.kind == settle:
		return live != op.settlement.Late, after
	case at == 0: // the hold had ended
		return !live, before
	}
	return live, after
}

// at returns when a call was decided. It returns 0 if the call does not say so.
func (op mixedOperation) at() int64 {
	switch {
	case op.kind == settle:
		return op.settlement.At.UnixMicro()
	case op.kind == extend && op.until == 0:
		return 0
	case op.kind == extend:
		return op.until - op.ttl.Microseconds()
	}
	return op.results.Each[0].DecidedAt.UnixMicro()
}

// isFollowedBy tells whether op is a Wait that was allowed together with the call next, and took before next. Both
// calls get the ResetAfter of next. The ResetAfter of next may be shorter, because next may have spent the last credit,
// which lasts longer than ordinary units.
func (op mixedOperation) isFollowedBy(next mixedOperation) bool {
	if op.kind != wait || next.kind != wait || op.space != next.space {
		return false
	}
	a, b := op.asks[0], next.asks[0]
	one, other := op.results.Each[0], next.results.Each[0]
	return a.limit == b.limit && a.policy == b.policy && a.key == b.key && one.DecidedAt.Equal(other.DecidedAt) &&
		one.ResetAfter == other.ResetAfter && one.Remaining > other.Remaining
}

// combine merges the answers of several policies. The argument one is the answer of the next policy.
func combine(r, one ratelimit.Result, first bool) ratelimit.Result {
	if first {
		return one
	}
	if one.Remaining < r.Remaining {
		r.Limit, r.Remaining = one.Limit, one.Remaining
	}
	r.Allowed = r.Allowed && one.Allowed
	r.Held = max(r.Held, one.Held)
	r.RetryAfter, r.ResetAfter = max(r.RetryAfter, one.RetryAfter), max(r.ResetAfter, one.ResetAfter)
	return r
}

// interval returns the time in which an operation may have taken effect.
func (op mixedOperation) interval() (from, to int64) {
	if op.kind == reset || op.at() == 0 {
		return op.call, op.end
	}
	switch at := op.at(); {
	case op.kind == refund:
		return op.call, op.end // a refund of nothing locks no row, so it reads the rows before it reads the clock
	case op.kind == peek:
		return op.call, at // the call reads the rows without locks before it reads the clock
	case op.kind == rolledBack:
		// No other call sees the effect of this one. A denial may read the rows as a Peek does. A take may have read
		// the clock up to 10 ms before it created a row, and the key may have been reset meanwhile.
		return op.call, op.end
	case op.kind == grant, op.kind == settle, op.kind == extend, op.results.Allowed:
		return at, op.end // other calls may see the effect after the commit
	}
	return op.call, op.end // a denial may read as a Peek does, or see uncommitted changes of its own statement
}

func (op mixedOperation) describe() string {
	var text strings.Builder
	_, _ = fmt.Fprintf(&text, "%s, %t", op.kind, op.results.Allowed)
	if op.id > 0 {
		_, _ = fmt.Fprintf(&text, ", hold %d, %v, %+v, until %d", op.id, op.ttl, op.settlement, op.until)
	}
	for i, r := range op.results.Each {
		_, _ = fmt.Fprintf(&text, "; %+v: %t, remaining %d, retry %v, reset %v, at %d",
			op.asks[i], r.Allowed, r.Remaining, r.RetryAfter, r.ResetAfter, r.DecidedAt.UnixMicro())
	}
	return text.String()
}

func (j mixJudge) check(t *testing.T, history []mixedOperation) (result porcupine.CheckResult, picture string) {
	t.Helper()
	ops := make([]porcupine.Operation, len(history))
	for i, op := range history {
		op.followed = slices.ContainsFunc(history, op.isFollowedBy)
		from, to := op.interval()
		ops[i] = porcupine.Operation{ClientId: op.client, Input: op, Call: from, Return: to}
	}
	return explain(t, porcupine.Model{
		Init: func() any { return books{} },
		Step: func(state, input, _ any) (bool, any) {
			return j.step(state.(books), input.(mixedOperation))
		},
		Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
			partitions := make([][]porcupine.Operation, spaces)
			for _, op := range history {
				space := op.Input.(mixedOperation).space
				partitions[space] = append(partitions[space], op)
			}
			return partitions
		},
		DescribeOperation: func(input, _ any) string { return input.(mixedOperation).describe() },
		DescribeState:     func(state any) string { return fmt.Sprintf("%+v", state) },
	}, ops)
}

// outcomes counts the outcomes in histories: allowed calls, denied calls, denials although one limiter had room, and
// statements for several limiters.
type outcomes struct {
	kinds                           map[kind]bool
	allowed, denied, spared, shared bool
}

func (o *outcomes) add(history []mixedOperation, shared int64) {
	o.shared = o.shared || shared > 0
	for _, op := range history {
		if o.kinds == nil {
			o.kinds = map[kind]bool{}
		}
		o.kinds[op.kind] = true
		o.allowed = o.allowed || op.results.Allowed
		o.denied = o.denied || !op.results.Allowed && len(op.results.Each) > 0
		hadRoom := func(r ratelimit.Result) bool { return r.RetryAfter == 0 }
		o.spared = o.spared || !op.results.Allowed && slices.ContainsFunc(op.results.Each, hadRoom)
	}
}

// all tells whether the histories contain each kind of call of the mix, and each outcome.
func (o *outcomes) all(m mix) bool {
	for _, kind := range m.calls {
		if !o.kinds[kind] {
			return false
		}
	}
	several := slices.ContainsFunc(m.calls, func(k kind) bool {
		return k == allowAll || k == allowAllTx || k == rolledBack
	})
	shared := o.shared || doortest.Between() // which statements of a service are shared is unseen here
	return o.allowed && o.denied && (o.spared || !several) && (shared || !m.crowd)
}
