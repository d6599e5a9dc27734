package keys

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

// These are the bounds of a hold.
const (
	shortestHold = time.Millisecond
	longestHold  = 24 * time.Hour
	mostUsed     = 1 << 62
)

func HoldCommand(a *cli.App) *cobra.Command {
	var cost int64
	var ttl time.Duration
	cmd := askCommand(a, true, func(ctx context.Context, q question) (Answer, error) {
		if cost < 1 {
			return Answer{}, cli.Usage(fmt.Errorf("--cost is %d, and must be at least 1", cost))
		}
		if err := checkTTL(ttl); err != nil {
			return Answer{}, err
		}
		return q.hold(ctx, cost, ttl)
	})
	cmd.Use = "hold NAME KEY --policy POLICY --cost N --for DURATION"
	cmd.Short = "Set units of a key's limit aside until their use is known"
	cmd.Long = `Sets --cost units of a key's limit aside, if they fit, and prints the hold. Pass the hold to 'settle',
which counts what was used, to 'cancel' or to 'extend', on any machine. After --for, the units are free
again. If the units do not fit, the command prints nothing on standard output, and exits with 3. If it
fails, the hold may exist all the same, until --for is over. The text of a hold has neither the key nor
a secret. ` + noPolicies + " " + noForce
	cmd.Example = `  pgratelimit hold tokens acme --policy "bucket 4000 50/1s" \
      --cost 512 --for 30s --json
  hold=$(pgratelimit hold tokens acme --policy "fixed 100000/1d" \
      --durable --cost 4000 --for 2m)`
	cmd.Flags().Int64Var(&cost, "cost", 0, "how much to hold, all of it or nothing")
	cobra.CheckErr(cmd.MarkFlagRequired("cost"))
	addTTL(cmd, &ttl)
	return cmd
}

//go:embed sql/hold.sql
var holdSQL string

// hold sets units aside. Its Answer has no limit and no time, because the SQL function returns none.
func (q question) hold(ctx context.Context, cost int64, ttl time.Duration) (Answer, error) {
	if q.dry {
		_, err := q.limiter.AllowN(ctx, q.key, cost) // this only finds invalid arguments, because the context has ended
		return Answer{}, err
	}
	of := q.limiter.Config()
	answer := Answer{Decision: new(Decision), done: "denied", holds: true}
	err := q.db.Call(ctx, func(tx cli.Tx) error {
		return tx.QueryRow(ctx, holdSQL, of.Name, q.key, of.Policy.String(), cost, ttl, of.Durable).Scan(
			&answer.Allowed, &answer.Hold, &answer.Remaining, &answer.RetryAfterUS, &answer.ResetAfterUS)
	})
	if err == nil && !answer.Allowed {
		err = cli.ErrDenied
	}
	return answer, err
}

// Settlement is the output of the commands settle and cancel.
type Settlement struct {
	Counted   int64      `json:"counted"`
	Late      bool       `json:"late"`       // whether the hold had ended
	SettledAt *time.Time `json:"settled_at"` // null if nothing was held, because the policy mode was off
}

func (s Settlement) print(w io.Writer) {
	switch {
	case s.SettledAt == nil:
		fmt.Fprintln(w, "nothing was held, so nothing is counted")
	case s.Late:
		fmt.Fprintf(w, "settled at %s: %d counted, although the hold had ended\n", cli.Instant(*s.SettledAt), s.Counted)
	default:
		fmt.Fprintf(w, "settled at %s: %d counted\n", cli.Instant(*s.SettledAt), s.Counted)
	}
}

const settleSQL = `SELECT counted, late, settled_at FROM rate_limit_settle($1, $2, $3)`

func SettleCommand(a *cli.App) *cobra.Command {
	var used int64
	var policy ratelimit.Policy
	cmd := holdCommand(a, settleSQL, func() ([]any, error) {
		if used < 0 || used > mostUsed {
			return nil, fmt.Errorf("--used is %d, and must be from 0 to 2^62", used)
		}
		if policy == nil {
			return []any{used, nil}, nil
		}
		return []any{used, policy.String()}, nil
	}, Settlement.print)
	cmd.Use = "settle HOLD --used N"
	cmd.Short = "Count what was used of a hold, and free the rest"
	cmd.Long = `Ends a hold, and counts what was used, which may be more than was held. If the hold has ended, --used
counts all the same, and the output says so. A hold is settled once: for an hour, a repetition prints
the first settlement and changes nothing. So repeat the command if it fails. As with 'charge', a key can
owe 10 limits: a larger settlement fails, and the hold stays. --policy is needed only if the key's
algorithm was changed after the hold.`
	cmd.Example = `  pgratelimit settle "$hold" --used 2719
  pgratelimit settle "$hold" --used 2719 --policy "bucket 4000 50/1s" --json`
	cmd.Flags().Int64Var(&used, "used", 0, "how much was used")
	cobra.CheckErr(cmd.MarkFlagRequired("used"))
	cli.AddPolicy(cmd, &policy, "count by this policy, not by that of the hold")
	return cmd
}

func CancelCommand(a *cli.App) *cobra.Command {
	cmd := holdCommand(a, settleSQL, func() ([]any, error) { return []any{0, nil}, nil }, Settlement.print)
	cmd.Use = "cancel HOLD"
	cmd.Short = "End a hold of which nothing was used"
	cmd.Long = `Ends a hold of which nothing was used, so that its units are free. This is 'settle --used 0': if the
hold is settled, the command prints the first settlement and changes nothing.`
	cmd.Example = `  pgratelimit cancel "$hold"`
	return cmd
}

// Extension is the output of the command extend.
type Extension struct {
	EndsAt *time.Time `json:"ends_at"` // null if nothing is held, because the policy mode was off
}

func (e Extension) print(w io.Writer) {
	if e.EndsAt == nil {
		fmt.Fprintln(w, "nothing is held")
		return
	}
	fmt.Fprintf(w, "held until %s\n", cli.Instant(*e.EndsAt))
}

func ExtendCommand(a *cli.App) *cobra.Command {
	var ttl time.Duration
	cmd := holdCommand(a, `SELECT rate_limit_extend($1, $2)`, func() ([]any, error) {
		return []any{ttl}, checkTTL(ttl)
	}, Extension.print)
	cmd.Use = "extend HOLD --for DURATION"
	cmd.Short = "Make a hold last longer"
	cmd.Long = `Makes a hold last for at least --for from now. It never makes a hold shorter. If the hold has ended or
is settled, the command fails, because others may have taken the units: settle it all the same, and make
another hold if more is to come.`
	cmd.Example = `  pgratelimit extend "$hold" --for 2m`
	addTTL(cmd, &ttl)
	return cmd
}

// holdCommand returns a command for a hold. The statement sql has the hold and the result of arguments as parameters,
// and returns the fields of T. The command tells processes to forget that they denied the keys of the hold.
func holdCommand[T any](
	a *cli.App, sql string, arguments func() ([]any, error), text func(result T, w io.Writer),
) *cobra.Command {
	return a.Finish(&cobra.Command{
		Args: cobra.ExactArgs(1),
		RunE: a.OnDatabase(func(ctx context.Context, db cli.DB, args []string) error {
			more, err := arguments()
			if err != nil {
				return cli.Usage(err)
			}
			var results []T
			if err := db.Call(ctx, func(tx cli.Tx) error {
				type part struct{ Name, Key string }
				parts, err := cli.Rows[part](ctx, tx, "SELECT name, key FROM rate_limit_find_hold($1)", args[0])
				if err != nil {
					return err
				}
				if results, err = cli.Rows[T](ctx, tx, sql, append([]any{args[0]}, more...)...); err != nil {
					return err
				}
				for _, p := range parts {
					if err := announce(ctx, tx, p.Name, p.Key); err != nil {
						return err
					}
				}
				return nil
			}); err != nil {
				return err
			}
			return a.Print(results[0], func(w io.Writer) { text(results[0], w) })
		}),
	})
}

func addTTL(cmd *cobra.Command, ttl *time.Duration) {
	cmd.Flags().DurationVar(ttl, "for", 0, "how long to hold from now, from 1ms to 24h")
	cobra.CheckErr(cmd.MarkFlagRequired("for"))
}

func checkTTL(ttl time.Duration) error {
	if ttl < shortestHold || ttl > longestHold {
		return cli.Usage(errors.New("--for must be from 1ms to 24h: extend the hold while its work goes on"))
	}
	return nil
}
