// Package keys has the commands about limiters and their keys: what they have taken, and take, refund, grant, reset.
package keys

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/forget"
	"github.com/pgratelimit/ratelimit/internal/pg"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/policies"
)

// noPolicies is what the commands that ask under --policy do not do.
const noPolicies = `This does not look
into rate_limit_policy: its rows, bans too, are obeyed only by limiters whose Config.Policies is set.
'pgratelimit explain' shows them.`

// noForce is what the commands that write under --policy refuse.
const noForce = `If the limiter's rows are in the other table, or of
another kind than the policy, which would have what they count forgotten, nothing is done without --force.`

func PeekCommand(a *cli.App) *cobra.Command {
	cmd := askCommand(a, false, func(ctx context.Context, q question) (ratelimit.Result, error) {
		return q.limiter.Peek(ctx, q.key)
	})
	cmd.Use = "peek NAME KEY --policy POLICY"
	cmd.Short = "Show what is left of a key's limit, and take nothing"
	cmd.Long = `Shows what is left of a key's limit under --policy, and takes nothing. ` + noPolicies
	cmd.Example = `  pgratelimit peek login user:123 --policy "sliding 10/1m"
  pgratelimit peek api acme --policy "fixed 100000/30d" --durable --json`
	return cmd
}

func TakeCommand(a *cli.App) *cobra.Command {
	var cost int64
	var receipt string
	cmd := askCommand(a, true, func(ctx context.Context, q question) (result ratelimit.Result, err error) {
		if cost < 1 {
			return result, cli.Usage(fmt.Errorf("--cost is %d, and must be at least 1", cost))
		}
		if receipt != "" && !q.dry {
			result, err = takeWithReceipt(ctx, q, cost, receipt)
		} else {
			result, err = q.limiter.AllowN(ctx, q.key, cost)
		}
		if err == nil && !result.Allowed {
			err = cli.ErrDenied
		}
		return result, err
	})
	cmd.Use = "take NAME KEY --policy POLICY"
	cmd.Short = "Take from a key's limit, and exit with 3 if that is denied"
	cmd.Long = `Takes from a key's limit under --policy, and exits with 3 if that is denied. ` + noPolicies +
		" " + noForce
	cmd.Example = `  pgratelimit take mail alice --policy "bucket 20 5/10s" && sendmail alice
  pgratelimit take export acme --policy "sliding 100/1h" --cost 10 --json`
	cmd.Flags().Int64Var(&cost, "cost", 1, "how much to take, all of it or nothing")
	cmd.Flags().StringVar(&receipt, "receipt", "",
		"new `file` for the receipt, which refund needs; it holds the key, and only you can read it")
	return cmd
}

func GrantCommand(a *cli.App) *cobra.Command {
	var cost int64
	cmd := askCommand(a, true, func(ctx context.Context, q question) (ratelimit.Result, error) {
		result, err := q.limiter.Grant(ctx, q.key, cost)
		if err == nil {
			tell(ctx, a, q.pool, q.limiter.Config().Name, q.key)
		}
		return result, err
	})
	cmd.Use = "grant NAME KEY --policy POLICY --cost N"
	cmd.Short = "Give a key credit above its limit"
	cmd.Long = `Gives a key credit of --cost above its limit, for support or a purchase, say. It is spent once there
is no ordinary room, each unit once, and lapses when the key is not used for a window (of a sliding
or calendar window two, of a bucket the time to fill it). This is also how to give back what an
application took for nothing: only the application can refund its own takes. Give the policy that
the application has. Each run grants anew. ` + noForce
	cmd.Example = `  pgratelimit grant login user:123 --policy "sliding 10/1m" --cost 5
  pgratelimit grant api acme --policy "fixed 100000/30d" --durable --cost 20000 --json`
	cmd.Flags().Int64Var(&cost, "cost", 0, "how much credit to give")
	cobra.CheckErr(cmd.MarkFlagRequired("cost"))
	return cmd
}

// Decision is a ratelimit.Result in the output, with the names that the SQL functions use.
type Decision struct {
	Allowed      bool      `json:"allowed"`
	Limit        int64     `json:"limit"`
	Remaining    int64     `json:"remaining"`
	RetryAfterUS int64     `json:"retry_after_us"`
	ResetAfterUS int64     `json:"reset_after_us"`
	DecidedAt    time.Time `json:"decided_at"`
	Warning      string    `json:"warning,omitempty"`
}

// question is what a command asks one limiter about one key.
type question struct {
	pool    *pgxpool.Pool
	limiter *ratelimit.Limiter
	key     string
	dry     bool // the context has ended: only whether the question makes sense is wanted
}

// askCommand returns a command that asks one limiter about one key. If it writes, it refuses to do so in a table or
// under a kind of policy that the limiter does not seem to have.
func askCommand(a *cli.App,
	writes bool, ask func(context.Context, question) (ratelimit.Result, error),
) *cobra.Command {
	var policy cli.PolicyValue
	var durable, force bool
	cmd := &cobra.Command{
		Args: cobra.ExactArgs(2),
		RunE: cli.Action(func(ctx context.Context, args []string) error {
			pool, err := a.Open(ctx)
			if err != nil {
				return err
			}
			defer pool.Close()
			config := ratelimit.Config{Name: args[0], Policy: policy.Policy, Durable: durable}
			limiter, err := newLimiter(a, pool, config, a.Schema)
			if err != nil {
				return err
			}
			// A command line that makes no sense is refused before the database is asked.
			over, cancel := context.WithCancel(ctx)
			cancel()
			if _, err := ask(over, question{pool, limiter, args[1], true}); !errors.Is(err, context.Canceled) {
				return err
			}
			schema, err := a.Home(ctx, pool)
			if err != nil {
				return err
			}
			if limiter, err = newLimiter(a, pool, config, schema); err != nil {
				return err
			}
			misled := policies.Misled(ctx, a, args[0], &args[1], policy.String(), durable)
			if misled != "" && writes && !force {
				return fmt.Errorf("nothing was done, because %s; --force does it all the same", misled)
			}
			result, err := ask(ctx, question{pool, limiter, args[1], false})
			if err != nil && !errors.Is(err, cli.ErrDenied) {
				return err
			}
			return errors.Join(printDecision(a, result, misled), err)
		}),
	}
	cli.AddPolicy(cmd, &policy)
	cli.AddDurable(cmd, &durable)
	if writes {
		cmd.Flags().BoolVar(&force, "force", false,
			"do it although the limiter's rows are in the other table, or of another kind than the policy")
	}
	a.AddTimeout(cmd)
	a.AddJSON(cmd)
	return cmd
}

// newLimiter returns a limiter that works in a schema, and logs nothing, because its errors are printed.
func newLimiter(
	a *cli.App, pool *pgxpool.Pool, config ratelimit.Config, schema string,
) (*ratelimit.Limiter, error) {
	config.Client = ratelimit.ClientConfig{
		Schema: schema, Timeout: a.Timeout, Logger: slog.New(slog.DiscardHandler),
	}
	return ratelimit.New(pool, config)
}

// tell tells processes that something was given to a key. If it fails, the gift still counts, so that is no error:
// whoever sees one would give again.
func tell(ctx context.Context, a *cli.App, pool *pgxpool.Pool, limiter, key string) {
	if err := a.Call(ctx, pool, func(tx pgx.Tx) error { return announce(ctx, tx, limiter, key) }); err != nil {
		fmt.Fprintf(a.Stderr, "warning: it is given, but other processes may deny the key for another second, because "+
			"they were not told: %s\n", a.Message(err))
	}
}

func printDecision(a *cli.App, r ratelimit.Result, warning string) error {
	d := Decision{r.Allowed, r.Limit, r.Remaining,
		r.RetryAfter.Microseconds(), r.ResetAfter.Microseconds(), r.DecidedAt, warning}
	return a.Print(d, func(w io.Writer) {
		word, retry := "allowed", ""
		if !d.Allowed {
			word, retry = "denied", ", retry after "+cli.Span(d.RetryAfterUS)
		}
		fmt.Fprintf(w, "%s: %d of %d remaining%s, as good as new after %s\n",
			word, d.Remaining, d.Limit, retry, cli.Span(d.ResetAfterUS))
		policies.PrintWarning(w, warning)
	})
}

var (
	//go:embed sql/reset.sql
	resetSQL string
	//go:embed sql/reset_keys.sql
	resetKeysSQL string
	//go:embed sql/reset_batch_ephemeral.sql
	resetEphemeralBatchSQL string
	//go:embed sql/reset_batch_durable.sql
	resetDurableBatchSQL string
	//go:embed sql/may_delete.sql
	mayDeleteSQL string
	//go:embed sql/next_keys_ephemeral.sql
	nextEphemeralKeysSQL string
	//go:embed sql/next_keys_durable.sql
	nextDurableKeysSQL string
	//go:embed sql/count_ephemeral.sql
	countEphemeralKeysSQL string
	//go:embed sql/count_durable.sql
	countDurableKeysSQL string
)

// BatchSize is how many keys one statement handles at most.
const BatchSize = 1000

func ResetCommand(a *cli.App) *cobra.Command {
	var durable, all, yes bool
	cmd := &cobra.Command{
		Use:   "reset NAME {KEY | --all}",
		Short: "Make a key as good as new, or all keys of a limiter",
		Long: `Makes a key as good as new, or all keys of a limiter, in small transactions. Processes that remember
a denial of the key go on denying for up to a second. Those whose Config.Policies is set are told to
forget it. If the limiter has several policies, the key has a row for each of them, and all of them go.
If there is nothing to reset because the limiter's rows are in the other table, that is a failure.`,
		Example: `  pgratelimit reset login user:123
  pgratelimit reset login --all
  pgratelimit reset api --all --durable --yes`,
		Args: func(cmd *cobra.Command, args []string) error {
			if all {
				return cobra.ExactArgs(1)(cmd, args)
			}
			return cobra.ExactArgs(2)(cmd, args)
		},
		RunE: cli.Action(func(ctx context.Context, args []string) error {
			var to policies.PolicyTarget
			if !all {
				to.Key = &args[1]
			}
			if err := policies.CheckPolicyTarget(args[0], to); err != nil {
				return err
			}
			pool, err := a.Open(ctx)
			if err != nil {
				return err
			}
			defer pool.Close()
			if !all {
				n, err := resetKey(ctx, a, pool, algorithm.RowNames(args[0]), args[1], durable)
				if err == nil {
					err = resetElsewhere(ctx, a, args[0], &args[1], n, durable)
				}
				return errors.Join(err, printReset(a, n, durable, err))
			}
			question := fmt.Sprintf("Reset all keys of limiter %s in %s?", cli.Printable(args[0]), cli.Table(durable))
			if err := a.Confirm(ctx, question, yes); err != nil {
				return err
			}
			var n int64
			err = a.InStores(ctx, func(store *cli.App, in *pgxpool.Pool) error {
				for _, name := range algorithm.RowNames(args[0]) {
					more, err := ResetAll(ctx, store, in, pool, name, durable)
					if n += more; err != nil {
						return err
					}
				}
				return nil
			})
			if err == nil {
				err = resetElsewhere(ctx, a, args[0], nil, n, durable)
			}
			return errors.Join(err, printReset(a, n, durable, err))
		}),
	}
	cmd.Flags().BoolVar(&all, "all", false, "reset all keys of the limiter; asks first")
	cli.AddYes(cmd, &yes)
	cli.AddDurable(cmd, &durable)
	a.AddTimeout(cmd)
	a.AddJSON(cmd)
	return cmd
}

// resetElsewhere is an error if nothing was reset because the limiter has its rows in the other table.
func resetElsewhere(ctx context.Context, a *cli.App, limiter string, key *string, reset int64, durable bool) error {
	if reset > 0 {
		return nil
	}
	if found, err := policies.KindsOf(ctx, a, limiter, key); err == nil && found.Elsewhere(limiter, durable) {
		return errors.New("nothing was reset, because " + policies.Elsewhere(limiter, durable))
	}
	return nil
}

// resetKey returns how many rows of a key were removed. A key has one for each policy of its limiter.
func resetKey(
	ctx context.Context, a *cli.App, pool *pgxpool.Pool, names []string, key string, durable bool,
) (n int64, err error) {
	err = a.Call(ctx, pool, func(tx pgx.Tx) error {
		if err := announce(ctx, tx, names[0], key); err != nil {
			return err
		}
		return tx.QueryRow(ctx, resetSQL, names, key, durable).Scan(&n)
	})
	return n, err
}

// announce tells processes that something was given to keys, when the transaction commits.
func announce(ctx context.Context, tx pgx.Tx, limiter string, keys ...string) error {
	hashes := map[string]bool{}
	for _, key := range keys {
		hashes[forget.Hash(limiter, key)] = true
	}
	for payload := range forget.Payloads(hashes) {
		if _, err := tx.Exec(ctx, "SELECT pg_notify($1, $2)", forget.Channel, payload); err != nil {
			return err
		}
	}
	return nil
}

// ResetAll goes through the keys of rows of a name in order. Keys that are added meanwhile may stay.
//
// It never waits for a row while it holds another one, so it cannot deadlock with anybody. A batch leaves out the
// keys that somebody holds, and at the end they are reset one at a time. A role that may not delete from the
// table has the function do it, which may not leave out keys: of a batch in which somebody holds a key, all are reset
// one at a time.
//
// Processes hear what is announced in the database that they use. If that is a proxy of this one, it is told after each
// transaction.
func ResetAll(
	ctx context.Context, a *cli.App, pool, proxy *pgxpool.Pool, name string, durable bool,
) (total int64, err error) {
	query, count := resetEphemeralBatchSQL, countEphemeralKeysSQL
	if durable {
		query, count = resetDurableBatchSQL, countDurableKeysSQL
	}
	var mayDelete bool
	if err := a.Read(ctx, pool, func(tx pgx.Tx) error {
		err := tx.QueryRow(ctx, mayDeleteSQL, cli.Table(durable)).Scan(&mayDelete)
		if errors.Is(err, pgx.ErrNoRows) { // then the next statement says what is wrong
			return nil
		}
		return err
	}); err != nil {
		return 0, err
	}

	bar, all, passed := a.NewBar("resetting"), int64(0), int64(0)
	defer bar.Remove()
	if bar.Shown != nil {
		err := a.Read(ctx, pool, func(tx pgx.Tx) error { return tx.QueryRow(ctx, count, name).Scan(&all) })
		if err != nil {
			return 0, err
		}
	}
	var held []string
	tell := func(keys ...string) error {
		if a.Connection == "" {
			return nil
		}
		return a.Call(ctx, proxy, func(tx pgx.Tx) error { return announce(ctx, tx, name, keys...) })
	}
	one := func(keys []string) error {
		for _, key := range keys {
			n, err := resetKey(ctx, a, pool, []string{name}, key, durable)
			total += n
			if err == nil {
				err = tell(key)
			}
			if err != nil {
				return err
			}
		}
		return nil
	}
	transaction := a.Call
	if mayDelete {
		transaction = a.Write
	}
	for after := ""; ; {
		var keys, reset []string
		if err := transaction(ctx, pool, func(tx pgx.Tx) (err error) {
			if keys, err = nextKeys(ctx, tx, name, after, BatchSize, durable); err != nil ||
				len(keys) == 0 || !mayDelete {
				return err
			}
			rows, err := tx.Query(ctx, query, name, keys)
			if err != nil {
				return err
			}
			if reset, err = pgx.CollectRows(rows, pgx.RowTo[string]); err != nil {
				return err
			}
			return announce(ctx, tx, name, reset...)
		}); err != nil {
			return total, err
		}
		if len(keys) == 0 {
			err := one(held)
			return total, err
		}
		after = keys[len(keys)-1]
		total += int64(len(reset))
		if err := tell(reset...); err != nil {
			return total, err
		}
		passed += int64(len(keys))
		bar.Update(passed, all)
		slices.Sort(reset) // the keys are in the order of their bytes
		keys = slices.DeleteFunc(keys, func(key string) bool {
			_, found := slices.BinarySearch(reset, key)
			return found
		})
		if mayDelete {
			held = append(held, keys...)
			continue
		}
		var n int64
		err := a.Call(ctx, pool, func(tx pgx.Tx) error {
			if err := announce(ctx, tx, name, keys...); err != nil {
				return err
			}
			return tx.QueryRow(ctx, resetKeysSQL, name, keys, durable).Scan(&n)
		})
		switch total += n; {
		case pg.LockTimeout(err):
			err = one(keys)
		case err == nil:
			err = tell(keys...)
		}
		if err != nil {
			return total, err
		}
	}
}

// nextKeys returns up to limit keys of a limiter that come after the key after, in order.
func nextKeys(ctx context.Context, tx pgx.Tx, name, after string, limit int64, durable bool) ([]string, error) {
	query := nextEphemeralKeysSQL
	if durable {
		query = nextDurableKeysSQL
	}
	rows, err := tx.Query(ctx, query, name, after, limit)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// printReset says how many keys were reset, also if an error came in between.
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
			fmt.Fprintf(w, "nothing to reset in %s; without --durable it would have been %s\n",
				value.Table, cli.Table(false))
		default:
			fmt.Fprintf(w, "nothing to reset in %s; --durable is for %s\n", value.Table, cli.Table(true))
		}
	})
}
