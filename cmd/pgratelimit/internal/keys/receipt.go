package keys

import (
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/algorithm"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

// receipt is a file that says what a take took, so that it can be given back, once.
type receipt struct {
	Database string      `json:"database"`
	Schema   string      `json:"schema"`
	Limiter  string      `json:"limiter"`
	Key      string      `json:"key"`
	Policy   string      `json:"policy"`
	Durable  bool        `json:"durable"`
	Cost     int64       `json:"cost"`
	Taken    []takenFrom `json:"taken"` // from the row of each policy
	Sum      string      `json:"sum"`   // over all of the above: nobody edits it by mistake
}

// text is what the file holds.
func (r receipt) text() []byte {
	r.Sum = ""
	content, _ := json.Marshal(r) // cannot fail with these types
	r.Sum = fmt.Sprintf("%x", sha256.Sum256(content))
	content, _ = json.MarshalIndent(r, "", "  ")
	return append(content, '\n')
}

// takenFrom has what rate_limit_all wants to know of a take, under its names.
type takenFrom struct {
	Since *int64 `json:"taken_since"`
	In    *int64 `json:"taken_in"`
	At    *int64 `json:"taken_at"`
	Spent *int64 `json:"taken_spent"`
}

func RefundCommand(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "refund FILE",
		Short: "Give back what a take took, by its receipt",
		Long: `Gives back what 'pgratelimit take --receipt FILE' took, because the work came to nothing: what of it
still counts, and never more. The receipt is used up: FILE is removed before the database is asked, and
stays only if nothing can have been given back. For what an application took, and for more than a limit,
see grant.

A receipt is all that a refund goes by: the database does not know which ones were used. So copy none. A
copy gives back once more, and then what others have taken of the same key. The key stands in it too. A
receipt that was edited, or is of another database or schema, is refused. But its check sum is no
signature: keep it from people whom you would not let run reset.`,
		Example: `  pgratelimit refund alice.json
  pgratelimit take mail alice --policy "bucket 20 5/10s" --receipt alice.json`,
		Args: cobra.ExactArgs(1),
		RunE: cli.Action(func(ctx context.Context, args []string) error {
			file, err := filepath.EvalSymlinks(args[0]) // a link that is removed would leave the receipt
			var content []byte
			if err == nil {
				content, err = os.ReadFile(file)
			}
			if errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("%w; if this receipt was used before, there is nothing left to give back", err)
			}
			if err != nil {
				return err
			}
			r, policies, err := readReceipt(content)
			if err != nil {
				return cli.Usage(fmt.Errorf("%s is no receipt of 'pgratelimit take --receipt': %w", args[0], err))
			}
			pool, err := a.Open(ctx)
			if err != nil {
				return err
			}
			defer pool.Close()
			database, schema, err := whichDatabase(ctx, a, pool) // while it is sure that nothing has been given back
			if err != nil {
				return err
			}
			if database != r.Database || schema != r.Schema {
				return fmt.Errorf("the receipt is of database %s and schema %s, and this is database %s and "+
					"schema %s: --database-url and --schema say which is meant",
					cli.Printable(r.Database), cli.Printable(r.Schema), cli.Printable(database), cli.Printable(schema))
			}
			if err := os.Remove(file); err != nil {
				return err
			}
			result, err := settle(ctx, a, pool, &r, policies, -r.Cost)
			if err != nil {
				return errors.Join(err, r.restore(file, err))
			}
			return printDecision(a, result, "")
		}),
	}
	a.AddTimeout(cmd)
	a.AddJSON(cmd)
	return cmd
}

// whichDatabase tells which database and schema a receipt is of.
func whichDatabase(ctx context.Context, a *cli.App, pool *pgxpool.Pool) (database, schema string, err error) {
	err = a.Read(ctx, pool, func(tx pgx.Tx) error {
		schema = tx.(cli.Qualified).Schema
		return tx.QueryRow(ctx, "SELECT current_database()::text").Scan(&database)
	})
	return database, schema, err
}

// readReceipt refuses what no take has written, because giving it back could give back somebody else's.
func readReceipt(content []byte) (r receipt, policies []algorithm.Numbers, err error) {
	if err := json.Unmarshal(content, &r); err != nil {
		return r, nil, errors.New("it is not in its form") // the text of the error could show the key
	}
	if _, err := ratelimit.ParsePolicy(r.Policy); err != nil {
		return r, nil, err
	}
	policies, err = algorithm.Parse(r.Policy)
	if err == nil && (r.Cost < 1 || len(r.Taken) != len(policies) || r.Limiter == "" || r.Key == "") {
		err = errors.New("it does not say what was taken")
	}
	if err == nil && !bytes.Equal(content, r.text()) { // also a field was added or doubled
		err = errors.New("it was edited, or is damaged")
	}
	for _, t := range r.Taken {
		if err == nil && (t.In == nil || t.Spent == nil) {
			err = errors.New("it does not say what was taken")
		}
	}
	return r, policies, err
}

// restore writes the file again if the database has refused, so that nothing was given back.
func (r *receipt) restore(path string, failure error) error {
	if _, refused := errors.AsType[*pgconn.PgError](failure); !refused && !pgconn.SafeToRetry(failure) {
		return errors.New("perhaps it was given back, so the receipt is used up")
	}
	file, err := createReceipt(path)
	if err != nil {
		return err
	}
	return r.write(file)
}

// createReceipt makes a file that only its owner reads, since a key may be personal data. It replaces none.
func createReceipt(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600) //nolint:gosec // the person names it
}

func (r *receipt) write(file *os.File) error {
	_, err := file.Write(r.text())
	return errors.Join(err, file.Close())
}

// takeWithReceipt takes, and writes a receipt if that was allowed.
func takeWithReceipt(
	ctx context.Context, a *cli.App, pool *pgxpool.Pool, config ratelimit.Config, key string, cost int64, path string,
) (ratelimit.Result, error) {
	file, err := createReceipt(path) // before anything is taken that could not be given back
	if err != nil {
		return ratelimit.Result{}, fmt.Errorf("%w; nothing was taken", err)
	}
	r := receipt{Limiter: config.Name, Key: key, Policy: config.Policy.String(), Durable: config.Durable, Cost: cost}
	policies, err := algorithm.Parse(r.Policy)
	if err == nil {
		r.Database, r.Schema, err = whichDatabase(ctx, a, pool)
	}
	if err != nil {
		return ratelimit.Result{}, errors.Join(err, file.Close(), os.Remove(path))
	}
	result, err := settle(ctx, a, pool, &r, policies, cost)
	if err != nil || !result.Allowed {
		return result, errors.Join(err, file.Close(), os.Remove(path))
	}
	return result, r.write(file)
}

//go:embed sql/take.sql
var takeSQL string

// settle takes for a receipt, which then says what was taken, or gives back what it says.
func settle(
	ctx context.Context, a *cli.App, pool *pgxpool.Pool, r *receipt, policies []algorithm.Numbers, cost int64,
) (result ratelimit.Result, err error) {
	var names, zones []string
	var algorithms []int16
	var limits, spans, refills []int64
	var since, in, at, spent []*int64
	for i, p := range policies {
		names = append(names, algorithm.RowName(r.Limiter, i))
		algorithms, limits = append(algorithms, p.Algorithm), append(limits, p.Limit)
		spans, refills = append(spans, p.Span.Microseconds()), append(refills, p.Refill)
		zones = append(zones, p.Zone)
		if cost < 0 {
			t := r.Taken[i]
			since, in, at, spent = append(since, t.Since), append(in, t.In), append(at, t.At), append(spent, t.Spent)
		}
	}
	var taken []takenFrom
	err = a.Call(ctx, pool, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, takeSQL, names, r.Key, r.Durable, algorithms, limits, spans, refills, cost,
			since, in, at, spent, zones)
		if err != nil {
			return err
		}
		var granted bool
		var remaining, retry, reset int64
		var decided time.Time
		var t takenFrom
		_, err = pgx.ForEachRow(rows,
			[]any{&granted, &remaining, &retry, &reset, &decided, &t.Since, &t.In, &t.At, &t.Spent}, func() error {
				if i := len(taken); i == 0 || remaining < result.Remaining {
					result.Limit, result.Remaining = limits[i], remaining
				}
				result.Allowed, result.DecidedAt = granted, decided
				result.RetryAfter = max(result.RetryAfter, time.Duration(retry)*time.Microsecond)
				result.ResetAfter = max(result.ResetAfter, time.Duration(reset)*time.Microsecond)
				taken = append(taken, t)
				return nil
			})
		if err != nil || cost > 0 {
			return err
		}
		return announce(ctx, tx, r.Limiter, r.Key)
	})
	if cost > 0 {
		r.Taken = taken
	}
	return result, err
}
