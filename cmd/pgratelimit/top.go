package main

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit"
)

// keyState is what is left to a key. Times are microseconds.
type keyState struct {
	Key          string `json:"key"`
	Remaining    int64  `json:"remaining"`
	RetryAfterUS int64  `json:"retry_after_us"` // 0: a cost of 1 fits
	ResetAfterUS int64  `json:"reset_after_us"`
}

// topResult is the output.
type topResult struct {
	Limiter  string     `json:"limiter"`
	Table    string     `json:"table"`
	Looked   int64      `json:"rows_looked_at"`
	Complete bool       `json:"complete"` // all rows of the limiter were looked at
	Keys     []keyState `json:"keys"`
}

func (a *app) topCommand() *cobra.Command {
	var policy policyValue
	var durable bool
	var n int
	var maxRows int64
	cmd := &cobra.Command{
		Use:   "top NAME --policy POLICY",
		Short: "List the keys of a limiter that are closest to their limit, or over it",
		Long: `Lists the keys of a limiter that have least left, with how long it takes until a cost of 1 fits, and until they are as good as new.
The policy has to be given, because the rows do not hold it. The keys are looked at in batches, which read and wait for nobody;
of a limiter with more than --max-rows keys, only that many, and the output says so. Keys that have taken nothing are not listed.`,
		Example: `  pgratelimit top login --policy "sliding 10/1m"
  pgratelimit top api --policy "fixed 100000/30d" --durable -n 50 --json`,
		Args: cobra.ExactArgs(1),
		RunE: action(func(ctx context.Context, args []string) error {
			if n < 1 || maxRows < 1 {
				return usageError{errors.New("--number and --max-rows must be at least 1")}
			}
			pool, err := a.open(ctx)
			if err != nil {
				return err
			}
			defer pool.Close()
			result := topResult{Limiter: args[0], Table: table(durable), Keys: []keyState{}}
			result.Looked, result.Complete, err = a.peekAll(ctx, pool, args[0], policy.Policy, durable, maxRows, func(states []keyState) {
				result.Keys = append(result.Keys, slices.DeleteFunc(states, func(s keyState) bool { return s.ResetAfterUS == 0 })...)
				slices.SortFunc(result.Keys, closest)
				result.Keys = result.Keys[:min(n, len(result.Keys))]
			})
			if err != nil {
				return err
			}
			return a.print(result, result.print)
		}),
	}
	addPolicy(cmd, &policy)
	addDurable(cmd, &durable)
	cmd.Flags().IntVarP(&n, "number", "n", 10, "how many keys to list")
	addMaxRows(cmd, &maxRows)
	a.addTimeout(cmd)
	a.addJSON(cmd)
	return cmd
}

func addMaxRows(cmd *cobra.Command, maxRows *int64) {
	cmd.Flags().Int64Var(maxRows, "max-rows", 100_000, "look at no more rows of a limiter; 100,000 take about a second")
}

// closest puts those first that have least left, and among these those that have to wait longest.
func closest(a, b keyState) int {
	return cmp.Or(cmp.Compare(a.Remaining, b.Remaining), cmp.Compare(b.RetryAfterUS, a.RetryAfterUS),
		cmp.Compare(b.ResetAfterUS, a.ResetAfterUS), cmp.Compare(a.Key, b.Key))
}

func (r topResult) print(w io.Writer) {
	fmt.Fprintf(w, "KEY\tREMAINING\tFREE AGAIN AFTER\tAS GOOD AS NEW AFTER\n")
	for _, key := range r.Keys {
		free := "now"
		if key.RetryAfterUS > 0 {
			free = wait(key.RetryAfterUS)
		}
		fmt.Fprintf(w, "%s\t%d\t%s\t%s\n", printable(key.Key), key.Remaining, free, wait(key.ResetAfterUS))
	}
	fmt.Fprintf(w, "\n%d rows of limiter %s in %s looked at", r.Looked, printable(r.Limiter), r.Table)
	if !r.Complete {
		fmt.Fprintf(w, ", and there are more: see --max-rows")
	}
	fmt.Fprintln(w)
}

var (
	//go:embed sql/peek_fixed.sql
	peekFixedSQL string
	//go:embed sql/peek_sliding.sql
	peekSlidingSQL string
	//go:embed sql/peek_bucket.sql
	peekBucketSQL string
	//go:embed sql/peek_log.sql
	peekLogSQL string
)

// peekAll asks for the state of a limiter's keys, in batches, each in its own transaction. It tells how many rows it has looked
// at, and whether those were all.
func (a *app) peekAll(ctx context.Context, pool *pgxpool.Pool, name string, policy ratelimit.Policy, durable bool, maxRows int64,
	visit func([]keyState),
) (looked int64, complete bool, err error) {
	var after string
	for {
		left := maxRows - looked
		var keys []string
		var states []keyState
		err := a.read(ctx, pool, func(tx pgx.Tx) (err error) {
			// With nothing left to look at, one more key tells that there are more.
			keys, err = nextKeys(ctx, tx, name, after, min(batchSize, max(left, 1)), durable)
			if err == nil && len(keys) > 0 && left > 0 {
				states, err = peekKeys(ctx, tx, name, policy, durable, keys)
			}
			return err
		})
		switch {
		case err != nil:
			return looked, false, err
		case len(keys) == 0:
			return looked, true, nil
		case left == 0:
			return looked, false, nil
		}
		visit(states)
		looked += int64(len(keys))
		after = keys[len(keys)-1]
	}
}

// peekKeys asks the database for the states of keys, in their order.
func peekKeys(ctx context.Context, tx pgx.Tx, name string, policy ratelimit.Policy, durable bool, keys []string) ([]keyState, error) {
	query, args := peekFixedSQL, []any{name, keys, durable}
	switch p := policy.(type) {
	case ratelimit.FixedWindow:
		args = append(args, p.Limit, p.Window.Microseconds())
	case ratelimit.SlidingWindow:
		query, args = peekSlidingSQL, append(args, p.Limit, p.Window.Microseconds())
	case ratelimit.TokenBucket:
		query, args = peekBucketSQL, append(args, p.Capacity, p.Refill, p.Every.Microseconds())
	case ratelimit.SlidingLog:
		query, args = peekLogSQL, append(args, p.Limit, p.Window.Microseconds())
	default:
		return nil, fmt.Errorf("one policy is needed: the rows of the second of %q are those of the limiter %s/2, and so on", policy, name)
	}
	rows, err := tx.Query(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	states := make([]keyState, 0, len(keys))
	var ord int64
	var s keyState
	_, err = pgx.ForEachRow(rows, []any{&ord, &s.Remaining, &s.RetryAfterUS, &s.ResetAfterUS}, func() error {
		s.Key = keys[ord-1]
		states = append(states, s)
		return nil
	})
	return states, err
}
