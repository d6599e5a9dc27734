package keys

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/rowsql"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/policies"
)

// keyState is what a key has left of its limit. Times are in microseconds.
type keyState struct {
	Key          string `json:"key"`
	Remaining    int64  `json:"remaining"`
	Held         int64  `json:"held"`           // the units of live holds, which are not in Remaining
	RetryAfterUS int64  `json:"retry_after_us"` // 0 if a cost of 1 fits now
	ResetAfterUS int64  `json:"reset_after_us"`
}

// TopResult is the output of the command top.
type TopResult struct {
	Limiter  string     `json:"limiter"`
	Table    string     `json:"table"`
	Looked   int64      `json:"rows_looked_at"`
	Complete bool       `json:"complete"` // whether all rows of the limiter were read
	Share    float64    `json:"share"`    // the approximate share of the limiter's rows that was read, from 0 to 1
	At       time.Time  `json:"at"`       // the time of the database (of shard 0), from which all durations count
	Keys     []keyState `json:"keys"`
	Warning  string     `json:"warning,omitempty"`

	slots bool // whether the policy is a Concurrency
}

func TopCommand(a *cli.App) *cobra.Command {
	var policy ratelimit.Policy
	var durable bool
	var n int
	var maxRows int64
	var watch bool
	cmd := &cobra.Command{
		Use:   "top NAME --policy POLICY",
		Short: "List the keys of a limiter that are closest to their limit",
		Long: `Lists the keys of a limiter that have least left, with the units that are held, the time until a cost
of 1 fits, and the time until the key is as good as new. All times count from one moment. Give the
policy, because the rows do not have it. Keys that another algorithm wrote count as new: 'pgratelimit
limits' lists the algorithms. Of slots, the times are those after which they are free if no holder
renews or releases one.
The command reads the keys in batches, and waits for no locks. If a limiter has more than --max-rows
keys, the command reads about --max-rows keys, and prints the share of the keys that it has read. It
chooses pages at random, so it reads keys that were made together either all or not at all. Keys that
took and hold nothing are not listed.`,
		Example: `  pgratelimit top login --policy "sliding 10/1m"
  pgratelimit top login --policy "sliding 10/1m" --watch
  pgratelimit top api --policy "fixed 100000/30d" --durable -n 50 --json`,
		Args: cobra.ExactArgs(1),
		RunE: cli.Action(func(ctx context.Context, args []string) error {
			if n < 1 || maxRows < 1 {
				return cli.Usage(errors.New("--number and --max-rows must be at least 1"))
			}
			if err := policies.CheckPolicyTarget(args[0], policies.PolicyTarget{}); err != nil {
				return err
			}
			of := ratelimit.Config{Name: args[0], Policy: policy, Durable: durable}
			return a.Show(ctx, watch, func() (func() error, error) {
				result, err := readTop(ctx, a, of, n, maxRows)
				return func() error { return a.Print(result, result.print) }, err
			})
		}),
	}
	cli.RequirePolicy(cmd, &policy)
	cli.AddDurable(cmd, &durable)
	cmd.Flags().IntVarP(&n, "number", "n", 10, "how many keys to list")
	cmd.Flags().BoolVar(&watch, "watch", false, cli.WatchUsage)
	addMaxRows(cmd, &maxRows)
	return a.Finish(cmd)
}

// readTop reads the n keys of a limiter that are closest to their limit.
func readTop(ctx context.Context, a *cli.App, of ratelimit.Config, n int, maxRows int64) (TopResult, error) {
	result := TopResult{Limiter: of.Name, Table: cli.Table(of.Durable), Complete: true, Keys: []keyState{}}
	_, result.slots = of.Policy.(ratelimit.Concurrency)
	rows := 0.0 // an estimate of the number of the limiter's rows
	if err := a.InStores(ctx, func(store cli.DB) error {
		states, sample, err := peekAll(ctx, store, of, maxRows)
		if err != nil {
			return err
		}
		untouched := func(s keyState) bool { return s.ResetAfterUS == 0 }
		result.Keys = append(result.Keys, slices.DeleteFunc(states, untouched)...)
		slices.SortFunc(result.Keys, Closest)
		result.Keys = result.Keys[:min(n, len(result.Keys))]
		result.Looked += int64(len(sample.keys))
		result.Complete = result.Complete && sample.share == 1
		if result.Share = sample.share; len(sample.keys) > 0 {
			rows += float64(len(sample.keys)) / sample.share
		}
		if result.At.IsZero() {
			result.At = sample.at
		}
		return nil
	}); err != nil {
		return result, err
	}
	if !result.Complete && rows > 0 {
		result.Share = float64(result.Looked) / rows
	}
	result.Warning = policies.Misled(ctx, a, of.Name, nil, of.Policy.String(), of.Durable)
	return result, nil
}

const defaultMaxRows = 100_000

func addMaxRows(cmd *cobra.Command, maxRows *int64) {
	cmd.Flags().Int64Var(maxRows, "max-rows", defaultMaxRows,
		"look at no more than so many rows of a limiter in each shard, at random; 100,000 take some seconds")
}

// Closest compares keys. The key with less left comes first, and among equals the key that must wait longer.
func Closest(a, b keyState) int {
	return cmp.Or(cmp.Compare(a.Remaining, b.Remaining), cmp.Compare(b.RetryAfterUS, a.RetryAfterUS),
		cmp.Compare(b.ResetAfterUS, a.ResetAfterUS), cmp.Compare(a.Key, b.Key))
}

func (r TopResult) print(w io.Writer) {
	policies.PrintWarning(w, r.Warning)
	heading := "KEY\tREMAINING\tHELD\tFREE AGAIN AFTER\tAS GOOD AS NEW AFTER\n"
	if r.slots {
		heading = "KEY\tFREE\tHELD\tONE FREE AFTER\tALL FREE AFTER\n"
	}
	fmt.Fprint(w, heading)
	for _, key := range r.Keys {
		free := "now"
		if key.RetryAfterUS > 0 {
			free = cli.Span(key.RetryAfterUS)
		}
		fmt.Fprintf(w, "%s\t%d\t%d\t%s\t%s\n",
			cli.Short(key.Key), key.Remaining, key.Held, free, cli.Span(key.ResetAfterUS))
	}
	fmt.Fprintf(w, "\n%s of limiter %s in %s looked at", cli.Count(r.Looked, "row"), cli.Printable(r.Limiter), r.Table)
	if !r.Complete {
		fmt.Fprintf(w, ", chosen at random, which is about %.2g %% of them: see --max-rows", 100*r.Share)
	}
	if r.Looked == 0 && r.Table == cli.Table(false) {
		fmt.Fprintf(w, "; give --durable for %s", cli.Table(true))
	}
	fmt.Fprintln(w)
	if r.slots && len(r.Keys) > 0 {
		fmt.Fprintf(w, "slots are free after these times %s; 'pgratelimit slots' lists who holds them\n", unlessRenewed)
	}
}

//go:embed sql/sample.sql
var sampleSQL string

// sample is a part of a limiter's keys, or all of them.
type sample struct {
	keys  []string
	share float64   // the approximate share of the limiter's keys; 1 if keys has all of them
	at    time.Time // the database's time when the keys were read
}

// peekAll reads the states that a limiter's keys have at one moment. Each batch of keys has its own transaction. If
// there are more than maxRows keys, peekAll reads a sample.
func peekAll(
	ctx context.Context, db cli.DB, of ratelimit.Config, maxRows int64,
) (states []keyState, s sample, err error) {
	if s, err = sampleKeys(ctx, db, of, maxRows); err != nil {
		return nil, s, err
	}
	bar := db.NewBar("looking")
	defer bar.Remove()
	for keys := range slices.Chunk(s.keys, BatchSize) {
		if err := db.Read(ctx, func(tx cli.Tx) error {
			more, err := peekKeys(ctx, tx, of, keys, s.at)
			states = append(states, more...)
			return err
		}); err != nil {
			return nil, s, err
		}
		bar.Update(int64(len(states)), int64(len(s.keys)))
	}
	return states, s, nil
}

// sampleKeys returns all keys of a limiter. If there are more than maxRows keys, sampleKeys chooses blocks of the table
// at random, and then rows of the limiter in these blocks.
func sampleKeys(ctx context.Context, db cli.DB, of ratelimit.Config, maxRows int64) (s sample, err error) {
	err = db.Read(ctx, func(tx cli.Tx) (err error) {
		if err = tx.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&s.at); err != nil {
			return err
		}
		s.share = 1
		s.keys, err = nextKeys(ctx, tx, of.Name, "", maxRows+1, of.Durable)
		if err != nil || int64(len(s.keys)) <= maxRows {
			return err
		}
		_, percent, err := cli.TableSizes(ctx, tx, false)
		if err != nil {
			return err
		}
		// Without --max-rows, a sample has about defaultMaxRows rows.
		s.share = min(1, percent[cli.Table(of.Durable)]/100*max(1, float64(maxRows)/defaultMaxRows))
		s.keys = nil
		// rows may contain an error
		rows, _ := tx.Query(ctx, rowsql.InTable(sampleSQL, of.Durable), of.Name, 100*s.share, maxRows)
		var key string
		var from int64
		_, err = pgx.ForEachRow(rows, []any{&key, &from}, func() error {
			s.keys = append(s.keys, key)
			return nil
		})
		slices.Sort(s.keys) // so that the keys of a batch are neighbors in the index
		if from > 0 {
			s.share *= float64(len(s.keys)) / float64(from)
		}
		return err
	})
	return s, err
}

// peekKeys reads the states of keys, in order.
func peekKeys(ctx context.Context, tx cli.Tx, of ratelimit.Config, keys []string, at time.Time) ([]keyState, error) {
	numbers, err := algorithm.Parse(of.Policy.String())
	if err != nil {
		return nil, err
	}
	if len(numbers) > 1 {
		return nil, fmt.Errorf("give one policy instead of %q: "+
			"the rows of the second one are those of the limiter %s/2, and so on", of.Policy, of.Name)
	}
	p := numbers[0]
	// rows may contain an error
	rows, _ := tx.Query(ctx, rowsql.Peek, of.Name, keys, of.Durable, p.Algorithm, p.Limit, p.Span.Microseconds(),
		p.Refill, at, p.Zone)
	states := make([]keyState, 0, len(keys))
	var ord int64
	var s keyState
	_, err = pgx.ForEachRow(rows, []any{&ord, &s.Remaining, &s.Held, &s.RetryAfterUS, &s.ResetAfterUS}, func() error {
		s.Key = keys[ord-1]
		states = append(states, s)
		return nil
	})
	return states, err
}
