package keys

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/policytable"
	"github.com/pgratelimit/ratelimit/internal/rowsql"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/policies"
)

var (
	//go:embed sql/reset.sql
	resetSQL string
	//go:embed sql/count.sql
	countSQL string
)

// BatchSize is the largest number of keys that one statement resets.
const BatchSize = 1000

func ResetCommand(a *cli.App) *cobra.Command {
	var durable, all, yes bool
	cmd := &cobra.Command{
		Use:   "reset NAME {KEY | --all}",
		Short: "Make a key as good as new, or all keys of a limiter",
		Long: `Makes a key as good as new, or all keys of a limiter, in small transactions. Processes that remember a
denial of the key may deny the key for another second. Processes whose Config.Policies is set are told
to forget the denial. If the limiter has several policies, the command removes the row of each policy.
The command fails if there is nothing to reset because the limiter's rows are in the other table.`,
		Example: `  pgratelimit reset login user:123
  pgratelimit reset login --all
  pgratelimit reset api --all --durable --yes`,
		Args: func(cmd *cobra.Command, args []string) error {
			if all {
				return cobra.ExactArgs(1)(cmd, args)
			}
			return cobra.ExactArgs(2)(cmd, args)
		},
		RunE: a.OnDatabase(func(ctx context.Context, db cli.DB, args []string) error {
			var to policies.PolicyTarget
			if !all {
				to.Key = &args[1]
			}
			if err := policies.CheckPolicyTarget(args[0], to); err != nil {
				return err
			}
			names := algorithm.RowNames(args[0])
			var n int64
			var err error
			if all {
				if err := a.Confirm(ctx, fmt.Sprintf("Reset all keys of limiter %s in %s?",
					cli.Printable(args[0]), cli.Table(durable)), yes); err != nil {
					return err
				}
				n, err = resetNames(ctx, db, names, durable)
			} else {
				n, err = resetKeys(ctx, db, names, args[1:], durable, true)
			}
			if n == 0 && err == nil {
				found, unknown := policies.KindsOf(ctx, a, args[0], to.Key)
				if unknown == nil && found.Elsewhere(args[0], durable) {
					err = errors.New("nothing was reset, because " + policies.Elsewhere(args[0], durable))
				}
			}
			return errors.Join(err, printReset(a, n, durable, err))
		}),
	}
	cmd.Flags().BoolVar(&all, "all", false, "reset all keys of the limiter; asks first")
	cli.AddYes(cmd, &yes)
	cli.AddDurable(cmd, &durable)
	return a.Finish(cmd)
}

// resetNames resets all keys that have rows with these names, in all databases. resetNames returns how many rows it
// removed.
func resetNames(ctx context.Context, db cli.DB, names []string, durable bool) (total int64, err error) {
	err = db.InStores(ctx, func(store cli.DB) error {
		for _, name := range names {
			n, err := ResetAll(ctx, store, db, name, durable)
			if total += n; err != nil {
				return err
			}
		}
		return nil
	})
	return total, err
}

// resetKeys resets keys, and returns how many rows it removed. A key has a row for each policy of its limiter. If the
// argument waits is false, resetKeys fails when a row is locked.
func resetKeys(ctx context.Context, db cli.DB, names, keys []string, durable, waits bool) (n int64, err error) {
	var lockTimeout *int // in milliseconds
	if !waits {
		lockTimeout = new(1)
	}
	err = db.Call(ctx, func(tx cli.Tx) error {
		if err := announce(ctx, tx, names[0], keys...); err != nil {
			return err
		}
		return tx.QueryRow(ctx, resetSQL, names, keys, durable, lockTimeout).Scan(&n)
	})
	return n, err
}

// announce tells processes that keys have got units. Processes hear of this when the transaction commits.
func announce(ctx context.Context, tx cli.Tx, limiter string, keys ...string) error {
	hashes := map[string]bool{}
	for _, key := range keys {
		hashes[policytable.KeyHash(limiter, key)] = true
	}
	for payload := range policytable.ForgetPayloads(hashes) {
		if _, err := tx.Exec(ctx, "SELECT pg_notify($1, $2)", policytable.Channel, payload); err != nil {
			return err
		}
	}
	return nil
}

// ResetAll resets all keys that have rows with a name, in the order of the keys. If keys are added meanwhile, they may
// remain.
//
// ResetAll cannot deadlock, because it does not wait for locks while it holds row locks. If a row of a batch is locked,
// ResetAll halves the batch. At the end, ResetAll resets the keys with locked rows, one at a time.
//
// Processes listen in the database that they use. If the processes use a proxy, ResetAll announces the keys there.
func ResetAll(ctx context.Context, db, proxy cli.DB, name string, durable bool) (total int64, err error) {
	bar, all, passed := db.NewBar("resetting"), int64(0), int64(0)
	defer bar.Remove()
	if bar.Shown != nil {
		if err := db.Read(ctx, func(tx cli.Tx) error {
			return tx.QueryRow(ctx, rowsql.InTable(countSQL, durable), name).Scan(&all)
		}); err != nil {
			return 0, err
		}
	}
	var held []string
	var reset func(keys []string, waits bool) error
	reset = func(keys []string, waits bool) error {
		n, err := resetKeys(ctx, db, []string{name}, keys, durable, waits)
		switch half := len(keys) / 2; {
		case !waits && pg.LockTimeout(err) && half == 0:
			held = append(held, keys...)
			return nil
		case !waits && pg.LockTimeout(err):
			if err := reset(keys[:half], false); err != nil {
				return err
			}
			return reset(keys[half:], false)
		case err != nil:
			return err
		}
		total += n
		passed += int64(len(keys))
		bar.Update(passed, all)
		if db.Connection == "" {
			return nil
		}
		return proxy.Call(ctx, func(tx cli.Tx) error { return announce(ctx, tx, name, keys...) })
	}
	for after := ""; ; {
		var keys []string
		if err := db.Read(ctx, func(tx cli.Tx) (err error) {
			keys, err = nextKeys(ctx, tx, name, after, BatchSize, durable)
			return err
		}); err != nil {
			return total, err
		}
		if len(keys) == 0 {
			break
		}
		after = keys[len(keys)-1]
		if err := reset(keys, false); err != nil {
			return total, err
		}
	}
	for _, key := range held {
		if err := reset([]string{key}, true); err != nil {
			return total, err
		}
	}
	return total, nil
}

// nextKeys returns, in order, at most limit keys of a limiter that follow the key in the argument after.
func nextKeys(ctx context.Context, tx cli.Tx, name, after string, limit int64, durable bool) ([]string, error) {
	rows, _ := tx.Query(ctx, rowsql.InTable(rowsql.NextKeys, durable), name, after, limit) // rows may contain an error
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// printReset prints how many rows were removed, even if an error occurred later.
func printReset(a *cli.App, n int64, durable bool, err error) error {
	if err != nil && n == 0 {
		return nil
	}
	value := struct {
		Table string `json:"table"`
		Reset int64  `json:"reset"`
	}{cli.Table(durable), n}
	return a.Print(value, func(w io.Writer) {
		switch {
		case n > 0:
			fmt.Fprintf(w, "reset %d in %s\n", n, value.Table)
		case durable:
			fmt.Fprintf(w, "nothing to reset in %s; leave out --durable for %s\n", value.Table, cli.Table(false))
		default:
			fmt.Fprintf(w, "nothing to reset in %s; give --durable for %s\n", value.Table, cli.Table(true))
		}
	})
}
