package faults

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
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
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// kind is a kind of call in a mix.
type kind string

const (
	allow      kind = "Allow"
	peek       kind = "Peek"
	wait       kind = "Wait"
	refund     kind = "Refund"
	grant      kind = "Grant"
	charge     kind = "Charge"
	hold       kind = "HoldAll"
	settle     kind = "Settle"
	extend     kind = "Extend"
	reset      kind = "Reset"
	allowAll   kind = "AllowAll"
	allowAllTx kind = "AllowAll in a transaction, committed"
	rolledBack kind = "AllowAll in a transaction, rolled back"
)

// mix is a workload of calls for a few limiters. A call may take from several of them.
type mix struct {
	limits []limit
	calls  []kind // the kinds from which calls are drawn
	decoys bool   // whether an attacker's decoys of the called functions are in the attacker's schema
	locks  bool   // whether other transactions keep rows locked, sometimes longer than callers wait
	crowd  bool   // whether there are so many callers that one statement decides for several limiters
	leased bool   // whether the callers also take from a key with leases
	apart  bool   // whether each limiter has its own client, so that no statement decides for several
	month  time.Duration
}

// limit is a limiter of a mix.
type limit struct {
	name     string
	durable  bool
	keys     int                  // in each space
	policies [][]ratelimit.Policy // the limiter's policy, and those for With; several policies make up an All
}

// spaces is the number of sets of keys. Each call uses keys of only one set.
const spaces = 3

// ask is the part of a call that asks one limiter.
type ask struct {
	limit, policy, key int
	cost               int64 // 0 for a Peek; negative for a refund or a grant
}

// mixedOperation is one call of a mix.
type mixedOperation struct {
	kind          kind
	client, space int
	asks          []ask
	call, end     int64
	results       ratelimit.Results // one result, if the call has one limiter
	owed          int64             // how much the key owes after this charge
	id            int64             // the hold, if this makes, settles or extends one
	ttl           time.Duration     // how long the hold lasts, or is extended
	held          *ratelimit.Hold   // the hold, if it was made
	settlement    ratelimit.Settlement
	until         int64            // when the hold ends after this Extend; 0 if it had ended before
	taken         ratelimit.Result // the take, if this is a refund
	of            []portion        // the take's part for each policy, if this is a refund
	followed      bool             // this Wait was allowed together with others, and is not the last of them
}

// run runs callers on several pools, which stand for processes. It returns the history, and how many statements decided
// for several limiters.
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
	if m.locks {
		timeout = 4 * patience
	}
	for i := range workers {
		workers[i].pool = db.OwnerPool(t, func(config *pgxpool.Config) { config.MaxConns = 5 })
		defer workers[i].pool.Close() //nolint:revive // all pools stay open until the end
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
					} // another algorithm needs a second limiter of the name
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
	impatient := make(chan struct{}) // closed when a call got ErrKeyHeld
	told := sync.OnceFunc(func() { close(impatient) })
	end := func() {}
	if m.locks {
		end = m.lock(t, db, workers[0].limiters, impatient, &histories[pools*callersOfPool], &errs[pools*callersOfPool])
	}
	var callers sync.WaitGroup
	for i := range pools * callersOfPool {
		callers.Go(func() {
			random := rand.New(rand.NewPCG(seed, uint64(i)))
			var takes []mixedOperation // takes from one limiter that were not refunded
			var held []mixedOperation  // holds that were not settled
			for n := 0; n < calls && errs[i] == nil; n++ {
				op := m.draw(random)
				if op.kind == refund && len(takes) == 0 {
					op.kind = allow
				}
				switch op.kind {
				case settle, extend:
					if len(held) == 0 {
						continue
					}
					at := random.IntN(len(held))
					op.asks, op.space = slices.Clone(held[at].asks), held[at].space
					op.id, op.held, op.ttl = held[at].id, held[at].held, m.month // which is longer than it had at first
					if op.kind == settle {
						held = slices.Delete(held, at, at+1)
						for i := range op.asks {
							op.asks[i].cost = random.Int64N(2 * op.asks[i].cost)
						}
					}
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
				if errors.Is(errs[i], ratelimit.ErrKeyHeld) { // the call certainly counted nothing
					errs[i] = nil
					told()
					continue
				}
				// Nor did these calls. On a busy machine, held keys may use up the time of a call for other keys.
				if errors.Is(errs[i], ratelimit.ErrOwesTooMuch) || errors.Is(errs[i], pg.ErrHeldUp) {
					errs[i] = nil
					continue
				}
				histories[i] = append(histories[i], op)
				takes = append(takes, op.takes()...)
				if op.kind == hold && op.held != nil {
					held = append(held, op)
				}
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
		require.True(t, m.locks)
	default:
		require.False(t, m.locks)
	}
	return slices.Concat(histories...), statements.Load()
}

const (
	patience     = 3 * time.Second // how long a call waits for a held key
	locksBriefly = 20 * time.Millisecond
)

// lock adds a caller that takes from keys of space 0 in transactions that stay open. The returned function stops the
// caller. The first transaction takes from all keys, and stays open until a call got ErrKeyHeld. The later transactions
// take from one key each, and are short.
func (m mix) lock(
	t *testing.T,
	db *pgtest.DB,
	limiters [][]*ratelimit.Limiter,
	impatient <-chan struct{},
	history *[]mixedOperation,
	err *error,
) (end func()) {
	t.Helper()
	locker := worker{pool: db.Of(keyOf(0, 0)).Pool, limiters: limiters}
	ctx, cancel := context.WithCancel(t.Context())
	locked, ended := make(chan struct{}), make(chan struct{})
	once := func(limits, key int, keep func()) error {
		op := mixedOperation{kind: allowAllTx, client: 1 << 10, call: time.Now().UnixMicro()}
		for i := range limits {
			op.asks = append(op.asks, ask{limit: i, key: key % m.limits[i].keys, cost: 1})
		}
		err := pgx.BeginFunc(t.Context(), locker.pool, func(tx pgx.Tx) (err error) {
			op.results, err = ratelimit.AllowAll(t.Context(), locker.requests(op, tx)...)
			keep()
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
			*err = once(1, key, func() { pause(t.Context(), locksBriefly) })
		}
	}()
	<-locked
	return func() {
		cancel()
		<-ended
	}
}

// requests returns the requests of an operation within a transaction.
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
	limiters [][]*ratelimit.Limiter // by limit and policy
	leased   *ratelimit.Limiter     // the limiter of the key with leases
}

func policyOf(policies []ratelimit.Policy) ratelimit.Policy {
	if len(policies) > 1 {
		return ratelimit.All(policies...)
	}
	return policies[0]
}

// draw draws a call at random.
func (m mix) draw(random *rand.Rand) mixedOperation {
	op := mixedOperation{kind: m.calls[random.IntN(len(m.calls))], space: random.IntN(spaces)}
	limits := random.Perm(len(m.limits))
	switch op.kind {
	case allowAll, allowAllTx, rolledBack, hold:
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
	case charge:
		a.cost = 10 + random.Int64N(10)
	case hold:
		op.id, op.ttl = ids.Add(1), time.Duration(1000+random.Int64N(m.month.Microseconds()/2))*time.Microsecond
	case reset:
		a.policy = 0
	}
	return op
}

// takes returns the refunds with which a worker may give back a call's takes.
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

// keyOf returns the name of a key. All keys of a space are on one shard.
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
	case charge:
		var charged ratelimit.Charged
		charged, err = limiter.Charge(ctx, key, n)
		one, op.owed = charged.Result(), charged.Owed
		one.RetryAfter = charged.RetryAfter
	case reset:
		return limiter.Reset(ctx, key)
	case allowAll:
		op.results, err = ratelimit.AllowAll(ctx, requests...)
		return err
	case hold:
		var r ratelimit.HoldResults
		r, err = ratelimit.HoldAll(ctx, op.ttl, requests...)
		op.results, op.held = r.Results, r.Hold
		return err
	case settle:
		return op.settle(ctx)
	case extend:
		err = op.held.Extend(ctx, op.ttl)
		if errors.Is(err, ratelimit.ErrHoldEnded) {
			return nil
		}
		op.until = op.held.EndsAt().UnixMicro()
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

// settle settles a hold twice. The second answer must be the first one.
func (op *mixedOperation) settle(ctx context.Context) (err error) {
	used := make([]int64, len(op.asks))
	for i, a := range op.asks {
		used[i] = a.cost
	}
	if op.settlement, err = op.held.Settle(ctx, used...); err != nil {
		return err
	}
	again, err := op.held.Settle(ctx, 1)
	if err == nil && !reflect.DeepEqual(op.settlement, again) {
		err = fmt.Errorf("settled twice: %+v and %+v", op.settlement, again)
	}
	return err
}

// ids counts the holds.
var ids atomic.Int64

var errRolledBack = errors.New("this transaction is to be rolled back")

// mixes returns a mix for each feature, and a mix with all features.
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
	// No bucket changes its numbers. The refill between the two readings of the clock (see sql/sliding.sql) would count
	// by the new numbers.
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
	// Each call is one entry of the queue. One statement has all queued entries for one table.
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
		// There are so many calls that the faster statement for sets decides most of them. That statement does not support logs.
		"sets in a crowd": {limits: limitsOfSets, calls: []kind{allowAll, allowAll, allowAll, allow}, crowd: true},
		"held rows": {
			limits: limits,
			calls:  []kind{allowAll, allowAll, allow, allow, refund, grant, peek, reset},
			locks:  true,
		},
		"several policies": {limits: severalLimits, calls: []kind{allow, allow, allowAll, peek, refund, grant}},
		"refunds and grants": {
			limits: limits,
			calls:  []kind{allowAll, allowAll, allowAll, allowAll, allow, allow, refund, refund, grant, peek},
			decoys: true,
		},
		"other policies": {limits: changing, calls: []kind{allowAll, allow, allow, peek}},
		"charges":        {limits: limits, calls: []kind{allowAll, allowAll, allow, allow, allow, charge, refund, grant, peek}},
		"holds":          {limits: limits, calls: []kind{allowAll, allow, allow, hold, hold, hold, settle, settle, extend, charge, refund, grant, peek}},
		"beside leases":  {limits: limits, calls: []kind{allowAll, allow, allow, peek, refund, grant}, leased: true},
		"waits": {
			limits: slices.Concat(limits[:1], severalLimits[1:]),
			calls:  []kind{wait, allow, allow, allowAll, allowAll},
		},
		"transactions": {limits: limits, calls: []kind{allowAllTx, allowAllTx, rolledBack, allow, allowAll}},
		"resets":       {limits: limits, calls: []kind{allowAll, allowAll, allow, reset}},
		// There is no AllowAll, so a statement for several limiters has separate requests for each.
		"many limiters": {
			limits: many, crowd: true,
			calls: []kind{allow, allow, allow, allow, peek, peek, refund, grant},
		},
		"clients of their own": {
			limits: limits, apart: true,
			calls: []kind{allowAllTx, rolledBack, allow, allow, allow, peek, wait, refund, grant, reset},
		},
		// In this mix, a reset deletes only one of two rows.
		"refunds of what is made anew": {
			limits: []limit{{"address", false, 1, slices.Concat(one(sliding), several, several)}, limits[3]},
			calls:  []kind{allow, allow, allowAll, refund, refund, reset},
		},
		"all of them together": {limits: everything, calls: []kind{
			allowAll, allowAll, allowAll, allowAllTx, rolledBack, allow, allow, peek, wait, hold, settle, extend, charge, refund, refund,
			grant, reset,
		}},
		"all of them together, in a crowd": {limits: crowded, calls: []kind{
			allowAll, allowAll, allowAllTx, rolledBack, allow, allow, allow, allow, peek, wait, hold, settle, extend, charge,
			refund, refund, grant, reset,
		}, crowd: true},
	}
	if pgtest.Shards() > 0 { // calls take several times as long there, so most mixes of single features are left out
		maps.DeleteFunc(all, func(name string, m mix) bool {
			return !m.locks && !m.leased && !strings.HasPrefix(name, "all of them together")
		})
	}
	for name, m := range all {
		m.month = span
		if pgtest.Shards() > 0 { // no call runs in a transaction of the caller
			m.calls = slices.DeleteFunc(m.calls, func(k kind) bool { return k == allowAllTx || k == rolledBack })
		}
		all[name] = m
	}
	return all
}

// briefly is a time in which an idle machine makes a part of a mix's calls.
const briefly = 42 * time.Millisecond

// Many callers of several limiters get the same answers as sequential callers. An AllowAll counts as one call.
func TestMixesAreLinearizable(t *testing.T) {
	t.Parallel()

	random := random(t)
	for name := range mixes(briefly) {
		for round := range testkit.Rounds(t, "ROUNDS", 1) {
			// A busy machine makes few calls within a span and denies none of them. So the span grows until every kind
			// of call and every outcome has occurred.
			var seen outcomes
			for span := briefly; !seen.all(mixes(span)[name]); span *= 2 {
				require.Less(t, span, time.Minute, "%s: not varied enough: %+v", name, seen)
				m := mixes(span)[name]
				db := withMonths(t, m.month)
				if m.decoys && round == 0 && span == briefly { // once is enough, because this takes seconds
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

// attack creates decoys of everything that the functions and the limiters' statements call, as a role that may only
// create objects in the schema. If a decoy runs, the call fails.
func attack(t *testing.T, db *pgtest.DB) {
	t.Helper()
	for _, db := range append(db.Shards, db) {
		db.SomeDecoys(t, "public", pgtest.Statements(t, "../..")...)
		_, err := db.Pool.Exec(t.Context(), "SELECT cardinality(ARRAY['a'])")
		require.ErrorContains(t, err, "decoy public.cardinality(text[]) was run by") // shows that the decoys work
	}
}
