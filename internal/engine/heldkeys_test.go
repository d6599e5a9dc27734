package engine_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// keep begins a transaction that takes from a key. If made is true, the transaction has made the key's row. If made is
// false, the transaction has locked an existing row.
func keep(t *testing.T, db *pgtest.DB, config ratelimit.Config, key string, made bool) pgx.Tx {
	t.Helper()
	db = db.Of(key)
	if !made {
		_, err := limitertest.New(
			t,
			db.Pool,
			ratelimit.Config{
				Name:    config.Name,
				Policy:  config.Policy,
				Durable: config.Durable,
			},
		).Allow(t.Context(), key)
		require.NoError(t, err)
		return limitertest.Hold(t, db, config, key)
	}
	tx := pgtest.Begin(t, db)
	_, err := limitertest.New(
		t,
		db.Pool,
		ratelimit.Config{Name: config.Name, Policy: config.Policy, Durable: config.Durable},
	).WithTx(tx).Allow(t.Context(), key)
	require.NoError(t, err)
	return tx
}

func eachTableAndRow(t *testing.T, test func(t *testing.T, durable, made bool)) {
	t.Helper()
	for _, made := range []bool{false, true} {
		for _, durable := range limitertest.TablesFor(t, fmt.Sprint(made)) {
			t.Run(fmt.Sprintf("%s, just made: %t", pgtest.Table(durable), made), func(t *testing.T) {
				t.Parallel()
				test(t, durable, made)
			})
		}
	}
}

// While some keys are held, calls for other keys are decided. Calls for held keys are decided as soon as the
// transactions end. A held key does not count as an outage.
func TestHeldRowsHoldUpNobodyElse(t *testing.T) {
	t.Parallel()

	eachTableAndRow(t, func(t *testing.T, durable, made bool) {
		db := pgtest.New(t)
		config := ratelimit.Config{
			Name:      "test",
			Policy:    ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year},
			Durable:   durable,
			OnFailure: ratelimit.FailOpen(),
		}
		limiter := limitertest.New(t, db.NewPool(t, nil), config)
		var holders []pgx.Tx
		var held []func() (ratelimit.Result, error)
		for i := range 4 {
			holders = append(holders, keep(t, db, config, fmt.Sprint("held ", i), made))
		}
		for i := range holders {
			held = append(
				held,
				testkit.Later(func() (ratelimit.Result, error) { return limiter.Allow(context.Background(), fmt.Sprint("held ", i)) }),
			)
		}
		ask := func() {
			errs := make([]error, 20)
			results := make([]ratelimit.Result, len(errs))
			testkit.Together(
				len(errs),
				func(i int) { results[i], errs[i] = limiter.Allow(context.Background(), fmt.Sprint("free ", i)) },
			)
			require.NoError(t, errors.Join(errs...))
			for _, result := range results {
				require.Equal(t, ratelimit.SourceDatabase, result.Source)
				require.True(t, result.Allowed)
			}
		}
		for i, holder := range holders {
			ask()
			require.NoError(t, holder.Commit(t.Context()))
			result, err := held[i]()
			require.NoError(t, err)
			require.Equal(t, ratelimit.SourceDatabase, result.Source)
			require.EqualValues(t, 8, result.Remaining)
		}
		require.False(t, limitertest.Engine(limiter).Batcher.Breaker.IsOpen(engine.KindEphemeral))
		require.EqualValues(t, 4, limitertest.Taken(t, db.Pool, config, "free 7"))
	})
}

// If a key stays held, its callers get ErrKeyHeld, and no other error, whatever OnFailure says.
func TestKeysHeldForGood(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	eachTableAndRow(t, func(t *testing.T, durable, made bool) {
		db := pgtest.New(t)
		config := ratelimit.Config{
			Name:      "test",
			Policy:    ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year},
			Durable:   durable,
			OnFailure: ratelimit.FailOpen(),
		}
		clientConfig := ratelimit.ClientConfig{Timeout: 8 * time.Second}
		limiter := limitertest.New(t, db.NewPool(t, nil), config, clientConfig)
		owner := limitertest.New(t, db.Pool, config, clientConfig)
		holder := pgtest.Begin(t, db)
		const keys = 45
		for i := range keys {
			if key := fmt.Sprint("held ", i); made {
				_, err := owner.WithTx(holder).Allow(t.Context(), key)
				require.NoError(t, err)
			} else {
				_, err := owner.Allow(t.Context(), key)
				require.NoError(t, err)
			}
		}
		pgtest.Exec(t, holder, "SELECT FROM "+pgtest.Table(durable)+" FOR UPDATE")
		errs := make([]error, keys+20)
		results := make([]ratelimit.Result, len(errs))
		testkit.Together(len(errs), func(i int) {
			key := fmt.Sprint("held ", i)
			if i >= keys {
				key = fmt.Sprint("free ", i)
			}
			results[i], errs[i] = limiter.Allow(context.Background(), key)
		})
		for i, err := range errs {
			if i >= keys {
				require.NoError(t, err)
				require.Equal(t, ratelimit.SourceDatabase, results[i].Source)
				continue
			}
			require.ErrorIs(t, err, ratelimit.ErrKeyHeld, "%+v", results[i])
			require.ErrorIs(t, err, ratelimit.ErrTimeout)
			require.NotErrorIs(t, err, ratelimit.ErrOutcomeUnknown)
			require.Zero(t, results[i])
		}
		if err := limiter.Reset(t.Context(), "held 0"); !made { // a row that is only being made cannot be reset
			require.ErrorIs(t, err, ratelimit.ErrKeyHeld)
		}
		peeked, err := limiter.Peek(t.Context(), "held 0")
		require.NoError(t, err)
		require.Equal(t, ratelimit.SourceDatabase, peeked.Source)
		require.False(t, limitertest.Engine(limiter).Batcher.Breaker.IsOpen(engine.KindEphemeral))
		require.NoError(t, holder.Commit(t.Context()))
		for i := range keys {
			require.EqualValues(t, 1, limitertest.Taken(t, db.Pool, config, fmt.Sprint("held ", i)))
		}
	})
}

// An AllowAll with a held key waits in the lane, and does not keep its other rows locked meanwhile.
func TestSetsWithAHeldPart(t *testing.T) {
	t.Parallel()

	for _, made := range []bool{false, true} {
		db := pgtest.New(t)
		a, b, c := limitertest.ThreeLimits(t, db.NewPool(t, nil), 100, 100, 100)
		holder := keep(t, db, b.Config(), "{all}held", made)
		waits := testkit.Later(func() (ratelimit.Results, error) {
			return ratelimit.AllowAll(context.Background(), a.Request("{all}address", 1), b.Request("{all}held", 1), c.Request("all", 1))
		})
		for i := range 20 {
			results, err := ratelimit.AllowAll(
				t.Context(),
				a.Request("{all}address", 1),
				b.Request(fmt.Sprint("{all}", i), 1),
				c.Request("all", 1),
			)
			require.NoError(t, err)
			require.True(t, results.Allowed)
			_, err = c.Allow(t.Context(), "all")
			require.NoError(t, err)
		}
		require.NoError(t, holder.Commit(t.Context()))
		results, err := waits()
		require.NoError(t, err)
		require.True(t, results.Allowed)
		require.EqualValues(t, 21, limitertest.Taken(t, db.Pool, a.Config(), "{all}address"))
		require.EqualValues(t, 41, limitertest.Taken(t, db.Pool, c.Config(), "all"))
		require.EqualValues(t, 2, limitertest.Taken(t, db.Pool, b.Config(), "{all}held"))
	}
}

// A locked table counts as an outage, not as a held row. Calls wait for a table that is locked only for a moment.
func TestLockedTable(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	for _, durable := range []bool{false, true} {
		db := pgtest.New(t)
		pool := db.NewPool(t, nil)
		config := ratelimit.Config{
			Name:      "test",
			Policy:    ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year},
			Durable:   durable,
			OnFailure: ratelimit.FailOpen(),
		}
		patient := limitertest.New(t, pool, config)
		clientConfig := ratelimit.ClientConfig{Timeout: 5 * time.Second} // long enough for busy machines
		open := limitertest.New(t, pool, config, clientConfig)
		config.OnFailure = ratelimit.ReturnError()
		strict := limitertest.New(t, pool, config, clientConfig)
		earlier, err := strict.Allow(t.Context(), "{key}earlier")
		require.NoError(t, err)
		holder := pgtest.Begin(t, db.Of("key"))
		pgtest.Exec(t, holder, "LOCK TABLE "+pgtest.Table(durable)+" IN ACCESS EXCLUSIVE MODE")
		for _, call := range []func() (ratelimit.Result, error){
			func() (ratelimit.Result, error) { return strict.Allow(t.Context(), "key") },
			func() (ratelimit.Result, error) { return strict.Peek(t.Context(), "key") },
			func() (ratelimit.Result, error) { return limitertest.AsResult(strict.Refund(t.Context(), earlier)) },
			func() (ratelimit.Result, error) { return ratelimit.Result{}, strict.Reset(t.Context(), "key") },
			func() (ratelimit.Result, error) {
				_, err := ratelimit.AllowAll(t.Context(), strict.Request("key", 1))
				return ratelimit.Result{}, err
			},
		} {
			_, err := call()
			require.ErrorIs(t, err, ratelimit.ErrUnavailable)
			require.Equal(t, "unavailable", ratelimit.ErrorKind(err))
			require.NotErrorIs(t, err, ratelimit.ErrKeyHeld)
			require.NotErrorIs(t, err, ratelimit.ErrOutcomeUnknown)
		}
		kind := engine.KindEphemeral
		if durable {
			kind = engine.KindDurable
		}
		for range engine.BreakerFailures {
			require.False(t, limitertest.Engine(open).Batcher.Breaker.IsOpen(kind))
			result, err := open.Allow(t.Context(), "key")
			require.NoError(t, err)
			require.Equal(t, ratelimit.SourceFailedOpen, result.Source)
		}
		require.True(t, limitertest.Engine(open).Batcher.Breaker.IsOpen(kind))
		waits := testkit.Later(func() (ratelimit.Result, error) { return patient.Allow(context.Background(), "key") })
		pgtest.WaitUntilBlocked(t, db.Pool, 1)
		require.NoError(t, holder.Commit(t.Context()))
		result, err := waits()
		require.NoError(t, err)
		require.Equal(t, ratelimit.SourceDatabase, result.Source)
		require.EqualValues(t, 1, limitertest.Taken(t, db.Pool, config, "key"))
	}
}

// A statement that skips locked rows returns which transactions have locked them, and decides the other requests. For
// rows that are just being made, the statement returns 0.
func TestHoldersOfSkippedRows(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	for _, durable := range []bool{false, true} {
		db := pgtest.New(t)
		config := ratelimit.Config{
			Name:    "test",
			Policy:  ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year},
			Durable: durable,
		}
		limiter := limitertest.New(t, db.Pool, config)
		for _, key := range []string{"there", "held"} {
			_, err := limiter.Allow(t.Context(), key)
			require.NoError(t, err)
		}
		maker := keep(t, db, config, "made", true)
		holder := limitertest.Hold(t, db, config, "held")
		var by int64
		require.NoError(t, holder.QueryRow(t.Context(), "SELECT pg_current_xact_id()::text::bigint").Scan(&by))
		elements := []modeltest.Element{
			{Key: "there", Cost: 1, Count: 1}, {Key: "made", Cost: 1, Count: 1},
			{Key: "held", Cost: 1, Count: 1}, {Key: "new", Cost: 1, Count: 1},
		}
		// The timeout is long enough to make the row "new", which comes last.
		skip := engine.Transaction{LockTimeout: engine.LockTimeout(time.Second), SkipHeld: true}
		require.NoError(t, decide(t.Context(), limiter, db.Pool, elements, skip))
		granted := map[string]int64{}
		for i := range elements {
			granted[elements[i].Key] = elements[i].Decision.Granted
		}
		require.Equal(t, map[string]int64{"there": 1, "made": engine.Locked, "held": engine.Locked, "new": 1}, granted)
		require.Zero(t, elements[1].Decision.Remaining)
		require.Equal(t, by, elements[2].Decision.Remaining)
		require.NoError(t, maker.Rollback(t.Context()))
		require.NoError(t, holder.Commit(t.Context()))
		require.EqualValues(t, 2, limitertest.Taken(t, db.Pool, config, "there"))
	}
}

// The second statement decides all calls for existing rows, however many other rows are being made.
func TestRowsBeingMadeDelayNobody(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	var statements []ratelimit.StatementEvent
	config := ratelimit.Config{
		Name:          "test",
		Policy:        ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year},
		NoDenialCache: true,
	}
	owner := limitertest.New(t, db.Pool, config)
	var mu sync.Mutex
	clientConfig := ratelimit.ClientConfig{Observer: &ratelimit.Observer{Statement: func(e ratelimit.StatementEvent) {
		mu.Lock()
		defer mu.Unlock()
		statements = append(statements, e)
	}}}
	limiter := limitertest.New(t, db.NewPool(t, nil), config, clientConfig)
	holder := pgtest.Begin(t, db)
	var there, made []*engine.Request
	for i := range 45 {
		_, err := owner.Allow(t.Context(), fmt.Sprint("there ", i))
		require.NoError(t, err)
		_, err = owner.WithTx(holder).Allow(t.Context(), fmt.Sprint("made ", i))
		require.NoError(t, err)
		there = append(there, requestsFor(limiter, fmt.Sprint("there ", i), 1)...)
		made = append(made, requestsFor(limiter, fmt.Sprint("made ", i), 1)...)
	}
	all := slices.Concat(made, there)
	send(limiter, all)
	_, errs := outcomes(there)
	require.NoError(t, errors.Join(errs...))
	mu.Lock()
	require.Equal(t, 90, statements[0].Size)
	require.Error(t, statements[0].Err)
	require.Equal(t, 90, statements[1].Size)
	require.NoError(t, statements[1].Err)
	for _, e := range statements[2:] {
		require.Less(t, e.Size, 46)
	}
	mu.Unlock()
	require.NoError(t, holder.Commit(t.Context()))
	_, errs = outcomes(made)
	require.NoError(t, errors.Join(errs...))
}

// If one transaction after the other holds a key of an AllowAll, the AllowAll loses races, but does not get ErrKeyHeld.
// If a key of another AllowAll stays held, that key does not delay the first AllowAll.
func TestSetsThatLoseRacesAreNotHeld(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	for _, made := range []bool{false, true} {
		t.Run(fmt.Sprint("just made: ", made), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			config := ratelimit.Config{
				Name:   "test",
				Policy: ratelimit.FixedWindow{Limit: 100, Window: limitertest.Year},
			}
			clientConfig := ratelimit.ClientConfig{Timeout: 8 * time.Second}
			limiter := limitertest.New(t, db.NewPool(t, nil), config, clientConfig)
			holder := keep(t, db, config, "somebody else", made)
			turn := keep(t, db, config, "all", false)
			var calls []func() (ratelimit.Results, error)
			for _, user := range []string{"user 1", "user 2", "user 3", "somebody else"} {
				calls = append(calls, testkit.Later(func() (ratelimit.Results, error) {
					return ratelimit.AllowAll(context.Background(), limiter.Request(user, 1), limiter.Request("all", 1))
				}))
			}
			// Only these transactions ever get the lock, because each one waits for the lock before the previous one
			// ends.
			conns := []*pgx.Conn{turn.Conn(), pgtest.Connect(t, db)}
			for began, i := time.Now(), 1; time.Since(began) < limitertest.Engine(limiter).Batcher.Held.Patience()*5/4; i++ {
				next, err := conns[i%2].Begin(t.Context())
				require.NoError(t, err)
				locks := testkit.Later(func() (any, error) {
					return next.Exec(
						context.Background(),
						"SELECT FROM rate_limit_ephemeral WHERE key = 'all' FOR UPDATE",
					)
				})
				pgtest.Exec(t, turn, "SELECT pg_sleep(0.02)")
				require.NoError(t, turn.Commit(t.Context()))
				_, err = locks()
				require.NoError(t, err)
				turn = next
			}
			require.NoError(t, turn.Commit(t.Context()))
			for i, call := range calls {
				results, err := call()
				if i == 3 {
					require.ErrorIs(t, err, ratelimit.ErrKeyHeld)
					continue
				}
				require.NoError(t, err)
				require.True(t, results.Allowed)
			}
			require.NoError(t, holder.Commit(t.Context()))
		})
	}
}
