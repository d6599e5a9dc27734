package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// threeLimits are limiters for an address, a user and all together, of every algorithm and in both tables.
func threeLimits(t *testing.T, db DBTX, address, user, everybody int64) (a, b, c *Limiter) {
	t.Helper()
	client := newClient(t, db, ClientConfig{Test: frozen(t0)})
	a = client.limiter(t, Config{Name: "address", Policy: SlidingWindow{Limit: address, Window: year}})
	b = client.limiter(
		t,
		Config{Name: "user", Policy: TokenBucket{Capacity: user, Refill: 1, Every: 24 * time.Hour}, Durable: true},
	)
	c = client.limiter(t, Config{Name: "all", Policy: FixedWindow{Limit: everybody, Window: year}})
	return a, b, c
}

func TestAllowAllTakesFromAllOrFromNone(t *testing.T) {
	t.Parallel()

	pool := pgtest.New(t).Pool
	a, b, c := threeLimits(t, pool, 5, 4, 3)
	requests := []Request{a.Request("{all}192.0.2.1", 1), b.Request("{all}ann", 2), c.Request("all", 1)}

	first, err := AllowAll(t.Context(), requests...)
	require.NoError(t, err)
	require.True(t, first.Allowed)
	require.Zero(t, first.RetryAfter)
	for i, want := range []Result{
		modelResults(a.model.Rules[0], t0, 1)[0], modelResults(b.model.Rules[0], t0, 2)[0], modelResults(c.model.Rules[0], t0, 1)[0],
	} {
		require.Equal(t, want, utc(first.Each[i]))
	}
	second, err := AllowAll(t.Context(), requests...)
	require.NoError(t, err)
	require.True(t, second.Allowed)

	// Now the bucket is empty. The others have room, and keep it.
	denied, err := AllowAll(t.Context(), requests...)
	require.NoError(t, err)
	require.False(t, denied.Allowed)
	for i, refused := range []bool{false, true, false} {
		require.False(t, denied.Each[i].Allowed, "nothing was taken")
		require.Equal(t, refused, denied.Each[i].RetryAfter > 0)
	}
	require.Equal(t, 2*24*time.Hour, denied.RetryAfter) // for two tokens
	require.Equal(t, denied.RetryAfter, denied.Each[1].RetryAfter)
	for i, want := range []int64{3, 0, 1} {
		require.Equal(t, want, denied.Each[i].Remaining)
	}
	require.EqualValues(t, 2, taken(t, pool, a.Config(), "{all}192.0.2.1"))
	require.EqualValues(t, 4, taken(t, pool, b.Config(), "{all}ann"))
	require.EqualValues(t, 2, taken(t, pool, c.Config(), "all"))

	// If two refuse, the longer time is told.
	_, err = c.Allow(t.Context(), "all")
	require.NoError(t, err)
	denied, err = AllowAll(t.Context(), requests...)
	require.NoError(t, err)
	require.Equal(t, year, denied.RetryAfter)
	require.Equal(t, 2*24*time.Hour, denied.Each[1].RetryAfter)

	// The limiters' own calls see what was taken.
	one, err := a.Peek(t.Context(), "{all}192.0.2.1")
	require.NoError(t, err)
	require.EqualValues(t, 3, one.Remaining)
}

// A request that one limit refuses may come from anywhere, so no row of another limit may be made for it.
func TestDenialOfAllWritesNothing(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	pool := db.Pool
	a, b, c := threeLimits(t, pool, 5, 5, 1)
	_, err := c.Allow(t.Context(), "all")
	require.NoError(t, err)
	before := [2]map[modeltest.RowID]modeltest.Row{storedRows(t, pool, false), storedRows(t, pool, true)}
	tx := pgtest.Begin(t, db)
	for i := range 20 {
		denied, err := allowAllTx(
			t.Context(),
			tx,
			a.Request(fmt.Sprint(i), 1),
			b.Request(fmt.Sprint(i), 1),
			c.Request("all", 1),
		)
		require.NoError(t, err)
		require.False(t, denied.Allowed)
		require.EqualValues(t, 5, denied.Each[0].Remaining)
	}
	for _, config := range []Config{a.Config(), b.Config()} {
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
	several := a.client.limiter(
		t,
		Config{Name: "address", Policy: All(a.Config().Policy, FixedWindow{Limit: 2, Window: year})},
	)
	schema := newLimiter(t, db.Pool, Config{Name: "x", Policy: a.Config().Policy}, ClientConfig{Schema: "else"})
	tests := map[string]struct {
		requests []Request
		index    int
		is       error
		says     string
	}{
		"none":     {nil, 0, nil, "there are 0 requests; pass 1 to 100"},
		"too many": {make([]Request, 101), 0, nil, "there are 101 requests"},
		"no limiter": {
			[]Request{a.Request("x", 1), {}},
			1,
			errNoLimiter,
			"request 1 of AllowAll: it has no limiter",
		},
		"no key": {
			[]Request{a.Request("x", 1), b.Request("", 1)},
			1,
			ErrInvalidKey,
			"request 1 of AllowAll: invalid key",
		},
		"a negative cost": {
			[]Request{a.Request("x", -1)},
			0,
			ErrInvalidCost,
			"request 0 of AllowAll: invalid cost: it is -1, and must be at least 1",
		},
		"a cost of 0": {
			[]Request{a.Request("x", 1), b.Request("x", 0)},
			1,
			ErrInvalidCost,
			"it is 0, and must be at least 1",
		},
		"a cost above one limit": {
			[]Request{a.Request("x", 5), b.Request("x", 6)},
			1,
			ErrCostExceedsLimit,
			"6 can never fit into 5",
		},
		"the same key twice": {
			[]Request{a.Request("x", 1), b.Request("x", 1), a.Request("x", 1)},
			2,
			errSameKey,
			"ask once, for the sum of the costs",
		},
		"the same key, other policy": {
			[]Request{a.Request("x", 1), several.Request("x", 1)},
			1,
			errSameKey,
			"same limiter and key",
		},
		"two databases": {
			[]Request{a.Request("x", 1), elsewhere.Request("x", 1)},
			1,
			errOtherClient,
			"another client",
		},
		"two schemas": {
			[]Request{a.Request("x", 1), schema.Request("x", 1)},
			1,
			errOtherClient,
			"another client",
		},
	}
	over, end := context.WithCancel(t.Context())
	end()
	for name, test := range tests {
		for _, ctx := range []context.Context{t.Context(), over} {
			results, err := AllowAll(ctx, test.requests...)
			var refused *RequestError
			require.ErrorAs(t, err, &refused, name)
			require.Equal(t, test.index, refused.Index, name)
			require.ErrorContains(t, err, test.says, name)
			require.Zero(t, results, name)
			if test.is != nil {
				require.ErrorIs(t, err, test.is, name)
			}
		}
	}
	require.Empty(t, storedRows(t, db.Pool, false))
	require.Empty(t, storedRows(t, db.Pool, true))
}

// The function refuses what Go would have refused before.
func TestAllFunctionRefusesBadParts(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	pool := pgtest.New(t).Pool
	good := func() []any {
		return append(allArrays([]modeltest.Request{
			{Parts: []modeltest.Part{
				{ID: modeltest.RowID{Name: "a", Key: "x"}, Policy: model.FixedWindow{Limit: 3, Window: time.Hour}, Cost: 1},
				{ID: modeltest.RowID{Name: "b", Key: "y"}, Policy: model.TokenBucket{Capacity: 3, Refill: 1, Every: time.Hour}, Cost: 1},
			}, Count: 1},
			{
				Parts: []modeltest.Part{{ID: modeltest.RowID{Name: "a", Key: "y"}, Policy: model.SlidingWindow{Limit: 3, Window: time.Hour}, Cost: 1}},
				Count: 1,
			},
		}), nil, nil, t0, nil, nil, nil, nil, false, nil, nil)
	}
	_, err := pool.Exec(t.Context(), engine.Text("all", ""), good()...)
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
		"too few leased":               {19, []int64{0, 0}},
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
		require.Equal(t, stored, storedRows(t, pool, false), name)
	}
}

// Many callers ask at once on four pools. Exactly as many get through as the smallest limit allows, and every
// limit has counted exactly those.
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
	testkit.Together(users*tries, func(i int) {
		user, l := i%users, processes[i%len(pools)]
		requests := []Request{
			l.a.Request(fmt.Sprint("{all}address ", i%7), 1),
			l.b.Request(fmt.Sprint("{all}user ", user), 1),
			l.c.Request("all", 1),
		}
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
		require.Equal(t, n, taken(t, db.Pool, processes[0].b.Config(), fmt.Sprint("{all}user ", user)))
		total += n
	}
	require.EqualValues(t, everybody, total) // 10 × 25 would be 250
	require.EqualValues(t, everybody, taken(t, db.Pool, processes[0].c.Config(), "all"))
	var addresses int64
	for i := range 7 {
		addresses += taken(t, db.Pool, processes[0].a.Config(), fmt.Sprint("{all}address ", i))
	}
	require.EqualValues(t, everybody, addresses)
}

// A limit that everybody shares does not keep sets from leaving together.
func TestSetsAreCoalesced(t *testing.T) {
	t.Parallel()

	const calls = 200
	db := pgtest.New(t)
	pool, counted := tracedPool(t, db)
	client := newClient(t, pool, ClientConfig{MaxInFlight: 1})
	a := client.limiter(t, Config{Name: "address", Policy: FixedWindow{Limit: 10, Window: year}})
	b := client.limiter(
		t,
		Config{Name: "user", Policy: TokenBucket{Capacity: 10, Refill: 1, Every: 24 * time.Hour}, Durable: true},
	)
	c := client.limiter(t, Config{Name: "all", Policy: FixedWindow{Limit: 1000, Window: year}})
	holder := pgtest.Begin(t, db.Of("all"))
	pgtest.Exec(t, holder, "LOCK TABLE rate_limit_ephemeral")
	blocked := testkit.Later(func() (Result, error) { return a.Allow(context.Background(), "{all}blocked") })
	pgtest.WaitUntilBlocked(t, db.Pool, 1)
	finished := make([]func() (Results, error), calls)
	for i := range calls {
		finished[i] = testkit.Later(func() (Results, error) {
			return AllowAll(
				context.Background(),
				a.Request(fmt.Sprint("{all}", i), 1),
				b.Request(fmt.Sprint("{all}", i), 1),
				c.Request("all", 1),
			)
		})
	}
	testkit.WaitUntil(t, func() bool { return a.client.inQueue() == calls })
	require.NoError(t, holder.Commit(t.Context()))
	_, err := blocked()
	require.NoError(t, err)
	for _, call := range finished {
		results, err := call()
		require.NoError(t, err)
		require.True(t, results.Allowed)
	}
	require.EqualValues(t, calls, taken(t, db.Pool, c.Config(), "all"))
	require.Less(t, counted.count(), calls) // 4, unless the machine takes so long that some are asked again
}

func TestAllowAllInATransaction(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	a, b, c := threeLimits(t, db.Pool, 5, 5, 5)
	for _, commit := range []bool{false, true} {
		tx := pgtest.Begin(t, db)
		results, err := allowAllTx(t.Context(), tx, a.Request("x", 1), b.Request("y", 2), c.Request("z", 3))
		require.NoError(t, err)
		require.True(t, results.Allowed)
		if !commit {
			require.NoError(t, tx.Rollback(t.Context()))
			require.Empty(t, storedRows(t, db.Pool, false))
			continue
		}
		require.NoError(t, tx.Commit(t.Context()))
		require.EqualValues(t, 1, taken(t, db.Pool, a.Config(), "x"))
		require.EqualValues(t, 2, taken(t, db.Pool, b.Config(), "y"))
		require.EqualValues(t, 3, taken(t, db.Pool, c.Config(), "z"))
	}

	// On a limiter of one connection, too.
	tx := pgtest.Begin(t, db)
	a, b, _ = threeLimits(t, tx, 5, 5, 5)
	results, err := AllowAll(t.Context(), a.Request("x", 4), b.Request("y", 4))
	require.NoError(t, err)
	require.Equal(t, []bool{true, false}, []bool{results.Each[0].RetryAfter == 0, results.Each[1].RetryAfter == 0})
	require.NoError(t, tx.Rollback(t.Context()))
}

// AllowAll with a durable limiter that asks for it commits synchronously.
func TestAllowAllWaitsForTheLogIfOneLimiterDoes(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "pages, plans and settings of the session that decides")

	for _, synchronous := range []bool{false, true} {
		db := pgtest.New(t)
		probe(t, db)
		client := newClient(t, db.Pool, ClientConfig{})
		quick := client.limiter(t, Config{Name: "quick", Policy: FixedWindow{Limit: 5, Window: year}})
		durable := client.limiter(
			t,
			Config{
				Name:              "durable",
				Policy:            FixedWindow{Limit: 5, Window: year},
				Durable:           true,
				SynchronousCommit: synchronous,
			},
		)
		_, err := AllowAll(t.Context(), quick.Request("x", 1), durable.Request("x", 1))
		require.NoError(t, err)
		want := "off"
		if synchronous {
			want = "on"
		}
		require.Equal(t, want, pgtest.Scalar[string](t, db.Pool, "SELECT synchronous_commit FROM probe"))
	}
}

// A request that is printed or logged shows no key.
func TestRequestThatIsPrinted(t *testing.T) {
	t.Parallel()

	pool, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/nothing")
	require.NoError(t, err)
	defer pool.Close()
	request := newLimiter(
		t,
		pool,
		Config{Name: "api", Policy: FixedWindow{Limit: 10, Window: time.Second}},
	).Request("personal", 2)
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
		require.Equal(t, "2 of api", fmt.Sprintf(verb, request), verb)
		require.NotContains(
			t,
			fmt.Sprintf(verb, map[string]any{"many": []*Request{&request}, "one": &request}),
			"personal",
			verb,
		)
	}
	var log strings.Builder
	for _, logger := range []*slog.Logger{slog.New(slog.NewTextHandler(&log, nil)), slog.New(slog.NewJSONHandler(&log, nil))} {
		logger.Info("asked", "request", request, "pointer", &request, "many", []Request{request})
	}
	require.NotContains(t, log.String(), "personal")
	require.Equal(t, "of no limiter", fmt.Sprint(Request{}))
}
