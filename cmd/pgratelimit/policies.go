package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"
)

// Modes of rows.
const (
	modeEnforce = "enforce"
	modeShadow  = "shadow"
	modeOff     = "off"
	modeDeny    = "deny"
)

var (
	//go:embed sql/policy/applying.sql
	applyingPoliciesSQL string
	//go:embed sql/policy/list.sql
	listPoliciesSQL string
	//go:embed sql/policy/count_bans.sql
	countBansSQL string
	//go:embed sql/policy/turn.sql
	policyTurnSQL string
	//go:embed sql/policy/remove.sql
	removePoliciesSQL string
	//go:embed sql/policy/add.sql
	addPolicySQL string
)

// policyTarget is whom a row is for: a key, the keys with a prefix, or, if both are nil, everybody.
type policyTarget struct{ key, prefix *string }

func (t policyTarget) String() string {
	switch {
	case t.key != nil:
		return "key " + short(*t.key)
	case t.prefix != nil:
		return "prefix " + short(*t.prefix)
	}
	return "everybody"
}

// is tells whether two targets are the same.
func (t policyTarget) is(other policyTarget) bool {
	same := func(a, b *string) bool { return (a == nil) == (b == nil) && (a == nil || *a == *b) }
	return same(t.key, other.key) && same(t.prefix, other.prefix)
}

// policyRow is a row of rate_limit_policy.
type policyRow struct {
	ID         int64      `json:"id"`
	Limiter    string     `json:"name"`
	Key        *string    `json:"key"`
	KeyPrefix  *string    `json:"key_prefix"` // if this and the key are null, the row is for everybody
	Mode       string     `json:"mode"`
	Policy     *string    `json:"policy"` // of the modes enforce and shadow
	ValidFrom  *time.Time `json:"valid_from"`
	ValidUntil *time.Time `json:"valid_until"` // null if it has no end
	Comment    string     `json:"comment"`
	Automatic  bool       `json:"automatic"` // a limiter has made this ban
	ChangedBy  string     `json:"changed_by"`
	ChangedAt  time.Time  `json:"changed_at"`
	State      string     `json:"state,omitempty"`
}

// These are the states of a row.
const (
	inForce    = "in force"
	overridden = "overridden"  // by another row, for now
	passedOver = "passed over" // because limiters of this release cannot read it
	notYet     = "not yet"
)

func (r *policyRow) columns() []any {
	return []any{&r.ID, &r.Limiter, &r.Key, &r.KeyPrefix, &r.Mode, &r.Policy, &r.ValidFrom, &r.ValidUntil,
		&r.Comment, &r.Automatic, &r.ChangedBy, &r.ChangedAt}
}

func (r *policyRow) inUTC() { inUTC(r.ValidFrom, r.ValidUntil, &r.ChangedAt) }

// inUTC makes times those that the output has.
func inUTC(times ...*time.Time) {
	for _, t := range times {
		if t != nil {
			*t = t.UTC()
		}
	}
}

func (r *policyRow) target() policyTarget { return policyTarget{r.Key, r.KeyPrefix} }
func (r *policyRow) shadow() bool         { return r.Mode == modeShadow }

// begun tells whether a row counts from a moment on, unless it has ended.
func (r *policyRow) begun(at time.Time) bool { return r.ValidFrom == nil || !r.ValidFrom.After(at) }

func (r *policyRow) counts(at time.Time) bool {
	return r.begun(at) && (r.ValidUntil == nil || r.ValidUntil.After(at))
}

// decides is what a row says: its policy, "off" or "deny".
func (r *policyRow) decides() string {
	if r.Policy != nil {
		return printable(*r.Policy)
	}
	return r.Mode
}

// first returns the row of those that apply to a key that is in force, or nil. They have to come best first.
func first(rows []policyRow, at time.Time, shadow bool) *policyRow {
	for i := range rows {
		if rows[i].shadow() == shadow && rows[i].counts(at) && rows[i].readable() {
			return &rows[i]
		}
	}
	return nil
}

// judge sets the states of rows that come best first, of which one is in force, and one shadow.
func judge(rows []policyRow, at time.Time) {
	decides, shadows := first(rows, at, false), first(rows, at, true)
	for i := range rows {
		switch r := &rows[i]; {
		case r == decides || r == shadows:
			r.State = inForce
		case !r.readable():
			r.State = passedOver
		case !r.begun(at):
			r.State = notYet
		default:
			r.State = overridden
		}
	}
}

// scanPolicies reads rows.
func scanPolicies(rows pgx.Rows, err error) ([]policyRow, error) {
	if err != nil {
		return nil, err
	}
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (r policyRow, err error) {
		err = row.Scan(r.columns()...)
		r.inUTC()
		return r, err
	})
	if all == nil {
		all = []policyRow{} // not null in JSON
	}
	return all, err
}

// applyingPolicies returns the rows that apply to a target, best first, and the database's clock.
func applyingPolicies(
	ctx context.Context, tx pgx.Tx, name string, target policyTarget, ended bool,
) (rows []policyRow, at time.Time, err error) {
	if err := tx.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&at); err != nil {
		return nil, at, err
	}
	rows, err = scanPolicies(tx.Query(ctx, applyingPoliciesSQL, name, target.key, target.prefix, ended))
	return rows, at.UTC(), err
}

func (a *app) policyCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "policy",
		Short: "Change limits without a deploy: policies that are rows of a table",
		Long: `Policies that are rows of the table rate_limit_policy. Limiters whose Config.Policies is set obey them.
Of the rows for a key, one for exactly this key comes first, then that for the longest prefix, then
one for everybody, and then the policy in the code, which this command cannot know. Of several rows
for the same, the one that began last is in force. Rows that limiters cannot read, or whose policy is
of another kind than the one in the code, are passed over. Rows of the mode shadow are looked up in the
same way, but among themselves: they are decided too, and only reported.`,
		Args: knownCommand,
		RunE: missingCommand,
	}
	cmd.AddCommand(a.policyListCommand(), a.policyGetCommand(), a.policySetCommand(), a.policyUnsetCommand(),
		a.policyCompareCommand(), a.policyHistoryCommand())
	for _, sub := range cmd.Commands() {
		sub.ValidArgsFunction = cobra.NoFileCompletions
	}
	return cmd
}

func (a *app) policyListCommand() *cobra.Command {
	var bans bool
	cmd := &cobra.Command{
		Use:   "list [NAME]",
		Short: "List the policies of a limiter, or of all",
		Long: `Lists the policies that have not ended. Bans that limiters have made are counted, and listed with
--bans.`,
		Example: `  pgratelimit policy list
  pgratelimit policy list login --bans --json`,
		Args: cobra.MaximumNArgs(1),
		RunE: action(func(ctx context.Context, args []string) error {
			pool, err := a.openFirst(ctx)
			if err != nil {
				return err
			}
			defer pool.Close()
			var name *string
			if len(args) > 0 {
				name = &args[0]
			}
			var rows []policyRow
			var automatic int64
			err = a.read(ctx, pool, func(tx pgx.Tx) error {
				var at time.Time
				if err := tx.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&at); err != nil {
					return err
				}
				if rows, err = scanPolicies(tx.Query(ctx, listPoliciesSQL, name, bans)); err != nil {
					return err
				}
				for from, to := 0, 0; from < len(rows); from = to { // those for the same
					for to < len(rows) && rows[to].Limiter == rows[from].Limiter &&
						rows[to].target().is(rows[from].target()) {
						to++
					}
					judge(rows[from:to], at)
				}
				return tx.QueryRow(ctx, countBansSQL, name).Scan(&automatic)
			})
			if err != nil {
				return err
			}
			value := struct {
				Policies []policyRow `json:"policies"`
				Bans     int64       `json:"automatic_bans"`
			}{rows, automatic}
			return a.print(value, func(w io.Writer) {
				printPolicies(w, rows, "there is none")
				if automatic > 0 && !bans {
					fmt.Fprintf(w, "\nbans that limiters have made: %d; --bans lists them\n", automatic)
				}
			})
		}),
	}
	cmd.Flags().BoolVar(&bans, "bans", false, "list bans that limiters have made, too")
	a.addTimeout(cmd)
	a.addJSON(cmd)
	return cmd
}

func (a *app) policyGetCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "get NAME [KEY]",
		Short: "Show the policies that apply to a key, best first",
		Long: `Shows the policies that apply to a key, best first, and which of them is in force now. Without a key,
those for everybody.`,
		Example: `  pgratelimit policy get login user:123
  pgratelimit policy get login --json`,
		Args: cobra.RangeArgs(1, 2),
		RunE: action(func(ctx context.Context, args []string) error {
			target := policyTarget{}
			if len(args) > 1 {
				target.key = &args[1]
			}
			if err := checkPolicyTarget(args[0], target); err != nil {
				return err
			}
			pool, err := a.openFirst(ctx)
			if err != nil {
				return err
			}
			defer pool.Close()
			var rows []policyRow
			if err := a.read(ctx, pool, func(tx pgx.Tx) error {
				var at time.Time
				rows, at, err = applyingPolicies(ctx, tx, args[0], target, false)
				judge(rows, at)
				return err
			}); err != nil {
				return err
			}
			return a.print(rows, func(w io.Writer) {
				printPolicies(w, rows, "there is none, so the policy in the code holds")
			})
		}),
	}
	a.addTimeout(cmd)
	a.addJSON(cmd)
	return cmd
}

// printPolicies prints rows as a table. The comment comes last, because it may be long.
func printPolicies(w io.Writer, rows []policyRow, none string) {
	if len(rows) == 0 {
		fmt.Fprintln(w, none)
		return
	}
	fmt.Fprintf(w, "STATE\t%s\n", policyHeader)
	for i := range rows {
		fmt.Fprintf(w, "%s\t%s\n", rows[i].State, rows[i].line())
	}
}

const policyHeader = "LIMITER\tFOR\tMODE\tPOLICY\tFROM\tUNTIL\tBY\tCOMMENT"

// line is what a table says of a row.
func (r *policyRow) line() string {
	from, until, policy, by := "always", "", "", printable(r.ChangedBy)
	if r.ValidFrom != nil {
		from = instant(*r.ValidFrom)
	}
	if r.ValidUntil != nil {
		until = instant(*r.ValidUntil)
	}
	if r.Policy != nil {
		policy = printable(*r.Policy)
	}
	if r.Automatic {
		by += " (limiter)"
	}
	return strings.Join([]string{printable(r.Limiter), r.target().String(), printable(r.Mode), policy, from, until,
		by, printable(r.Comment)}, "\t")
}

// targetFlags are the flags that say whom a policy is for.
type targetFlags struct {
	key, prefix string
	everybody   bool
}

func (f *targetFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.key, "key", "", "for this key")
	cmd.Flags().StringVar(&f.prefix, "prefix", "", "for all keys that begin with this")
	cmd.Flags().BoolVar(&f.everybody, "everybody", false, "for all keys of the limiter")
	cmd.MarkFlagsMutuallyExclusive("key", "prefix", "everybody")
}

// target returns whom the flags name.
func (f *targetFlags) target(cmd *cobra.Command) (t policyTarget) {
	if cmd.Flags().Changed("key") {
		t.key = &f.key
	}
	if cmd.Flags().Changed("prefix") {
		t.prefix = &f.prefix
	}
	return t
}

// checkPolicyTarget refuses what cannot be in the table, before the database is asked.
func checkPolicyTarget(name string, t policyTarget) error {
	wrong := func(text *string, most int) bool { return text != nil && (*text == "" || len(*text) > most) }
	switch {
	case wrong(&name, 128):
		return usageError{errors.New("NAME is the name of a limiter, of 1 to 128 bytes")}
	case wrong(t.key, 512):
		return usageError{errors.New("a key has 1 to 512 bytes")}
	case wrong(t.prefix, 512):
		return usageError{errors.New("a prefix has 1 to 512 bytes; --everybody is for all keys")}
	}
	return nil
}

// policyChange is what a command has changed, or would change.
type policyChange struct {
	DryRun  bool        `json:"dry_run"`
	Removed []policyRow `json:"removed"`
	Added   *policyRow  `json:"added"` // null if nothing is
	// Overrides is the row for the same that would be in force when the added one begins, and stays.
	Overrides *policyRow `json:"overrides"`
	Lowers    bool       `json:"lowers"` // the limit, or may do so, which needs --force
	at        time.Time
	because   string // it lowers which limit
}

// changePolicies has decide look at the rows that apply to a target, and say what is to change. Nobody else can change
// policies meanwhile.
func (a *app) changePolicies(
	ctx context.Context, pool *pgxpool.Pool, name string, target policyTarget, dry bool,
	decide func(rows []policyRow, change *policyChange) error,
) (change policyChange, err error) {
	transaction := a.write
	if dry {
		transaction = a.read
	}
	err = transaction(ctx, pool, func(tx pgx.Tx) error {
		change = policyChange{DryRun: dry, Removed: []policyRow{}}
		if !dry {
			if _, err := tx.Exec(ctx, policyTurnSQL); err != nil {
				return err
			}
		}
		rows, at, err := applyingPolicies(ctx, tx, name, target, true)
		if err != nil {
			return err
		}
		change.at = at
		if err := decide(rows, &change); err != nil || dry {
			return err
		}
		if len(change.Removed) > 0 {
			var ids []int64
			for _, r := range change.Removed {
				ids = append(ids, r.ID)
			}
			if _, err := tx.Exec(ctx, removePoliciesSQL, ids); err != nil {
				return err
			}
		}
		if r := change.Added; r != nil {
			err := tx.QueryRow(ctx, addPolicySQL, name, r.Key, r.KeyPrefix, r.Mode, r.Policy, r.ValidFrom, r.ValidUntil,
				r.Comment).Scan(r.columns()...)
			r.inUTC()
			return err
		}
		return nil
	})
	return change, err
}

// printPolicyChange prints what has changed, in the words of the command.
func (a *app) printPolicyChange(change *policyChange, removed, added, none string) error {
	return a.print(change, func(w io.Writer) {
		if len(change.Removed) == 0 && change.Added == nil {
			fmt.Fprintln(w, none)
			return
		}
		would := ""
		if change.DryRun {
			would = "would be "
		}
		fmt.Fprintf(w, "WHAT\t%s\n", policyHeader)
		for i := range change.Removed {
			fmt.Fprintf(w, "%s%s\t%s\n", would, removed, change.Removed[i].line())
		}
		if change.Added != nil {
			fmt.Fprintf(w, "%s%s\t%s\n", would, added, change.Added.line())
		}
		if change.Overrides != nil {
			fmt.Fprintf(w, "%soverridden\t%s\n", would, change.Overrides.line())
		}
		if change.DryRun && change.Lowers {
			fmt.Fprintf(w, "\nthis %s, and needs --force\n", change.because)
		}
	})
}
