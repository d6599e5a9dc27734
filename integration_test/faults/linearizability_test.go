package faults

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// judge checks whether sequential calls can explain a history of concurrent calls. For each call there must be a moment
// between its beginning and its end when the rule gives the same decision, by the database time in the result.
type judge struct {
	rule
	// If cache is set, denials may come from a cache. Then judge computes denials from the remembered state.
	cache bool
	// If untimed is set, judge does not compare RetryAfter and ResetAfter. After refunds and grants they depend on the
	// times of calls with unknown outcomes.
	untimed bool
}

// step returns the possible accounts after an operation. It returns none if the operation is impossible.
func (j judge) step(a account, op operation) []any {
	switch {
	case op.Reset:
		// A call that creates the row anew waits for no lock, so the row's time can be the time at which the call's
		// statement began.
		return []any{account{}}
	case op.Unknown:
		// The time of this decision is unknown too. The policies of these histories do not depend on it.
		if op.Cost > j.roomAt(a, a.clock) {
			return []any{a}
		}
		taken, _ := j.decide(a, a.clock, op.Cost, op.Of)
		anyway, _ := j.decide(a, a.clock, op.Cost, op.anyway(a))
		return []any{a, taken, anyway}
	}
	if op.after > a.locked {
		return nil
	}
	at := op.Result.DecidedAt.UnixMicro()
	next, want := j.decide(a, at, op.Cost, op.Of)
	// If a call with an unknown outcome began the window, the window's time is unknown, too.
	if j.untimed && want.Remaining != op.Result.Remaining {
		next, want = j.decide(a, at, op.Cost, op.anyway(a))
	}
	unchanged := next == a
	next.clock, next.locked = at, a.locked
	if j.locks(op) {
		next.locked++
	}
	if j.untimed {
		want.RetryAfter, want.ResetAfter = op.Result.RetryAfter, op.Result.ResetAfter
	}
	switch {
	case at > op.Return:
		return nil
	case j.mayBeCached(op):
		if j.cached(op, want) {
			return []any{a}
		}
		return nil
	case at < max(op.Call, a.clock) || !same(want, op.Result):
		return nil // the clock advances under a row's lock
	case op.Cost == 0, op.Of != nil && unchanged: // a refund that gives back nothing locks no missing row
		return []any{a}
	}
	return []any{next}
}

func (j judge) mayBeCached(op operation) bool {
	return j.cache && op.Cost > 0 && !op.Reset && !op.Unknown && !op.Result.Allowed
}

// interval returns the time in which an operation may have taken effect. If a history has only takes, each take holds
// the row's lock when it reads the clock. So it took effect at that time. (Calls of one statement have one time, and
// any order.)
func (j judge) interval(history []operation, op operation, staleness time.Duration, allTake bool) (from, to int64) {
	at := op.Result.DecidedAt.UnixMicro()
	switch {
	case op.Unknown:
		return op.Call, math.MaxInt64 // it may take effect after the call returned
	case op.Reset:
		return op.Call, op.Return
	case j.mayBeCached(op):
		return staleSince(history, op, staleness), op.Return
	case op.Of != nil:
		return op.Call, op.Return // one of the two cases below
	case op.Cost == 0:
		return op.Call, at // a Peek reads the rows before it reads the clock
	case allTake:
		return at, at
	}
	// Other calls see the effect after the commit. Until then, operations that need the row's lock wait. A Peek does
	// not wait, and neither does a reset if there was no row.
	return at, op.Return
}

// anyway returns op.Of as if it were a take from the account a. It returns nil if op is no refund.
func (op operation) anyway(a account) *portion {
	if op.Of == nil {
		return nil
	}
	of := *op.Of
	of.In, of.Since = a.start, a.since
	return &of
}

func same(a, b ratelimit.Result) bool {
	at, bt := a.DecidedAt, b.DecidedAt
	a.DecidedAt, b.DecidedAt = time.Time{}, time.Time{}
	return limitertest.Plain(a) == limitertest.Plain(b) && at.Equal(bt)
}

// cached checks whether a remembered denial is right. For a cost of 1, its times are exact. For a larger cost, smaller
// requests may have been granted since, so the right times may be later.
func (j judge) cached(op operation, want ratelimit.Result) bool {
	got := op.Result
	if want.Allowed || got.Remaining >= op.Cost || got.Limit != want.Limit {
		return false
	}
	if op.Cost == 1 {
		return got.RetryAfter == want.RetryAfter && got.ResetAfter == want.ResetAfter
	}
	return 0 < got.RetryAfter && got.RetryAfter <= want.RetryAfter && got.ResetAfter <= want.ResetAfter
}

func (j judge) model() porcupine.Model {
	model := porcupine.NondeterministicModel{
		Init: func() []any { return []any{account{}} },
		Step: func(state, input, _ any) []any { return j.step(state.(account), input.(operation)) },
		Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
			keys := map[string][]porcupine.Operation{}
			for _, op := range history {
				key := op.Input.(operation).Key
				keys[key] = append(keys[key], op)
			}
			var partitions [][]porcupine.Operation
			for _, partition := range keys {
				partitions = append(partitions, partition)
			}
			return partitions
		},
		DescribeOperation: func(input, _ any) string {
			op := input.(operation)
			switch {
			case op.Reset:
				return "reset"
			case op.Unknown:
				return fmt.Sprintf("%d: unknown", op.Cost)
			}
			return fmt.Sprintf(
				"%d: %t, remaining %d, retry %v, reset %v, at %d",
				op.Cost,
				op.Result.Allowed,
				op.Result.Remaining,
				op.Result.RetryAfter,
				op.Result.ResetAfter,
				op.Result.DecidedAt.UnixMicro(),
			)
		},
		DescribeState: func(state any) string { return fmt.Sprintf("%+v", state) },
	}
	return model.ToModel()
}

// check looks for an explanation of a history. If there is none, it writes a picture of the history to a file.
func (j judge) check(
	t *testing.T,
	history []operation,
	staleness time.Duration,
) (result porcupine.CheckResult, picture string) {
	t.Helper()
	allTake := !slices.ContainsFunc(history, func(op operation) bool { return op.Reset || op.Unknown || op.Cost <= 0 })
	ops := make([]porcupine.Operation, len(history))
	for i, op := range history {
		from, to := j.interval(history, op, staleness, allTake)
		op.after = j.locksBefore(history, op)
		ops[i] = porcupine.Operation{ClientId: op.Client, Input: op, Call: from, Return: to}
	}
	return explain(t, j.model(), ops)
}

// locks tells whether an operation reads the clock while it holds the lock of its key's row.
func (j judge) locks(op operation) bool {
	return op.Cost != 0 && op.Of == nil && !op.Reset && !op.Unknown && !j.mayBeCached(op)
}

// locksBefore returns how many operations locked the same row before op. A row's clock never goes back, so these
// operations come before op, and the search need not try op earlier. If a row can be created again, the result is 0.
func (j judge) locksBefore(history []operation, op operation) (n int) {
	if !j.locks(op) || slices.ContainsFunc(history, func(op operation) bool { return op.Reset || op.Unknown }) {
		return 0
	}
	for _, other := range history {
		if other.Key == op.Key && j.locks(other) && other.Result.DecidedAt.Before(op.Result.DecidedAt) {
			n++
		}
	}
	return n
}

// explain looks for an order of operations that a model allows.
func explain(
	t *testing.T,
	model porcupine.Model,
	ops []porcupine.Operation,
) (result porcupine.CheckResult, picture string) {
	t.Helper()
	result, info := porcupine.CheckOperationsVerbose(model, ops, amply)
	if result == porcupine.Ok {
		return result, ""
	}
	file, err := os.CreateTemp("", "history-*.html") //nolint:usetesting // the file has to survive the test
	require.NoError(t, err)
	require.NoError(t, file.Close())
	require.NoError(t, porcupine.VisualizePath(model, info, file.Name()))
	return result, file.Name()
}

// staleSince returns the earliest time that a remembered denial may describe. A limiter may learn of another limiter's
// reset as late as staleness allows. A limiter knows of its own resets at once.
func staleSince(history []operation, denial operation, staleness time.Duration) int64 {
	since := denial.Call - staleness.Microseconds()
	for _, op := range history {
		if (op.Reset || op.Cost < 0) && op.Limiter == denial.Limiter && op.Key == denial.Key &&
			op.Return < denial.Call {
			since = max(since, op.Return)
		}
	}
	return since
}

// histories returns the workloads whose histories are judged.
func histories(algorithm string) map[string]workload {
	base := workload{
		Algorithm: algorithm, Limit: 20, Span: 50 * time.Millisecond,
		Limiters: 2, Callers: 6, Calls: 40, Keys: 4, MaxCost: 7, Looks: 10, Gap: time.Millisecond,
	}
	plain, durable, cached, resets, cachedResets, reset, hot := base, base, base, base, base, base, base
	gifts, cachedGifts, many := base, base, base
	gifts.Refunds, gifts.Grants = 15, 5
	cachedGifts.Cache, cachedGifts.Refunds, cachedGifts.Grants, cachedGifts.DenialMaxAge, cachedGifts.Callers = true, 5, 2, 5*time.Millisecond, 3
	durable.Durable = true
	cached.Cache = true
	resets.Resets = 5
	// There are few callers, so that few denials can be about the same moment. The search would try all orders.
	cachedResets.Cache, cachedResets.Resets, cachedResets.DenialMaxAge, cachedResets.Callers = true, 5, 5*time.Millisecond, 3
	// This workload creates and deletes one row again and again.
	reset.Keys, reset.Resets, reset.Callers, reset.Gap = 1, 30, 4, 0
	// These are waves of equal requests for one key. Coalescing merges the requests. There are no Peeks, because the
	// search could take for ever with them.
	hot.Keys, hot.MaxCost, hot.Callers, hot.Calls, hot.Gap, hot.Looks = 1, 1, 24, 10, 0, 0
	// The queue has so many keys that one statement decides all of them.
	many.Keys, many.Callers, many.Gap = 12, 30, 0
	return map[string]workload{
		"plain": plain, "many keys": many, "durable": durable, "cache": cached, "resets": resets, "cache and resets": cachedResets,
		"one key, reset all the time": reset, "one hot key": hot, "refunds and grants": gifts, "cache, refunds and grants": cachedGifts,
	}
}

var algorithms = []string{"fixed window", "sliding window", "token bucket", "sliding log", "calendar window"}

// Many callers with several pools and processes get the same answers as sequential callers.
func TestLinearizable(t *testing.T) {
	t.Parallel()

	random := random(t)
	for _, algorithm := range algorithms {
		for name, w := range histories(algorithm) {
			for range testkit.Rounds(t, "ROUNDS", 1) {
				// A busy machine makes few calls within a span, so the span doubles until it sees both outcomes.
				for w, varied := w, false; !varied; w.Span *= 2 {
					require.Less(t, w.Span, time.Minute, "%s, %s: not varied enough", algorithm, name)
					w.Seed = random.Uint64()
					history := w.runInProcesses(t, withMonths(t, w.Span))
					varied = hasBothOutcomes(history)
					result, picture := judge{ruleOf(w.policy(), w.Span), w.Cache, false}.check(t, history, w.DenialMaxAge)
					require.Equal(t, porcupine.Ok, result, "%s, %s: see %s", algorithm, name, picture)
				}
			}
		}
	}
}

// hasBothOutcomes tells whether a history has allowed and denied calls.
func hasBothOutcomes(history []operation) bool {
	allowed := func(op operation) bool { return op.Cost > 0 && op.Result.Allowed }
	denied := func(op operation) bool { return op.Cost > 0 && !op.Reset && !op.Unknown && !op.Result.Allowed }
	return slices.ContainsFunc(history, allowed) && slices.ContainsFunc(history, denied)
}

// uncertain runs a workload in which the database ends sessions, answers get lost after the commit, and callers leave.
// So it is unknown whether some calls counted. All other calls that failed certainly did not count.
func uncertain(w workload, t *testing.T, db *pgtest.DB) []operation {
	t.Helper()
	// Every key was used before, so the beginning of its window is known.
	primer := limitertest.New(t, db.Pool, ratelimit.Config{
		Name: "test", Policy: w.policy(),
	})
	var history []operation
	for key := range w.Keys {
		op := operation{Client: 1 << 10, Limiter: 1 << 10, Key: keyNumber(key), Cost: 2}
		occurred, err := op.make(t.Context(), primer, false, 0)
		require.NoError(t, err)
		require.True(t, occurred)
		history = append(history, op)
	}

	proxy := newWireProxy(t, db.URL)
	w.URL = proxy.url
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		var err error
		for err == nil && ctx.Err() == nil {
			proxy.fail(&fault{reply: replyIs[*pgproto3.DataRow], then: cut}) // a ping has no DataRow
			// The time is counted in statements, so some calls succeed, however slow this machine is.
			for ctx.Err() == nil && proxy.sent() < 16 {
				pause(ctx, time.Millisecond)
			}
			for _, db := range append(db.Shards, db) { // PL/Proxy's sessions have no application_name
				_, killErr := db.Pool.Exec(context.WithoutCancel(ctx), `
					SELECT pg_terminate_backend(pid) FROM pg_stat_activity
					WHERE datname = current_database() AND application_name IN ('limiter', '') AND state = 'active'
						AND pid <> pg_backend_pid()`)
				err = errors.Join(err, killErr)
			}
		}
		ended <- err
	}()
	history = append(history, w.runInProcesses(t, db)...)
	cancel()
	require.NoError(t, <-ended)
	return history
}

func uncertainWorkload(algorithm string) workload {
	return workload{
		Algorithm: algorithm, Limit: 60, Span: 30 * day,
		Limiters: 2, Callers: 6, Calls: 16, Keys: 24, MaxCost: 7, Looks: 10, Leaves: 5, Gap: time.Millisecond,
	}
}

func TestLinearizableWithUnknownOutcomes(t *testing.T) {
	t.Parallel()

	random := random(t)
	unknown := 0
	for _, algorithm := range algorithms {
		if algorithm == "sliding log" {
			continue // the time of this call shows when it was decided
		}
		// Only by chance does a session end while it decides.
		for round := 0; round < testkit.Rounds(t, "ROUNDS", 2) || unknown == 0; round++ {
			require.Less(t, round, 100)
			w := uncertainWorkload(algorithm)
			db := withMonths(t, w.Span)
			gifts := round%2 == 1
			if gifts {
				w.Refunds, w.Grants = 10, 5
			}
			w.Seed = random.Uint64()
			history := uncertain(w, t, db)
			for _, op := range history {
				if op.Unknown {
					unknown++
				}
			}
			result, picture := judge{ruleOf(w.policy(), w.Span), w.Cache, gifts}.check(t, history, 0)
			require.Equal(t, porcupine.Ok, result, "%s: see %s", algorithm, picture)
		}
	}
	t.Logf("%d calls with unknown outcome", unknown)
	require.Positive(t, unknown)
}

const takesSliding = "rate_limit_take_sliding_window"

// This is a negative control: the judge finds the faults of broken variants in the same kinds of histories.
func TestJudgeCatches(t *testing.T) {
	t.Parallel()

	random := random(t)
	for name, broken := range map[string]struct {
		algorithm string // "" means sliding window
		history   string // "" means one with unknown outcomes
		spoil     func(t *testing.T, pool *pgxpool.Pool)
		misread   func(j *judge, w *workload, history []operation) []operation
	}{
		"the time of the transaction's begin": {history: "plain", spoil: func(t *testing.T, pool *pgxpool.Pool) {
			for _, function := range []string{"_rate_limit_now", "rate_limit_all"} {
				pgtest.Rewrite(t, pool, function, "clock_timestamp()", "pg_catalog.now()")
			}
		}},
		"rows that are read without a lock": {history: "plain", spoil: func(t *testing.T, pool *pgxpool.Pool) {
			// The statements for ordinary takes always lock, so this test lets rate_limit_all decide all takes.
			pgtest.LeaveToAll(t, pool, takesSliding)
			pgtest.Rewrite(t, pool, "rate_limit_all", "FOR UPDATE SKIP LOCKED", "OFFSET 0")
			pgtest.Rewrite(t, pool, "rate_limit_all", "FOR UPDATE", "OFFSET 0")
		}},
		"takes that forget the window before": {history: "plain", spoil: func(t *testing.T, pool *pgxpool.Pool) {
			pgtest.Rewrite(t, pool, "_rate_limit_sliding_fits", "(prev_count * least", "(0 * least")
		}},
		"a retry time that is a microsecond late": {history: "plain", spoil: func(t *testing.T, pool *pgxpool.Pool) {
			const told, late = "s.remaining, s.retry_after_us,", "s.remaining, s.retry_after_us + (s.retry_after_us > 0)::int,"
			pgtest.Rewrite(t, pool, "rate_limit_all", told, late)
			pgtest.RewriteTwins(t, pool, pgtest.Left, told, late)
		}},
		"a reset that resets nothing": {history: "resets", spoil: func(t *testing.T, pool *pgxpool.Pool) {
			pgtest.Rewrite(t, pool, "rate_limit_reset", "r.key = key", "r.key = ''")
		}},
		"a cache that is said to know of every reset at once": {
			history: "cache and resets", misread: func(_ *judge, w *workload, history []operation) []operation {
				w.DenialMaxAge = 0
				return history
			},
		},
		"a cache where none is said to be": {history: "cache", misread: func(j *judge, _ *workload, history []operation) []operation {
			j.cache = false
			return history
		}},
		"refunds that give nothing back": {history: "refunds and grants", spoil: func(t *testing.T, pool *pgxpool.Pool) {
			pgtest.Rewrite(t, pool, "_rate_limit_sliding_refund", "back := least(units, rolled.count);", "back := 0;")
		}},
		"refunds of what does not count any more": {history: "refunds and grants", spoil: func(t *testing.T, pool *pgxpool.Pool) {
			pgtest.Rewrite(t, pool,
				"_rate_limit_sliding_refund", "later = 0 AND taken_in = s.window_start THEN", "later = 0 THEN")
		}},
		"credit that is spent twice": {history: "refunds and grants", spoil: func(t *testing.T, pool *pgxpool.Pool) {
			pgtest.Rewrite(t, pool, "_rate_limit_sliding",
				"s.expires_at := clock + s.reset_after_us", "s.expires_at := clock + s.reset_after_us; s.credit := s.credit + s.spent")
		}},
		"windows of the calendar that last from the first take on": {
			algorithm: "calendar window", history: "plain", spoil: func(t *testing.T, pool *pgxpool.Pool) {
				pgtest.Rewrite(t, pool, "_rate_limit_window_end", "(clock / 50000 + 1) * 50000", "clock + 50000")
			},
		},
		"takes from many keys that count on from a window of the calendar that is over": {
			algorithm: "calendar window", history: "many keys", spoil: func(t *testing.T, pool *pgxpool.Pool) {
				pgtest.RewriteTwins(t, pool, "rate_limit_take_calendar_window", "CASE WHEN clock < d.expires_at THEN d.count ELSE 0 END", "d.count")
			},
		},
		"windows of the calendar that go on while there is credit": {
			algorithm: "calendar window", history: "refunds and grants", spoil: func(t *testing.T, pool *pgxpool.Pool) {
				pgtest.Rewrite(t, pool, "_rate_limit_calendar", "OR t - s.window_start >= s.scale", "")
			},
		},
		"a grant that got lost": {history: "plain", misread: func(_ *judge, _ *workload, history []operation) []operation {
			return slices.DeleteFunc(history, func(op operation) bool { return op.Key == keyNumber(0) && op.Cost > 0 && op.Result.Allowed })
		}},
		"unknown outcomes that are taken for failures": {misread: func(_ *judge, _ *workload, history []operation) []operation {
			return slices.DeleteFunc(history, func(op operation) bool { return op.Unknown })
		}},
	} {
		random := rand.New(rand.NewPCG(random.Uint64(), 0))
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			caught := porcupine.Ok
			for attempt := 0; caught == porcupine.Ok && attempt < 100; attempt++ {
				algorithm := cmp.Or(broken.algorithm, "sliding window")
				w, run := histories(algorithm)[broken.history], workload.runInProcesses
				if broken.history == "" {
					w, run = uncertainWorkload(algorithm), uncertain
				}
				db := withMonths(t, w.Span)
				if broken.spoil != nil {
					broken.spoil(t, db.Pool)
				}
				w.Seed = random.Uint64()
				history := run(w, t, db)
				j := judge{ruleOf(w.policy(), w.Span), w.Cache, false}
				if broken.misread != nil {
					history = broken.misread(&j, &w, history)
				}
				var picture string
				if caught, picture = j.check(t, history, w.DenialMaxAge); picture != "" {
					content, err := os.ReadFile(picture)
					require.NoError(t, err)
					require.Contains(t, string(content), "remaining")
					require.NoError(t, os.Remove(picture))
				}
			}
			require.Equal(t, porcupine.Illegal, caught)
		})
	}
}
