package faults

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// kind is what a call of a mix does.
type kind string

const (
	allow      kind = "Allow"
	peek       kind = "Peek"
	wait       kind = "Wait"
	refund     kind = "Refund"
	grant      kind = "Grant"
	reset      kind = "Reset"
	allowAll   kind = "AllowAll"
	allowAllTx kind = "AllowAllTx, committed"
	rolledBack kind = "AllowAllTx, rolled back"
)

// mix is a workload of calls over a few limiters, several of which one call may take from.
type mix struct {
	limits []limit
	calls  []kind // one of them is drawn for each call
}

// limit is a limiter of a mix.
type limit struct {
	name     string
	durable  bool
	keys     int                  // in each space
	policies [][]ratelimit.Policy // its own, and those that With asks under; several are All of them
}

// spaces is how many sets of keys there are. No call takes from two of them.
const spaces = 3

// ask is what a call asks of one limiter.
type ask struct {
	limit, policy, key int
	cost               int64 // 0 looks; below 0 gives back, or grants
}

// mixedOperation is one call of a mix.
type mixedOperation struct {
	kind          kind
	client, space int
	asks          []ask
	call, end     int64
	results       ratelimit.Results // of one, for a call of one limiter
}

// run has several pools of callers at work, as several processes would.
func (m mix) run(t *testing.T, db *pgtest.DB, seed uint64) []mixedOperation {
	t.Helper()
	const pools, callersOfPool, calls = 3, 3, 60
	workers := make([]worker, pools)
	for i := range workers {
		workers[i].pool = db.NewPool(t, func(config *pgxpool.Config) { config.MaxConns = 5 })
		defer workers[i].pool.Close() //nolint:revive // they are all to stay until the end
		for _, l := range m.limits {
			workers[i].limiters = append(workers[i].limiters, newLimiter(t, workers[i].pool, ratelimit.Config{
				Name: l.name, Policy: policyOf(l.policies[0]), Durable: l.durable, Timeout: amply, NoDenialCache: true,
			}))
		}
	}
	histories, errs := make([][]mixedOperation, pools*callersOfPool), make([]error, pools*callersOfPool)
	var callers sync.WaitGroup
	for i := range histories {
		callers.Go(func() {
			random := rand.New(rand.NewPCG(seed, uint64(i)))
			for n := 0; n < calls && errs[i] == nil; n++ {
				op := m.draw(random)
				op.client = i
				op.call = time.Now().UnixMicro()
				errs[i] = workers[i%pools].make(t.Context(), m, &op)
				op.end = time.Now().UnixMicro()
				histories[i] = append(histories[i], op)
			}
		})
	}
	callers.Wait()
	require.NoError(t, errors.Join(errs...))
	return slices.Concat(histories...)
}

// worker is what the callers of one pool share.
type worker struct {
	pool     *pgxpool.Pool
	limiters []*ratelimit.Limiter
}

func policyOf(policies []ratelimit.Policy) ratelimit.Policy {
	if len(policies) > 1 {
		return ratelimit.All(policies...)
	}
	return policies[0]
}

// draw draws a call.
func (m mix) draw(random *rand.Rand) mixedOperation {
	op := mixedOperation{kind: m.calls[random.IntN(len(m.calls))], space: random.IntN(spaces)}
	limits := random.Perm(len(m.limits))
	switch op.kind {
	case allowAll, allowAllTx, rolledBack:
		limits = limits[:1+random.IntN(len(limits))]
	default:
		limits = limits[:1]
	}
	for _, i := range limits {
		l := m.limits[i]
		op.asks = append(op.asks, ask{limit: i, policy: random.IntN(len(l.policies)), key: random.IntN(l.keys), cost: 1 + random.Int64N(4)})
	}
	switch a := &op.asks[0]; op.kind {
	case peek:
		a.cost = 0
	case reset:
		a.policy = 0
	case refund, grant:
		a.cost = -a.cost
	}
	return op
}

func keyOf(space, key int) string { return fmt.Sprintf("key %d of space %d", key, space) }

// make makes a call of a mix.
func (w worker) make(ctx context.Context, m mix, op *mixedOperation) error {
	requests := make([]ratelimit.Request, len(op.asks))
	var limiter *ratelimit.Limiter
	for i, a := range op.asks {
		var err error
		if limiter, err = w.limiters[a.limit].With(policyOf(m.limits[a.limit].policies[a.policy])); err != nil {
			return err
		}
		requests[i] = limiter.Request(keyOf(op.space, a.key), a.cost)
	}
	inTx := func(tx pgx.Tx) (err error) {
		op.results, err = ratelimit.AllowAllTx(ctx, tx, requests...)
		return err
	}
	key, n := keyOf(op.space, op.asks[0].key), op.asks[0].cost
	var one ratelimit.Result
	var err error
	switch op.kind {
	case allow, peek:
		one, err = limiter.AllowN(ctx, key, n)
	case wait:
		one, err = limiter.WaitN(ctx, key, n)
	case refund:
		one, err = limiter.Refund(ctx, key, -n)
	case grant:
		one, err = limiter.Grant(ctx, key, -n)
	case reset:
		return limiter.Reset(ctx, key)
	case allowAll:
		op.results, err = ratelimit.AllowAll(ctx, requests...)
		return err
	case allowAllTx:
		return pgx.BeginFunc(ctx, w.pool, inTx)
	case rolledBack:
		err := pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
			if err := inTx(tx); err != nil {
				return err
			}
			return errRolledBack
		})
		if errors.Is(err, errRolledBack) {
			return nil
		}
		return err
	}
	op.results = ratelimit.Results{Allowed: one.Allowed, RetryAfter: one.RetryAfter, Each: []ratelimit.Result{one}}
	return err
}

var errRolledBack = errors.New("this transaction is to be rolled back")

// books are the accounts of all rows that the calls of one space take from.
type books [8]account

// mixJudge says whether a history of a mix can be explained by calls that were made one after the other.
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
				j.rules[policy] = ruleOf(policy)
			}
		}
		rows = max(rows, m.row(i, m.width(i)-1, l.keys-1)+1)
	}
	require.LessOrEqual(t, rows, len(books{}))
	return j
}

// width is how many rows a key of a limiter has.
func (m mix) width(limit int) int {
	width := 0
	for _, policies := range m.limits[limit].policies {
		width = max(width, len(policies))
	}
	return width
}

// row is where in the books a policy's account is.
func (m mix) row(limit, part, key int) int {
	row := part*m.limits[limit].keys + key
	for i := range limit {
		row += m.width(i) * m.limits[i].keys
	}
	return row
}

// step returns the books after an operation, and whether it can be at this point.
func (j mixJudge) step(before books, op mixedOperation) (bool, books) {
	after := before
	if op.kind == reset {
		a := op.asks[0]
		for part := range j.limits[a.limit].policies[a.policy] {
			row := j.row(a.limit, part, a.key)
			after[row] = account{clock: before[row].clock}
		}
		return true, after
	}

	at := op.results.Each[0].DecidedAt.UnixMicro()
	if at < op.call || at > op.end {
		return false, before
	}
	fits := true
	for _, a := range op.asks {
		for part, policy := range j.limits[a.limit].policies[a.policy] {
			fits = fits && a.cost <= j.rules[policy].roomAt(before[j.row(a.limit, part, a.key)], at)
		}
	}
	want := ratelimit.Results{Allowed: true}
	for i, a := range op.asks {
		var of ratelimit.Result
		for part, policy := range j.limits[a.limit].policies[a.policy] {
			row, rule, cost := j.row(a.limit, part, a.key), j.rules[policy], a.cost
			if at < before[row].clock {
				return false, before // under a row's lock, the clock moves on
			}
			if !fits && cost <= rule.roomAt(before[row], at) {
				cost = 0 // it has room, but nothing is taken
			}
			next, one := rule.decide(before[row], at, cost, op.kind == grant)
			next.clock = at
			nothing := cost == 0 || op.kind == refund && rule.usage(before[row], at) == 0
			if fits && !nothing && op.kind != rolledBack {
				after[row] = next
			}
			of = combine(of, one, part == 0)
		}
		got := op.results.Each[i]
		if op.kind == wait && of.ResetAfter <= got.ResetAfter {
			of.ResetAfter = got.ResetAfter // that of the last of those who were allowed together
		}
		if !same(of, got) {
			return false, before
		}
		want.Allowed = want.Allowed && of.Allowed
		want.RetryAfter = max(want.RetryAfter, of.RetryAfter)
	}
	return want.Allowed == op.results.Allowed && want.RetryAfter == op.results.RetryAfter, after
}

// combine is what is told about several policies, of which one is the next.
func combine(r, one ratelimit.Result, first bool) ratelimit.Result {
	if first {
		return one
	}
	if one.Remaining < r.Remaining {
		r.Limit, r.Remaining = one.Limit, one.Remaining
	}
	r.Allowed = r.Allowed && one.Allowed
	r.RetryAfter, r.ResetAfter = max(r.RetryAfter, one.RetryAfter), max(r.ResetAfter, one.ResetAfter)
	return r
}

// interval is when an operation may have taken effect.
func (op mixedOperation) interval() (from, to int64) {
	if op.kind == reset {
		return op.call, op.end
	}
	switch at := op.results.Each[0].DecidedAt.UnixMicro(); {
	case op.kind == refund:
		return op.call, op.end // a refund of nothing locks no row, and so looks before it reads the clock
	case op.kind == peek, op.kind == rolledBack:
		return op.call, at // what is seen by nobody else may have looked without locks, before it read the clock
	case op.kind == grant, op.results.Allowed:
		return at, op.end // others may see it once it is committed
	}
	return op.call, op.end // a denial may have looked, too, or have seen what its statement was about to commit
}

func (op mixedOperation) describe() string {
	var text strings.Builder
	_, _ = fmt.Fprintf(&text, "%s, %t", op.kind, op.results.Allowed)
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

// mixes are the features alone, and all of them together.
func mixes() map[string]mix {
	const span = 42 * time.Millisecond
	one := func(policies ...ratelimit.Policy) (list [][]ratelimit.Policy) {
		for _, policy := range policies {
			list = append(list, []ratelimit.Policy{policy})
		}
		return list
	}
	fixed := ratelimit.FixedWindow{Limit: 12, Window: span}
	sliding := ratelimit.SlidingWindow{Limit: 20, Window: span}
	bucket := ratelimit.TokenBucket{Capacity: 15, Refill: 10, Every: span}
	smallBucket := ratelimit.TokenBucket{Capacity: 7, Refill: 20, Every: span / 3 * 2}
	log := ratelimit.SlidingLog{Limit: 14, Window: span}
	several := [][]ratelimit.Policy{{ratelimit.SlidingWindow{Limit: 10, Window: span / 4}, ratelimit.FixedWindow{Limit: 16, Window: span}}}
	limits := []limit{
		{"address", false, 2, one(fixed)}, {"user", true, 2, one(sliding)}, {"session", false, 1, one(bucket)}, {"everybody", true, 1, one(log)},
	}
	severalLimits := []limit{
		{"address", false, 2, several}, {"everybody", true, 1, [][]ratelimit.Policy{{bucket, log, fixed}}},
	}
	changing := []limit{
		{"address", false, 1, one(fixed, ratelimit.FixedWindow{Limit: 18, Window: span / 2}, log)},
		{"user", true, 1, one(sliding, ratelimit.SlidingWindow{Limit: 10, Window: 2 * span}, fixed)},
		{"session", false, 1, one(bucket, smallBucket, ratelimit.TokenBucket{Capacity: 25, Refill: 9, Every: span})},
		{"everybody", true, 1, one(log, ratelimit.SlidingLog{Limit: 20, Window: span / 2}, bucket)},
	}
	everything := []limit{
		{"address", false, 2, slices.Concat(one(fixed), several, one(log))}, {"user", true, 1, one(sliding, bucket)},
		{"session", false, 1, one(bucket, smallBucket)}, {"everybody", true, 1, one(log, fixed)},
	}
	return map[string]mix{
		"sets":               {limits, []kind{allowAll, allowAll, allowAll, allow, peek}},
		"several policies":   {severalLimits, []kind{allow, allow, allowAll, peek, refund, grant}},
		"refunds and grants": {limits, []kind{allowAll, allowAll, allowAll, allow, refund, refund, grant, peek}},
		"other policies":     {changing, []kind{allowAll, allow, allow, peek}},
		"waits":              {slices.Concat(limits[:1], severalLimits[1:]), []kind{wait, allow, allow, allowAll, allowAll}},
		"transactions":       {limits, []kind{allowAllTx, allowAllTx, rolledBack, allow, allowAll}},
		"resets":             {limits, []kind{allowAll, allowAll, allow, reset}},
		// A reset deletes one of two rows.
		"refunds of what is made anew": {
			[]limit{{"address", false, 1, slices.Concat(one(sliding), several, several)}, limits[3]}, []kind{allow, allow, allowAll, refund, refund, reset},
		},
		"all of them together": {everything, []kind{
			allowAll, allowAll, allowAll, allowAllTx, rolledBack, allow, allow, peek, wait, refund, refund, grant, reset,
		}},
	}
}

// What many callers of several limiters are told is what they would be told one after the other, each AllowAll as one.
func TestMixesAreLinearizable(t *testing.T) {
	t.Parallel()

	random := random(t)
	for name, m := range mixes() {
		for range rounds(t, 2) {
			history := m.run(t, pgtest.New(t), random.Uint64())
			requireAllOutcomes(t, m, history)
			result, picture := m.judge(t).check(t, history)
			require.Equal(t, porcupine.Ok, result, "%s: see %s", name, picture)
		}
	}
}

// requireAllOutcomes requires that a history is worth to be judged: each kind of call is in it, some were allowed, some were denied, and
// some of those although a limiter had room.
func requireAllOutcomes(t *testing.T, m mix, history []mixedOperation) {
	t.Helper()
	allowed, denied, spared := false, false, false
	kinds := map[kind]bool{}
	for _, op := range history {
		kinds[op.kind] = true
		allowed = allowed || op.results.Allowed
		denied = denied || !op.results.Allowed && op.kind != reset
		spared = spared || !op.results.Allowed && slices.ContainsFunc(op.results.Each, func(r ratelimit.Result) bool { return r.Allowed })
	}
	require.True(t, allowed && denied && spared, "allowed %t, denied %t, denied with room %t", allowed, denied, spared)
	for _, kind := range m.calls {
		require.True(t, kinds[kind], kind)
	}
}

// Negative controls: the judge finds what is wrong with broken variants, in histories like those above.
func TestJudgeOfMixesCatches(t *testing.T) {
	t.Parallel()

	random := random(t)
	rewritten := func(old, replacement string) func(t *testing.T, pool *pgxpool.Pool) {
		return func(t *testing.T, pool *pgxpool.Pool) {
			t.Helper()
			rewrite(t, pool, "rate_limit_all", old, replacement)
		}
	}
	for name, broken := range map[string]struct {
		mix     string
		spoil   func(t *testing.T, pool *pgxpool.Pool)
		misread func(history []mixedOperation)
	}{
		"an AllowAll that takes from one of the tables": {mix: "sets", spoil: rewritten("WHERE n.to_write AND n.durable", "WHERE false")},
		"an AllowAll that takes where there is room": {mix: "sets", spoil: rewritten(
			"                    CASE algorithm\n                    WHEN 1 THEN\n                        IF granted",
			"granted := CASE WHEN just_look THEN 0 ELSE least(asked, remaining / r.cost) END; CASE algorithm WHEN 1 THEN IF granted",
		)},
		"rows that are read without a lock":         {mix: "sets", spoil: rewritten("FOR UPDATE", "OFFSET 0")},
		"the time of the transaction's begin":       {mix: "sets", spoil: rewritten("clock_timestamp()", "pg_catalog.now()")},
		"a log that forgets nothing but the newest": {mix: "sets", spoil: rewritten("s.log[1:newest] || ARRAY[", "ARRAY[")},
		"another algorithm's row that is taken for one's own": {
			mix: "other policies", spoil: rewritten("IF writers[at] <> algorithm THEN", "IF false THEN"),
		},
		"a second policy that counts nothing": {mix: "several policies", spoil: rewritten("WHERE d.ctid = n.tid", "WHERE d.ctid = n.tid AND d.prefix NOT LIKE '%/2'")},
		"credit that is spent twice": {mix: "refunds and grants", spoil: rewritten(
			"s.expires_at := clock + reset_after_us", "s.expires_at := clock + reset_after_us; s.credit := s.credit + spent",
		)},
		"a refund that sees the old rows of some policies and the new ones of others": {
			mix: "refunds of what is made anew", spoil: rewritten("EXIT WHEN missing;", "EXIT WHEN missing AND costs[ord] > 0;"),
		},
		"a reset that resets nothing": {mix: "resets", spoil: func(t *testing.T, pool *pgxpool.Pool) {
			rewrite(t, pool, "rate_limit_reset", "r.key = key", "r.key = ''")
		}},
		"transactions that are rolled back, and said to be committed": {mix: "transactions", misread: func(history []mixedOperation) {
			for i := range history {
				if history[i].kind == rolledBack {
					history[i].kind = allowAllTx
				}
			}
		}},
		"an AllowAll that says it was denied": {mix: "sets", misread: func(history []mixedOperation) {
			i := slices.IndexFunc(history, func(op mixedOperation) bool { return op.kind == allowAll && op.results.Allowed })
			history[i].results.Allowed = false
		}},
	} {
		t.Run(name, func(t *testing.T) {
			caught := porcupine.Ok
			for attempt := 0; caught == porcupine.Ok && attempt < 20; attempt++ {
				db := pgtest.New(t)
				if broken.spoil != nil {
					broken.spoil(t, db.Pool)
				}
				m := mixes()[broken.mix]
				history := m.run(t, db, random.Uint64())
				if broken.misread != nil {
					broken.misread(history)
				}
				var picture string
				if caught, picture = m.judge(t).check(t, history); picture != "" {
					require.NoError(t, os.Remove(picture))
				}
			}
			require.Equal(t, porcupine.Illegal, caught)
		})
	}
}
