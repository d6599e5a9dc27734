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
	"sync/atomic"
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
	decoys bool   // a role that may create in the schema of the functions has made decoys of what they call
	holds  bool   // somebody's transactions keep rows locked, some of them for longer than the others have the patience
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
	taken         ratelimit.Result  // of a refund: which take
	of            []portion         // and what that is of each policy
}

// run has several pools of callers at work, as several processes would.
func (m mix) run(t *testing.T, db *pgtest.DB, seed uint64) []mixedOperation {
	t.Helper()
	const pools, callersOfPool, calls = 3, 3, 60
	workers := make([]worker, pools)
	timeout := amply
	if m.holds {
		timeout = 2 * holdsLong
	}
	for i := range workers {
		workers[i].pool = db.NewPool(t, func(config *pgxpool.Config) { config.MaxConns = 5 })
		defer workers[i].pool.Close() //nolint:revive // they are all to stay until the end
		for _, l := range m.limits {
			workers[i].limiters = append(workers[i].limiters, newLimiter(t, workers[i].pool, ratelimit.Config{
				Name: l.name, Policy: policyOf(l.policies[0]), Durable: l.durable, Timeout: timeout, NoDenialCache: true,
			}))
		}
	}
	histories, errs := make([][]mixedOperation, pools*callersOfPool+1), make([]error, pools*callersOfPool+1)
	var impatient atomic.Int64
	end := func() {}
	if m.holds {
		end = m.hold(t, db, workers[0].limiters, &histories[pools*callersOfPool], &errs[pools*callersOfPool])
	}
	var callers sync.WaitGroup
	for i := range pools * callersOfPool {
		callers.Go(func() {
			random := rand.New(rand.NewPCG(seed, uint64(i)))
			var takes []mixedOperation // of one limiter each, which were not given back
			for n := 0; n < calls && errs[i] == nil; n++ {
				op := m.draw(random)
				if op.kind == refund && len(takes) == 0 {
					op.kind = allow
				}
				switch op.kind {
				case refund:
					at := random.IntN(len(takes))
					op = takes[at]
					takes = slices.Delete(takes, at, at+1)
				case grant:
					op.asks[0].cost *= -1
				}
				op.client = i
				op.call = time.Now().UnixMicro()
				errs[i] = workers[i%pools].make(t.Context(), m, &op)
				op.end = time.Now().UnixMicro()
				if errors.Is(errs[i], ratelimit.ErrKeyHeld) { // it has counted nothing
					errs[i] = nil
					impatient.Add(1)
					continue
				}
				histories[i] = append(histories[i], op)
				takes = append(takes, op.takes()...)
			}
		})
	}
	callers.Wait()
	end()
	require.NoError(t, errors.Join(errs...))
	require.Equal(t, m.holds, impatient.Load() > 0)
	return slices.Concat(histories...)
}

// holdsLong is longer than the others have the patience, and holdsBriefly is not.
const (
	holdsLong    = 1300 * time.Millisecond
	holdsBriefly = 20 * time.Millisecond
)

// hold has one more caller take from keys of space 0 in transactions that it keeps open: the first one, of all keys, for long, and
// those after it, of one key each, briefly, until the function that it returns is called.
func (m mix) hold(t *testing.T, db *pgtest.DB, limiters []*ratelimit.Limiter, history *[]mixedOperation, err *error) (end func()) {
	t.Helper()
	holder := worker{pool: db.Pool, limiters: limiters}
	ctx, cancel := context.WithCancel(t.Context())
	locked, ended := make(chan struct{}), make(chan struct{})
	once := func(limits, key int, length time.Duration, locked chan<- struct{}) error {
		op := mixedOperation{kind: allowAllTx, client: 1 << 10, call: time.Now().UnixMicro()}
		for i := range limits {
			op.asks = append(op.asks, ask{limit: i, key: key % m.limits[i].keys, cost: 1})
		}
		err := pgx.BeginFunc(t.Context(), holder.pool, func(tx pgx.Tx) (err error) {
			op.results, err = ratelimit.AllowAllTx(t.Context(), tx, holder.requests(m, op)...)
			if locked != nil {
				close(locked)
			}
			pause(t.Context(), length)
			return err
		})
		op.end = time.Now().UnixMicro()
		*history = append(*history, op)
		return err
	}
	go func() {
		defer close(ended)
		*err = once(len(m.limits), 0, holdsLong, locked)
		for key := 0; *err == nil && ctx.Err() == nil; key++ {
			*err = once(1, key, holdsBriefly, nil)
		}
	}()
	<-locked
	return func() {
		cancel()
		<-ended
	}
}

// requests are those of an AllowAll.
func (w worker) requests(m mix, op mixedOperation) (requests []ratelimit.Request) {
	for _, a := range op.asks {
		requests = append(requests, w.limiters[a.limit].Request(keyOf(op.space, a.key), a.cost))
	}
	return requests
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
	}
	return op
}

// takes are refunds of what a call has taken, which its worker may make.
func (op mixedOperation) takes() []mixedOperation {
	if op.kind == rolledBack || op.kind == reset || !op.results.Allowed {
		return nil
	}
	var refunds []mixedOperation
	for i, a := range op.asks {
		if parts := partsOf(op.results.Each[i]); parts != nil {
			a.cost = -a.cost
			refunds = append(refunds, mixedOperation{kind: refund, space: op.space, asks: []ask{a}, taken: op.results.Each[i], of: parts})
		}
	}
	return refunds
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
		one, err = limiter.Refund(ctx, op.taken)
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
			after[row] = account{}
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
			var back *portion
			if op.kind == refund {
				back = &op.of[part]
			}
			next, one := rule.decide(before[row], at, cost, back)
			nothing := cost == 0 || op.kind == refund && next == before[row]
			next.clock = at
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
func mixes(span time.Duration) map[string]mix {
	one := func(policies ...ratelimit.Policy) (list [][]ratelimit.Policy) {
		for _, policy := range policies {
			list = append(list, []ratelimit.Policy{policy})
		}
		return list
	}
	fixed := ratelimit.FixedWindow{Limit: 12, Window: span}
	sliding := ratelimit.SlidingWindow{Limit: 20, Window: span}
	bucket := ratelimit.TokenBucket{Capacity: 15, Refill: 10, Every: span}
	log := ratelimit.SlidingLog{Limit: 14, Window: span}
	several := [][]ratelimit.Policy{{ratelimit.SlidingWindow{Limit: 10, Window: span / 4}, ratelimit.FixedWindow{Limit: 16, Window: span}}}
	limits := []limit{
		{"address", false, 2, one(fixed)}, {"user", true, 2, one(sliding)}, {"session", false, 1, one(bucket)}, {"everybody", true, 1, one(log)},
	}
	severalLimits := []limit{
		{"address", false, 2, several}, {"everybody", true, 1, [][]ratelimit.Policy{{bucket, log, fixed}}},
	}
	// No bucket of other numbers: what flowed in during the last milliseconds before a change, between the two readings of the clock (see
	// sql/limit.sql), counts by the new numbers.
	changing := []limit{
		{"address", false, 1, one(fixed, ratelimit.FixedWindow{Limit: 18, Window: span / 2}, log)},
		{"user", true, 1, one(sliding, ratelimit.SlidingWindow{Limit: 10, Window: 2 * span}, fixed)},
		{"session", false, 1, one(bucket, log, fixed)},
		{"everybody", true, 1, one(log, ratelimit.SlidingLog{Limit: 20, Window: span / 2}, bucket)},
	}
	everything := []limit{
		{"address", false, 2, slices.Concat(one(fixed), several, one(log))}, {"user", true, 1, one(sliding, bucket)},
		{"session", false, 1, one(bucket, sliding)}, {"everybody", true, 1, one(log, fixed)},
	}
	return map[string]mix{
		"sets":               {limits: limits, calls: []kind{allowAll, allowAll, allowAll, allow, peek}},
		"held rows":          {limits: limits, calls: []kind{allowAll, allowAll, allow, allow, refund, grant, peek, reset}, holds: true},
		"several policies":   {limits: severalLimits, calls: []kind{allow, allow, allowAll, peek, refund, grant}},
		"refunds and grants": {limits: limits, calls: []kind{allowAll, allowAll, allowAll, allowAll, allow, allow, refund, refund, grant, peek}, decoys: true},
		"other policies":     {limits: changing, calls: []kind{allowAll, allow, allow, peek}},
		"waits":              {limits: slices.Concat(limits[:1], severalLimits[1:]), calls: []kind{wait, allow, allow, allowAll, allowAll}},
		"transactions":       {limits: limits, calls: []kind{allowAllTx, allowAllTx, rolledBack, allow, allowAll}},
		"resets":             {limits: limits, calls: []kind{allowAll, allowAll, allow, reset}},
		// A reset deletes one of two rows.
		"refunds of what is made anew": {
			limits: []limit{{"address", false, 1, slices.Concat(one(sliding), several, several)}, limits[3]},
			calls:  []kind{allow, allow, allowAll, refund, refund, reset},
		},
		"all of them together": {limits: everything, calls: []kind{
			allowAll, allowAll, allowAll, allowAllTx, rolledBack, allow, allow, peek, wait, refund, refund, grant, reset,
		}},
	}
}

// briefly is a span within which a machine at rest makes some calls of a mix, and not all of them.
const briefly = 42 * time.Millisecond

// What many callers of several limiters are told is what they would be told one after the other, each AllowAll as one.
func TestMixesAreLinearizable(t *testing.T) {
	t.Parallel()

	random := random(t)
	for name := range mixes(briefly) {
		for round := range rounds(t, 1) {
			// Until there was something of everything. A busy machine makes few calls within a span, and denies none of them, so the
			// spans grow until it does.
			var seen outcomes
			for span := briefly; !seen.all(mixes(span)[name]); span *= 2 {
				require.Less(t, span, time.Minute, "%s: not varied enough: %+v", name, seen)
				m := mixes(span)[name]
				db := pgtest.New(t)
				if m.decoys && round == 0 && span == briefly { // once, because it takes some seconds
					attack(t, db)
				}
				history := m.run(t, db, random.Uint64())
				seen.add(history)
				result, picture := m.judge(t).check(t, history)
				require.Equal(t, porcupine.Ok, result, "%s: see %s", name, picture)
			}
		}
	}
}

// attack has a role that may do nothing but create in the schema of the functions make decoys of what they, and the limiters'
// statements, call. One that runs fails, and so does the call.
func attack(t *testing.T, db *pgtest.DB) {
	t.Helper()
	db.SomeDecoys(t, "public", pgtest.Statements(t, "../..")...)
	_, err := db.Pool.Exec(t.Context(), "SELECT cardinality(ARRAY['a'])")
	require.ErrorContains(t, err, "decoy public.cardinality(text[]) was run by") // so they are in place
}

// outcomes are what was seen in histories: that some calls were allowed, some denied, and some of those although a limiter had room.
type outcomes struct {
	kinds                   map[kind]bool
	allowed, denied, spared bool
}

func (o *outcomes) add(history []mixedOperation) {
	for _, op := range history {
		if o.kinds == nil {
			o.kinds = map[kind]bool{}
		}
		o.kinds[op.kind] = true
		o.allowed = o.allowed || op.results.Allowed
		o.denied = o.denied || !op.results.Allowed && op.kind != reset
		o.spared = o.spared || !op.results.Allowed && slices.ContainsFunc(op.results.Each, func(r ratelimit.Result) bool { return r.Allowed })
	}
}

// all tells whether the histories were worth to be judged: each kind of call of the mix is in them, and each outcome.
func (o *outcomes) all(m mix) bool {
	for _, kind := range m.calls {
		if !o.kinds[kind] {
			return false
		}
	}
	return o.allowed && o.denied && o.spared
}

// Negative controls: the judge finds what is wrong with broken variants, in histories like those above.
func TestJudgeOfMixesCatches(t *testing.T) {
	t.Parallel()

	random := random(t)
	rewritten := func(oldNew ...string) func(t *testing.T, pool *pgxpool.Pool) {
		return func(t *testing.T, pool *pgxpool.Pool) {
			t.Helper()
			for i := 0; i < len(oldNew); i += 2 {
				rewrite(t, pool, "rate_limit_all", oldNew[i], oldNew[i+1])
			}
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
		"rows that are read without a lock":         {mix: "sets", spoil: rewritten("FOR UPDATE SKIP LOCKED", "OFFSET 0", "FOR UPDATE", "OFFSET 0")},
		"the time of the transaction's begin":       {mix: "sets", spoil: rewritten("clock_timestamp()", "pg_catalog.now()")},
		"a log that forgets nothing but the newest": {mix: "sets", spoil: rewritten("s.log[1:newest] || ARRAY[", "ARRAY[")},
		"another algorithm's row that is taken for one's own": {
			mix: "other policies", spoil: rewritten("IF writers[at] <> algorithm THEN", "IF false THEN"),
		},
		"a second policy that counts nothing": {mix: "several policies", spoil: rewritten("WHERE d.ctid = n.tid", "WHERE d.ctid = n.tid AND d.prefix NOT LIKE '%/2'")},
		"credit that is spent twice": {mix: "refunds and grants", spoil: rewritten(
			"s.expires_at := clock + reset_after_us", "s.expires_at := clock + reset_after_us; s.credit := s.credit + spent",
		)},
		"a refund of what does not count any more": {mix: "several policies", spoil: rewritten(
			"s.window_start = taken_in[part]", "taken_in[part] IS NOT NULL",
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
			if i >= 0 {
				history[i].results.Allowed = false
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			caught := porcupine.Ok
			for attempt := 0; caught == porcupine.Ok && attempt < 100; attempt++ {
				db := pgtest.New(t)
				if broken.spoil != nil {
					broken.spoil(t, db.Pool)
				}
				m := mixes(briefly << min(attempt/4, 5))[broken.mix] // a busy machine needs more time
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
