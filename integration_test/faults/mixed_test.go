package faults

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
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
	allowAllTx kind = "AllowAll in a transaction, committed"
	rolledBack kind = "AllowAll in a transaction, rolled back"
)

// mix is a workload of calls over a few limiters, several of which one call may take from.
type mix struct {
	limits []limit
	calls  []kind // one of them is drawn for each call
	decoys bool   // a role that may create in the schema of the functions has made decoys of what they call
	holds  bool   // somebody's transactions keep rows locked, some of them for longer than the others have the patience
	crowd  bool   // so many callers at once that statements decide for several limiters
	leased bool   // the callers take from a key with leases, too
	apart  bool   // each limiter has a client of its own, so that no statement does
	month  time.Duration
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
	followed      bool              // a Wait was not the last of those that were allowed together
}

// run has several pools of callers at work, as several processes would. It returns what they saw, and how many
// statements have decided for several limiters.
func (m mix) run(t *testing.T, db *pgtest.DB, seed uint64) (history []mixedOperation, shared int64) {
	t.Helper()
	pools, callersOfPool, calls := 3, 3, 60
	if m.crowd {
		pools, callersOfPool, calls = 2, 12, 24
	}
	workers := make([]worker, pools)
	var statements atomic.Int64
	observer := &ratelimit.Observer{Statement: func(e ratelimit.StatementEvent) {
		if e.Limiter == "" && e.Err == nil {
			statements.Add(1)
		}
	}}
	timeout := amply
	if m.holds {
		timeout = 4 * patience
	}
	for i := range workers {
		workers[i].pool = db.OwnerPool(t, func(config *pgxpool.Config) { config.MaxConns = 5 })
		defer workers[i].pool.Close() //nolint:revive // they are all to stay until the end
		config := ratelimit.ClientConfig{Timeout: timeout, Observer: observer}
		client := limitertest.NewClient(t, workers[i].pool, config)
		for _, l := range m.limits {
			var limiters []*ratelimit.Limiter
			for _, policies := range l.policies {
				limit := ratelimit.Config{
					Name: l.name, Policy: policyOf(policies), Durable: l.durable, NoDenialCache: true,
				}
				if len(limiters) > 0 {
					if with, err := limiters[0].With(limit.Policy); err == nil {
						limiters = append(limiters, with)
						continue
					} // of another algorithm, which takes a second limiter of that name
				}
				if m.apart {
					limiters = append(limiters, limitertest.New(t, workers[i].pool, limit, config))
				} else {
					limiters = append(limiters, limitertest.Of(t, client, limit))
				}
			}
			workers[i].limiters = append(workers[i].limiters, limiters)
		}
		if m.leased {
			workers[i].leased = limitertest.Of(t, client, ratelimit.Config{
				Name: "sliding", Policy: leasesInMix().policy("sliding"), Lease: &ratelimit.Lease{MaxShare: 0.1},
			})
		}
	}
	histories, errs := make([][]mixedOperation, pools*callersOfPool+1), make([]error, pools*callersOfPool+1)
	uses := make([][]leaseUse, pools*callersOfPool)
	impatient := make(chan struct{}) // closed when a call was told of a held key
	told := sync.OnceFunc(func() { close(impatient) })
	end := func() {}
	if m.holds {
		end = m.hold(t, db, workers[0].limiters, impatient, &histories[pools*callersOfPool], &errs[pools*callersOfPool])
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
					told()
					continue
				}
				histories[i] = append(histories[i], op)
				takes = append(takes, op.takes()...)
				for n := 0; m.leased && n < 4 && errs[i] == nil; n++ {
					errs[i] = workers[i%pools].takeLeased(t.Context(), random, &uses[i])
				}
			}
		})
	}
	callers.Wait()
	end()
	require.NoError(t, errors.Join(errs...))
	if m.leased {
		requireLeasesInMix(t, slices.Concat(uses...))
	}
	select {
	case <-impatient:
		require.True(t, m.holds)
	default:
		require.False(t, m.holds)
	}
	return slices.Concat(histories...), statements.Load()
}

const (
	patience     = 1500 * time.Millisecond // how long a call waits for a held key
	holdsBriefly = 20 * time.Millisecond
)

// hold has one more caller take from keys of space 0 in transactions that it keeps open, until the function that
// it returns is called. The first transaction takes from all keys and stays open until a call was impatient. Those
// after it take from one key each, briefly.
func (m mix) hold(
	t *testing.T,
	db *pgtest.DB,
	limiters [][]*ratelimit.Limiter,
	impatient <-chan struct{},
	history *[]mixedOperation,
	err *error,
) (end func()) {
	t.Helper()
	holder := worker{pool: db.Of(keyOf(0, 0)).Pool, limiters: limiters}
	ctx, cancel := context.WithCancel(t.Context())
	locked, ended := make(chan struct{}), make(chan struct{})
	once := func(limits, key int, hold func()) error {
		op := mixedOperation{kind: allowAllTx, client: 1 << 10, call: time.Now().UnixMicro()}
		for i := range limits {
			op.asks = append(op.asks, ask{limit: i, key: key % m.limits[i].keys, cost: 1})
		}
		err := pgx.BeginFunc(t.Context(), holder.pool, func(tx pgx.Tx) (err error) {
			op.results, err = ratelimit.AllowAll(t.Context(), holder.requests(op, tx)...)
			hold()
			return err
		})
		op.end = time.Now().UnixMicro()
		*history = append(*history, op)
		return err
	}
	go func() {
		defer close(ended)
		*err = once(len(m.limits), 0, func() {
			close(locked)
			select {
			case <-impatient:
			case <-ctx.Done(): // the callers have ended
			}
		})
		for key := 0; *err == nil && ctx.Err() == nil; key++ {
			*err = once(1, key, func() { pause(t.Context(), holdsBriefly) })
		}
	}()
	<-locked
	return func() {
		cancel()
		<-ended
	}
}

// requests are what an operation asks within a transaction.
func (w worker) requests(op mixedOperation, tx pgx.Tx) (requests []ratelimit.Request) {
	for _, a := range op.asks {
		limiter := w.limiters[a.limit][a.policy]
		requests = append(requests, limiter.WithTx(tx).Request(keyOf(op.space, a.key), a.cost))
	}
	return requests
}

// worker is what the callers of one pool share.
type worker struct {
	pool     *pgxpool.Pool
	limiters [][]*ratelimit.Limiter // of each limit, one for each policy
	leased   *ratelimit.Limiter     // beside them
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
		op.asks = append(
			op.asks,
			ask{limit: i, policy: random.IntN(len(l.policies)), key: random.IntN(l.keys), cost: 1 + random.Int64N(4)},
		)
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
			refunds = append(
				refunds,
				mixedOperation{kind: refund, space: op.space, asks: []ask{a}, taken: op.results.Each[i], of: parts},
			)
		}
	}
	return refunds
}

// keyOf returns keys of a space that are on one shard.
func keyOf(space, key int) string { return fmt.Sprintf("key %d of {space %d}", key, space) }

// make makes a call of a mix.
func (w worker) make(ctx context.Context, m mix, op *mixedOperation) error {
	requests := make([]ratelimit.Request, len(op.asks))
	var limiter *ratelimit.Limiter
	for i, a := range op.asks {
		limiter = w.limiters[a.limit][a.policy]
		requests[i] = limiter.Request(keyOf(op.space, a.key), a.cost)
	}
	inTx := func(tx pgx.Tx) (err error) {
		op.results, err = ratelimit.AllowAll(ctx, w.requests(*op, tx)...)
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
		one, err = limitertest.AsResult(limiter.Refund(ctx, op.taken))
	case grant:
		one, err = limitertest.AsResult(limiter.Grant(ctx, key, -n))
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
	month := ratelimit.CalendarWindow{Limit: 13, Unit: ratelimit.CalendarMonth, Zone: "Europe/Berlin"}
	several := [][]ratelimit.Policy{
		{ratelimit.SlidingWindow{Limit: 10, Window: span / 4}, ratelimit.FixedWindow{Limit: 16, Window: span}},
	}
	limits := []limit{
		{
			"address",
			false,
			2,
			one(fixed),
		}, {"user", true, 2, one(sliding)}, {"session", false, 1, one(bucket)}, {"everybody", true, 1, one(log)},
		{"quota", false, 1, one(month)},
	}
	severalLimits := []limit{
		{"address", false, 2, several}, {"everybody", true, 1, [][]ratelimit.Policy{{bucket, log, month}}},
	}
	// There is no bucket of other numbers. What flowed in during the last milliseconds before a change, between
	// the two readings of the clock (see sql/sliding.sql), counts by the new numbers.
	changing := []limit{
		{"address", false, 1, one(fixed, ratelimit.FixedWindow{Limit: 18, Window: span / 2}, log)},
		{"user", true, 1, one(sliding, ratelimit.SlidingWindow{Limit: 10, Window: 2 * span}, fixed)},
		{"session", false, 1, one(bucket, log, fixed)},
		{"everybody", true, 1, one(log, ratelimit.SlidingLog{Limit: 20, Window: span / 2}, bucket)},
		{"quota", false, 1, one(month, ratelimit.CalendarWindow{Limit: 9, Unit: ratelimit.CalendarMonth}, fixed)},
	}
	everything := []limit{
		{"address", false, 2, slices.Concat(one(fixed), several, one(log))}, {"user", true, 1, one(sliding, bucket)},
		{"session", false, 1, one(bucket, sliding)}, {"everybody", true, 1, one(log, fixed)},
		{"quota", false, 1, one(month, sliding)},
	}
	// Each is one line of the queue, and so many short lines of one table leave together.
	many := slices.Concat(limits[2:])
	for i, policy := range []ratelimit.Policy{fixed, sliding, bucket, log, month} {
		many = append(many, limit{fmt.Sprint("tenant ", i), false, 1, one(policy)})
	}
	limitsOfSets := slices.Concat(limits[:3], limits[4:])
	limitsOfSets[1].durable = false
	crowded := slices.Clone(everything)
	crowded[1].durable = false
	all := map[string]mix{
		"sets": {limits: limits, calls: []kind{allowAll, allowAll, allowAll, allow, peek}},
		// So many that the shorter way for sets decides most of them, which has no logs.
		"sets in a crowd": {limits: limitsOfSets, calls: []kind{allowAll, allowAll, allowAll, allow}, crowd: true},
		"held rows": {
			limits: limits,
			calls:  []kind{allowAll, allowAll, allow, allow, refund, grant, peek, reset},
			holds:  true,
		},
		"several policies": {limits: severalLimits, calls: []kind{allow, allow, allowAll, peek, refund, grant}},
		"refunds and grants": {
			limits: limits,
			calls:  []kind{allowAll, allowAll, allowAll, allowAll, allow, allow, refund, refund, grant, peek},
			decoys: true,
		},
		"other policies": {limits: changing, calls: []kind{allowAll, allow, allow, peek}},
		"beside leases":  {limits: limits, calls: []kind{allowAll, allow, allow, peek, refund, grant}, leased: true},
		"waits": {
			limits: slices.Concat(limits[:1], severalLimits[1:]),
			calls:  []kind{wait, allow, allow, allowAll, allowAll},
		},
		"transactions": {limits: limits, calls: []kind{allowAllTx, allowAllTx, rolledBack, allow, allowAll}},
		"resets":       {limits: limits, calls: []kind{allowAll, allowAll, allow, reset}},
		// No AllowAll: what is decided for several limiters is what was asked of each of them.
		"many limiters": {
			limits: many, crowd: true,
			calls: []kind{allow, allow, allow, allow, peek, peek, refund, grant},
		},
		"clients of their own": {
			limits: limits, apart: true,
			calls: []kind{allowAllTx, rolledBack, allow, allow, allow, peek, wait, refund, grant, reset},
		},
		// A reset deletes one of two rows.
		"refunds of what is made anew": {
			limits: []limit{{"address", false, 1, slices.Concat(one(sliding), several, several)}, limits[3]},
			calls:  []kind{allow, allow, allowAll, refund, refund, reset},
		},
		"all of them together": {limits: everything, calls: []kind{
			allowAll, allowAll, allowAll, allowAllTx, rolledBack, allow, allow, peek, wait, refund, refund, grant, reset,
		}},
		"all of them together, in a crowd": {limits: crowded, calls: []kind{
			allowAll, allowAll, allowAllTx, rolledBack, allow, allow, allow, allow, peek, wait, refund, refund, grant,
			reset,
		}, crowd: true},
	}
	if pgtest.Shards() > 0 { // which decide in no transaction of the caller
		delete(all, "transactions")
	}
	for name, m := range all {
		m.month = span
		if pgtest.Shards() > 0 {
			m.calls = slices.DeleteFunc(m.calls, func(k kind) bool { return k == allowAllTx || k == rolledBack })
		}
		all[name] = m
	}
	return all
}

// briefly is a span within which a machine at rest makes some calls of a mix, and not all of them.
const briefly = 42 * time.Millisecond

// Many callers of several limiters are told what they would be told one after the other, each AllowAll as one.
func TestMixesAreLinearizable(t *testing.T) {
	t.Parallel()

	random := random(t)
	for name := range mixes(briefly) {
		for round := range testkit.Rounds(t, "ROUNDS", 1) {
			// This goes on until there was something of everything. A busy machine makes few calls within a span
			// and denies none of them, so the spans grow until it does.
			var seen outcomes
			for span := briefly; !seen.all(mixes(span)[name]); span *= 2 {
				require.Less(t, span, time.Minute, "%s: not varied enough: %+v", name, seen)
				m := mixes(span)[name]
				db := withMonths(t, m.month)
				if m.decoys && round == 0 && span == briefly { // once, because it takes some seconds
					attack(t, db)
				}
				history, shared := m.run(t, db, random.Uint64())
				seen.add(history, shared)
				result, picture := m.judge(t).check(t, history)
				require.Equal(t, porcupine.Ok, result, "%s: see %s", name, picture)
			}
		}
	}
}

// attack has a role that may only create, in the schema of the functions, make decoys of what the functions and
// the limiters' statements call. A decoy that runs fails, and so does the call.
func attack(t *testing.T, db *pgtest.DB) {
	t.Helper()
	for _, db := range append(db.Shards, db) {
		db.SomeDecoys(t, "public", pgtest.Statements(t, "../..")...)
		_, err := db.Pool.Exec(t.Context(), "SELECT cardinality(ARRAY['a'])")
		require.ErrorContains(t, err, "decoy public.cardinality(text[]) was run by") // so they are in place
	}
}
