package ratelimit

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// modelPart is a part of a request of rate_limit_all, with the decision that the models make.
type modelPart struct {
	id       rowID
	durable  bool
	policy   ruled
	cost     int64
	refund   []model.Take // what a cost below 0 is of, or nil for a grant
	decision model.Decision
}

// modelRequest takes from all of its parts, or from none, count times one after the other.
type modelRequest struct {
	parts []modelPart
	count int64
	ahead int64 // how many of these are to be spent later
	moved bool  // a row that refuses it is written, because the clock has left it behind
}

func (m rows) state(p modelPart) model.State {
	if row := m[p.durable][p.id]; row.algorithm == p.policy.Numbers().Algorithm {
		return row.State
	}
	return model.State{}
}

func (m rows) has(p modelPart) bool {
	_, ok := m[p.durable][p.id]
	return ok
}

func (m rows) clone() rows { return rows{false: maps.Clone(m[false]), true: maps.Clone(m[true])} }

// decideAll has the model make the decisions of a statement. If rows are missing, the function looks first. A
// request that is refused then stays refused, and a refund that finds nothing then gives nothing back. Rows are
// made for the others. A request that shares a row with one of those others before it counts as one of them.
func (m rows) decideAll(requests []modelRequest, clock int64) {
	lacks := slices.ContainsFunc(requests, func(r modelRequest) bool {
		return slices.ContainsFunc(r.parts, func(p modelPart) bool {
			return p.cost != 0 && !m.has(p)
		})
	})
	seen := m.clone()
	changes := map[bool]map[rowID]bool{false: {}, true: {}}
	for i := range requests {
		r := &requests[i]
		if lacks {
			seen.clone().decideRequest(r, clock)
			givesBack := r.parts[0].refund != nil
			refused := r.parts[0].decision.Granted == 0 && !r.moved ||
				givesBack && !slices.ContainsFunc(r.parts, seen.has)
			if len(r.parts) == 1 && 1 <= r.parts[0].cost && r.parts[0].cost <= r.parts[0].policy.Numbers().Limit {
				refused = false // it needs no row but one from which it takes
			}
			if refused && !slices.ContainsFunc(r.parts, func(p modelPart) bool { return changes[p.durable][p.id] }) {
				continue
			}
			for _, p := range r.parts {
				changes[p.durable][p.id] = true
				if !m.has(p) {
					m[p.durable][p.id] = storedRow{}
				}
			}
		}
		m.decideRequest(r, clock)
	}
}

func (m rows) decideRequest(r *modelRequest, clock int64) {
	requests := r.count
	if r.parts[0].cost < 0 {
		requests = 1 // all at once
	}
	decide := func(p modelPart, cost int64) (model.State, model.Decision) {
		return element{cost: cost, count: r.count, refund: p.refund}.decide(p.policy, m.state(p), clock)
	}
	fits := func() bool {
		for _, p := range r.parts {
			if _, d := decide(p, p.cost); d.Granted == 0 {
				return false
			}
		}
		return true
	}
	before := make([]model.State, len(r.parts))
	for i, p := range r.parts {
		before[i] = m.state(p)
	}
	granted := int64(0)
	for ; granted < requests && fits(); granted++ {
		for _, p := range r.parts {
			if next, _ := decide(p, p.cost); next != m.state(p) { // as it is when there was nothing to give back
				m[p.durable][p.id] = storedRow{p.policy.Numbers().Algorithm, next}
			}
		}
	}
	if requests < r.count {
		granted = r.count
	}
	for i := range r.parts {
		p := &r.parts[i]
		current := m.state(*p)
		credit := modeltest.CreditOf(p.policy, before[i], clock)
		_, p.decision = decide(*p, 0)
		next, asked := current, model.Decision{Granted: 1}
		if granted < r.count {
			next, asked = decide(*p, p.cost)
		}
		p.decision.Granted, p.decision.RetryAfter = granted, 0
		if p.cost > 0 {
			p.decision.Taken.Spent = credit - modeltest.CreditOf(p.policy, current, clock)
		}
		log := model.NewEntries(nil) // what retryAfter comes from
		if granted < r.count && asked.Granted == 0 {
			p.decision.RetryAfter, log = asked.RetryAfter, asked.State.Log // it is this part that refuses
			if next != current {
				m[p.durable][p.id] = storedRow{p.policy.Numbers().Algorithm, next}
				p.decision.State = next
				r.moved = true
			}
		}
		if bucket, ok := p.policy.(TokenBucket); ok && r.ahead > 0 {
			log = before[i].Log
			if ahead := granted - (r.count - r.ahead); ahead > 0 {
				m[p.durable][p.id] = storedRow{bucket.Numbers().Algorithm, bucket.lend(m.state(*p), ahead*p.cost)}
			}
		}
		p.decision.State.Log = log
		p.decision.DecidedAt = timeRead(clock)
	}
}

// Compares the function of several limits with the models. The requests are random, and come beside requests for a
// single limit of the same rows. After each statement every column and every row is compared.
func TestAllEqualsModels(t *testing.T) {
	t.Parallel()

	pool := pgtest.New(t).Pool
	seed := testSeed(t)
	var granted, refused, halfRefused, looks, refunds, grants, lends int
	for story := range uint64(40 * rounds(t)) {
		r := rand.New(rand.NewPCG(seed, story))
		space := fmt.Sprintf("%d ", story)
		policies := map[string]ruled{"a": randomPolicy(r), "b": randomPolicy(r), "c": randomPolicy(r)}
		asModel := rows{false: {}, true: {}}
		clock := int64(1)<<50 + r.Int64N(1<<51)
		var goals []int64
		takes := map[rowID][]model.Take{}
		for step := range 20 {
			title := fmt.Sprintf("%s=%d, story %d, step %d", seedVariable, seed, story, step)
			name := string('a' + rune(r.IntN(3)))
			switch r.IntN(10) {
			case 0:
				policies[name] = randomPolicy(r)
			case 1:
				policies[name] = changedPolicy(r, policies[name])
			}
			clock = nextClock(r, clock, policies[name], goals)
			goals = goals[:0]
			look := r.IntN(10) == 0
			requests := make([]modelRequest, 1+r.IntN(5))
			for i := range requests {
				requests[i] = randomRequest(r, policies, takes, space, look)
			}
			if r.IntN(5) == 0 {
				compareOne(t, pool, title, requests[0].parts[0], clock, asModel)
				compareRows(t, pool, title, space, asModel)
				continue
			}
			asModel.decideAll(requests, clock)
			for _, request := range requests {
				all := true
				for _, p := range request.parts {
					if _, bucket := p.policy.(TokenBucket); bucket && asModel.state(p).Log != "" {
						lends++
					}
					if p.cost > 0 && p.decision.Granted > 0 {
						takes[p.id] = append(
							takes[p.id],
							p.decision.TakenBy(p.policy, p.cost, 1+r.Int64N(p.decision.Granted)),
						)
					}
					if p.decision.RetryAfter != model.Never {
						goals = append(goals, clock+p.decision.RetryAfter)
					}
					goals = append(goals, clock+p.decision.ResetAfter)
					all = all && p.decision.RetryAfter != 0
				}
				switch {
				case look:
					looks++
				case request.parts[0].cost < 0 && request.parts[0].refund == nil:
					grants++
				case request.parts[0].cost < 0:
					refunds++
				case request.parts[0].decision.Granted > 0:
					granted++
				case all:
					refused++
				default:
					halfRefused++
				}
			}
			compareAll(t, pool, title, requests, clock, r.IntN(3) == 0)
			compareRows(t, pool, title, space, asModel)
		}
	}
	for _, n := range []int{granted, refused, halfRefused, looks, refunds, grants, lends} {
		require.Greater(
			t,
			n,
			40,
			"granted %d, refused by all %d, by some %d, looks %d, refunds %d, grants %d, of buckets that are leased from %d",
			granted,
			refused,
			halfRefused,
			looks,
			refunds,
			grants,
			lends,
		)
	}
}

// The same for rate_limit_take_all, with requests that it is made for.
func TestTakesFromAllEqualModels(t *testing.T) {
	t.Parallel()

	db, seed, taken, left := pgtest.New(t), testSeed(t), 0, 0
	for story := range uint64(60 * rounds(t)) {
		m, n, err := tellTakes(t, db.Pool, rand.New(rand.NewPCG(seed, story)), story, nil)
		require.NoError(t, err, "story %d", story)
		taken, left = taken+m, left+n
	}
	require.Greater(t, taken, 30*rounds(t))
	require.Greater(t, left, 30*rounds(t))
}

// tellTakes has requests of several parts take by rate_limit_take_all, now and then from rows with granted credit. It
// returns how the models differ, and how often it has decided and has left that to rate_limit_all. Policies are mostly
// of those algorithms, unless there are none.
func tellTakes(
	t *testing.T, pool *pgxpool.Pool, r *rand.Rand, story uint64, mostly []int16,
) (taken, left int, err error) {
	t.Helper()
	policy := func() ruled {
		for {
			p := randomPolicy(r)
			if a := p.Numbers().Algorithm; a != algorithm.SlidingLog &&
				(mostly == nil || slices.Contains(mostly, a) || r.IntN(10) == 0) {
				return p
			}
		}
	}
	space, durable := fmt.Sprintf("%d ", story), r.IntN(2) == 0
	policies := map[string]ruled{"a": policy(), "b": policy(), "c": policy()}
	asModel := rows{false: {}, true: {}}
	clock := int64(1)<<50 + r.Int64N(1<<51)
	var goals []int64
	for range 20 {
		name := string('a' + rune(r.IntN(3)))
		switch r.IntN(10) {
		case 0:
			policies[name] = policy()
		case 1:
			policies[name] = changedPolicy(r, policies[name])
		}
		clock, goals = nextClock(r, clock, policies[name], goals), nil
		requests := make([]modelRequest, 1+r.IntN(3))
		for i := range requests {
			q := randomRequest(r, policies, nil, space, false)
			q.count, q.ahead = q.count-q.ahead, 0
			for j := range q.parts {
				p := &q.parts[j]
				p.durable, p.id.key = durable, "{"+space+"}"+[...]string{"x", "ä"}[r.IntN(2)]
				if limit := p.policy.Numbers().Limit; p.cost > 0 && r.IntN(4) > 0 { // or it would seldom fit
					p.cost = 1 + r.Int64N(max(limit/4, 1))
				}
			}
			slices.SortFunc(q.parts, func(a, b modelPart) int { return cmp.Compare(a.id.name+a.id.key, b.id.name+b.id.key) })
			q.parts = slices.CompactFunc(q.parts, func(a, b modelPart) bool { return a.id == b.id })
			requests[i] = q
		}
		from, into := rowSetOfModel(requests)
		asModel.decideAll(requests, clock)
		for _, request := range requests {
			for _, p := range request.parts {
				if p.decision.RetryAfter != model.Never {
					goals = append(goals, clock+p.decision.RetryAfter)
				}
				goals = append(goals, clock+p.decision.ResetAfter)
			}
		}
		if from == nil { // a grant, say
			compareAll(t, pool, space, requests, clock, false)
			continue
		}
		declined, err := takesDiffer(t.Context(), pool, requests, clock, from, into)
		if err == nil {
			err = rowsDiffer(t, pool, space, asModel)
		}
		if err != nil {
			return taken, left, err
		}
		if taken++; declined {
			taken, left = taken-1, left+1
		}
	}
	return taken, left, nil
}

func randomRequest(
	r *rand.Rand,
	policies map[string]ruled,
	takes map[rowID][]model.Take,
	space string,
	look bool,
) modelRequest {
	request := modelRequest{count: 1}
	if r.IntN(4) == 0 {
		request.count = 1 + r.Int64N(5)
	}
	gives, grants := r.IntN(3) == 0, r.IntN(3) == 0
	if !look && !gives && r.IntN(3) == 0 {
		request.ahead = 1 + r.Int64N(5)
		request.count += request.ahead
	}
	for range 1 + r.IntN(4) {
		name := string('a' + rune(r.IntN(3)))
		p := modelPart{
			// All of a story are on one shard.
			id:      rowID{space + name, "{" + space + "}" + [...]string{"x", "y", "Y", "ä", "x:1"}[r.IntN(5)]},
			durable: r.IntN(4) == 0,
			policy:  policies[name],
		}
		switch cost := randomCost(r, p.policy.Numbers().Limit); {
		case look:
		case !gives:
			p.cost = max(cost, 1)
		case cost < 0:
			p.cost = cost
		default:
			p.cost = -max(cost, 1)
		}
		if p.cost < 0 && !grants {
			p.cost, _, p.refund = randomRefund(r, p.policy, takes[p.id], p.cost, 1)
		}
		if !slices.ContainsFunc(
			request.parts,
			func(q modelPart) bool { return q.id == p.id && q.durable == p.durable },
		) {
			request.parts = append(request.parts, p)
		}
		if p.cost > 1<<58 { // the product of both has to fit
			request.ahead = 0
		}
	}
	return request
}

// allZones are the time zones of parts.
func allZones(requests []modelRequest) (zones []string) {
	for _, request := range requests {
		for _, p := range request.parts {
			zones = append(zones, p.policy.Numbers().Zone)
		}
	}
	return zones
}

// allArrays are the arguments of rate_limit_all from $1 to $10.
func allArrays(requests []modelRequest) []any {
	var owners []int32
	var names, keys []string
	var durables []bool
	var algorithms []int16
	var limits, spans, refills, costs, counts []int64
	for i, request := range requests {
		for _, p := range request.parts {
			numbers := p.policy.Numbers()
			owners, names, keys = append(owners, int32(i)), append(names, p.id.name), append(keys, p.id.key)
			durables, algorithms = append(durables, p.durable), append(algorithms, numbers.Algorithm)
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
			costs, counts = append(costs, p.cost), append(counts, request.count)
		}
	}
	return []any{owners, names, keys, durables, algorithms, limits, spans, refills, costs, counts}
}

// allRefunds are its arguments from $14 on.
func allRefunds(requests []modelRequest) []any {
	var parts []modelPart
	for _, request := range requests {
		parts = append(parts, request.parts...)
	}
	var refunds refundArguments
	for i, p := range parts {
		if p.refund != nil {
			refunds.set(i, len(parts), &p.refund[0])
		}
	}
	return []any{refunds.since, refunds.in, refunds.at, refunds.spent}
}

// allLeased are what is leased, and what is not any more.
func allLeased(requests []modelRequest) (leased []int64) {
	for _, request := range requests {
		for _, p := range request.parts {
			if p.refund != nil {
				leased = append(leased, p.refund[0].Ended)
			} else {
				leased = append(leased, request.ahead*p.cost)
			}
		}
	}
	return leased
}

// compareOne asks what a part does of its row alone, by the function of its algorithm, and compares the decision.
func compareOne(t *testing.T, pool *pgxpool.Pool, title string, p modelPart, clock int64, asModel rows) {
	t.Helper()
	if p.refund != nil { // it cannot tell that a lease has ended
		k := p.refund[0]
		k.Ended = 0
		p.refund = []model.Take{k}
	}
	one := step{
		policy:   p.policy,
		durable:  p.durable,
		name:     p.id.name,
		clock:    clock,
		elements: []element{{key: p.id.key, cost: p.cost, count: 1, refund: p.refund}},
	}
	asModel.decide(one)
	c := callOf("", one)
	require.NoError(t, c.query(t.Context(), pool, false), title)
	got, want := c.into[0].decision, one.elements[0].decision
	got.State, want.State, got.DecidedAt = model.State{}, model.State{}, got.DecidedAt.UTC()
	require.Equal(t, want, got, "%s: %v", title, one)
}

// compareAll compares every decision.
func compareAll(t *testing.T, pool *pgxpool.Pool, title string, requests []modelRequest, clock int64, skip bool) {
	t.Helper()
	got := map[int64]model.Decision{}
	args := append(allArrays(requests), nil, nil, time.UnixMicro(clock))
	args = append(append(args, allRefunds(requests)...), skip, allZones(requests), allLeased(requests))
	err := queryDecisions(t.Context(), pool, allStatement, args, func(ord int64, d model.Decision) { got[ord] = d })
	require.NoError(t, err, "%s\n%v", title, requests)
	ord := int64(0)
	for i, request := range requests {
		for j, p := range request.parts {
			ord++
			is, want := got[ord], p.decision
			is.DecidedAt = is.DecidedAt.UTC()
			for _, d := range []*model.Decision{&is, &want} {
				d.State, d.Taken.Units = modeltest.Told(d.State), 0
			}
			require.Equal(t, want, is, "%s, request %d, part %d of %+v", title, i, j, requests)
		}
	}
	require.Len(t, got, int(ord), title)
}

// rowSetOfModel returns the rows that requests take from, and their parts, or nil if rate_limit_take_all cannot be asked.
func rowSetOfModel(requests []modelRequest) (*rowSet, []*part) {
	var asked []*request
	var into []*part
	var counts []int64
	for _, r := range requests {
		q := &request{count: r.count, ahead: r.ahead}
		for _, p := range r.parts {
			q.parts = append(q.parts, part{
				space: &keyspace{durable: p.durable}, rules: p.policy.one(), name: p.id.name, key: p.id.key, cost: p.cost,
			})
			counts = append(counts, r.count)
		}
		for i := range q.parts {
			into = append(into, &q.parts[i])
		}
		asked = append(asked, q)
	}
	return rowSetOf(asked, into, counts), into
}

// takesDiffer has rate_limit_take_all decide requests, and compares every decision. left tells whether it has left them
// to rate_limit_all.
func takesDiffer(
	ctx context.Context, pool *pgxpool.Pool, requests []modelRequest, clock int64, from *rowSet, into []*part,
) (left bool, err error) {
	var owners []int32
	var counts []int64
	var want []model.Decision
	for i, r := range requests {
		for _, p := range r.parts {
			owners, counts, want = append(owners, int32(i)), append(counts, r.count), append(want, p.decision)
		}
	}
	d := newDatabase(pool, "", func() time.Time { return time.UnixMicro(clock) })
	c := d.takeAll(from, into, owners, counts, transaction{})
	from.ended = func(l bool) { left = l }
	if err := c.query(ctx, pool, false); err != nil {
		return left, err
	}
	for i := range want {
		is, want := into[i].decision, want[i]
		is.DecidedAt = timeRead(is.DecidedAt.UnixMicro())
		for _, d := range []*model.Decision{&is, &want} {
			d.State, d.Taken.Units = modeltest.Told(d.State), 0
		}
		if !reflect.DeepEqual(want, is) {
			return left, fmt.Errorf("part %d, left %v: SQL %+v, model %+v", i, left, is, want)
		}
	}
	return left, nil
}

func compareRows(t *testing.T, pool *pgxpool.Pool, title, space string, asModel rows) {
	t.Helper()
	require.NoError(t, rowsDiffer(t, pool, space, asModel), title)
}

// rowsDiffer compares every column of every row.
func rowsDiffer(t *testing.T, pool *pgxpool.Pool, space string, asModel rows) error {
	t.Helper()
	for durable, want := range asModel {
		found, err := pool.Query(
			context.Background(),
			"SELECT "+rowColumns+" FROM "+pgtest.Table(durable)+" WHERE prefix = ANY ($1)",
			[]string{space + "a", space + "b", space + "c"},
		)
		require.NoError(t, err)
		is := map[rowID]storedRow{}
		for found.Next() {
			id, row, err := scanRow(found)
			require.NoError(t, err)
			is[id] = row
		}
		require.NoError(t, found.Err())
		if !reflect.DeepEqual(want, is) {
			return fmt.Errorf("in %s: SQL %+v, model %+v", strings.TrimSpace(pgtest.Table(durable)), is, want)
		}
	}
	return nil
}

// Before missing rows are made, all parts are looked at without locks. A request that is not refused then is decided by
// its locked rows. One that is refused is told what was true at the moment when it was looked at, and waits for nobody.
func TestSetsBesideANewRowAreDecidedAtOneInstant(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	type told struct {
		Granted, Remaining int64
		RetryAfter         *int64 `db:"retry_after_us"`
	}
	in := func(d time.Duration) *int64 { return new(d.Microseconds()) }
	for name, change := range map[string]struct {
		take         int64 // from a limit of 10, before
		inTx         func(ctx context.Context, tx pgx.Tx, limiter *Limiter) error
		locked, seen told // of three more
	}{
		"less room": {8, func(ctx context.Context, tx pgx.Tx, limiter *Limiter) error {
			_, err := limiter.WithTx(tx).Allow(ctx, "key")
			return err
		}, told{0, 1, in(year)}, told{0, 2, in(year)}},
		"more room": {10, func(ctx context.Context, tx pgx.Tx, limiter *Limiter) error {
			_, err := limiter.WithTx(tx).Grant(ctx, "key", 5)
			return err
		}, told{1, 2, in(0)}, told{0, 0, in(year)}},
		"no row": {10, func(ctx context.Context, tx pgx.Tx, limiter *Limiter) error {
			return limiter.WithTx(tx).Reset(ctx, "key")
		}, told{1, 7, in(0)}, told{0, 0, in(year)}},
	} {
		for _, together := range []bool{false, true} { // the row that is there and the new one are of one request
			t.Run(fmt.Sprintf("%s, together %t", name, together), func(t *testing.T) {
				t.Parallel()
				db := pgtest.New(t)
				limiter := newLimiter(
					t,
					db.Pool,
					Config{
						Name:   "known",
						Policy: FixedWindow{Limit: 10, Window: year},
						Client: ClientConfig{Timeout: amply, Test: frozen(t0)},
					},
				)
				_, err := limiter.AllowN(t.Context(), "key", change.take)
				require.NoError(t, err)
				holder, caller := pgtest.Begin(t, db), pgtest.Begin(t, db)
				require.NoError(t, change.inTx(t.Context(), holder, limiter))

				answer := testkit.Later(func() ([]told, error) { // the new row's key is longer, so it comes first
					rows, err := caller.Query(context.Background(), `SELECT granted, remaining, retry_after_us
						FROM rate_limit_all(ARRAY[1, CASE WHEN $1 THEN 1 ELSE 2 END], '{known,new}', '{key,longer key}', '{f,f}',
							'{1,1}', '{10,10}', ARRAY[$2::bigint, $2], '{0,0}', '{3,1}', now => $3)
						ORDER BY ord`, together, year.Microseconds(), t0)
					if err != nil {
						return nil, err
					}
					return pgx.CollectRows(rows, pgx.RowToStructByName[told])
				})
				if !together {
					pgtest.WaitUntilBlocked(t, db.Pool, 1)
					require.NoError(t, holder.Commit(t.Context()))
				}
				got, err := answer()
				require.NoError(t, err)
				made := rowID{"new", "longer key"}
				if together {
					require.NoError(t, holder.Rollback(t.Context()))
					require.Equal(t, []told{change.seen, {0, 10, in(0)}}, got)
					require.NotContains(t, storedRows(t, caller, false), made)
				} else {
					require.Equal(t, []told{change.locked, {1, 9, in(0)}}, got)
					require.Contains(t, storedRows(t, caller, false), made)
				}
			})
		}
	}
}

// Compares what is leased of a bucket, and what goes back beside it, with the model.
func TestLeasesOfABucketInSQL(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool
	seed := testSeed(t)
	kept := 0 // refunds that left room for leases
	for story := range uint64(20 * rounds(t)) {
		r := rand.New(rand.NewPCG(seed, story))
		bucket := TokenBucket{Capacity: 100 + r.Int64N(3000), Refill: 1 + r.Int64N(50), Every: model.Duration(1 + r.Int64N(2e7))}
		part := modelPart{id: rowID{fmt.Sprintf("%d a", story), "key"}, policy: bucket}
		asModel := rows{false: {}, true: {}}
		clock, period := int64(1)<<50, bucket.Lasts()/model.LeasesInBucket
		var takes []model.Take
		for step := range 60 {
			clock += oneOf(r, []int64{0, 0, r.Int64N(period + 1), r.Int64N(2*period + 1), period, 2 * period})
			switch r.IntN(20) {
			case 0:
				clock += r.Int64N(bucket.Lasts())
			case 1:
				clock -= r.Int64N(2 * bucket.Lasts())
			}
			request := modelRequest{parts: []modelPart{part}, count: 1}
			p := &request.parts[0]
			if p.cost = 1 + r.Int64N(20); len(takes) > 0 && r.IntN(2) == 0 {
				k := takes[len(takes)-1-r.IntN(min(len(takes), 4))]
				if r.IntN(2) == 0 {
					k.Ended = r.Int64N(k.Units + 1)
				}
				p.cost, p.refund = -k.Units, []model.Take{k}
				full := k
				full.Ended = model.Never
				unleased := asModel.state(*p)
				unleased.Log = ""
				_, without := bucket.Refund(unleased, clock, full)
				_, with := bucket.Refund(asModel.state(*p), clock, k)
				if without.Remaining > with.Remaining {
					kept++
				}
			} else if r.IntN(2) == 0 {
				request.ahead = r.Int64N(1 + bucket.Capacity/40)
				request.count += request.ahead
			}
			title := fmt.Sprintf("%s=%d, story %d, step %d", seedVariable, seed, story, step)
			if request.ahead == 0 && r.IntN(2) == 0 { // by the function of buckets, which leaves the notes alone
				compareOne(t, pool, title, *p, clock, asModel)
			} else {
				requests := []modelRequest{request}
				asModel.decideAll(requests, clock)
				if d := requests[0].parts[0].decision; p.cost > 0 && d.Granted > 0 {
					takes = append(takes, d.TakenBy(bucket, p.cost, d.Granted))
				}
				compareAll(t, pool, title, requests, clock, false)
			}
			compareRows(t, pool, title, strings.TrimSuffix(part.id.name, "a"), asModel)
		}
	}
	require.Greater(t, kept, 5*rounds(t))
}
