// Package keys has the commands that show the usage of keys, and that take, charge, hold, refund, grant and reset.
package keys

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/policies"
)

const noPolicies = `It does
not obey the rows of rate_limit_policy, such as bans: 'pgratelimit explain' shows them.`

const noForce = `If the
limiter's rows are in the other table, or of another kind than the policy, so that the policy would
forget what they count, it does nothing without --force.`

func PeekCommand(a *cli.App) *cobra.Command {
	cmd := askCommand(a, false, func(ctx context.Context, q question) (Answer, error) {
		answer, err := decided(q.limiter.Peek(ctx, q.key))
		_, answer.slots = q.limiter.Config().Policy.(ratelimit.Concurrency)
		return answer, err
	})
	cmd.Use = "peek NAME KEY --policy POLICY"
	cmd.Short = "Show what is left of a key's limit, and take nothing"
	cmd.Long = `Shows what is left of a key's limit under --policy, and takes nothing. It shows how many slots are free,
and not who waits for one: 'pgratelimit slots' does. ` + noPolicies
	cmd.Example = `  pgratelimit peek login user:123 --policy "sliding 10/1m"
  pgratelimit peek api acme --policy "fixed 100000/30d" --durable --json`
	return cmd
}

func TakeCommand(a *cli.App) *cobra.Command {
	var cost int64
	var receipt string
	cmd := askCommand(a, true, func(ctx context.Context, q question) (Answer, error) {
		if cost < 1 {
			return Answer{}, cli.Usage(fmt.Errorf("--cost is %d, and must be at least 1", cost))
		}
		result, err := q.take(ctx, cost, receipt)
		if err == nil && !result.Allowed {
			err = cli.ErrDenied
		}
		return decided(result, err)
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

func ChargeCommand(a *cli.App) *cobra.Command {
	var cost int64
	cmd := askCommand(a, true, func(ctx context.Context, q question) (Answer, error) {
		if cost < 1 {
			return Answer{}, cli.Usage(fmt.Errorf("--cost is %d, and must be at least 1", cost))
		}
		c, err := q.limiter.Charge(ctx, q.key, cost)
		answer := given("charged", ratelimit.Balance{
			Limit: c.Limit, Remaining: c.Remaining, ResetAfter: c.ResetAfter, DecidedAt: c.DecidedAt,
		})
		answer.Decision, answer.Owed = &Decision{c.RetryAfter == 0, c.RetryAfter.Microseconds()}, c.Owed
		return answer, err
	})
	cmd.Use = "charge NAME KEY --policy POLICY --cost N"
	cmd.Short = "Count what a key has used, even above its limit"
	cmd.Long = `Counts what a key has used, whether it fits or not. The key owes what is above its limit, up to 10
limits, and is denied until that has drained. A larger charge fails, and counts nothing. Each run
charges anew. With --json, allowed says whether a cost of 1 would be allowed now. ` + noPolicies + " " + noForce
	cmd.Example = `  pgratelimit charge tokens acme --policy "fixed 100000/30d" \
      --durable --cost 2719
  pgratelimit charge tokens acme --policy "bucket 4000 50/1s" --cost 512 --json`
	cmd.Flags().Int64Var(&cost, "cost", 0, "how much was used")
	cobra.CheckErr(cmd.MarkFlagRequired("cost"))
	return cmd
}

func GrantCommand(a *cli.App) *cobra.Command {
	var cost int64
	cmd := askCommand(a, true, func(ctx context.Context, q question) (Answer, error) {
		balance, err := q.limiter.Grant(ctx, q.key, cost)
		if err == nil {
			tell(ctx, q.db, q.limiter.Config().Name, q.key)
		}
		return given("granted", balance), err
	})
	cmd.Use = "grant NAME KEY --policy POLICY --cost N"
	cmd.Short = "Give a key credit above its limit"
	cmd.Long = `Gives a key credit of --cost above its limit, for support or a purchase, say. Takes spend it when there
is no ordinary room, each unit once. It lapses when the key is not used for a window: for two if it is a
sliding or calendar window, and for the time that a bucket needs to fill. Use it too for what an
application took for nothing, if there is no receipt. Give the application's policy. Each run grants
anew. ` + noForce
	cmd.Example = `  pgratelimit grant login user:123 --policy "sliding 10/1m" --cost 5
  pgratelimit grant api acme --policy "fixed 100000/30d" --durable \
      --cost 20000 --json`
	cmd.Flags().Int64Var(&cost, "cost", 0, "how much credit to give")
	cobra.CheckErr(cmd.MarkFlagRequired("cost"))
	return cmd
}

// Answer is a command's result for a key. The fields have the names of the SQL functions' columns.
type Answer struct {
	*Decision              // nil for the commands grant and refund
	Hold         string    `json:"hold,omitempty"`
	Limit        int64     `json:"limit,omitempty"` // 0 for the command hold
	Remaining    int64     `json:"remaining"`
	Owed         int64     `json:"owed,omitempty"` // how much a charged key counts above its limit
	Held         int64     `json:"held,omitempty"` // how many units live holds set aside; for the command peek
	ResetAfterUS int64     `json:"reset_after_us"`
	DecidedAt    time.Time `json:"decided_at,omitzero"` // zero for the command hold
	Warning      string    `json:"warning,omitempty"`

	done  string // a word for the result
	slots bool   // whether the policy is a Concurrency
	holds bool   // whether standard output is for the hold only, because a shell passes it on
}

type Decision struct {
	Allowed      bool  `json:"allowed"`
	RetryAfterUS int64 `json:"retry_after_us"`
}

// decided returns the Answer of a command that makes a decision.
func decided(r ratelimit.Result, err error) (Answer, error) {
	word := "denied"
	if r.Allowed {
		word = "allowed"
	}
	a := given(word, ratelimit.Balance{
		Limit: r.Limit, Remaining: r.Remaining, ResetAfter: r.ResetAfter, DecidedAt: r.DecidedAt,
	})
	a.Held = r.Held
	a.Decision = &Decision{r.Allowed, r.RetryAfter.Microseconds()}
	return a, err
}

// given returns the Answer of a command that gives units back or grants credit.
func given(word string, b ratelimit.Balance) Answer {
	return Answer{
		done: word, Limit: b.Limit, Remaining: b.Remaining,
		ResetAfterUS: b.ResetAfter.Microseconds(), DecidedAt: b.DecidedAt,
	}
}

func (r Answer) print(a *cli.App) error {
	switch {
	case a.JSON || !r.holds:
		return a.Print(r, r.text)
	case r.Allowed:
		policies.PrintWarning(a.Stderr, r.Warning)
		_, err := fmt.Fprintln(a.Stdout, r.Hold)
		return err
	}
	r.text(a.Stderr)
	return nil
}

func (r Answer) text(w io.Writer) {
	if r.slots {
		fmt.Fprintf(w, "%s: %d of %d free%s\n", r.done, r.Remaining, r.Limit,
			slotTimes(r.Held, r.RetryAfterUS, r.ResetAfterUS))
		policies.PrintWarning(w, r.Warning)
		return
	}
	limit, owed, held, retry := "", "", "", ""
	if r.Limit > 0 {
		limit = fmt.Sprintf(" of %d", r.Limit)
	}
	if r.Owed > 0 {
		owed = fmt.Sprintf(", %d owed", r.Owed)
	}
	if r.Held > 0 {
		held = fmt.Sprintf(", %d held", r.Held)
	}
	if r.Decision != nil && !r.Allowed {
		retry = ", retry after " + cli.Span(r.RetryAfterUS)
	}
	fmt.Fprintf(w, "%s: %d%s remaining%s%s%s, as good as new after %s\n",
		r.done, r.Remaining, limit, owed, held, retry, cli.Span(r.ResetAfterUS))
	policies.PrintWarning(w, r.Warning)
}

// question is a request to a limiter for a key.
type question struct {
	db      cli.DB
	limiter *ratelimit.Limiter
	key     string
	dry     bool // whether the context has already ended, so that only errors in the command line are found
}

// askCommand returns a command for one key. If the command writes, it refuses a policy or table that the limiter does
// not seem to use.
func askCommand(a *cli.App, writes bool, ask func(context.Context, question) (Answer, error)) *cobra.Command {
	var policy ratelimit.Policy
	var durable, force bool
	cmd := &cobra.Command{
		Args: cobra.ExactArgs(2),
		RunE: a.OnDatabase(func(ctx context.Context, db cli.DB, args []string) error {
			config := ratelimit.Config{Name: args[0], Policy: policy, Durable: durable}
			limiter, err := newLimiter(db, config, db.Schema)
			if err != nil {
				return err
			}
			// Find errors in the command line before using the database.
			over, cancel := context.WithCancel(ctx)
			cancel()
			if _, err := ask(over, question{db, limiter, args[1], true}); !errors.Is(err, context.Canceled) {
				return err
			}
			schema, err := db.Home(ctx)
			if err != nil {
				return err
			}
			if limiter, err = newLimiter(db, config, schema); err != nil {
				return err
			}
			misled := policies.Misled(ctx, a, args[0], &args[1], policy.String(), durable)
			if misled != "" && writes && !force {
				return fmt.Errorf("nothing was done, because %s; --force does it all the same", misled)
			}
			answer, err := ask(ctx, question{db, limiter, args[1], false})
			if err != nil && !errors.Is(err, cli.ErrDenied) {
				return err
			}
			answer.Warning = misled
			return errors.Join(answer.print(a), err)
		}),
	}
	cli.RequirePolicy(cmd, &policy)
	cli.AddDurable(cmd, &durable)
	if writes {
		cmd.Flags().BoolVar(&force, "force", false,
			"do it although the limiter's rows are in the other table, or of another kind than the policy")
	}
	return a.Finish(cmd)
}

// newLimiter returns a limiter for a schema. The limiter does not log, because the command prints errors.
func newLimiter(db cli.DB, config ratelimit.Config, schema string) (*ratelimit.Limiter, error) {
	client, err := ratelimit.NewClient(db.Pool, ratelimit.ClientConfig{
		Schema: schema, Timeout: db.Timeout, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return nil, err
	}
	return client.Limiter(config)
}

// tell announces to other processes that a key has got units. If that fails, tell only prints a warning. After an
// error, users would run the command again, and give the units twice.
func tell(ctx context.Context, db cli.DB, limiter, key string) {
	if err := db.Call(ctx, func(tx cli.Tx) error { return announce(ctx, tx, limiter, key) }); err != nil {
		fmt.Fprintf(db.Stderr, "warning: it is given, but other processes may deny the key for another second, "+
			"because they were not told: %s\n", db.Message(err))
	}
}
