package ratelimit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// seedVariable repeats the random cases of a run that has failed.
const seedVariable = "RATELIMIT_TEST_SEED"

func testSeed(t *testing.T) uint64 {
	t.Helper()
	if text := os.Getenv(seedVariable); text != "" {
		seed, err := strconv.ParseUint(text, 10, 64)
		require.NoError(t, err)
		return seed
	}
	return rand.Uint64()
}

// The SQL functions against the models: random requests, and after each of them every column of the answer and every row.
func TestSQLEqualsModel(t *testing.T) {
	t.Parallel()
	// Each of the ways to decide has to decide everything alike, also what it is not there for.
	for name, prepare := range map[string]func(t *testing.T, db DBTX){
		"as it comes": func(*testing.T, DBTX) {}, "many keys in one statement": neverFew, "everything by rate_limit_all": neverCheap,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			prepare(t, db.Pool)
			require.NoError(t, replay(t.Context(), db.Pool, "rounding", roundingStory(), 10))
			requireModel(t, db)
		})
	}
}

// roundingStory asks for one more than there is room for where, of 10 taken in the window before, 4.5 count still, and round up: in a
// window that goes on, and in one that begins.
func roundingStory() []step {
	ask := func(key string, after, cost int64) step {
		return step{policy: SlidingWindow{Limit: 10, Window: time.Minute}, name: "a", clock: c0 + after, elements: []element{{key: key, cost: cost, count: 1}}}
	}
	return []step{ask("x", 0, 10), ask("y", 0, 10), ask("x", minute*3/2, 1), ask("x", minute*31/20, 5), ask("y", minute*31/20, 6)}
}

// requireModel has random stories decided by the functions of a database and by the models.
func requireModel(t *testing.T, db *pgtest.DB) {
	t.Helper()

	const (
		workers  = 4
		stepsOf  = 40 // requests of a story
		perBatch = 10
	)
	enough := 10_000 * int64(rounds(t)) // elements
	seed := testSeed(t)

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var stories, elements atomic.Int64
	failures := make(chan string, workers)
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for ctx.Err() == nil && elements.Load() < enough {
				story := uint64(stories.Add(1))
				title := fmt.Sprintf("%s=%d, story %d", seedVariable, seed, story)
				steps, err := newStory(rand.New(rand.NewPCG(seed, story)), stepsOf)
				if err == nil {
					err = replay(ctx, db.Pool, title, steps, perBatch)
				}
				if err != nil {
					failures <- describe(ctx, db.Pool, steps, err, title)
					cancel()
					return
				}
				for _, step := range steps {
					elements.Add(int64(len(step.elements)))
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

// step is one call of a function.
type step struct {
	policy   Policy
	durable  bool
	name     string // short; replay puts something before it
	clock    int64
	skip     bool      // rows that somebody holds are passed over
	brief    bool      // costs and counts that are all 1 are left out
	elements []element // with the decisions that the model makes
}

func (s step) String() string {
	var elements strings.Builder
	for _, e := range s.elements {
		fmt.Fprintf(&elements, " {key: %q, cost: %d, count: %d, refund: %+v}", e.key, e.cost, e.count, e.refund)
	}
	return fmt.Sprintf("at %d, %q in %s, %#v, skip %v, brief %v:%s", s.clock, s.name, table(s.durable), s.policy, s.skip, s.brief, elements.String())
}

// rows is the model of both tables.
type rows map[bool]map[rowID]storedRow

// algorithm is the number that the function of a policy puts into a row.
func algorithm(p Policy) int16 {
	switch p.(type) {
	case FixedWindow:
		return 1
	case SlidingWindow:
		return 2
	case TokenBucket:
		return 3
	default:
		return 4
	}
}

// decide has the model make the decisions of a step: an element of count k is k requests, one after the other.
func (m rows) decide(s step) {
	for i := range s.elements {
		e := &s.elements[i]
		id := rowID{s.name, e.key}
		var current state // of no row, and of a row of another algorithm
		if row := m[s.durable][id]; row.algorithm == algorithm(s.policy) {
			current = row.state
		}

		var granted int64
		var last decision
		credit := creditOf(s.policy, current, s.clock)
		requests := e.count
		if e.cost < 0 {
			requests = 1 // all at once
		}
		for asked := int64(0); asked < requests; asked++ {
			next, d := e.decide(s.policy, current, s.clock)
			granted += d.granted
			last = d
			if next == current { // and so for all further ones
				break
			}
			current = next
			m[s.durable][id] = storedRow{algorithm(s.policy), current}
		}
		if last.granted = granted; e.cost < 0 {
			last.granted = e.count
		}
		last.decidedAt = time.UnixMicro(s.clock).UTC()
		last.state = toldState(used(last.state, algorithm(s.policy)))
		last.taken.units, last.taken.spent = 0, 0
		if e.cost > 0 {
			last.taken.spent = credit - creditOf(s.policy, current, s.clock)
		}
		e.decision = last
	}
}

// decide is the model's decision of one of its requests, or of what they give together.
func (e element) decide(p Policy, s state, clock int64) (state, decision) {
	if e.cost >= 0 {
		return p.decide(s, clock, e.cost)
	}
	units := int64(math.MaxInt64)
	if e.count <= -(math.MaxInt64 / e.cost) {
		units = -e.count * e.cost
	}
	if e.refund == nil {
		return p.grant(s, clock, min(units, maxCredit))
	}
	k := e.refund[0]
	k.units, k.spent = units, min(max(k.spent, 0), units)
	return p.refund(s, clock, k)
}

// used is the part of a row that means something to its algorithm.
func used(s state, algorithm int16) state {
	if algorithm == 3 {
		s.prevCount = 0
		return s
	}
	s.scale, s.capacity, s.refill, s.returned = 0, 0, 0, 0
	if algorithm != 2 {
		s.prevCount = 0
	}
	return s
}

// newStory makes up requests that hang together: few keys, one clock, and policies that change now and then. The error is a
// panic of the model.
func newStory(r *rand.Rand, steps int) (story []step, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("after %v: panic: %v\n%s", story, p, debug.Stack())
		}
	}()
	model := rows{false: {}, true: {}}
	policy := randomPolicy(r)
	clock := int64(1)<<50 + r.Int64N(1<<51)
	var goals []int64 // times at which something happens, of recent decisions
	takes := map[rowID][]take{}

	for range steps {
		switch r.IntN(20) {
		case 0:
			policy = randomPolicy(r)
		case 1, 2:
			policy = changedPolicy(r, policy)
		}
		clock = nextClock(r, clock, policy, goals)
		s := step{policy: policy, durable: r.IntN(4) == 0, name: "a", clock: clock}
		if r.IntN(4) == 0 {
			s.name = "b"
		}
		s.brief = r.IntN(2) == 0
		ordinary := r.IntN(2) == 0 // takes alone
		s.skip = !ordinary && r.IntN(3) == 0
		several := 1 + r.IntN(8)
		if ordinary && r.IntN(2) == 0 {
			several = 1
		}
		for range several {
			cost := randomCost(r, policy.limit())
			if ordinary {
				cost = randomTake(r, policy.limit())
			}
			e := element{
				key:   [...]string{"x", "y", "Y", "ä", "x:1"}[r.IntN(5)],
				cost:  cost,
				count: randomCount(r, policy.limit(), cost),
			}
			if !ordinary && (cost < 0 || r.IntN(6) == 0) && r.IntN(5) > 0 {
				e.cost, e.count, e.refund = randomRefund(r, policy, takes[rowID{s.name, e.key}], e.cost, e.count)
			}
			s.elements = append(s.elements, e)
		}
		if r.IntN(2) == 0 { // as the limiter sends a few
			slices.SortStableFunc(s.elements, func(a, b element) int {
				return cmp.Or(len(b.key)-len(a.key), strings.Compare(a.key, b.key))
			})
		}
		story = append(story, s)
		model.decide(s)
		goals = goals[:0]
		for _, e := range s.elements {
			if e.decision.retryAfter != never {
				goals = append(goals, clock+e.decision.retryAfter)
			}
			goals = append(goals, clock+e.decision.resetAfter)
			if e.cost > 0 && e.decision.granted > 0 {
				id := rowID{s.name, e.key}
				takes[id] = append(takes[id], e.decision.takenBy(policy, e.cost, 1+r.Int64N(e.decision.granted)))
			}
		}
	}
	return story, nil
}

// randomRefund is a refund: of all or part of something that was taken, whether it was given back already or not, or of what nobody has.
func randomRefund(r *rand.Rand, p Policy, takes []take, cost, count int64) (int64, int64, []take) {
	if len(takes) == 0 || r.IntN(6) == 0 {
		extreme := func() int64 {
			return [...]int64{math.MinInt64, -1, 0, 1, 1 << 61, math.MaxInt64, r.Int64() >> r.IntN(64)}[r.IntN(7)]
		}
		k := take{extreme(), extreme(), extreme(), extreme(), extreme()}
		if len(takes) > 0 {
			known := takes[r.IntN(len(takes))]
			if r.IntN(2) == 0 {
				k.since = known.since
			}
			if r.IntN(2) == 0 {
				k.in = known.in
			}
		}
		return min(cost, -1), count, []take{k}
	}
	k := takes[len(takes)-1-r.IntN(min(len(takes), 4))]
	if r.IntN(3) == 0 {
		from := r.Int64N(k.units)
		k = k.part(p, from, from+1+r.Int64N(k.units-from))
	}
	return -k.units, 1, []take{k}
}

// magnitude is a number from 1 to limit of any order of magnitude, and often the one or the other end.
func magnitude(r *rand.Rand, limit int64) int64 {
	switch r.IntN(12) {
	case 0:
		return limit
	case 1:
		return 1
	case 2:
		return max(limit-1, 1)
	}
	return min(max(r.Int64()>>(63-(1+r.IntN(bits.Len64(uint64(limit))))), 1), limit)
}

func randomPolicy(r *rand.Rand) Policy {
	window := magnitude(r, maxSpan)
	if r.IntN(3) == 0 {
		window = 1 + r.Int64N(20)
	}
	limit := magnitude(r, maxProduct/window)
	switch r.IntN(8) {
	case 0, 1, 2, 3:
		limit = 1 + r.Int64N(min(20, maxProduct/window))
	case 4:
		limit = maxProduct / window
	}
	switch r.IntN(4) {
	case 0:
		return FixedWindow{Limit: limit, Window: duration(window)}
	case 1:
		return SlidingWindow{Limit: limit, Window: duration(window)}
	case 2:
		return SlidingLog{Limit: min(limit, maxLogLimit), Window: duration(window)}
	}
	slowest := ceilDiv(limit*window, maxSpan)
	refill := slowest + magnitude(r, math.MaxInt64-slowest)
	if r.IntN(2) == 0 {
		refill = slowest + r.Int64N(20)
	}
	return TokenBucket{Capacity: limit, Refill: refill, Every: duration(window)}
}

// changedPolicy is what an operator might make of a policy: a little more or less of something, or the other kind of window.
func changedPolicy(r *rand.Rand, p Policy) Policy {
	vary := func(n int64) int64 {
		if r.IntN(2) == 0 {
			return n
		}
		return max(n/4*r.Int64N(8)+r.Int64N(8)-4, 1)
	}
	var changed Policy
	switch p := p.(type) {
	case FixedWindow:
		p.Limit, p.Window = vary(p.Limit), duration(vary(micros(p.Window))%(2*maxSpan))
		if changed = p; r.IntN(3) == 0 {
			changed = SlidingWindow(p)
		}
	case SlidingWindow:
		p.Limit, p.Window = vary(p.Limit), duration(vary(micros(p.Window))%(2*maxSpan))
		if changed = p; r.IntN(3) == 0 {
			changed = []Policy{FixedWindow(p), SlidingLog(p)}[r.IntN(2)]
		}
	case SlidingLog:
		p.Limit, p.Window = vary(p.Limit), duration(vary(micros(p.Window))%(2*maxSpan))
		if changed = p; r.IntN(3) == 0 {
			changed = SlidingWindow(p)
		}
	case TokenBucket:
		p.Capacity, p.Refill, p.Every = vary(p.Capacity), vary(p.Refill), duration(vary(micros(p.Every))%(2*maxSpan))
		changed = p
	}
	if changed.validate() != nil {
		return p
	}
	return changed
}

func randomCost(r *rand.Rand, limit int64) int64 {
	switch r.IntN(10) {
	case 0, 1:
		return 0
	case 2:
		return limit + 1 + r.Int64N(3)
	case 3:
		return [...]int64{math.MaxInt64, 1 << 62, limit}[r.IntN(3)]
	case 4, 5:
		return magnitude(r, limit)
	case 6:
		return magnitude(r, min(limit, 10))
	case 7:
		return -magnitude(r, math.MaxInt64)
	case 8:
		return [...]int64{-1, -2, -limit, math.MinInt64}[r.IntN(4)]
	}
	return 1 + r.Int64N(min(limit, 3))
}

// randomTake is a cost that may fit.
func randomTake(r *rand.Rand, limit int64) int64 {
	switch r.IntN(4) {
	case 0:
		return magnitude(r, limit)
	case 1:
		return 1 + r.Int64N(min(limit, 3))
	}
	return 1
}

func randomCount(r *rand.Rand, limit, cost int64) int64 {
	switch r.IntN(12) {
	case 0:
		return 1 + r.Int64N(1000)
	case 1:
		if cost == 0 || cost > 1<<51 || cost < -1<<51 { // a model is no closed formula, and a key may hold credit of 2^61
			return math.MaxInt64
		}
		if cost > 0 && limit/cost < 1000 {
			return 2000
		}
	case 2, 3, 4:
		return 1 + r.Int64N(5)
	}
	return 1
}

// nextClock lets time stand still, go on, or jump, by any magnitude up to several windows; often to the very microsecond at which
// something is to happen, or to one beside it.
func nextClock(r *rand.Rand, clock int64, policy Policy, goals []int64) int64 {
	const first, last = 1, 1 << 55 // 1970, and the year 3111
	window := int64(1)
	switch p := policy.(type) {
	case FixedWindow:
		window = micros(p.Window)
	case SlidingWindow:
		window = micros(p.Window)
	case SlidingLog:
		window = micros(p.Window)
	case TokenBucket:
		window = p.fillTime(p.full())
	}
	switch choice := r.IntN(20); {
	case choice < 4:
	case choice < 10 && len(goals) > 0:
		clock = goals[r.IntN(len(goals))] + r.Int64N(3) - 1
	case choice < 12:
		clock += window*r.Int64N(4) + r.Int64N(3) - 1
	case choice < 14:
		clock -= window*r.Int64N(3) + r.Int64N(3) - 1
	case choice < 18:
		clock += magnitude(r, 3*window)
	default:
		clock -= magnitude(r, 3*window)
	}
	return min(max(clock, first), last)
}

// difference is a step that went another way than the model's, which expects the decisions that stand in steps.
type difference struct {
	step, element int // element is -1 for an error, or a row of another key
	text          string
}

func (d *difference) Error() string { return d.text }

// replay runs steps on a pool and compares, after each of them, every decision and every row. It stops at the first
// difference. space goes before all names, and must be new.
func replay(ctx context.Context, pool *pgxpool.Pool, space string, steps []step, perBatch int) error {
	model := rows{false: {}, true: {}}
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

func queueStep(batch *pgx.Batch, space string, s step) {
	keys, costs, counts := make([]string, len(s.elements)), make([]int64, len(s.elements)), make([]int64, len(s.elements))
	for i, e := range s.elements {
		keys[i], costs[i], counts[i] = e.key, e.cost, e.count
	}
	var refunds refunds
	for i, e := range s.elements {
		if e.refund != nil {
			refunds.add(i, len(s.elements), e.refund[0])
		}
	}
	if s.brief && !slices.ContainsFunc(costs, func(cost int64) bool { return cost != 1 }) {
		costs = nil
	}
	if s.brief && !slices.ContainsFunc(counts, func(count int64) bool { return count != 1 }) {
		counts = nil
	}
	args := []any{space + s.name, keys, costs, counts, s.durable, nil, nil, time.UnixMicro(s.clock), refunds.since, refunds.in, refunds.at, refunds.spent, s.skip}
	batch.Queue(s.policy.statement(), append(args, s.policy.numbers()...)...)
	batch.Queue("SELECT "+rowColumns+" FROM "+table(s.durable)+" WHERE prefix = ANY ($1)", []string{space + "a", space + "b"})
}

func compare(results pgx.BatchResults, space string, steps []step, first int, model rows) (err error) {
	defer func() { err = errors.Join(err, results.Close()) }()
	for i, s := range steps {
		model.decide(s)
		fail := func(element int, format string, args ...any) error {
			return &difference{first + i, element, fmt.Sprintf(format, args...)}
		}

		answer, err := results.Query()
		if err != nil {
			return fail(-1, "%v", err)
		}
		seen := 0
		for answer.Next() {
			var ord int64
			var retryAfter *int64
			var got decision
			var log []int64
			targets := []any{
				&ord, &got.granted, &got.remaining, &retryAfter, &got.resetAfter, &got.decidedAt,
				&got.state.count, &got.state.prevCount, &got.state.windowStart, &got.state.credit, &got.state.scale, &got.state.expiresAt,
				&got.taken.spent, &got.taken.since, &got.taken.at, &log,
			}
			if err := answer.Scan(targets[:len(answer.FieldDescriptions())]...); err != nil {
				return fail(-1, "%v", err)
			}
			got.state.log, got.state.since, got.taken.in = newEntries(log), got.taken.since, got.state.windowStart
			got.retryAfter = never
			if retryAfter != nil {
				got.retryAfter = *retryAfter
			}
			got.decidedAt = got.decidedAt.UTC()
			want := s.elements[ord-1].decision
			got.state = used(got.state, algorithm(s.policy))
			if got != want {
				return fail(int(ord-1), "element %d: SQL\n%+v\nmodel\n%+v", ord, got, want)
			}
			seen++
		}
		if err := answer.Err(); err != nil {
			return fail(-1, "%v", err)
		}
		if seen != len(s.elements) {
			return fail(-1, "%d answers", seen)
		}

		table, err := results.Query()
		if err != nil {
			return fail(-1, "%v", err)
		}
		for table.Next() {
			id, got, err := scanRow(table)
			if err != nil {
				return fail(-1, "%v", err)
			}
			id.name = strings.TrimPrefix(id.name, space)
			want, ok := model[s.durable][id]
			seen--
			if got.state, want.state = used(got.state, got.algorithm), used(want.state, want.algorithm); !ok || got != want {
				about := slices.IndexFunc(s.elements, func(e element) bool { return e.key == id.key && s.name == id.name })
				return fail(about, "row of %q: SQL\n%+v\nmodel\n%+v", id, got, want)
			}
		}
		if err := table.Err(); err != nil {
			return fail(-1, "%v", err)
		}
		if want := len(model[s.durable]); len(s.elements)-seen != want {
			return fail(-1, "%d rows, and %d in the model", len(s.elements)-seen, want)
		}
	}
	return nil
}

// describe shows a failing story: as short as leaving out elements one by one makes it.
func describe(ctx context.Context, pool *pgxpool.Pool, steps []step, err error, title string) string {
	tries := 0
	failing := func(steps []step) error {
		tries++
		return replay(ctx, pool, fmt.Sprintf("%s, try %d ", title, tries), steps, 1)
	}
	var at *difference
	if !errors.As(err, &at) {
		return fmt.Sprintf("%s: %v", title, err)
	}
	shortest := steps[:at.step+1]
	for i, step := range slices.Backward(shortest) {
		for j := range slices.Backward(step.elements) {
			shorter := slices.Clone(shortest)
			shorter[i].elements = slices.Delete(slices.Clone(shorter[i].elements), j, j+1)
			if len(shorter[i].elements) == 0 {
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

// modelResults are what calls of these costs for one key, one after the other at the same time, are to be told by the model.
func modelResults(p Policy, at time.Time, costs ...int64) []Result {
	return modelResultsFrom(p, state{}, at, costs...)
}

// modelResultsFrom are those that follow on a state.
func modelResultsFrom(p Policy, s state, at time.Time, costs ...int64) []Result {
	results := make([]Result, len(costs))
	for i, cost := range costs {
		var d decision
		s, d = element{cost: cost, count: 1}.decide(p, s, at.UnixMicro())
		results[i] = Result{
			Allowed:    d.granted == 1 || cost == 0 && d.retryAfter == 0,
			Limit:      p.limit(),
			Remaining:  d.remaining,
			RetryAfter: duration(d.retryAfter),
			ResetAfter: duration(d.resetAfter),
			DecidedAt:  at,
		}
	}
	return results
}

// utc makes results comparable: a time in another zone is another time.Time, and what was taken stands in no literal.
func utc(r Result) Result {
	r.DecidedAt, r.receipt = r.DecidedAt.UTC(), nil
	return r
}

func tally(results []Result) map[Result]int {
	counts := map[Result]int{}
	for _, r := range results {
		counts[utc(r)]++
	}
	return counts
}

// fastPolicies have uneven numbers, so that a result shows which decision it was.
func fastPolicies() map[string]Policy {
	return map[string]Policy{
		"fixed window":   FixedWindow{Limit: 100, Window: 7 * time.Second},
		"sliding window": SlidingWindow{Limit: 100, Window: 7 * time.Second},
		"token bucket":   TokenBucket{Capacity: 100, Refill: 3, Every: 7 * time.Second},
		"sliding log":    SlidingLog{Limit: 100, Window: 7 * time.Second},
	}
}

func TestCoalescedCallsAreToldWhatCallsInARowAre(t *testing.T) {
	t.Parallel()

	for name, policy := range fastPolicies() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const keys, calls = 3, 130
			limiter := newLimiter(t, pgtest.New(t).Pool, Config{Name: "test", Policy: policy, Timeout: amply, NoDenialCache: true, Test: frozen(t0)})

			for _, cost := range []int64{1, 7} {
				results, errs := make([]Result, keys*calls), make([]error, keys*calls)
				together(keys*calls, func(i int) {
					results[i], errs[i] = limiter.AllowN(t.Context(), fmt.Sprintf("cost %d, key %d", cost, i/calls), cost)
				})
				require.NoError(t, errors.Join(errs...))
				want := tally(modelResults(policy, t0, slices.Repeat([]int64{cost}, calls)...))
				for key := range keys {
					require.Equal(t, want, tally(results[key*calls:(key+1)*calls]))
				}
			}
		})
	}
}

func TestPeeksAreCoalesced(t *testing.T) {
	t.Parallel()

	policy := FixedWindow{Limit: 2, Window: time.Minute}
	limiter := newLimiter(t, pgtest.New(t).Pool, Config{Name: "test", Policy: policy, Timeout: amply, NoDenialCache: true, Test: frozen(t0)})
	for taken := range 3 {
		results, errs := make([]Result, 50), make([]error, 50)
		together(50, func(i int) { results[i], errs[i] = limiter.Peek(t.Context(), "key") })
		require.NoError(t, errors.Join(errs...))
		want := modelResults(policy, t0, append(slices.Repeat([]int64{1}, taken), 0)...)[taken]
		require.Equal(t, map[Result]int{want: 50}, tally(results))

		_, err := limiter.Allow(t.Context(), "key")
		require.NoError(t, err)
	}
}

// newCalls are calls as enqueue makes them, of these costs.
func newCalls(key string, costs ...int64) []*call {
	batch := make([]*call, len(costs))
	for i, cost := range costs {
		batch[i] = &call{key: key, cost: cost, since: time.Now(), done: make(chan struct{}, 1)}
	}
	return batch
}

// outcomes waits for calls.
func outcomes(batch []*call) (results []Result, errs []error) {
	for _, c := range batch {
		<-c.done
		results, errs = append(results, c.result), append(errs, c.err)
	}
	return results, errs
}

func TestCallsOfOneBatchAreDecidedInOrderOfArrival(t *testing.T) {
	t.Parallel()

	seed := testSeed(t)
	for name, policy := range fastPolicies() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			limiter := newLimiter(t, pgtest.New(t).Pool, Config{Name: "test", Policy: policy, Timeout: amply, NoDenialCache: true, Test: frozen(t0)})
			r := rand.New(rand.NewPCG(seed, 0))
			for round := range 100 {
				// A few keys whose calls are shuffled together. Costs come in runs, most of which fit, and some that never will.
				costs := make([][]int64, 1+r.IntN(4))
				calls := make([][]*call, len(costs))
				states := make([]state, len(costs))
				var batch []*call
				for key := range costs {
					for range 1 + r.IntN(8) {
						cost := [...]int64{1, 1, 5, 40, -1, -50}[r.IntN(6)]
						costs[key] = append(costs[key], slices.Repeat([]int64{cost}, 1+r.IntN(4))...)
					}
					name := fmt.Sprint("round ", round, ", key ", key)
					calls[key] = newCalls(name, costs[key]...)
					if r.IntN(2) == 0 {
						n := 1 + r.Int64N(50)
						_, err := limiter.Grant(t.Context(), name, n)
						require.NoError(t, err)
						states[key], _ = policy.grant(state{}, t0.UnixMicro(), n)
					}
				}
				for waiting := slices.Clone(calls); len(waiting) > 0; {
					key := r.IntN(len(waiting))
					batch = append(batch, waiting[key][0])
					if waiting[key] = waiting[key][1:]; len(waiting[key]) == 0 {
						waiting = slices.Delete(waiting, key, key+1)
					}
				}

				limiter.send(&flight{batch: batch})
				for key := range costs {
					results, errs := outcomes(calls[key])
					require.NoError(t, errors.Join(errs...))
					for i := range results {
						results[i] = utc(results[i])
					}
					require.Equal(t, modelResultsFrom(policy, states[key], t0, costs[key]...), results, "%s=%d, round %d: costs %v", seedVariable, seed, round, costs[key])
				}
			}
		})
	}
}

func TestGroupMergesOnlyNeighboursOfAKey(t *testing.T) {
	t.Parallel()

	batch := slices.Concat(newCalls("a", 1, 1), newCalls("b", 1), newCalls("a", 1, 2), newCalls("b", 1), newCalls("a", 1), newCalls("a", 2),
		newCalls("b", -1, -1, 1))
	type merged struct {
		key         string
		cost, count int64
	}
	var got []merged
	for _, e := range new(flight).group(batch) {
		got = append(got, merged{e.key, e.cost, e.count})
	}
	require.Equal(t, []merged{{"a", 1, 3}, {"a", 2, 1}, {"a", 1, 1}, {"a", 2, 1}, {"b", 1, 2}, {"b", -1, 1}, {"b", -1, 1}, {"b", 1, 1}}, got)
	require.Len(t, new(flight).group(batch[:1]), 1)
	require.Empty(t, new(flight).group(nil))
}

func TestBoardTakesCallsInOrder(t *testing.T) {
	t.Parallel()

	limiter := newLimiter(t, &pgxpool.Pool{}, Config{Name: "test", Policy: FixedWindow{Limit: 1, Window: time.Second}, MaxBatch: 3})
	for key, cost := range []int64{1, 1, 1, 1, 0, 0, 2, 0, 1, 1, 1} {
		limiter.queue = append(limiter.queue, newCalls(fmt.Sprint(key), cost)...)
	}
	// Those that look and those that take leave apart, and no more than MaxBatch at once.
	for _, want := range []string{"0 1 2", "3 6 8", "4 5 7", "9 10", ""} {
		var keys []string
		for _, c := range limiter.board(nil) {
			keys = append(keys, c.key)
		}
		require.Equal(t, want, strings.Join(keys, " "))
	}
	require.Empty(t, limiter.queue)
}

// Anybody may call the functions from psql. What cannot be done is refused in words, and leaves no trace.
func TestSQLRefusesBadArguments(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	calls := map[string]string{
		"fixed window":   "rate_limit_fixed_window(%s, %s, 10, 1000%s)",
		"sliding window": "rate_limit_sliding_window(%s, %s, 10, 1000%s)",
		"token bucket":   "rate_limit_token_bucket(%s, %s, 10, 1, 1000%s)",
		"sliding log":    "rate_limit_sliding_log(%s, %s, 10, 1000%s)",
	}
	const invalid = "22023"
	long := "repeat('ä', 257)"
	for name, call := range calls {
		for what, arguments := range map[string]struct{ name, keys, more, code string }{
			"no name":                        {"NULL", "ARRAY['a']", "", invalid},
			"an empty name":                  {"''", "ARRAY['a']", "", invalid},
			"a long name":                    {"repeat('n', 129)", "ARRAY['a']", "", invalid},
			"no keys":                        {"'n'", "NULL", "", invalid},
			"an empty array":                 {"'n'", "ARRAY[]::text[]", "", invalid},
			"an empty array of everything":   {"'n'", "ARRAY[]::text[]", ", ARRAY[]::bigint[], ARRAY[]::bigint[]", invalid},
			"a key that is NULL":             {"'n'", "ARRAY[NULL]::text[]", "", invalid},
			"NULL among keys":                {"'n'", "ARRAY['a', NULL, 'b']", "", invalid},
			"NULL among keys to look at":     {"'n'", "ARRAY['a', NULL, 'b']", ", ARRAY[0, 0, 0]", invalid},
			"an empty key":                   {"'n'", "ARRAY['a', '']", "", invalid},
			"a long key":                     {"'n'", "ARRAY[" + long + "]", "", invalid},
			"a long key among others":        {"'n'", "ARRAY['a', " + long + ", 'z']", "", invalid},
			"a long key to look at":          {"'n'", "ARRAY[" + long + "]", ", ARRAY[0]", invalid},
			"a huge key":                     {"'n'", "ARRAY['a', (SELECT string_agg(md5(i::text), '') FROM generate_series(1, 30000) AS i)]", "", invalid},
			"keys in two dimensions":         {"'n'", "ARRAY[ARRAY['a'], ARRAY['b']]", "", invalid},
			"keys that are counted from 5":   {"'n'", "'[5:6]={a,b}'::text[]", "", invalid},
			"a count of 0":                   {"'n'", "ARRAY['a', 'b']", ", NULL, ARRAY[1, 0]", invalid},
			"a negative count":               {"'n'", "ARRAY['a', 'b']", ", NULL, ARRAY[1, -1]", invalid},
			"fewer costs than keys":          {"'n'", "ARRAY['a', 'b']", ", ARRAY[1]", invalid},
			"more costs than keys":           {"'n'", "ARRAY['a']", ", ARRAY[1, 1]", invalid},
			"no costs for one key":           {"'n'", "ARRAY['a']", ", ARRAY[]::bigint[]", invalid},
			"fewer counts than keys":         {"'n'", "ARRAY['a', 'b']", ", NULL, ARRAY[1]", invalid},
			"more counts than keys":          {"'n'", "ARRAY['a']", ", NULL, ARRAY[1, 1]", invalid},
			"a negative lock timeout":        {"'n'", "ARRAY['a']", ", lock_timeout_ms => -1", invalid},
			"a key that cannot be in UTF-8":  {"'n'", `ARRAY[E'\xff']`, "", "22021"},
			"a key with NUL":                 {"'n'", `ARRAY[E'\u0000']`, "", "42601"},
			"a cost that is no whole number": {"'n'", "ARRAY['a']", ", ARRAY['1.5']::bigint[]", "22P02"},
		} {
			for _, durable := range []string{"", ", durable => true"} {
				refused(t, db.Pool, fmt.Sprintf("%s, %s", name, what),
					"SELECT * FROM "+fmt.Sprintf(call, arguments.name, arguments.keys, arguments.more+durable), arguments.code)
			}
		}
	}

	for _, numbers := range []string{
		"NULL, 1000", "10, NULL", "0, 1000", "10, 0", "-1, 1000", "10, -1", "-9223372036854775808, -9223372036854775808",
		"1, 2251799813685249", "2049, 2251799813685248", "4611686018427387905, 1", "2305843009213693953, 2", "9223372036854775807, 9223372036854775807",
	} {
		refused(t, db.Pool, numbers, "SELECT * FROM rate_limit_fixed_window('n', ARRAY['a'], "+numbers+")", invalid)
		refused(t, db.Pool, numbers, "SELECT * FROM rate_limit_sliding_window('n', ARRAY['a'], "+numbers+")", invalid)
		refused(t, db.Pool, numbers, "SELECT * FROM rate_limit_sliding_log('n', ARRAY['a'], "+numbers+")", invalid)
	}
	refused(t, db.Pool, "1001 in a log", "SELECT * FROM rate_limit_sliding_log('n', ARRAY['a'], 1001, 1000)", invalid)
	for _, numbers := range []string{
		"NULL, 1, 1000", "10, NULL, 1000", "10, 1, NULL", "0, 1, 1000", "10, 0, 1000", "10, 1, 0", "-1, 1, 1000", "10, -1, 1000", "10, 1, -1",
		"1, 1, 2251799813685249", "2, 1, 2251799813685248", "4611686018427387905, 4611686018427387905, 1", "4611686018427387904, 2047, 1",
		"9223372036854775807, 9223372036854775807, 9223372036854775807",
	} {
		refused(t, db.Pool, numbers, "SELECT * FROM rate_limit_token_bucket('n', ARRAY['a'], "+numbers+")", invalid)
	}
	for _, key := range []string{"NULL, NULL", "NULL, 'a'", "'n', NULL", "'', ''", "'n', " + long} {
		require.False(t, scalar[bool](t, db.Pool, "SELECT rate_limit_reset("+key+")"))
	}
	for _, durable := range []bool{false, true} {
		require.Empty(t, storedRows(t, db.Pool, durable))
	}

	// The ends of the range are part of it.
	for _, call := range []string{
		"fixed_window('n', ARRAY['a'], 2048, 2251799813685248)", "fixed_window('n', ARRAY['a'], 4611686018427387904, 1)",
		"sliding_window('n', ARRAY['a'], 2048, 2251799813685248)", "sliding_window('n', ARRAY['a'], 4611686018427387904, 1)",
		"token_bucket('n', ARRAY['a'], 1, 1, 2251799813685248)", "token_bucket('n', ARRAY['a'], 4611686018427387904, 2048, 1)",
		"token_bucket('n', ARRAY['a'], 1, 9223372036854775807, 1)", "sliding_log('n', ARRAY['a'], 1000, 2251799813685248)",
		"fixed_window(repeat('n', 128), ARRAY[repeat('k', 512)], 1, 1)",
	} {
		require.EqualValues(t, 1, scalar[int64](t, db.Pool, "SELECT granted FROM rate_limit_"+call), call)
	}
}

// refused runs a statement that the database must refuse with that SQLSTATE, saying what is wrong or what would be right.
func refused(t *testing.T, db DBTX, what, sql, code string) {
	t.Helper()
	_, err := db.Exec(t.Context(), sql)
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr, "%s: %s", what, sql)
	require.Equal(t, code, pgErr.Code, "%s: %s: %v", what, sql, pgErr)
	if code == "22023" && !strings.Contains(sql, "lock_timeout_ms") {
		require.Contains(t, pgErr.Message, "rate_limit: ", "%s: %s", what, sql)
		require.NotEmpty(t, pgErr.Hint, "%s: %s", what, sql)
	}
}

func TestNullMeansTheDefaultInSQL(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	for i, call := range []string{
		"ARRAY['x', 'y'], 10, 1000000",
		"ARRAY['x', 'y'], 10, 1000000, NULL, NULL, NULL, NULL, NULL, NULL",
		"ARRAY['x', 'y'], 10, 1000000, ARRAY[NULL, 1]::bigint[], ARRAY[1, NULL]::bigint[]",
	} {
		rows, err := db.Pool.Query(t.Context(), fmt.Sprintf("SELECT remaining FROM rate_limit_fixed_window('%d', %s)", i, call))
		require.NoError(t, err)
		remaining, err := pgx.CollectRows(rows, pgx.RowTo[int64])
		require.NoError(t, err)
		require.Equal(t, []int64{9, 9}, remaining)
	}
	require.Len(t, storedRows(t, db.Pool, false), 6)
	require.Empty(t, storedRows(t, db.Pool, true))
}

// The statement that follows "Example:" in each function's comment works as it stands.
func TestExamplesInCommentsWork(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	rows, err := db.Pool.Query(t.Context(), `
		SELECT proname, coalesce(obj_description(oid, 'pg_proc'), '') FROM pg_proc
		WHERE pronamespace = 'public'::regnamespace AND proname NOT IN ('rate_limit_late', 'rate_limit_version')
		ORDER BY proname`)
	require.NoError(t, err)
	type function struct{ Name, Comment string }
	functions, err := pgx.CollectRows(rows, pgx.RowToStructByPos[function])
	require.NoError(t, err)
	require.Len(t, functions, 7)

	for _, f := range functions {
		_, example, found := strings.Cut(f.Comment, "Example: ")
		require.True(t, found, f.Name)
		sql := example[:closing(example)+1]

		before := len(storedRows(t, db.Pool, false))
		rows, err := db.Pool.Query(t.Context(), sql)
		require.NoError(t, err, sql)
		values, err := pgx.CollectRows(rows, pgx.RowToMap)
		require.NoError(t, err, sql)
		if f.Name == "rate_limit_all" {
			require.Len(t, values, 2, sql)
			require.EqualValues(t, 1, values[0]["granted"], sql)
			require.EqualValues(t, 1, values[1]["granted"], sql)
			continue
		}
		require.Len(t, values, 1, sql)
		if f.Name == "rate_limit_sweep" {
			require.Equal(t, true, values[0]["complete"])
			for column := range values[0] {
				require.Contains(t, f.Comment, column)
			}
			continue
		}
		if f.Name == "rate_limit_reset" {
			// It comes after the functions of windows, and its key is that of their examples.
			require.Equal(t, true, values[0]["rate_limit_reset"])
			continue
		}
		require.EqualValues(t, 1, values[0]["granted"], sql)
		for _, column := range []string{"ord", "remaining", "retry_after_us", "reset_after_us", "decided_at"} {
			require.Contains(t, values[0], column)
			require.Contains(t, f.Comment, column)
		}
		require.GreaterOrEqual(t, len(storedRows(t, db.Pool, false)), before)

		// And what it says is optional, by name.
		optional := strings.TrimSuffix(sql, ")") + ", costs => ARRAY[2], counts => ARRAY[3], durable => true)"
		require.EqualValues(t, 3, scalar[int64](t, db.Pool, strings.Replace(optional, "*", "granted", 1)), optional)
	}
}

// closing is where the first parenthesis of a text closes.
func closing(text string) int {
	depth := 0
	return strings.IndexFunc(text, func(r rune) bool {
		switch r {
		case '(':
			depth++
		case ')':
			depth--
			return depth == 0
		}
		return false
	})
}
