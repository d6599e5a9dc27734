package ratelimit_test

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

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

func TestAllowAllTakesFromAllOrFromNone(t *testing.T) {
	t.Parallel()

	pool := pgtest.New(t).Pool
	a, b, c := limitertest.ThreeLimits(t, pool, 5, 4, 3)
	requests := []ratelimit.Request{a.Request("{all}192.0.2.1", 1), b.Request("{all}ann", 2), c.Request("all", 1)}

	first, err := ratelimit.AllowAll(t.Context(), requests...)
	require.NoError(t, err)
	require.True(t, first.Allowed)
	require.Zero(t, first.RetryAfter)
	for i, want := range []ratelimit.Result{
		limitertest.ModelResults(limitertest.Model(a.Config().Policy).Rules[0], limitertest.T0, 1)[0], limitertest.ModelResults(limitertest.Model(b.Config().Policy).Rules[0], limitertest.T0, 2)[0], limitertest.ModelResults(limitertest.Model(c.Config().Policy).Rules[0], limitertest.T0, 1)[0],
	} {
		require.Equal(t, want, limitertest.Plain(first.Each[i]))
	}
	second, err := ratelimit.AllowAll(t.Context(), requests...)
	require.NoError(t, err)
	require.True(t, second.Allowed)

	// The bucket is empty now. The other limits have room, but a denied request takes nothing from them.
	denied, err := ratelimit.AllowAll(t.Context(), requests...)
	require.NoError(t, err)
	require.False(t, denied.Allowed)
	for i, refused := range []bool{false, true, false} {
		require.False(t, denied.Each[i].Allowed, "nothing was taken")
		require.Equal(t, refused, denied.Each[i].RetryAfter > 0)
	}
	require.Equal(t, 2*24*time.Hour, denied.RetryAfter) // the time until two tokens have flowed in
	require.Equal(t, denied.RetryAfter, denied.Each[1].RetryAfter)
	for i, want := range []int64{3, 0, 1} {
		require.Equal(t, want, denied.Each[i].Remaining)
	}
	require.EqualValues(t, 2, limitertest.Taken(t, pool, a.Config(), "{all}192.0.2.1"))
	require.EqualValues(t, 4, limitertest.Taken(t, pool, b.Config(), "{all}ann"))
	require.EqualValues(t, 2, limitertest.Taken(t, pool, c.Config(), "all"))

	// If two limits refuse, RetryAfter is the longer time.
	_, err = c.Allow(t.Context(), "all")
	require.NoError(t, err)
	denied, err = ratelimit.AllowAll(t.Context(), requests...)
	require.NoError(t, err)
	require.Equal(t, limitertest.Year, denied.RetryAfter)
	require.Equal(t, 2*24*time.Hour, denied.Each[1].RetryAfter)

	// Other calls of the limiters see the units that AllowAll took.
	one, err := a.Peek(t.Context(), "{all}192.0.2.1")
	require.NoError(t, err)
	require.EqualValues(t, 3, one.Remaining)
}

// Anybody may send a request that one limit refuses, so such a request must not make rows for the other limits.
func TestDenialOfAllWritesNothing(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	pool := db.Pool
	a, b, c := limitertest.ThreeLimits(t, pool, 5, 5, 1)
	_, err := c.Allow(t.Context(), "all")
	require.NoError(t, err)
	before := [2]map[modeltest.RowID]modeltest.Row{pgtest.StoredRows(t, pool, false), pgtest.StoredRows(t, pool, true)}
	tx := pgtest.Begin(t, db)
	for i := range 20 {
		denied, err := limitertest.AllowAllTx(
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
	for _, config := range []ratelimit.Config{a.Config(), b.Config()} {
		require.Zero(t, limitertest.Written(t, tx, config), config.Name)
	}
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, before[0], pgtest.StoredRows(t, pool, false))
	require.Equal(t, before[1], pgtest.StoredRows(t, pool, true))
}

func TestRequestsThatCannotBeAsked(t *testing.T) {
	t.Parallel()

	db, other := pgtest.New(t), pgtest.New(t)
	a, b, _ := limitertest.ThreeLimits(t, db.Pool, 5, 5, 5)
	elsewhere, _, _ := limitertest.ThreeLimits(t, other.Pool, 5, 5, 5)
	several := limitertest.Of(t, limitertest.Client(a),
		ratelimit.Config{Name: "address", Policy: ratelimit.All(a.Config().Policy, ratelimit.FixedWindow{Limit: 2, Window: limitertest.Year})},
	)
	schema := limitertest.New(t, db.Pool, ratelimit.Config{Name: "x", Policy: a.Config().Policy}, ratelimit.ClientConfig{Schema: "else"})
	tests := map[string]struct {
		requests []ratelimit.Request
		index    int
		is       error
		says     string
	}{
		"none":     {nil, 0, nil, "there are 0 requests; pass 1 to 100"},
		"too many": {make([]ratelimit.Request, 101), 0, nil, "there are 101 requests"},
		"no limiter": {
			[]ratelimit.Request{a.Request("x", 1), {}},
			1,
			ratelimit.ErrNoLimiter,
			"request 1 of the call: it has no limiter",
		},
		"no key": {
			[]ratelimit.Request{a.Request("x", 1), b.Request("", 1)},
			1,
			ratelimit.ErrInvalidKey,
			"request 1 of the call: invalid key",
		},
		"a negative cost": {
			[]ratelimit.Request{a.Request("x", -1)},
			0,
			ratelimit.ErrInvalidCost,
			"request 0 of the call: invalid cost: it is -1, and must be at least 1",
		},
		"a cost of 0": {
			[]ratelimit.Request{a.Request("x", 1), b.Request("x", 0)},
			1,
			ratelimit.ErrInvalidCost,
			"it is 0, and must be at least 1",
		},
		"a cost above one limit": {
			[]ratelimit.Request{a.Request("x", 5), b.Request("x", 6)},
			1,
			ratelimit.ErrCostExceedsLimit,
			"6 can never fit into 5",
		},
		"the same key twice": {
			[]ratelimit.Request{a.Request("x", 1), b.Request("x", 1), a.Request("x", 1)},
			2,
			ratelimit.ErrSameKey,
			"ask once, for the sum of the costs",
		},
		"the same key, other policy": {
			[]ratelimit.Request{a.Request("x", 1), several.Request("x", 1)},
			1,
			ratelimit.ErrSameKey,
			"same limiter and key",
		},
		"two databases": {
			[]ratelimit.Request{a.Request("x", 1), elsewhere.Request("x", 1)},
			1,
			ratelimit.ErrOtherClient,
			"another client",
		},
		"two schemas": {
			[]ratelimit.Request{a.Request("x", 1), schema.Request("x", 1)},
			1,
			ratelimit.ErrOtherClient,
			"another client",
		},
	}
	over, end := context.WithCancel(t.Context())
	end()
	for name, test := range tests {
		for _, ctx := range []context.Context{t.Context(), over} {
			results, err := ratelimit.AllowAll(ctx, test.requests...)
			var refused *ratelimit.RequestError
			require.ErrorAs(t, err, &refused, name)
			require.Equal(t, test.index, refused.Index, name)
			require.ErrorContains(t, err, test.says, name)
			require.Zero(t, results, name)
			if test.is != nil {
				require.ErrorIs(t, err, test.is, name)
			}
		}
	}
	require.Empty(t, pgtest.StoredRows(t, db.Pool, false))
	require.Empty(t, pgtest.StoredRows(t, db.Pool, true))
}

// Many callers ask at once on four pools. Exactly as many calls are admitted as the smallest limit allows, and each
// limit counts exactly these calls.
func TestAllowAllIsExactUnderConcurrency(t *testing.T) {
	t.Parallel()

	const users, tries, userLimit, everybody = 10, 60, 25, 200
	db := pgtest.New(t)
	var allowed [users]atomic.Int64
	pools := limitertest.SmallPools(t, db, 4)
	type limits struct{ a, b, c *ratelimit.Limiter }
	processes := make([]limits, len(pools))
	for i, pool := range pools {
		processes[i].a, processes[i].b, processes[i].c = limitertest.ThreeLimits(t, pool, 1000, userLimit, everybody)
	}
	errs := make([]error, users*tries)
	testkit.Together(users*tries, func(i int) {
		user, l := i%users, processes[i%len(pools)]
		requests := []ratelimit.Request{
			l.a.Request(fmt.Sprint("{all}address ", i%7), 1),
			l.b.Request(fmt.Sprint("{all}user ", user), 1),
			l.c.Request("all", 1),
		}
		rand.Shuffle(len(requests), func(i, j int) { requests[i], requests[j] = requests[j], requests[i] })
		results, err := ratelimit.AllowAll(t.Context(), requests...)
		if errs[i] = err; results.Allowed {
			allowed[user].Add(1)
		}
	})
	require.NoError(t, errors.Join(errs...))
	var total int64
	for user := range users {
		n := allowed[user].Load()
		require.LessOrEqual(t, n, int64(userLimit))
		require.Equal(t, n, limitertest.Taken(t, db.Pool, processes[0].b.Config(), fmt.Sprint("{all}user ", user)))
		total += n
	}
	require.EqualValues(t, everybody, total) // without the limit for everybody, total would be 10 × 25 = 250
	require.EqualValues(t, everybody, limitertest.Taken(t, db.Pool, processes[0].c.Config(), "all"))
	var addresses int64
	for i := range 7 {
		addresses += limitertest.Taken(t, db.Pool, processes[0].a.Config(), fmt.Sprint("{all}address ", i))
	}
	require.EqualValues(t, everybody, addresses)
}

func TestAllowAllInATransaction(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	a, b, c := limitertest.ThreeLimits(t, db.Pool, 5, 5, 5)
	for _, commit := range []bool{false, true} {
		tx := pgtest.Begin(t, db)
		results, err := limitertest.AllowAllTx(t.Context(), tx, a.Request("x", 1), b.Request("y", 2), c.Request("z", 3))
		require.NoError(t, err)
		require.True(t, results.Allowed)
		if !commit {
			require.NoError(t, tx.Rollback(t.Context()))
			require.Empty(t, pgtest.StoredRows(t, db.Pool, false))
			continue
		}
		require.NoError(t, tx.Commit(t.Context()))
		require.EqualValues(t, 1, limitertest.Taken(t, db.Pool, a.Config(), "x"))
		require.EqualValues(t, 2, limitertest.Taken(t, db.Pool, b.Config(), "y"))
		require.EqualValues(t, 3, limitertest.Taken(t, db.Pool, c.Config(), "z"))
	}

	// AllowAll also works on a single connection.
	tx := pgtest.Begin(t, db)
	a, b, _ = limitertest.ThreeLimits(t, tx, 5, 5, 5)
	results, err := ratelimit.AllowAll(t.Context(), a.Request("x", 4), b.Request("y", 4))
	require.NoError(t, err)
	require.Equal(t, []bool{true, false}, []bool{results.Each[0].RetryAfter == 0, results.Each[1].RetryAfter == 0})
	require.NoError(t, tx.Rollback(t.Context()))
}

// AllowAll commits synchronously if one of its limiters has SynchronousCommit.
func TestAllowAllWaitsForTheLogIfOneLimiterDoes(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "pages, plans and settings of the session that decides")

	for _, synchronous := range []bool{false, true} {
		db := pgtest.New(t)
		limitertest.Probe(t, db)
		client := limitertest.NewClient(t, db.Pool, ratelimit.ClientConfig{})
		quick := limitertest.Of(t, client, ratelimit.Config{Name: "quick", Policy: ratelimit.FixedWindow{Limit: 5, Window: limitertest.Year}})
		durable := limitertest.Of(t, client,
			ratelimit.Config{
				Name:              "durable",
				Policy:            ratelimit.FixedWindow{Limit: 5, Window: limitertest.Year},
				Durable:           true,
				SynchronousCommit: synchronous,
			},
		)
		_, err := ratelimit.AllowAll(t.Context(), quick.Request("x", 1), durable.Request("x", 1))
		require.NoError(t, err)
		want := "off"
		if synchronous {
			want = "on"
		}
		require.Equal(t, want, pgtest.Scalar[string](t, db.Pool, "SELECT synchronous_commit FROM probe"))
	}
}

// A printed or logged request shows no key.
func TestRequestThatIsPrinted(t *testing.T) {
	t.Parallel()

	pool, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/nothing")
	require.NoError(t, err)
	defer pool.Close()
	request := limitertest.New(
		t,
		pool,
		ratelimit.Config{Name: "api", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Second}},
	).Request("personal", 2)
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
		require.Equal(t, "2 of api", fmt.Sprintf(verb, request), verb)
		require.NotContains(
			t,
			fmt.Sprintf(verb, map[string]any{"many": []*ratelimit.Request{&request}, "one": &request}),
			"personal",
			verb,
		)
	}
	var log strings.Builder
	for _, logger := range []*slog.Logger{slog.New(slog.NewTextHandler(&log, nil)), slog.New(slog.NewJSONHandler(&log, nil))} {
		logger.Info("asked", "request", request, "pointer", &request, "many", []ratelimit.Request{request})
	}
	require.NotContains(t, log.String(), "personal")
	require.Equal(t, "of no limiter", fmt.Sprint(ratelimit.Request{}))
}
