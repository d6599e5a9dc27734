package limitertest

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// Taken returns how many units a key has taken of a slow policy's limit.
func Taken(t *testing.T, db pgtest.Executor, config ratelimit.Config, key string) int64 {
	t.Helper()
	return TakenOf(config, pgtest.StoredRows(t, db, config.Durable), key)
}

// TakenOf returns how many units a key has taken according to the stored rows.
func TakenOf(config ratelimit.Config, stored map[modeltest.RowID]modeltest.Row, key string) int64 {
	row := stored[modeltest.RowID{Name: config.Name, Key: key}]
	// A denied request can create a row that has no algorithm yet.
	if _, isBucket := config.Policy.(ratelimit.TokenBucket); isBucket && row.Algorithm != 0 {
		return model.CeilDiv(row.Count, row.Scale)
	}
	return row.Count
}

// ModelResults returns the results that the model gives to calls with these costs, for one key and at one time. The
// calls come one after another.
func ModelResults(p model.Rules, at time.Time, costs ...int64) []ratelimit.Result {
	return ModelResultsFrom(p, model.State{}, at, costs...)
}

// ModelResultsFrom does the same as ModelResults, for a key with the row s.
func ModelResultsFrom(p model.Rules, s model.State, at time.Time, costs ...int64) []ratelimit.Result {
	results := make([]ratelimit.Result, len(costs))
	for i, cost := range costs {
		var d model.Decision
		s, d = modeltest.Element{Cost: cost, Count: 1}.Decide(p, s, at.UnixMicro())
		results[i] = ratelimit.Result{
			Allowed:    d.Granted == 1 || cost == 0 && d.RetryAfter == 0,
			Limit:      p.Numbers().Limit,
			Remaining:  d.Remaining,
			RetryAfter: model.Duration(d.RetryAfter),
			ResetAfter: model.Duration(d.ResetAfter),
			DecidedAt:  at,
		}
	}
	return results
}

// Tally counts equal results.
func Tally(results []ratelimit.Result) map[ratelimit.Result]int {
	counts := map[ratelimit.Result]int{}
	for _, r := range results {
		counts[Plain(r)]++
	}
	return counts
}

// Written returns how many tuples the transaction has written to the limiter's table.
func Written(t *testing.T, tx pgx.Tx, config ratelimit.Config) int64 {
	t.Helper()
	return pgtest.Scalar[int64](
		t,
		tx,
		`SELECT n_tup_ins + n_tup_upd + n_tup_del FROM pg_stat_xact_user_tables WHERE relname = $1`,
		pgtest.Table(config.Durable),
	)
}

// ErrorOf returns only the error of a call.
func ErrorOf[T any](_ T, err error) error { return err }
