package engine_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/memdb"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// year2106 is the last microsecond at which a DecidedAt from Postgres is exact. See TestTimesAreReadExactly.
const year2106 = 4_291_747_200_000_000

// twins are two limiters, on Postgres and in memory, that get the same calls.
type twins struct {
	real, memory *ratelimit.Limiter
}

func (w twins) with(t *testing.T, policy ratelimit.Policy) (twins, bool) {
	t.Helper()
	onPostgres, err := w.real.With(policy)
	inMemory, memoryErr := w.memory.With(policy)
	require.Equal(t, err, memoryErr)
	return twins{onPostgres, inMemory}, err == nil
}

type told struct {
	result ratelimit.Result
	err    error
}

// seen returns the fields of w that must be equal for both limiters. Receipts are compared by refunds instead. Whether
// a denial is remembered depends on a random hash.
func (w told) seen() told {
	if w.result.Source == ratelimit.SourceCachedDenial {
		w.result.Source = ratelimit.SourceDatabase
	}
	return told{limitertest.Plain(w.result), w.err}
}

// A limiter in memory answers as a limiter on Postgres does, in every field and every error, for any order of calls.
func TestMemoryEqualsPostgres(t *testing.T) {
	t.Parallel()

	pool := pgtest.New(t).Pool
	seed := limitertest.Seed(t)
	var took, denied, looked, gaveBack, granted, owed, held, settled, late, failed, sets, halfRefused, together int
	varied := func() bool { // whether each kind of event has happened often enough
		return min(took, denied, looked, gaveBack, granted, owed, held, settled, late, failed, sets, halfRefused, together) > 5
	}
	for story := uint64(0); story < uint64(20*limitertest.Rounds(t)) || !varied(); story++ {
		require.Less(t, story, uint64(5_000), "took %d, denied %d, looked %d, gave back %d, granted %d, owed %d, held %d, settled %d, late %d, "+
			"failed %d, sets %d, half refused %d, some of several %d", took, denied, looked, gaveBack, granted, owed, held, settled, late, failed, sets, halfRefused, together)
		r := rand.New(rand.NewPCG(seed, story))
		clock := int64(1)<<50 + r.Int64N(1<<51)
		config := ratelimit.ClientConfig{
			Test: ratelimit.TestConfig{Now: func() time.Time { return time.UnixMicro(clock) }},
		}
		onPostgres, inMemory := limitertest.NewClient(t, pool, config), limitertest.NewClient(t, &memdb.DB{}, config)
		policies := make([]ratelimit.Policy, 3)
		limiters := make([]twins, len(policies))
		for i := range policies {
			policies[i] = limitertest.RandomPolicy(r)
			if i == 2 {
				policies[i] = ratelimit.All(limitertest.RandomPolicy(r), limitertest.RandomPolicy(r), limitertest.RandomPolicy(r))
			}
			config := ratelimit.Config{
				Name: fmt.Sprint("story ", story, " ", i), Policy: policies[i],
				Durable: r.IntN(4) == 0, NoDenialCache: r.IntN(2) == 0,
			}
			limiters[i] = twins{limitertest.Of(t, onPostgres, config), limitertest.Of(t, inMemory, config)}
		}
		var takes [][2]ratelimit.Result
		var holds [][2]*ratelimit.Hold
		earliest := clock // the least time since the first of the holds was made
		keep := func(on, in *ratelimit.Hold) {
			require.Equal(t, on == nil, in == nil)
			if on != nil {
				require.Equal(t, on.EndsAt(), in.EndsAt())
				if len(holds) == 0 {
					earliest = clock
				}
				holds = append(holds, [2]*ratelimit.Hold{on, in})
				held++
			}
		}
		var goals []int64
		for step := range 60 {
			title := fmt.Sprintf("%s=%d, story %d, step %d", modeltest.SeedVariable, seed, story, step)
			i := r.IntN(len(limiters))
			clock = min(modeltest.NextClock(r, clock, limitertest.Model(policies[i]).Rules[0], goals), year2106)
			goals = goals[:0]
			// In memory a write forgets old holds, and on Postgres the sweeper does. So they differ after the clock was set back.
			earliest = min(earliest, clock)
			if clock >= earliest+model.Micros(model.SettledKept) {
				holds, earliest = nil, clock
			}
			if rules := limitertest.Model(policies[i]).Rules; len(rules) == 1 && r.IntN(10) == 0 {
				changed := limitertest.Policy(modeltest.ChangedPolicy(r, rules[0]).Numbers())
				if with, ok := limiters[i].with(t, changed); ok {
					limiters[i], policies[i] = with, changed
				}
			}
			l := limiters[i]
			key := [...]string{"x", "y", "Y", "ä", "", "x\x00"}[min(r.IntN(20), 5-r.IntN(2)*2)]
			if r.IntN(10) > 0 {
				key = [...]string{"x", "y", "ä"}[r.IntN(3)]
			}
			var a, b told
			switch kind := r.IntN(17); {
			case kind == 16 && len(holds) > 0 && r.IntN(3) == 0:
				pair := modeltest.OneOf(r, holds)
				ttl := time.Duration(1+r.Int64N(100_000)) * time.Millisecond
				a.err, b.err = pair[0].Extend(t.Context(), ttl), pair[1].Extend(t.Context(), ttl)
				require.Equal(t, pair[0].EndsAt(), pair[1].EndsAt(), title)
			case kind >= 15 && len(holds) > 0:
				pair := modeltest.OneOf(r, holds)
				used := modeltest.RandomTake(r, limitertest.Model(l.real.Config().Policy).Limit)
				on, err := pair[0].Settle(t.Context(), used)
				in, memoryErr := pair[1].Settle(t.Context(), used)
				require.Equal(t, on, in, title)
				a.err, b.err = err, memoryErr
				if err == nil {
					settled++
				}
				if on.Late {
					late++
				}
			case kind >= 14:
				n := modeltest.RandomTake(r, limitertest.Model(l.real.Config().Policy).Limit)
				ttl := time.Duration(1+r.Int64N(100_000)) * time.Millisecond
				on, err := l.real.Hold(t.Context(), key, n, ttl)
				in, memoryErr := l.memory.Hold(t.Context(), key, n, ttl)
				a.result, b.result, a.err, b.err = on.Result, in.Result, err, memoryErr
				keep(on.Hold, in.Hold)
				if on.Hold != nil {
					goals = append(goals, on.Hold.EndsAt().UnixMicro())
				}
			case kind >= 12:
				n := r.Int64N(limitertest.Model(l.real.Config().Policy).Limit)
				if r.IntN(4) == 0 {
					n = modeltest.RandomCost(r, limitertest.Model(l.real.Config().Policy).Limit)
				}
				on, err := l.real.Charge(t.Context(), key, n)
				in, memoryErr := l.memory.Charge(t.Context(), key, n)
				require.Equal(t, err, memoryErr, title)
				a.err, b.err, a.result, b.result = err, memoryErr, on.Result(), in.Result()
				require.Equal(t, on.Owed, in.Owed, title)
				require.Equal(t, on.RetryAfter, in.RetryAfter, title)
				if err == nil && on.Owed > 0 {
					owed++
				}
				goals = append(goals, clock+model.Micros(on.RetryAfter))
			case kind < 5:
				n := modeltest.RandomTake(r, limitertest.Model(l.real.Config().Policy).Limit)
				if r.IntN(4) == 0 {
					n = modeltest.RandomCost(r, limitertest.Model(l.real.Config().Policy).Limit)
				}
				a.result, a.err = l.real.AllowN(t.Context(), key, n)
				b.result, b.err = l.memory.AllowN(t.Context(), key, n)
				switch {
				case a.err != nil:
				case n == 0:
					looked++
				case a.result.Allowed:
					took++
				default:
					denied++
				}
			case kind == 5:
				a.result, a.err = l.real.Peek(t.Context(), key)
				b.result, b.err = l.memory.Peek(t.Context(), key)
			case kind == 6 && r.IntN(3) == 0:
				a.err, b.err = l.real.Reset(t.Context(), key), l.memory.Reset(t.Context(), key)
			case kind < 8:
				n := modeltest.RandomCost(r, limitertest.Model(l.real.Config().Policy).Limit)
				a.result, a.err = limitertest.AsResult(l.real.Grant(t.Context(), key, n))
				b.result, b.err = limitertest.AsResult(l.memory.Grant(t.Context(), key, n))
				if a.err == nil {
					granted++
				}
			case kind < 10 && len(takes) > 0:
				take := takes[len(takes)-1-r.IntN(min(len(takes), 4))]
				n := r.Int64N(max(limitertest.Receipt(take[0]).Left(), 0)+2) + int64(r.IntN(2)) - 1
				a.result, a.err = limitertest.AsResult(l.real.RefundN(t.Context(), take[0], n))
				b.result, b.err = limitertest.AsResult(l.memory.RefundN(t.Context(), take[1], n))
				if a.err == nil {
					gaveBack++
				}
			case kind == 10:
				if key == "" || strings.ContainsRune(key, 0) {
					continue
				}
				n, count := modeltest.RandomTake(r, limitertest.Model(l.real.Config().Policy).Limit), 1+r.Int64N(5)
				on, err := decideTogether(t.Context(), l.real, key, n, count)
				require.NoError(t, err, title)
				in, err := decideTogether(t.Context(), l.memory, key, n, count)
				require.NoError(t, err, title)
				require.Equal(t, on, in, title)
				if on[0].Granted > 0 && on[0].Granted < count {
					together++
				}
				continue
			default:
				var asked [2][]ratelimit.Request
				for _, j := range r.Perm(len(limiters))[:1+r.IntN(len(limiters))] {
					n := max(modeltest.RandomTake(r, limitertest.Model(limiters[j].real.Config().Policy).Limit)-int64(r.IntN(8)/7), 0)
					asked[0] = append(asked[0], limiters[j].real.Request(key, n))
					asked[1] = append(asked[1], limiters[j].memory.Request(key, n))
				}
				on, err := ratelimit.AllowAll(t.Context(), asked[0]...)
				in, memoryErr := ratelimit.AllowAll(t.Context(), asked[1]...)
				require.Equal(t, err, memoryErr, title)
				require.Equal(t, on.Allowed, in.Allowed, title)
				require.Equal(t, on.RetryAfter, in.RetryAfter, title)
				require.Len(t, in.Each, len(on.Each), title)
				for k := range on.Each {
					require.Equal(t, told{result: on.Each[k]}.seen(), told{result: in.Each[k]}.seen(), title)
					if limitertest.Receipt(on.Each[k]) != nil {
						takes = append(takes, [2]ratelimit.Result{on.Each[k], in.Each[k]})
					}
					if !on.Allowed && on.Each[k].RetryAfter == 0 {
						halfRefused++
					}
				}
				sets++
				continue
			}
			if a.err != nil {
				failed++
			}
			require.Equal(t, a.seen(), b.seen(), title)
			require.Equal(t, limitertest.Receipt(a.result).Left(), limitertest.Receipt(b.result).Left(), title)
			if limitertest.Receipt(a.result) != nil {
				takes = append(takes, [2]ratelimit.Result{a.result, b.result})
			}
			if a.err == nil {
				goals = append(goals, clock+model.Micros(a.result.RetryAfter), clock+model.Micros(a.result.ResetAfter))
			}
		}
	}
}

// decideTogether returns the decisions about the rows of a key if count callers ask at the same time. It returns the
// rows' states only for denials, because only denials are remembered.
func decideTogether(ctx context.Context, l *ratelimit.Limiter, key string, n, count int64) ([]model.Decision, error) {
	r := newRequest(l, key, n)
	r.Count = count
	if err := limitertest.Engine(l).Batcher.Decide(ctx, limitertest.Engine(l).Database.DB, []*engine.Request{r}, engine.Transaction{}); err != nil {
		return nil, err
	}
	decisions := make([]model.Decision, len(r.Parts))
	for i, p := range r.Parts {
		d := p.Decision
		d.DecidedAt, d.Taken.Units, d.State = d.DecidedAt.UTC(), 0, modeltest.Told(d.State)
		d.Held = 0 // the functions for takes do not return it
		if d.Granted == count {
			d.State = model.State{}
		}
		decisions[i] = d
	}
	return decisions, nil
}

// If several limiters use one database in memory, exactly the limit is admitted.
func TestMemoryIsExactUnderConcurrency(t *testing.T) {
	t.Parallel()

	limitertest.EachSlowPolicyAllAndTable(t, 100, func(t *testing.T, config ratelimit.Config) {
		db := &memdb.DB{}
		limiters := []*ratelimit.Limiter{limitertest.New(t, db, config), limitertest.New(t, db, config)}
		var granted atomic.Int64
		testkit.Together(300, func(i int) {
			result, err := limiters[i%2].Allow(t.Context(), "key")
			if err != nil {
				t.Error(err)
			}
			if result.Allowed {
				granted.Add(1)
			}
		})
		require.EqualValues(t, 100, granted.Load())
	})
}

// Transactions are refused for a database in memory, and nothing is taken.
func TestMemoryHasNoTransactions(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	config := ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 3, Window: limitertest.Year}}
	limiter := limitertest.New(t, &memdb.DB{}, config)
	result, err := limiter.Allow(t.Context(), "key")
	require.NoError(t, err)
	tx := pgtest.Begin(t, pgtest.New(t))
	for name, call := range map[string]func() error{
		"AllowTx":    func() error { _, err := limiter.WithTx(tx).Allow(t.Context(), "key"); return err },
		"RefundTx":   func() error { _, err := limiter.WithTx(tx).Refund(t.Context(), result); return err },
		"GrantTx":    func() error { _, err := limiter.WithTx(tx).Grant(t.Context(), "key", 1); return err },
		"ResetTx":    func() error { return limiter.WithTx(tx).Reset(t.Context(), "key") },
		"AllowAllTx": func() error { _, err := limitertest.AllowAllTx(t.Context(), tx, limiter.Request("key", 1)); return err },
	} {
		var refused *ratelimit.ConfigError
		require.ErrorAs(t, call(), &refused, name)
		require.Equal(t, "tx", refused.Field)
	}
	result, err = limiter.Peek(t.Context(), "key")
	require.NoError(t, err)
	require.EqualValues(t, 2, result.Remaining)
}
