package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// threeLimits are limiters for an address, a user and all together, of every algorithm and in both tables.
func threeLimits(t *testing.T, db DBTX, address, user, everybody int64) (a, b, c *Limiter) {
	t.Helper()
	a = newLimiter(t, db, Config{Name: "address", Policy: SlidingWindow{Limit: address, Window: year}, Timeout: amply, Test: frozen(t0)})
	b = newLimiter(t, db, Config{Name: "user", Policy: TokenBucket{Capacity: user, Refill: 1, Every: 24 * time.Hour}, Durable: true, Timeout: amply, Test: frozen(t0)})
	c = newLimiter(t, db, Config{Name: "all", Policy: FixedWindow{Limit: everybody, Window: year}, Timeout: amply, Test: frozen(t0)})
	return a, b, c
}

func TestAllowAllTakesFromAllOrFromNone(t *testing.T) {
	t.Parallel()

	pool := pgtest.New(t).Pool
	a, b, c := threeLimits(t, pool, 5, 4, 3)
	requests := []Request{a.Request("192.0.2.1", 1), b.Request("ann", 2), c.Request("all", 1)}

	first, err := AllowAll(t.Context(), requests...)
	require.NoError(t, err)
	require.True(t, first.Allowed)
	require.Zero(t, first.RetryAfter)
	for i, want := range []Result{
		modelResults(a.policy, t0, 1)[0], modelResults(b.policy, t0, 2)[0], modelResults(c.policy, t0, 1)[0],
	} {
		require.Equal(t, want, utc(first.Each[i]))
	}
	second, err := AllowAll(t.Context(), requests...)
	require.NoError(t, err)
	require.True(t, second.Allowed)

	// Now the bucket is empty; the others have room, and keep it.
	denied, err := AllowAll(t.Context(), requests...)
	require.NoError(t, err)
	require.False(t, denied.Allowed)
	require.Equal(t, []bool{true, false, true}, []bool{denied.Each[0].Allowed, denied.Each[1].Allowed, denied.Each[2].Allowed})
	require.Equal(t, 2*24*time.Hour, denied.RetryAfter) // for two tokens
	require.Equal(t, denied.RetryAfter, denied.Each[1].RetryAfter)
	for i, want := range []int64{3, 0, 1} {
		require.Equal(t, want, denied.Each[i].Remaining)
	}
	require.EqualValues(t, 2, taken(t, pool, a.config, "192.0.2.1"))
	require.EqualValues(t, 4, taken(t, pool, b.config, "ann"))
	require.EqualValues(t, 2, taken(t, pool, c.config, "all"))

	// Of two that refuse, the longer time is told.
	_, err = c.Allow(t.Context(), "all")
	require.NoError(t, err)
	denied, err = AllowAll(t.Context(), requests...)
	require.NoError(t, err)
	require.Equal(t, year, denied.RetryAfter)
	require.Equal(t, 2*24*time.Hour, denied.Each[1].RetryAfter)

	// The limiters' own calls see what was taken.
	one, err := a.Peek(t.Context(), "192.0.2.1")
	require.NoError(t, err)
	require.EqualValues(t, 3, one.Remaining)
}

// Whoever is refused by one limit may come from anywhere: no row of another limit may be made for him.
func TestDenialOfAllWritesNothing(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pool := db.Pool
	a, b, c := threeLimits(t, pool, 5, 5, 1)
	_, err := c.Allow(t.Context(), "all")
	require.NoError(t, err)
	before := [2]map[rowID]storedRow{storedRows(t, pool, false), storedRows(t, pool, true)}
	tx := begin(t, db)
	for i := range 20 {
		denied, err := AllowAllTx(t.Context(), tx, a.Request(fmt.Sprint(i), 1), b.Request(fmt.Sprint(i), 1), c.Request("all", 1))
		require.NoError(t, err)
		require.False(t, denied.Allowed)
		require.EqualValues(t, 5, denied.Each[0].Remaining)
	}
	for _, config := range []Config{a.config, b.config} {
		require.Zero(t, written(t, tx, config), config.Name)
	}
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, before[0], storedRows(t, pool, false))
	require.Equal(t, before[1], storedRows(t, pool, true))
}

func TestRequestsThatCannotBeAsked(t *testing.T) {
	t.Parallel()

	db, other := pgtest.New(t), pgtest.New(t)
	a, b, _ := threeLimits(t, db.Pool, 5, 5, 5)
	elsewhere, _, _ := threeLimits(t, other.Pool, 5, 5, 5)
	several := newLimiter(t, db.Pool, Config{Name: "address", Policy: All(a.policy, FixedWindow{Limit: 2, Window: year})})
	schema := newLimiter(t, db.Pool, Config{Name: "x", Policy: a.policy, Schema: "else"})
	tests := map[string]struct {
		requests []Request
		index    int
		is       error
		says     string
	}{
		"none":                       {nil, 0, nil, "there are 0 requests; pass 1 to 100"},
		"too many":                   {make([]Request, 101), 0, nil, "there are 101 requests"},
		"no limiter":                 {[]Request{a.Request("x", 1), {}}, 1, errNoLimiter, "request 1 of AllowAll: it has no limiter"},
		"no key":                     {[]Request{a.Request("x", 1), b.Request("", 1)}, 1, ErrInvalidKey, "request 1 of AllowAll: invalid key"},
		"a negative cost":            {[]Request{a.Request("x", -1)}, 0, ErrInvalidCost, "request 0 of AllowAll: invalid cost: it is -1, and must be at least 1"},
		"a cost of 0":                {[]Request{a.Request("x", 1), b.Request("x", 0)}, 1, ErrInvalidCost, "it is 0, and must be at least 1"},
		"a cost above one limit":     {[]Request{a.Request("x", 5), b.Request("x", 6)}, 1, ErrCostExceedsLimit, "6 can never fit into 5"},
		"the same key twice":         {[]Request{a.Request("x", 1), b.Request("x", 1), a.Request("x", 1)}, 2, errSameKey, "ask once, for the sum of the costs"},
		"the same key, other policy": {[]Request{a.Request("x", 1), several.Request("x", 1)}, 1, errSameKey, "same limiter and key"},
		"two databases":              {[]Request{a.Request("x", 1), elsewhere.Request("x", 1)}, 1, errOtherDatabase, "another database or schema"},
		"two schemas":                {[]Request{a.Request("x", 1), schema.Request("x", 1)}, 1, errOtherDatabase, "another database or schema"},
	}
	for name, test := range tests {
		results, err := AllowAll(t.Context(), test.requests...)
		var refused *RequestError
		require.ErrorAs(t, err, &refused, name)
		require.Equal(t, test.index, refused.Index, name)
		require.ErrorContains(t, err, test.says, name)
		require.Zero(t, results, name)
		if test.is != nil {
			require.ErrorIs(t, err, test.is, name)
		}
	}
	require.Empty(t, storedRows(t, db.Pool, false))
	require.Empty(t, storedRows(t, db.Pool, true))
}

// The function refuses what Go would have refused before.
func TestAllFunctionRefusesBadParts(t *testing.T) {
	t.Parallel()

	pool := pgtest.New(t).Pool
	good := func() []any {
		return append(allArrays([]modelRequest{
			{parts: []modelPart{
				{id: rowID{"a", "x"}, policy: FixedWindow{Limit: 3, Window: time.Hour}, cost: 1},
				{id: rowID{"b", "y"}, policy: TokenBucket{Capacity: 3, Refill: 1, Every: time.Hour}, cost: 1},
			}, count: 1},
			{parts: []modelPart{{id: rowID{"a", "y"}, policy: SlidingWindow{Limit: 3, Window: time.Hour}, cost: 1}}, count: 1},
		}), nil, nil, t0, nil, nil, nil, nil, false)
	}
	_, err := pool.Exec(t.Context(), allStatement, good()...)
	require.NoError(t, err)
	stored := storedRows(t, pool, false)
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
		_, err := pool.Exec(t.Context(), allStatement, args...)
		var refused *pgconn.PgError
		require.ErrorAs(t, err, &refused, name)
		require.Equal(t, "22023", refused.Code, "%s: %v", name, err)
		require.Contains(t, err.Error(), "rate_limit: ", name)
		require.Equal(t, stored, storedRows(t, pool, false), name)
	}
}

// Of many at once on four pools, exactly as many get through as the smallest limit lets, and every limit has counted exactly those.
func TestAllowAllIsExactUnderConcurrency(t *testing.T) {
	t.Parallel()

	const users, tries, userLimit, everybody = 10, 60, 25, 200
	db := pgtest.New(t)
	var allowed [users]atomic.Int64
	pools := smallPools(t, db, 4)
	type limits struct{ a, b, c *Limiter }
	processes := make([]limits, len(pools))
	for i, pool := range pools {
		processes[i].a, processes[i].b, processes[i].c = threeLimits(t, pool, 1000, userLimit, everybody)
	}
	errs := make([]error, users*tries)
	together(users*tries, func(i int) {
		user, l := i%users, processes[i%len(pools)]
		requests := []Request{l.a.Request(fmt.Sprint("address ", i%7), 1), l.b.Request(fmt.Sprint("user ", user), 1), l.c.Request("all", 1)}
		rand.Shuffle(len(requests), func(i, j int) { requests[i], requests[j] = requests[j], requests[i] })
		results, err := AllowAll(t.Context(), requests...)
		if errs[i] = err; results.Allowed {
			allowed[user].Add(1)
		}
	})
	require.NoError(t, errors.Join(errs...))
	var total int64
	for user := range users {
		n := allowed[user].Load()
		require.LessOrEqual(t, n, int64(userLimit))
		require.Equal(t, n, taken(t, db.Pool, processes[0].b.config, fmt.Sprint("user ", user)))
		total += n
	}
	require.EqualValues(t, everybody, total) // 10 × 25 would be 250
	require.EqualValues(t, everybody, taken(t, db.Pool, processes[0].c.config, "all"))
	var addresses int64
	for i := range 7 {
		addresses += taken(t, db.Pool, processes[0].a.config, fmt.Sprint("address ", i))
	}
	require.EqualValues(t, everybody, addresses)
}

// Random sets of limits, new and known keys, in any order, beside calls for single limits, batches and resets.
func TestRandomSetsDoNotDeadlock(t *testing.T) {
	t.Parallel()

	const workers, calls = 16, 60
	db := pgtest.New(t)
	pools := smallPools(t, db, 4)
	errs := make([]error, workers)
	together(workers, func(w int) {
		r := rand.New(rand.NewPCG(testSeed(t), uint64(w)))
		var limiters []*Limiter
		for i := range 6 {
			policies := []Policy{FixedWindow{Limit: 1000, Window: year}, SlidingWindow{Limit: 40, Window: year}, TokenBucket{Capacity: 50, Refill: 1, Every: year}, SlidingLog{Limit: 60, Window: year}}
			l, err := New(pools[w%len(pools)], Config{Name: fmt.Sprint(i), Policy: policies[i%4], Durable: i%2 == 1, Timeout: amply, MaxInFlight: 3})
			errs[w] = errors.Join(errs[w], err)
			limiters = append(limiters, l)
		}
		several, err := New(pools[w%len(pools)], Config{Name: "several", Policy: All(limiters[0].policy, limiters[1].policy), Timeout: amply, MaxInFlight: 3})
		errs[w] = errors.Join(errs[w], err)
		limiters = append(limiters, several)
		key := func() string {
			return []string{"a", "bb", "c", "dd", "everybody", fmt.Sprint("new ", r.IntN(1000))}[r.IntN(6)]
		}
		for range calls {
			l := limiters[r.IntN(len(limiters))]
			var err error
			switch r.IntN(10) {
			case 0:
				_, err = l.Allow(t.Context(), key())
			case 1:
				_, err = l.Refund(t.Context(), forged(l, key(), 1))
			case 2:
				_, err = l.Grant(t.Context(), key(), 1)
			case 3:
				err = l.decide(t.Context(), l.db, []element{{key: "dd", cost: 1, count: 1}, {key: "a", cost: 1, count: 1}, {key: key(), cost: 1, count: 1}}, l.settings)
			case 4:
				err = l.Reset(t.Context(), key())
			default:
				var requests []Request
				for _, i := range r.Perm(len(limiters))[:1+r.IntN(len(limiters))] {
					requests = append(requests, limiters[i].Request(key(), 1))
				}
				_, err = AllowAll(t.Context(), requests...)
			}
			errs[w] = errors.Join(errs[w], err)
		}
	})
	require.NoError(t, errors.Join(errs...))
	require.Zero(t, deadlocks(t, db, pools...))
}

// What that test would see: two sets that lock their rows in the order given, because the function does not sort them, or takes any
// order for that of locking.
func TestLockingSetsInTheOrderGivenDeadlocks(t *testing.T) {
	t.Parallel()

	for name, oldNew := range map[string][]string{
		"as it is":    nil,
		"not sorted":  {`ORDER BY e.durable, octet_length(e.key) DESC, e.key COLLATE "C", e.name COLLATE "C", e.ord`, "ORDER BY e.ord"},
		"not checked": {"in_order := in_order AND (", "in_order := in_order OR ("},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			rewrite(t, db.Pool, "rate_limit_all", oldNew...)
			pool := smallPools(t, db, 1)[0]
			limiterA, limiterB, limiterC := threeLimits(t, pool, 10, 10, 10)
			part := func(limiter *Limiter, key string) modelPart {
				_, err := limiter.Allow(t.Context(), key) // makes the row
				require.NoError(t, err)
				return modelPart{id: rowID{limiter.config.Name, key}, durable: limiter.config.Durable, policy: limiter.policy, cost: 1}
			}
			a, b, c := part(limiterA, "x"), part(limiterB, "x"), part(limiterC, "m")
			ask := func(parts ...modelPart) func() (any, error) { // as given: AllowAll would put them in order
				args := append(allArrays([]modelRequest{{parts: parts, count: 1}}), nil, nil, nil, nil, nil, nil, nil, false)
				return later(func() (any, error) { return pool.Exec(context.Background(), allStatement, args...) })
			}
			holder := hold(t, db, limiterC.config, "m")
			one := ask(a, c, b) // in the order given it has the first, and waits for the second
			waitUntilBlocked(t, db.Pool, 1)
			other := ask(b, a)
			if oldNew != nil {
				waitUntilBlocked(t, db.Pool, 2)
			}
			require.NoError(t, holder.Commit(t.Context()))
			_, err1 := one()
			_, err2 := other()
			if oldNew == nil {
				require.NoError(t, errors.Join(err1, err2))
				require.Zero(t, deadlocks(t, db, pool))
				return
			}
			requireDeadlock(t, errors.Join(err1, err2))
		})
	}
}

// A limit that everybody shares does not keep sets from leaving together.
func TestSetsAreCoalesced(t *testing.T) {
	t.Parallel()

	const calls = 200
	db := pgtest.New(t)
	pool, counted := tracedPool(t, db)
	_, b, c := threeLimits(t, pool, 10, 10, 1000)
	a := newLimiter(t, pool, Config{Name: "address", Policy: FixedWindow{Limit: 10, Window: year}, Timeout: amply, MaxInFlight: 1})
	holder := begin(t, db)
	exec(t, holder, "LOCK TABLE rate_limit_ephemeral")
	blocked := later(func() (Result, error) { return a.Allow(context.Background(), "blocked") })
	waitUntilBlocked(t, db.Pool, 1)
	finished := make([]func() (Results, error), calls)
	for i := range calls {
		finished[i] = later(func() (Results, error) {
			return AllowAll(context.Background(), a.Request(fmt.Sprint(i), 1), b.Request(fmt.Sprint(i), 1), c.Request("all", 1))
		})
	}
	waitUntil(t, func() bool { return a.waiting() == calls })
	require.NoError(t, holder.Commit(t.Context()))
	_, err := blocked()
	require.NoError(t, err)
	for _, call := range finished {
		results, err := call()
		require.NoError(t, err)
		require.True(t, results.Allowed)
	}
	require.EqualValues(t, calls, taken(t, db.Pool, c.config, "all"))
	require.Less(t, counted.count(), 3+calls/10) // 4, unless the machine takes so long that some are asked again
}

func TestAllowAllInATransaction(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	a, b, c := threeLimits(t, db.Pool, 5, 5, 5)
	for _, commit := range []bool{false, true} {
		tx := begin(t, db)
		results, err := AllowAllTx(t.Context(), tx, a.Request("x", 1), b.Request("y", 2), c.Request("z", 3))
		require.NoError(t, err)
		require.True(t, results.Allowed)
		if !commit {
			require.NoError(t, tx.Rollback(t.Context()))
			require.Empty(t, storedRows(t, db.Pool, false))
			continue
		}
		require.NoError(t, tx.Commit(t.Context()))
		require.EqualValues(t, 1, taken(t, db.Pool, a.config, "x"))
		require.EqualValues(t, 2, taken(t, db.Pool, b.config, "y"))
		require.EqualValues(t, 3, taken(t, db.Pool, c.config, "z"))
	}

	// On a limiter of one connection, too.
	tx := begin(t, db)
	a, b, _ = threeLimits(t, tx, 5, 5, 5)
	results, err := AllowAll(t.Context(), a.Request("x", 4), b.Request("y", 4))
	require.NoError(t, err)
	require.Equal(t, []bool{true, false}, []bool{results.Each[0].Allowed, results.Each[1].Allowed})
	require.NoError(t, tx.Rollback(t.Context()))
}

// AllowAll with a durable limiter that asks for it commits synchronously.
func TestAllowAllWaitsForTheLogIfOneLimiterDoes(t *testing.T) {
	t.Parallel()

	for _, synchronous := range []bool{false, true} {
		db := pgtest.New(t)
		probe(t, db)
		quick := newLimiter(t, db.Pool, Config{Name: "quick", Policy: FixedWindow{Limit: 5, Window: year}, Timeout: amply})
		durable := newLimiter(t, db.Pool, Config{Name: "durable", Policy: FixedWindow{Limit: 5, Window: year}, Durable: true, SynchronousCommit: synchronous, Timeout: amply})
		_, err := AllowAll(t.Context(), quick.Request("x", 1), durable.Request("x", 1))
		require.NoError(t, err)
		want := "off"
		if synchronous {
			want = "on"
		}
		require.Equal(t, want, scalar[string](t, db.Pool, "SELECT synchronous_commit FROM probe"))
	}
}

func TestSeveralPolicies(t *testing.T) {
	t.Parallel()

	pool := pgtest.New(t).Pool
	now := t0
	config := Config{Name: "api", Timeout: amply, Test: TestConfig{Now: func() time.Time { return now }},
		Policy: All(SlidingWindow{Limit: 3, Window: time.Second}, FixedWindow{Limit: 5, Window: time.Hour})}
	l := newLimiter(t, pool, config)
	for i, want := range []Result{
		{Allowed: true, Limit: 3, Remaining: 2, ResetAfter: time.Hour},
		{Allowed: true, Limit: 3, Remaining: 1, ResetAfter: time.Hour},
		{Allowed: true, Limit: 3, Remaining: 0, ResetAfter: time.Hour},
		{Limit: 3, Remaining: 0, RetryAfter: 1333334 * time.Microsecond, ResetAfter: time.Hour},
	} {
		got, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
		want.DecidedAt = now
		require.Equal(t, want, utc(got), "call %d", i)
	}
	now = t0.Add(2 * time.Second)
	got, err := l.AllowN(t.Context(), "key", 2)
	require.NoError(t, err)
	require.Equal(t, Result{Allowed: true, Limit: 5, Remaining: 0, ResetAfter: time.Hour - 2*time.Second, DecidedAt: now}, utc(got))
	for _, call := range []func() (Result, error){
		func() (Result, error) { return l.Allow(t.Context(), "key") },
		func() (Result, error) { return l.Peek(t.Context(), "key") },
	} {
		got, err := call()
		require.NoError(t, err)
		require.Equal(t, Result{Limit: 5, RetryAfter: time.Hour - 2*time.Second, ResetAfter: time.Hour - 2*time.Second, DecidedAt: now}, utc(got))
	}
	_, err = l.AllowN(t.Context(), "key", 4)
	require.ErrorIs(t, err, ErrCostExceedsLimit) // of the smaller limit

	names := map[string]bool{}
	for id := range storedRows(t, pool, false) {
		names[id.name] = true
	}
	require.Equal(t, map[string]bool{"api": true, "api/2": true}, names)
	require.NoError(t, l.Reset(t.Context(), "key"))
	require.Empty(t, storedRows(t, pool, false))

	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	got, err = l.AllowNTx(t.Context(), tx, "key", 3)
	require.NoError(t, err)
	require.True(t, got.Allowed)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Empty(t, storedRows(t, pool, false))

	// A plain limiter of that name shares the first policy's rows.
	first, err := l.With(SlidingWindow{Limit: 3, Window: time.Second})
	require.NoError(t, err)
	_, err = first.AllowN(t.Context(), "key", 2)
	require.NoError(t, err)
	got, err = l.Peek(t.Context(), "key")
	require.NoError(t, err)
	require.EqualValues(t, 1, got.Remaining)
}

// Calls for the same key at the same time become one element, and are told what calls in a row are.
func TestSeveralPoliciesAreCoalesced(t *testing.T) {
	t.Parallel()

	policy := All(SlidingWindow{Limit: 30, Window: 7 * time.Second}, TokenBucket{Capacity: 50, Refill: 3, Every: 7 * time.Second})
	config := Config{Name: "test", Policy: policy, Timeout: amply, Test: frozen(t0)}
	pool := pgtest.New(t).Pool
	limiter, serial := newLimiter(t, pool, config), newLimiter(t, pool, config)
	const calls = 60
	want := make([]Result, calls)
	for i := range want {
		var err error
		want[i], err = serial.Allow(t.Context(), "in a row")
		require.NoError(t, err)
	}
	got, errs := make([]Result, calls), make([]error, calls)
	together(calls, func(i int) { got[i], errs[i] = limiter.Allow(t.Context(), "at once") })
	require.NoError(t, errors.Join(errs...))
	require.Equal(t, tally(want), tally(got))
}

// The policies of one limiter are given back to and granted to together, each within its own bounds.
func TestRefundAndGrantOfSeveralPolicies(t *testing.T) {
	t.Parallel()

	pool := pgtest.New(t).Pool
	now := t0
	l := newLimiter(t, pool, Config{Name: "api", Timeout: amply, Test: TestConfig{Now: func() time.Time { return now }},
		Policy: All(FixedWindow{Limit: 10, Window: time.Second}, SlidingLog{Limit: 15, Window: time.Hour})})
	told := func(result Result, err error) func(want Result) Result {
		t.Helper()
		require.NoError(t, err)
		return func(want Result) Result {
			t.Helper()
			want.Allowed, want.DecidedAt = true, now
			require.Equal(t, want, utc(result))
			return result
		}
	}
	eight := told(l.AllowN(t.Context(), "key", 8))(Result{Limit: 10, Remaining: 2, ResetAfter: time.Hour})
	now = now.Add(time.Second)
	four := told(l.AllowN(t.Context(), "key", 4))(Result{Limit: 15, Remaining: 3, ResetAfter: time.Hour})
	told(l.RefundN(t.Context(), eight, 6))(Result{Limit: 10, Remaining: 6, ResetAfter: time.Hour}) // the window that counted them is over
	told(l.Grant(t.Context(), "key", 5))(Result{Limit: 10, Remaining: 11, ResetAfter: time.Hour})
	ten := told(l.AllowN(t.Context(), "key", 10))(Result{Limit: 10, Remaining: 1, ResetAfter: time.Hour}) // 4 of the window's, 1 of the log's credit
	denied, err := l.AllowN(t.Context(), "key", 6)
	require.NoError(t, err)
	require.Equal(t, Result{Limit: 10, Remaining: 1, RetryAfter: time.Hour - time.Second, ResetAfter: time.Hour, DecidedAt: now}, utc(denied))
	told(l.Refund(t.Context(), four))(Result{Limit: 10, Remaining: 5, ResetAfter: time.Hour})
	told(l.RefundN(t.Context(), ten, 4))(Result{Limit: 10, Remaining: 9, ResetAfter: time.Hour}) // of each its credit first
	told(l.Refund(t.Context(), ten))(Result{Limit: 10, Remaining: 15, ResetAfter: time.Hour})
}

func TestAllIsValidated(t *testing.T) {
	t.Parallel()

	good := FixedWindow{Limit: 1, Window: time.Hour}
	nine := []Policy{good, good, good, good, good, good, good, good, good}
	for says, policy := range map[string]Policy{
		"is All of 0 policies, and needs 2 to 8": All(),
		"is All of 1 policies, and needs 2 to 8": All(good),
		"is All of 9 policies, and needs 2 to 8": All(nine...),
		"is All within All":                      All(good, All(good, good)),
		"is required":                            All(good, nil),
		"is 0, and must be at least 1":           All(good, FixedWindow{Window: time.Hour}),
	} {
		_, err := New(&pgxpool.Pool{}, Config{Name: "test", Policy: policy})
		var refused *ConfigError
		require.ErrorAs(t, err, &refused, says)
		require.ErrorContains(t, err, says)
	}
	_, err := New(&pgxpool.Pool{}, Config{Name: strings.Repeat("n", 127), Policy: All(good, good)})
	require.ErrorContains(t, err, "Config.Name has 129 bytes")
	_, err = New(&pgxpool.Pool{}, Config{Name: strings.Repeat("n", 126), Policy: All(nine[:8]...)})
	require.NoError(t, err)
}
