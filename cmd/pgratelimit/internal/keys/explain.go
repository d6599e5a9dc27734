package keys

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/algorithm"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/policies"
)

// Explanation says which policy is in force for a key, and why.
type Explanation struct {
	Limiter string               `json:"name"`
	Key     string               `json:"key"`
	At      time.Time            `json:"at"`      // the database's time
	Source  string               `json:"source"`  // a row for the key, for a prefix or for all keys, or the code
	Decides *policies.PolicyRow  `json:"decides"` // null if the policy in the code decides
	Shadow  *policies.PolicyRow  `json:"shadow"`  // null if there is no shadow policy
	Bans    []policies.PolicyRow `json:"bans"`    // the bans for the key, for one of its prefixes, or for all keys
	// Limiters ignore these rows, which are unreadable for limiters or have another kind of policy than --policy.
	PassedOver []policies.PolicyRow `json:"passed_over"`
	Code       *string              `json:"code"` // the policy in the code, which --policy gives
	Table      string               `json:"table"`
	State      []ruleState          `json:"state"` // null if no policy is known, or this role may not read the state
	Unknown    string               `json:"unknown,omitempty"`
	Warning    string               `json:"warning,omitempty"`
}

// ruleState is what a key has left under one part of a policy, and what is held.
type ruleState struct {
	Policy string `json:"policy"`
	keyState
	slots bool // whether the policy is a Concurrency
}

func ExplainCommand(a *cli.App) *cobra.Command {
	var policy ratelimit.Policy
	var durable bool
	cmd := &cobra.Command{
		Use:   "explain NAME KEY",
		Short: "Say which policy is in force for a key, why, and what is left",
		Long: `Says which policy is in force for a key, and where the policy comes from: a row for the key, for a
prefix of the key or for everybody, or the code. The command also shows shadow policies and bans, and
how much is left and held under the policy in force. It takes nothing. Give the policy in the code with --policy,
because the command does not know it. Limiters pass over rows of another kind than this policy. If there
is no row, the policy in the code is in force.`,
		Example: `  pgratelimit explain login user:123
  pgratelimit explain api acme --policy "fixed 100000/30d" --durable --json`,
		Args: cobra.ExactArgs(2),
		RunE: cli.Action(func(ctx context.Context, args []string) error {
			to := policies.PolicyTarget{Key: &args[1]}
			if err := policies.CheckPolicyTarget(args[0], to); err != nil {
				return err
			}
			e := Explanation{Limiter: args[0], Key: args[1], Source: "code", Bans: []policies.PolicyRow{},
				PassedOver: []policies.PolicyRow{}, Table: cli.Table(durable)}
			if policy != nil {
				e.Code = new(policy.String())
			}
			if err := a.InFirst(ctx, func(db cli.DB) error {
				return db.Read(ctx, func(tx cli.Tx) error {
					rows, at, err := policies.ApplyingPolicies(ctx, tx, args[0], to, false)
					e.judge(rows, at, policy)
					return err
				})
			}); err != nil {
				return err
			}
			counts := e.Code
			if e.Decides != nil {
				counts = e.Decides.Policy
			}
			switch {
			case counts != nil:
				if err := a.WithPool(ctx, func(db cli.DB) error { // the database of the policies may be another one
					return e.readState(ctx, db, *counts, durable)
				}); err != nil {
					return err
				}
				e.Warning = policies.Misled(ctx, a, args[0], to.Key, *counts, durable)
			case e.Decides != nil:
				e.Unknown = "nothing is counted while this row is in force"
			default:
				e.Unknown = "it depends on the policy in the code: give it with --policy"
			}
			return a.Print(e, e.print)
		}),
	}
	cli.AddPolicy(cmd, &policy, "the policy in the code; limiters pass over rows of another kind")
	cli.AddDurable(cmd, &durable)
	return a.Finish(cmd)
}

// judge sets the policy in force. The argument all has the rows for the key in order of precedence. The argument code
// is the policy in the code, or nil if it is not known.
func (e *Explanation) judge(all []policies.PolicyRow, at time.Time, code ratelimit.Policy) {
	var rows []policies.PolicyRow // the rows that the limiter obeys
	for _, r := range all {
		if r.ObeyedBy(code) {
			rows = append(rows, r)
		} else {
			e.PassedOver = append(e.PassedOver, r)
		}
	}
	policies.Judge(rows, at)
	e.At, e.Decides, e.Shadow = at, policies.First(rows, at, false), policies.First(rows, at, true)
	if r := e.Decides; r != nil {
		e.Source = "everybody"
		if r.Key != nil {
			e.Source = "key"
		} else if r.KeyPrefix != nil {
			e.Source = "prefix"
		}
	}
	for _, r := range rows {
		if r.Mode == policies.ModeDeny && r.Counts(at) {
			e.Bans = append(e.Bans, r)
		}
	}
}

// readState reads what a key has left under each part of a policy, if this role may read it.
func (e *Explanation) readState(ctx context.Context, db cli.DB, text string, durable bool) error {
	parts, err := algorithm.Parse(text)
	if err != nil {
		return err
	}
	err = db.Read(ctx, func(tx cli.Tx) error {
		for i, numbers := range parts {
			policy, err := ratelimit.ParsePolicy(numbers.String())
			if err != nil {
				return err
			}
			of := ratelimit.Config{Name: algorithm.RowName(e.Limiter, i), Policy: policy, Durable: durable}
			states, err := peekKeys(ctx, tx, of, []string{e.Key}, e.At)
			if err != nil {
				return err
			}
			e.State = append(e.State, ruleState{policy.String(), states[0], numbers.HasSlots()})
		}
		return nil
	})
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code == "42501" {
		e.State, e.Unknown = nil, "this role may not ask; deploy/grants.sql lets rate_limit_app ask"
		return nil
	}
	return err
}

func (e Explanation) print(w io.Writer) {
	about := func(r *policies.PolicyRow) string {
		text := fmt.Sprintf("%s, by the row %d for %s", r.Decides(), r.ID, r.Target())
		if r.ValidUntil != nil {
			text += ", until " + cli.Instant(*r.ValidUntil)
		}
		return fmt.Sprintf("%s, of %s: %s", text, cli.Printable(r.ChangedBy), cli.Printable(r.Comment))
	}
	switch {
	case e.Decides != nil:
		fmt.Fprintf(w, "in force\t%s\n", about(e.Decides))
	case e.Code != nil:
		fmt.Fprintf(w, "in force\tthe policy in the code, which is %s if --policy is right\n", *e.Code)
	default:
		fmt.Fprintf(w, "in force\tthe policy in the code, which this command cannot know\n")
	}
	for i := range e.PassedOver {
		fmt.Fprintf(w, "passed over\t%s\n", about(&e.PassedOver[i]))
	}
	if e.Shadow != nil {
		fmt.Fprintf(w, "shadow\t%s\n", about(e.Shadow))
	}
	for i := range e.Bans {
		r := &e.Bans[i]
		until := "without an end"
		if r.ValidUntil != nil {
			until = "until " + cli.Instant(*r.ValidUntil)
		}
		who := "by " + cli.Printable(r.ChangedBy)
		if r.Automatic {
			who = "by a limiter"
		}
		fmt.Fprintf(w, "banned\t%s, %s, for %s: %s\n", until, who, r.Target(), cli.Printable(r.Comment))
	}
	for _, s := range e.State {
		if s.slots {
			fmt.Fprintf(w, "left\t%d free under %s in %s%s\n", s.Remaining, s.Policy, e.Table,
				slotTimes(s.Held, s.RetryAfterUS, s.ResetAfterUS))
			continue
		}
		if s.ResetAfterUS == 0 {
			fmt.Fprintf(w, "left\t%d under %s in %s, untouched\n", s.Remaining, s.Policy, e.Table)
			continue
		}
		held, free := "", "now"
		if s.Held > 0 {
			held = fmt.Sprintf(", %d held", s.Held)
		}
		if s.RetryAfterUS > 0 {
			free = "after " + cli.Span(s.RetryAfterUS)
		}
		fmt.Fprintf(w, "left\t%d under %s in %s%s, free %s, as good as new after %s\n",
			s.Remaining, s.Policy, e.Table, held, free, cli.Span(s.ResetAfterUS))
	}
	if e.Unknown != "" {
		fmt.Fprintf(w, "left\tnot known: %s\n", e.Unknown)
	}
	policies.PrintWarning(w, e.Warning)
}
