package sql_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/shardkey"
)

// queryDecisions runs a statement, and calls the function each with every decision and its place.
func queryDecisions(ctx context.Context, db ratelimit.DBTX, sql string, args []any, each func(ord int64, d model.Decision)) error {
	const none = -9
	parts := make([]*engine.Part, 1000)
	for i := range parts {
		parts[i] = &engine.Part{Rules: model.FixedWindow{}, Decision: model.Decision{Granted: none}}
	}
	c := engine.Call{SQL: sql, Args: args, Into: parts}
	err := c.Query(ctx, db, false)
	for i, p := range parts {
		if p.Decision.Granted != none {
			each(int64(i)+1, p.Decision)
		}
	}
	return err
}

// TestSQLEqualsModel compares the SQL functions with the models. TestSQLEqualsModel compares every column of the result
// and of every row after each random request.
func TestSQLEqualsModel(t *testing.T) {
	t.Parallel()
	// Each function must give the same results, even for requests that it leaves to another function.
	for name, prepare := range map[string]func(t *testing.T, db pgtest.Executor){
		"as it comes":                  func(*testing.T, pgtest.Executor) {},
		"all takes by one statement":   limitertest.AlwaysArrays,
		"no take by one statement":     limitertest.NeverCheap,
		"everything by rate_limit_all": limitertest.AlwaysAll,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			prepare(t, db.Pool)
			require.NoError(t, replay(t.Context(), db.Pool, "rounding", roundingStory(), 10))
			require.NoError(t, replay(t.Context(), db.Pool, "buckets", changedBuckets(), 10))
			require.NoError(t, replay(t.Context(), db.Pool, "behind the clock", refundBehindTheClock(), 10))
			require.NoError(t, replay(t.Context(), db.Pool, "calendar", calendarBehindTheClock(), 10))
			require.NoError(t, replay(t.Context(), db.Pool, "of the window before", refundOfTheWindowBefore(), 10))
			requireModel(t, db)
		})
	}
}

// roundingStory takes one unit too many while 4.5 of the 10 units of the previous window still count. 4.5 is rounded up
// to 5. The story takes the unit in the next window and in a new window.
func roundingStory() []modeltest.Step {
	ask := func(key string, after, cost int64) modeltest.Step {
		return modeltest.Step{
			Policy:   model.SlidingWindow{Limit: 10, Window: time.Minute},
			Name:     "a",
			Clock:    limitertest.C0 + after,
			Elements: []modeltest.Element{{Key: key, Cost: cost, Count: 1}},
		}
	}
	return []modeltest.Step{
		ask("x", 0, 10),
		ask("y", 0, 10),
		ask("x", limitertest.Minute*3/2, 1),
		ask("x", limitertest.Minute*31/20, 5),
		ask("y", limitertest.Minute*31/20, 6),
	}
}

// changedBuckets takes from buckets with policies that differ in one number.
func changedBuckets() []modeltest.Step {
	ask := func(key string, after int64, policy model.TokenBucket) modeltest.Step {
		return modeltest.Step{Policy: policy, Name: "a", Clock: limitertest.C0 + after, Elements: []modeltest.Element{{Key: key, Cost: 1, Count: 1}}}
	}
	before := model.TokenBucket{Capacity: 10, Refill: 2, Every: time.Second}
	larger, faster, slower := before, before, before
	larger.Capacity, faster.Refill, slower.Every = 11, 3, 2*time.Second
	return []modeltest.Step{
		ask("x", 0, before),
		ask("x", 1, larger),
		ask("y", 1, before),
		ask("y", 2, faster),
		ask("z", 2, before),
		ask("z", 3, slower),
	}
}

// refundOfTheWindowBefore refunds the newest take, which is in the previous window. The units of older windows no
// longer count. These units stay in the row, and the row's expiry does not change.
func refundOfTheWindowBefore() []modeltest.Step {
	policy := model.SlidingWindow{Limit: 3, Window: time.Minute}
	return []modeltest.Step{
		{Policy: policy, Name: "a", Clock: limitertest.C0, Elements: []modeltest.Element{{Key: "x", Cost: 1, Count: 3}}},
		{Policy: policy, Name: "a", Clock: limitertest.C0 + limitertest.Minute*5/3, Elements: []modeltest.Element{{Key: "x", Cost: 1, Count: 1}}},
		{Policy: policy, Name: "a", Clock: limitertest.C0 + 2*limitertest.Minute, Elements: []modeltest.Element{
			{Key: "x", Cost: -1, Count: 1, Refund: []model.Take{{Units: 1, In: limitertest.C0 + limitertest.Minute}}},
		}},
	}
}

// calendarBehindTheClock sets the clock back to a time before calendar windows. In one window, all units were refunded.
// In another window, the key has credit, and some of it is refunded.
func calendarBehindTheClock() []modeltest.Step {
	ask := func(key string, clock, cost int64, refund []model.Take) modeltest.Step {
		return modeltest.Step{
			Policy: model.CalendarWindow{Limit: 9, Span: 24 * time.Hour, Zone: "America/New_York"}, Name: "a", Clock: clock,
			Elements: []modeltest.Element{{Key: key, Cost: cost, Count: 1, Refund: refund}},
		}
	}
	return []modeltest.Step{
		ask("x", limitertest.C0+1, 1, nil),
		ask("x", limitertest.C0, -1, []model.Take{{Units: 1, In: limitertest.C0 + 1}}),
		ask("x", limitertest.C0-limitertest.Hour, 1, nil),
		ask("y", limitertest.C0-1, -20, nil),
		ask("y", limitertest.C0+24*limitertest.Hour+1, 9, nil),
		ask("y", limitertest.C0+24*limitertest.Hour+1, 9, nil),
		ask("y", limitertest.C0, -1, []model.Take{{Units: 1, Spent: 1, Since: limitertest.C0 - 1, In: limitertest.C0 + 24*limitertest.Hour + 1}}),
	}
}

// refundBehindTheClock refunds the newest entry of a log with a shorter window, after the clock was set back to a time
// before the entry. The previous entry had already left the log, and does not come back.
func refundBehindTheClock() []modeltest.Step {
	long, short := model.SlidingLog{Limit: 3, Window: 2 * time.Microsecond}, model.SlidingLog{Limit: 1, Window: time.Microsecond}
	return []modeltest.Step{
		{Policy: long, Name: "b", Clock: limitertest.C0, Elements: []modeltest.Element{{Key: "x", Cost: 2, Count: 1}}},
		{Policy: long, Name: "b", Clock: limitertest.C0 + 1, Elements: []modeltest.Element{{Key: "x", Cost: 1, Count: 1}}},
		{Policy: short, Name: "b", Clock: limitertest.C0, Elements: []modeltest.Element{
			{Key: "x", Cost: -1, Count: 1, Refund: []model.Take{{Units: 1, In: limitertest.C0 + 1}}},
		}},
	}
}

// requireModel decides random stories with the functions and with the models, and requires equal results.
func requireModel(t *testing.T, db *pgtest.DB) {
	t.Helper()

	const (
		workers  = 2
		stepsOf  = 40 // how many requests a story has
		perBatch = 10
	)
	enough := int64(1_500 * limitertest.Rounds(t)) // how many elements are enough
	seed := limitertest.Seed(t)

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var stories, elements atomic.Int64
	failures := make(chan string, workers)
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for ctx.Err() == nil && elements.Load() < enough {
				story := uint64(stories.Add(1))
				title := fmt.Sprintf("%s=%d, story %d", modeltest.SeedVariable, seed, story)
				steps, err := modeltest.NewStory(rand.New(rand.NewPCG(seed, story)), stepsOf)
				if err == nil {
					err = replay(ctx, db.Pool, title, steps, perBatch)
				}
				if err != nil {
					failures <- describe(ctx, db.Pool, steps, err, title)
					cancel()
					return
				}
				for _, step := range steps {
					elements.Add(int64(len(step.Elements)))
				}
			}
		})
	}
	wg.Wait()
	select {
	case failure := <-failures:
		require.Fail(t, "SQL and model differ", failure)
	default:
	}
	require.GreaterOrEqual(t, elements.Load(), enough)
}

// difference is a step whose result differs from the model's.
type difference struct {
	step, element int // -1 for an error, or for a row of a key that is not in the step
	text          string
}

func (d *difference) Error() string { return d.text }

// replay runs steps, and compares every decision and every row after each step. replay stops at the first difference.
// The argument space is a prefix for all names, and no other call uses it.
func replay(ctx context.Context, pool *pgxpool.Pool, space string, steps []modeltest.Step, perBatch int) error {
	model := modeltest.NewRows()
	if pgtest.Shards() > 0 {
		perBatch = 1 // a transaction does not see its own changes of the shards' rows
	}
	for first := 0; first < len(steps); first += perBatch {
		chunk := steps[first:min(first+perBatch, len(steps))]
		batch := &pgx.Batch{}
		for _, s := range chunk {
			queueStep(batch, space, s)
		}
		if err := compare(pool.SendBatch(ctx, batch), space, chunk, first, model); err != nil {
			return err
		}
	}
	return nil
}

// takes tells whether a rate_limit_take_ function can decide the step. With a proxy, all keys must be on one shard.
func takes(s modeltest.Step) bool {
	_, log := s.Policy.(model.SlidingLog)
	shards := max(pgtest.Shards(), 1)
	return !s.Skip && (len(s.Elements) == 1 || !log) && !slices.ContainsFunc(s.Elements, func(e modeltest.Element) bool {
		return e.Cost < 1 || e.Charge || shardkey.Of(e.Key, shards) != shardkey.Of(s.Elements[0].Key, shards)
	})
}

// timeRead returns the time of a decision as rate_limit_all returns it.
func timeRead(clock int64) time.Time {
	return time.UnixMicro(int64(math.RoundToEven(float64(clock) / 1e6 * 1e6))).UTC()
}

// callOf returns the call that decides a step.
func callOf(space string, s modeltest.Step) engine.Call {
	n := len(s.Elements)
	keys, costs, counts, charges := make([]string, n), make([]int64, n), make([]int64, n), make([]bool, n)
	for i, e := range s.Elements {
		keys[i], costs[i], counts[i], charges[i] = e.Key, e.Cost, e.Count, e.Charge
	}
	var refunds engine.RefundArguments
	for i, e := range s.Elements {
		if e.Refund != nil {
			refunds.Set(i, len(s.Elements), &e.Refund[0])
		}
	}
	if s.Brief && !slices.ContainsFunc(costs, func(cost int64) bool { return cost != 1 }) {
		costs = nil
	}
	if s.Brief && !slices.ContainsFunc(counts, func(count int64) bool { return count != 1 }) {
		counts = nil
	}
	of := s.Policy.Numbers()
	c := engine.Call{Takes: takes(s), Counts: counts}
	for _, e := range s.Elements {
		c.Into = append(c.Into, &engine.Part{Space: &engine.Space{}, Rules: s.Policy, Cost: e.Cost})
	}
	if c.Takes {
		c.SQL = engine.Text(algorithm.ByCode(of.Algorithm).File, "")
		c.Args = append([]any{space + s.Name, keys, costs, counts, s.Durable, nil, nil, s.Clock}, engine.ArgumentsOf(of)...)
		return c
	}
	c.SQL = engine.Text("all", "")
	c.Args = limitertest.ArgumentsOfAll(space+s.Name, keys, of)
	c.Args[3] = slices.Repeat([]bool{s.Durable}, len(keys))
	c.Args[8], c.Args[9], c.Args[12] = costs, counts, time.UnixMicro(s.Clock)
	c.Args[13], c.Args[14], c.Args[15], c.Args[16] = refunds.Since, refunds.In, refunds.At, refunds.Spent
	c.Args[17] = s.Skip && pgtest.Shards() == 0 // skip_held only works for keys of one shard
	if slices.Contains(charges, true) {
		c.Args[20] = charges
	}
	return c
}

func queueStep(batch *pgx.Batch, space string, s modeltest.Step) {
	c := callOf(space, s)
	batch.Queue(c.SQL, c.Args...)
	batch.Queue(
		"SELECT "+pgtest.RowColumns+" FROM "+pgtest.Table(s.Durable)+" WHERE prefix = ANY ($1)",
		[]string{space + "a", space + "b"},
	)
}

func compare(results pgx.BatchResults, space string, steps []modeltest.Step, first int, model modeltest.Rows) (err error) {
	defer func() { err = errors.Join(err, results.Close()) }()
	for i, s := range steps {
		model.Decide(s)
		fail := func(element int, format string, args ...any) error {
			return &difference{first + i, element, fmt.Sprintf(format, args...)}
		}

		answer, err := results.Query()
		if err != nil {
			return fail(-1, "%v", err)
		}
		c := callOf(space, s)
		c.Undecide()
		if err := c.Read(answer); err != nil {
			return fail(-1, "%v", err)
		}
		seen := 0
		for ord, p := range c.Into {
			got, want := p.Decision, s.Elements[ord].Decision
			if got.Granted == engine.PassedOver {
				continue
			}
			got.DecidedAt = got.DecidedAt.UTC()
			if !c.Takes {
				want.DecidedAt = timeRead(s.Clock)
			}
			if got != want {
				return fail(ord, "element %d: SQL\n%+v\nmodel\n%+v", ord+1, got, want)
			}
			seen++
		}
		if err := answer.Err(); err != nil {
			return fail(-1, "%v", err)
		}
		if seen != len(s.Elements) {
			return fail(-1, "%d answers", seen)
		}

		table, err := results.Query()
		if err != nil {
			return fail(-1, "%v", err)
		}
		for table.Next() {
			id, got, err := pgtest.ScanRow(table)
			if err != nil {
				return fail(-1, "%v", err)
			}
			id.Name = strings.TrimPrefix(id.Name, space)
			want, ok := model[s.Durable][id]
			seen--
			if !ok || got != want {
				about := slices.IndexFunc(
					s.Elements,
					func(e modeltest.Element) bool { return e.Key == id.Key && s.Name == id.Name },
				)
				return fail(about, "row of %q: SQL\n%+v\nmodel\n%+v", id, got, want)
			}
		}
		if err := table.Err(); err != nil {
			return fail(-1, "%v", err)
		}
		if want := len(model[s.Durable]); len(s.Elements)-seen != want {
			return fail(-1, "%d rows, and %d in the model", len(s.Elements)-seen, want)
		}
	}
	return nil
}

// describe describes a failing story. describe leaves out all elements that are not necessary for the failure.
func describe(ctx context.Context, pool *pgxpool.Pool, steps []modeltest.Step, err error, title string) string {
	tries := 0
	failing := func(steps []modeltest.Step) error {
		tries++
		return replay(ctx, pool, fmt.Sprintf("%s, try %d ", title, tries), steps, 1)
	}
	var at *difference
	if !errors.As(err, &at) {
		return fmt.Sprintf("%s: %v", title, err)
	}
	shortest := steps[:at.step+1]
	for i, step := range slices.Backward(shortest) {
		for j := range slices.Backward(step.Elements) {
			shorter := slices.Clone(shortest)
			shorter[i].Elements = slices.Delete(slices.Clone(shorter[i].Elements), j, j+1)
			if len(shorter[i].Elements) == 0 {
				shorter = slices.Delete(shorter, i, i+1)
			}
			if less := failing(shorter); errors.As(less, &at) {
				shortest, err = shorter, less
			}
		}
	}
	var text strings.Builder
	fmt.Fprintln(&text, title)
	for _, s := range shortest {
		fmt.Fprintln(&text, s)
	}
	fmt.Fprintln(&text, err)
	return text.String()
}

// A crash or a rollback can lose a take. The refund of such a take gives nothing to a row that is ahead of the clock.
// The model's test has the same name.
func TestRefundToABucketThatTheClockHasLeftBehind(t *testing.T) {
	t.Parallel()
	const later = limitertest.C0 + limitertest.Minute
	p := model.TokenBucket{Capacity: 10, Refill: 1, Every: time.Second}
	db := pgtest.New(t)
	for granted, took := range map[int64]int64{0: 4, 5: 10} {
		var s model.State
		ask := func(clock int64, e modeltest.Element) modeltest.Step {
			e.Key, e.Count = "x", 1
			return modeltest.Step{Policy: p, Name: "a", Clock: clock, Elements: []modeltest.Element{e}}
		}
		var steps []modeltest.Step
		if granted > 0 {
			s, _ = model.Grant(p, s, later, granted)
			steps = append(steps, ask(later, modeltest.Element{Cost: -granted}))
		}
		s, kept := p.Decide(s, later, took)
		_, lost := p.Decide(s, limitertest.C0, 2)
		steps = append(steps, ask(later, modeltest.Element{Cost: took}), ask(limitertest.C0, modeltest.Element{Cost: -2, Refund: []model.Take{lost.Taken}}),
			ask(later, modeltest.Element{Cost: -took, Refund: []model.Take{kept.Taken}}), ask(later, modeltest.Element{Cost: 0}))
		require.NoError(t, replay(t.Context(), db.Pool, fmt.Sprintf("granted %d ", granted), steps, 1))
	}
}
