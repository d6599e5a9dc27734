package sql_test

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// TestAllEqualsModels compares rate_limit_all with the models. TestAllEqualsModels sends random requests, and decides
// the same rows with the models. TestAllEqualsModels compares every column of every row after each statement.
func TestAllEqualsModels(t *testing.T) {
	t.Parallel()

	pool := pgtest.New(t).Pool
	seed := limitertest.Seed(t)
	var granted, refused, halfRefused, looks, refunds, grants, charges, tooLarge, lends int
	varied := func() bool { // whether each kind of request has been decided often enough
		return min(granted, refused, halfRefused, looks, refunds, grants, charges, tooLarge, lends) > 10
	}
	for story := uint64(0); story < uint64(12*limitertest.Rounds(t)) || !varied(); story++ {
		require.Less(t, story, uint64(3_000), "granted %d, refused by all %d, by some %d, looks %d, refunds %d, grants %d, "+
			"charges %d, too large %d, of buckets that are leased from %d",
			granted, refused, halfRefused, looks, refunds, grants, charges, tooLarge, lends)
		r := rand.New(rand.NewPCG(seed, story))
		space := fmt.Sprintf("%d ", story)
		policies := map[string]model.Rules{"a": modeltest.RandomPolicy(r), "b": modeltest.RandomPolicy(r), "c": modeltest.RandomPolicy(r)}
		asModel := modeltest.NewRows()
		clock := int64(1)<<50 + r.Int64N(1<<51)
		var goals []int64
		takes := map[modeltest.RowID][]model.Take{}
		for step := range 20 {
			title := fmt.Sprintf("%s=%d, story %d, step %d", modeltest.SeedVariable, seed, story, step)
			name := string('a' + rune(r.IntN(3)))
			switch r.IntN(10) {
			case 0:
				policies[name] = modeltest.RandomPolicy(r)
			case 1:
				policies[name] = modeltest.ChangedPolicy(r, policies[name])
			}
			clock = modeltest.NextClock(r, clock, policies[name], goals)
			goals = goals[:0]
			look := r.IntN(10) == 0
			requests := make([]modeltest.Request, 1+r.IntN(5))
			for i := range requests {
				requests[i] = randomRequest(r, policies, takes, space, look)
			}
			if r.IntN(5) == 0 {
				compareOne(t, pool, title, requests[0].Parts[0], clock, asModel)
				compareRows(t, pool, title, space, asModel)
				continue
			}
			asModel.DecideAll(requests, clock)
			for _, request := range requests {
				all := true
				for _, p := range request.Parts {
					if _, bucket := p.Policy.(model.TokenBucket); bucket && asModel.State(p).Log != "" {
						lends++
					}
					if p.Cost > 0 && p.Decision.Granted > 0 {
						takes[p.ID] = append(
							takes[p.ID],
							p.Decision.TakenBy(p.Policy, p.Cost, 1+r.Int64N(p.Decision.Granted)),
						)
					}
					if p.Decision.RetryAfter != model.Never {
						goals = append(goals, clock+p.Decision.RetryAfter)
					}
					goals = append(goals, clock+p.Decision.ResetAfter)
					all = all && p.Decision.RetryAfter != 0
				}
				switch {
				case look:
					looks++
				case request.Charge && request.Parts[0].Decision.Granted > 0:
					charges++
				case request.Charge:
					tooLarge++
				case request.Parts[0].Cost < 0 && request.Parts[0].Refund == nil:
					grants++
				case request.Parts[0].Cost < 0:
					refunds++
				case request.Parts[0].Decision.Granted > 0:
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
}

// TestTakesFromAllEqualModels compares rate_limit_take_all with the models.
func TestTakesFromAllEqualModels(t *testing.T) {
	t.Parallel()

	db, seed, taken, left := pgtest.New(t), limitertest.Seed(t), 0, 0
	enough := 10 * limitertest.Rounds(t)
	for story := uint64(0); story < uint64(2*enough) || min(taken, left) < enough; story++ {
		require.Less(t, story, uint64(3_000), "taken %d, left %d", taken, left)
		m, n, err := tellTakes(t, db.Pool, rand.New(rand.NewPCG(seed, story)), story, nil)
		require.NoError(t, err, "story %d", story)
		taken, left = taken+m, left+n
	}
}

// tellTakes sends requests of several parts to rate_limit_take_all, sometimes for rows with granted credit. tellTakes
// returns how many calls rate_limit_take_all decided, how many it left to rate_limit_all, and the first difference from
// the models. Most policies have one of the given algorithms. If none is given, policies have any algorithm.
func tellTakes(
	t *testing.T, pool *pgxpool.Pool, r *rand.Rand, story uint64, mostly []int16,
) (taken, left int, err error) {
	t.Helper()
	policy := func() model.Rules {
		for {
			p := modeltest.RandomPolicy(r)
			if a := p.Numbers().Algorithm; a != algorithm.SlidingLog &&
				(mostly == nil || slices.Contains(mostly, a) || r.IntN(10) == 0) {
				return p
			}
		}
	}
	space, durable := fmt.Sprintf("%d ", story), r.IntN(2) == 0
	policies := map[string]model.Rules{"a": policy(), "b": policy(), "c": policy()}
	asModel := modeltest.NewRows()
	clock := int64(1)<<50 + r.Int64N(1<<51)
	var goals []int64
	for range 20 {
		name := string('a' + rune(r.IntN(3)))
		switch r.IntN(10) {
		case 0:
			policies[name] = policy()
		case 1:
			policies[name] = modeltest.ChangedPolicy(r, policies[name])
		}
		clock, goals = modeltest.NextClock(r, clock, policies[name], goals), nil
		requests := make([]modeltest.Request, 1+r.IntN(3))
		for i := range requests {
			q := randomRequest(r, policies, nil, space, false)
			q.Count, q.Ahead = q.Count-q.Ahead, 0
			for j := range q.Parts {
				p := &q.Parts[j]
				p.Durable, p.ID.Key = durable, "{"+space+"}"+[...]string{"x", "ä"}[r.IntN(2)]
				if limit := p.Policy.Numbers().Limit; p.Cost > 0 && r.IntN(4) > 0 { // otherwise the cost would seldom fit
					p.Cost = 1 + r.Int64N(max(limit/4, 1))
				}
			}
			slices.SortFunc(q.Parts, func(a, b modeltest.Part) int { return cmp.Compare(a.ID.Name+a.ID.Key, b.ID.Name+b.ID.Key) })
			q.Parts = slices.CompactFunc(q.Parts, func(a, b modeltest.Part) bool { return a.ID == b.ID })
			requests[i] = q
		}
		from, into := rowSetOfModel(requests)
		asModel.DecideAll(requests, clock)
		for _, request := range requests {
			for _, p := range request.Parts {
				if p.Decision.RetryAfter != model.Never {
					goals = append(goals, clock+p.Decision.RetryAfter)
				}
				goals = append(goals, clock+p.Decision.ResetAfter)
			}
		}
		if from == nil { // rate_limit_take_all cannot decide the request, for example a grant
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
	policies map[string]model.Rules,
	takes map[modeltest.RowID][]model.Take,
	space string,
	look bool,
) modeltest.Request {
	request := modeltest.Request{Count: 1}
	if r.IntN(4) == 0 {
		request.Count = 1 + r.Int64N(5)
	}
	gives, grants := r.IntN(3) == 0, r.IntN(3) == 0
	if request.Charge = !look && !gives && r.IntN(6) == 0; !look && !gives && !request.Charge && r.IntN(3) == 0 {
		request.Ahead = 1 + r.Int64N(5)
		request.Count += request.Ahead
	}
	for range 1 + r.IntN(4) {
		name := string('a' + rune(r.IntN(3)))
		p := modeltest.Part{
			// All keys of a story are on one shard.
			ID:      modeltest.RowID{Name: space + name, Key: "{" + space + "}" + [...]string{"x", "y", "Y", "ä", "x:1"}[r.IntN(5)]},
			Durable: r.IntN(4) == 0,
			Policy:  policies[name],
		}
		switch cost := modeltest.RandomCost(r, p.Policy.Numbers().Limit); {
		case look:
		case !gives:
			p.Cost = max(cost, 1)
		case cost < 0:
			p.Cost = cost
		default:
			p.Cost = -max(cost, 1)
		}
		if request.Charge && r.IntN(4) == 0 {
			p.Cost = max(p.Policy.Numbers().Limit+model.MaxOwed(p.Policy)+r.Int64N(3)-1, 1)
		}
		if p.Cost < 0 && !grants {
			p.Cost, _, p.Refund = modeltest.RandomRefund(r, p.Policy, takes[p.ID], p.Cost, 1)
		}
		if !slices.ContainsFunc(
			request.Parts,
			func(q modeltest.Part) bool { return q.ID == p.ID && q.Durable == p.Durable },
		) {
			request.Parts = append(request.Parts, p)
		}
		if p.Cost > 1<<58 { // the product of cost and count must fit into a bigint
			request.Ahead = 0
		}
	}
	return request
}

// allZones returns the time zones of all parts.
func allZones(requests []modeltest.Request) (zones []string) {
	for _, request := range requests {
		for _, p := range request.Parts {
			zones = append(zones, p.Policy.Numbers().Zone)
		}
	}
	return zones
}

// allRefunds returns the arguments of rate_limit_all from $14 on.
func allRefunds(requests []modeltest.Request) []any {
	var parts []modeltest.Part
	for _, request := range requests {
		parts = append(parts, request.Parts...)
	}
	var refunds engine.RefundArguments
	for i, p := range parts {
		if p.Refund != nil {
			refunds.Set(i, len(parts), &p.Refund[0])
		}
	}
	return []any{refunds.Since, refunds.In, refunds.At, refunds.Spent}
}

// allLeased returns the leased units of each part, or the units whose lease ends.
func allLeased(requests []modeltest.Request) (leased []int64) {
	for _, request := range requests {
		for _, p := range request.Parts {
			if p.Refund != nil {
				leased = append(leased, p.Refund[0].Ended)
			} else {
				leased = append(leased, request.Ahead*p.Cost)
			}
		}
	}
	return leased
}

// allCharges tells for each part whether its request is a charge.
func allCharges(requests []modeltest.Request) (charges []bool) {
	for _, request := range requests {
		charges = append(charges, slices.Repeat([]bool{request.Charge}, len(request.Parts))...)
	}
	return charges
}

// compareOne decides a part with the function of the part's algorithm, and compares the decision.
func compareOne(t *testing.T, pool *pgxpool.Pool, title string, p modeltest.Part, clock int64, asModel modeltest.Rows) {
	t.Helper()
	if p.Refund != nil { // the function of the algorithm cannot report the end of a lease
		k := p.Refund[0]
		k.Ended = 0
		p.Refund = []model.Take{k}
	}
	one := modeltest.Step{
		Policy:   p.Policy,
		Durable:  p.Durable,
		Name:     p.ID.Name,
		Clock:    clock,
		Elements: []modeltest.Element{{Key: p.ID.Key, Cost: p.Cost, Count: 1, Refund: p.Refund}},
	}
	asModel.Decide(one)
	c := callOf("", one)
	require.NoError(t, c.Query(t.Context(), pool, false), title)
	got, want := c.Into[0].Decision, one.Elements[0].Decision
	got.State, want.State, got.DecidedAt = model.State{}, model.State{}, got.DecidedAt.UTC()
	if !c.Takes {
		want.DecidedAt = timeRead(clock)
	}
	require.Equal(t, want, got, "%s: %v", title, one)
}

// compareAll decides requests with rate_limit_all, and compares every decision.
func compareAll(t *testing.T, pool *pgxpool.Pool, title string, requests []modeltest.Request, clock int64, skip bool) {
	t.Helper()
	got := map[int64]model.Decision{}
	args := append(limitertest.AllArrays(requests), nil, nil, time.UnixMicro(clock))
	args = append(append(args, allRefunds(requests)...), skip, allZones(requests), allLeased(requests), allCharges(requests))
	err := queryDecisions(t.Context(), pool, engine.Text("all", ""), limitertest.AllArguments(args...),
		func(ord int64, d model.Decision) { got[ord] = d })
	require.NoError(t, err, "%s\n%v", title, requests)
	ord := int64(0)
	for i, request := range requests {
		for j, p := range request.Parts {
			ord++
			is, want := got[ord], p.Decision
			is.DecidedAt, want.DecidedAt = is.DecidedAt.UTC(), timeRead(clock)
			is.State.Capacity, is.State.Refill = want.State.Capacity, want.State.Refill // the database does not return them
			for _, d := range []*model.Decision{&is, &want} {
				d.State, d.Taken.Units = modeltest.Told(d.State), 0
			}
			require.Equal(t, want, is, "%s, request %d, part %d of %+v", title, i, j, requests)
		}
	}
	require.Len(t, got, int(ord), title)
}

// rowSetOfModel returns the rows that requests take from, and their parts. rowSetOfModel returns nil if
// rate_limit_take_all cannot decide the requests.
func rowSetOfModel(requests []modeltest.Request) (*engine.RowSet, []*engine.Part) {
	var asked []*engine.Request
	var into []*engine.Part
	var counts []int64
	for _, r := range requests {
		if r.Charge {
			return nil, nil
		}
		q := &engine.Request{Count: r.Count, Ahead: r.Ahead}
		for _, p := range r.Parts {
			q.Parts = append(q.Parts, engine.Part{
				Space: &engine.Space{Durable: p.Durable}, Rules: p.Policy, Name: p.ID.Name, Key: p.ID.Key, Cost: p.Cost,
			})
			counts = append(counts, r.Count)
		}
		for i := range q.Parts {
			into = append(into, &q.Parts[i])
		}
		asked = append(asked, q)
	}
	return engine.RowSetOf(asked, into, counts), into
}

// takesDiffer decides requests with rate_limit_take_all, and compares every decision. The result left tells whether
// rate_limit_take_all called rate_limit_all.
func takesDiffer(
	ctx context.Context, pool *pgxpool.Pool, requests []modeltest.Request, clock int64, from *engine.RowSet, into []*engine.Part,
) (left bool, err error) {
	var owners []int32
	var counts []int64
	var want []model.Decision
	for i, r := range requests {
		for _, p := range r.Parts {
			owners, counts, want = append(owners, int32(i)), append(counts, r.Count), append(want, p.Decision)
		}
	}
	d := engine.NewDatabase(pool, "", func() time.Time { return time.UnixMicro(clock) })
	c := d.TakeAll(from, into, owners, counts, engine.Transaction{})
	from.Ended = func(l bool) { left = l }
	if err := c.Query(ctx, pool, false); err != nil {
		return left, err
	}
	for i := range want {
		is, want := into[i].Decision, want[i]
		is.DecidedAt = is.DecidedAt.UTC()
		for _, d := range []*model.Decision{&is, &want} {
			d.State, d.Taken.Units = modeltest.Told(d.State), 0
		}
		if !reflect.DeepEqual(want, is) {
			return left, fmt.Errorf("part %d, left %v: SQL %+v, model %+v", i, left, is, want)
		}
	}
	return left, nil
}

func compareRows(t *testing.T, pool *pgxpool.Pool, title, space string, asModel modeltest.Rows) {
	t.Helper()
	require.NoError(t, rowsDiffer(t, pool, space, asModel), title)
}

// rowsDiffer compares every column of every row.
func rowsDiffer(t *testing.T, pool *pgxpool.Pool, space string, asModel modeltest.Rows) error {
	t.Helper()
	for durable, want := range asModel {
		found, err := pool.Query(
			context.Background(),
			"SELECT "+pgtest.RowColumns+" FROM "+pgtest.Table(durable)+" WHERE prefix = ANY ($1)",
			[]string{space + "a", space + "b", space + "c"},
		)
		require.NoError(t, err)
		is := map[modeltest.RowID]modeltest.Row{}
		for found.Next() {
			id, row, err := pgtest.ScanRow(found)
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

// rate_limit_all first reads rows without locks if a row is missing. If the rows deny a request, the request is denied
// without a lock. If not, all rows of the request are locked before the decision.
func TestSetsBesideANewRowAreDecidedAtOneInstant(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	type told struct {
		Granted, Remaining int64
		RetryAfter         *int64 `db:"retry_after_us"`
	}
	in := func(d time.Duration) *int64 { return new(d.Microseconds()) }
	db := pgtest.New(t)
	for name, change := range map[string]struct {
		take         int64 // what was taken earlier, from a limit of 10
		inTx         func(ctx context.Context, tx pgx.Tx, limiter *ratelimit.Limiter) error
		locked, seen told // the results of a take of 3 units
	}{
		"less room": {8, func(ctx context.Context, tx pgx.Tx, limiter *ratelimit.Limiter) error {
			_, err := limiter.WithTx(tx).Allow(ctx, "key")
			return err
		}, told{Granted: 0, Remaining: 1, RetryAfter: in(limitertest.Year)}, told{Granted: 0, Remaining: 2, RetryAfter: in(limitertest.Year)}},
		"more room": {10, func(ctx context.Context, tx pgx.Tx, limiter *ratelimit.Limiter) error {
			_, err := limiter.WithTx(tx).Grant(ctx, "key", 5)
			return err
		}, told{Granted: 1, Remaining: 2, RetryAfter: in(0)}, told{Granted: 0, Remaining: 0, RetryAfter: in(limitertest.Year)}},
		"no row": {10, func(ctx context.Context, tx pgx.Tx, limiter *ratelimit.Limiter) error {
			return limiter.WithTx(tx).Reset(ctx, "key")
		}, told{Granted: 1, Remaining: 7, RetryAfter: in(0)}, told{Granted: 0, Remaining: 0, RetryAfter: in(limitertest.Year)}},
	} {
		for _, together := range []bool{false, true} { // whether one request has both rows, the existing row and the new row
			t.Run(fmt.Sprintf("%s, together %t", name, together), func(t *testing.T) { // one after the other, in one database
				pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_ephemeral")
				limiter := limitertest.New(
					t,
					db.Pool,
					ratelimit.Config{
						Name:   "known",
						Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year},
					},
					ratelimit.ClientConfig{Test: limitertest.Frozen(limitertest.T0)},
				)
				_, err := limiter.AllowN(t.Context(), "key", change.take)
				require.NoError(t, err)
				holder, caller := pgtest.Begin(t, db), pgtest.Begin(t, db)
				require.NoError(t, change.inTx(t.Context(), holder, limiter))

				answer := testkit.Later(func() ([]told, error) { // the new row's key is longer, so the new row comes first
					rows, err := caller.Query(context.Background(), `SELECT granted, remaining, retry_after_us
						FROM rate_limit_all(ARRAY[1, CASE WHEN $1 THEN 1 ELSE 2 END], '{known,new}', '{key,longer key}', '{f,f}',
							'{1,1}', '{10,10}', ARRAY[$2::bigint, $2], '{0,0}', '{3,1}', now => $3)
						ORDER BY ord`, together, limitertest.Year.Microseconds(), limitertest.T0)
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
				made := modeltest.RowID{Name: "new", Key: "longer key"}
				if together {
					require.NoError(t, holder.Rollback(t.Context()))
					require.Equal(t, []told{change.seen, {Granted: 0, Remaining: 10, RetryAfter: in(0)}}, got)
					require.NotContains(t, pgtest.StoredRows(t, caller, false), made)
				} else {
					require.Equal(t, []told{change.locked, {Granted: 1, Remaining: 9, RetryAfter: in(0)}}, got)
					require.Contains(t, pgtest.StoredRows(t, caller, false), made)
				}
			})
		}
	}
}

// TestLeasesOfABucketInSQL compares leases and refunds of a bucket with the model.
func TestLeasesOfABucketInSQL(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool
	seed := limitertest.Seed(t)
	kept := 0 // the number of refunds that left room for leases
	enough := 6 * limitertest.Rounds(t)
	for story := uint64(0); story < uint64(enough) || kept < enough; story++ {
		require.Less(t, story, uint64(3_000), "kept %d", kept)
		r := rand.New(rand.NewPCG(seed, story))
		bucket := model.TokenBucket{Capacity: 100 + r.Int64N(3000), Refill: 1 + r.Int64N(50), Every: model.Duration(1 + r.Int64N(2e7))}
		part := modeltest.Part{ID: modeltest.RowID{Name: fmt.Sprintf("%d a", story), Key: "key"}, Policy: bucket}
		asModel := modeltest.NewRows()
		clock, period := int64(1)<<50, bucket.Lasts()/model.LeasesInBucket
		var takes []model.Take
		for step := range 60 {
			clock += modeltest.OneOf(r, []int64{0, 0, r.Int64N(period + 1), r.Int64N(2*period + 1), period, 2 * period})
			switch r.IntN(20) {
			case 0:
				clock += r.Int64N(bucket.Lasts())
			case 1:
				clock -= r.Int64N(2 * bucket.Lasts())
			}
			request := modeltest.Request{Parts: []modeltest.Part{part}, Count: 1}
			p := &request.Parts[0]
			if p.Cost = 1 + r.Int64N(20); len(takes) > 0 && r.IntN(2) == 0 {
				k := takes[len(takes)-1-r.IntN(min(len(takes), 4))]
				if r.IntN(2) == 0 {
					k.Ended = r.Int64N(k.Units + 1)
				}
				p.Cost, p.Refund = -k.Units, []model.Take{k}
				full := k
				full.Ended = model.Never
				unleased := asModel.State(*p)
				unleased.Log = ""
				_, without := bucket.Refund(unleased, clock, full)
				_, with := bucket.Refund(asModel.State(*p), clock, k)
				if without.Remaining > with.Remaining {
					kept++
				}
			} else if r.IntN(2) == 0 {
				request.Ahead = r.Int64N(1 + bucket.Capacity/40)
				request.Count += request.Ahead
			}
			title := fmt.Sprintf("%s=%d, story %d, step %d", modeltest.SeedVariable, seed, story, step)
			// rate_limit_take_token_bucket does not change leases.
			if request.Ahead == 0 && r.IntN(2) == 0 {
				compareOne(t, pool, title, *p, clock, asModel)
			} else {
				requests := []modeltest.Request{request}
				asModel.DecideAll(requests, clock)
				if d := requests[0].Parts[0].Decision; p.Cost > 0 && d.Granted > 0 {
					takes = append(takes, d.TakenBy(bucket, p.Cost, d.Granted))
				}
				compareAll(t, pool, title, requests, clock, false)
			}
			compareRows(t, pool, title, strings.TrimSuffix(part.ID.Name, "a"), asModel)
		}
	}
}

// rate_limit_all also refuses arguments that the Go package never sends.
func TestAllFunctionRefusesBadParts(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	pool := pgtest.New(t).Pool
	good := func() []any {
		return limitertest.AllArguments(append(limitertest.AllArrays([]modeltest.Request{
			{Parts: []modeltest.Part{
				{ID: modeltest.RowID{Name: "a", Key: "x"}, Policy: model.FixedWindow{Limit: 3, Window: time.Hour}, Cost: 1},
				{ID: modeltest.RowID{Name: "b", Key: "y"}, Policy: model.TokenBucket{Capacity: 3, Refill: 1, Every: time.Hour}, Cost: 1},
			}, Count: 1},
			{
				Parts: []modeltest.Part{{ID: modeltest.RowID{Name: "a", Key: "y"}, Policy: model.SlidingWindow{Limit: 3, Window: time.Hour}, Cost: 1}},
				Count: 1,
			},
		}), nil, nil, limitertest.T0)...)
	}
	_, err := pool.Exec(t.Context(), engine.Text("all", ""), good()...)
	require.NoError(t, err)
	stored := pgtest.StoredRows(t, pool, false)
	for name, change := range map[string]struct {
		argument int
		value    any
	}{
		"requests that descend":        {0, []int32{1, 1, 0}},
		"a request that is torn":       {0, []int32{0, 1, 0}},
		"no request":                   {0, []*int32{nil, nil, nil}},
		"too few names":                {1, []string{"a", "b"}},
		"an empty name":                {1, []string{"", "b", "a"}},
		"a name that is too long":      {1, []string{strings.Repeat("n", 129), "b", "a"}},
		"an empty key":                 {2, []string{"x", "", "z"}},
		"a key that is too long":       {2, []string{"x", "y", strings.Repeat("k", 513)}},
		"no key":                       {2, []*string{nil, nil, nil}},
		"no keys":                      {2, []string{}},
		"no durable":                   {3, []*bool{nil, nil, nil}},
		"too few leased":               {19, []int64{0, 0}},
		"too few charges":              {20, []bool{true, true}},
		"an unknown algorithm":         {4, []int16{1, 9, 2}},
		"a limit of 0":                 {5, []int64{3, 3, 0}},
		"a limit out of range":         {5, []int64{1 << 62, 3, 3}},
		"a span of 0":                  {6, []int64{0, 1, 1}},
		"a bucket that takes an age":   {6, []int64{1, 1 << 60, 1}},
		"no refill":                    {7, []int64{0, 0, 0}},
		"a negative cost":              {8, []int64{1, -1, 1}},
		"a cost beside a negative one": {8, []int64{-1, 1, 1}},
		"a negative cost and no limit": {5, []int64{3, 3, -1}},
		"a cost of 0 beside others":    {8, []int64{1, 0, 1}},
		"a count of 0":                 {9, []int64{0, 0, 1}},
		"the same row in one request":  {1, []string{"a", "a", "a"}},
	} {
		args := good()
		args[change.argument] = change.value
		if name == "the same row in one request" {
			args[2] = []string{"x", "x", "x"}
		}
		_, err := pool.Exec(t.Context(), engine.Text("all", ""), args...)
		var refused *pgconn.PgError
		require.ErrorAs(t, err, &refused, name)
		require.Equal(t, "22023", refused.Code, "%s: %v", name, err)
		require.Contains(t, err.Error(), "rate_limit: ", name)
		require.Equal(t, stored, pgtest.StoredRows(t, pool, false), name)
	}
}
