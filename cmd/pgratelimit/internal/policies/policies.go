// Package policies has the commands that change and show the policies in the database, and bans.
package policies

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

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/algorithm"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

// Modes of rows.
const (
	ModeEnforce = "enforce"
	ModeShadow  = "shadow"
	ModeOff     = "off"
	ModeDeny    = "deny"
)

var (
	//go:embed sql/applying.sql
	applyingPoliciesSQL string
	//go:embed sql/list.sql
	listPoliciesSQL string
	//go:embed sql/count_bans.sql
	countBansSQL string
	//go:embed sql/turn.sql
	policyTurnSQL string
	//go:embed sql/remove.sql
	removePoliciesSQL string
	//go:embed sql/add.sql
	addPolicySQL string
)

// PolicyTarget is whom a row is for: a key, the keys with a prefix, or, if both are nil, everybody.
type PolicyTarget struct{ Key, prefix *string }

func (t PolicyTarget) String() string {
	switch {
	case t.Key != nil:
		return "key " + cli.Short(*t.Key)
	case t.prefix != nil:
		return "prefix " + cli.Short(*t.prefix)
	}
	return "everybody"
}

// is tells whether two targets are the same.
func (t PolicyTarget) is(other PolicyTarget) bool {
	same := func(a, b *string) bool { return (a == nil) == (b == nil) && (a == nil || *a == *b) }
	return same(t.Key, other.Key) && same(t.prefix, other.prefix)
}

// PolicyRow is a row of rate_limit_policy.
type PolicyRow struct {
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
	InForce    = "in force"
	overridden = "overridden"  // by another row, for now
	PassedOver = "passed over" // because limiters of this release cannot read it
	notYet     = "not yet"
)

func (r *PolicyRow) columns() []any {
	return []any{&r.ID, &r.Limiter, &r.Key, &r.KeyPrefix, &r.Mode, &r.Policy, &r.ValidFrom, &r.ValidUntil,
		&r.Comment, &r.Automatic, &r.ChangedBy, &r.ChangedAt}
}

func (r *PolicyRow) inUTC() { cli.InUTC(r.ValidFrom, r.ValidUntil, &r.ChangedAt) }

func (r *PolicyRow) Target() PolicyTarget { return PolicyTarget{r.Key, r.KeyPrefix} }
func (r *PolicyRow) shadow() bool         { return r.Mode == ModeShadow }

// begun tells whether a row counts from a moment on, unless it has ended.
func (r *PolicyRow) begun(at time.Time) bool { return r.ValidFrom == nil || !r.ValidFrom.After(at) }

func (r *PolicyRow) Counts(at time.Time) bool {
	return r.begun(at) && (r.ValidUntil == nil || r.ValidUntil.After(at))
}

// Decides is what a row says: its policy, "off" or "deny".
func (r *PolicyRow) Decides() string {
	if r.Policy != nil {
		return cli.Printable(*r.Policy)
	}
	return r.Mode
}

// First returns the row of those that apply to a key that is in force, or nil. They have to come best first.
func First(rows []PolicyRow, at time.Time, shadow bool) *PolicyRow {
	for i := range rows {
		if rows[i].shadow() == shadow && rows[i].Counts(at) && rows[i].readable() {
			return &rows[i]
		}
	}
	return nil
}

// Judge sets the states of rows that come best first, of which one is in force, and one shadow.
func Judge(rows []PolicyRow, at time.Time) {
	decides, shadows := First(rows, at, false), First(rows, at, true)
	for i := range rows {
		switch r := &rows[i]; {
		case r == decides || r == shadows:
			r.State = InForce
		case !r.readable():
			r.State = PassedOver
		case !r.begun(at):
			r.State = notYet
		default:
			r.State = overridden
		}
	}
}

// scanPolicies reads rows.
func scanPolicies(rows pgx.Rows, err error) ([]PolicyRow, error) {
	if err != nil {
		return nil, err
	}
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (r PolicyRow, err error) {
		err = row.Scan(r.columns()...)
		r.inUTC()
		return r, err
	})
	if all == nil {
		all = []PolicyRow{} // not null in JSON
	}
	return all, err
}

// ApplyingPolicies returns the rows that apply to a target, best first, and the database's clock.
func ApplyingPolicies(
	ctx context.Context, tx pgx.Tx, name string, target PolicyTarget, ended bool,
) (rows []PolicyRow, at time.Time, err error) {
	if err := tx.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&at); err != nil {
		return nil, at, err
	}
	rows, err = scanPolicies(tx.Query(ctx, applyingPoliciesSQL, name, target.Key, target.prefix, ended))
	return rows, at.UTC(), err
}

func PolicyCommand(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "policy",
		Short: "Change limits without a deploy: policies that are rows of a table",
		Long: `Policies that are rows of the table rate_limit_policy. Limiters whose Config.Policies is set obey them.
Of the rows for a key, one for exactly this key comes first, then that for the longest prefix, then
one for everybody, and then the policy in the code, which this command cannot know. Of several rows
for the same, the one that began last is in force. Rows that limiters cannot read, or whose policy is
of another kind than the one in the code, are passed over. Rows of the mode shadow are looked up in the
same way, but among themselves: they are decided too, and only reported.`,
		Args: cli.KnownCommand,
		RunE: cli.MissingCommand,
	}
	cmd.AddCommand(policyListCommand(a), policyGetCommand(a), policySetCommand(a), policyUnsetCommand(a),
		policyCompareCommand(a), policyHistoryCommand(a))
	for _, sub := range cmd.Commands() {
		sub.ValidArgsFunction = cobra.NoFileCompletions
	}
	return cmd
}

func policyListCommand(a *cli.App) *cobra.Command {
	var bans bool
	cmd := &cobra.Command{
		Use:   "list [NAME]",
		Short: "List the policies of a limiter, or of all",
		Long: `Lists the policies that have not ended. Bans that limiters have made are counted, and listed with
--bans.`,
		Example: `  pgratelimit policy list
  pgratelimit policy list login --bans --json`,
		Args: cobra.MaximumNArgs(1),
		RunE: cli.Action(func(ctx context.Context, args []string) error {
			pool, err := a.OpenFirst(ctx)
			if err != nil {
				return err
			}
			defer pool.Close()
			var name *string
			if len(args) > 0 {
				name = &args[0]
			}
			var rows []PolicyRow
			var automatic int64
			err = a.Read(ctx, pool, func(tx pgx.Tx) error {
				var at time.Time
				if err := tx.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&at); err != nil {
					return err
				}
				if rows, err = scanPolicies(tx.Query(ctx, listPoliciesSQL, name, bans)); err != nil {
					return err
				}
				for from, to := 0, 0; from < len(rows); from = to { // those for the same
					for to < len(rows) && rows[to].Limiter == rows[from].Limiter &&
						rows[to].Target().is(rows[from].Target()) {
						to++
					}
					Judge(rows[from:to], at)
				}
				return tx.QueryRow(ctx, countBansSQL, name).Scan(&automatic)
			})
			if err != nil {
				return err
			}
			value := struct {
				Policies []PolicyRow `json:"policies"`
				Bans     int64       `json:"automatic_bans"`
			}{rows, automatic}
			return a.Print(value, func(w io.Writer) {
				printPolicies(w, rows, "there is none")
				if automatic > 0 && !bans {
					fmt.Fprintf(w, "\nbans that limiters have made: %d; --bans lists them\n", automatic)
				}
			})
		}),
	}
	cmd.Flags().BoolVar(&bans, "bans", false, "list bans that limiters have made, too")
	a.AddTimeout(cmd)
	a.AddJSON(cmd)
	return cmd
}

func policyGetCommand(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "get NAME [KEY]",
		Short: "Show the policies that apply to a key, best first",
		Long: `Shows the policies that apply to a key, best first, and which of them is in force now. Without a key,
those for everybody.`,
		Example: `  pgratelimit policy get login user:123
  pgratelimit policy get login --json`,
		Args: cobra.RangeArgs(1, 2),
		RunE: cli.Action(func(ctx context.Context, args []string) error {
			target := PolicyTarget{}
			if len(args) > 1 {
				target.Key = &args[1]
			}
			if err := CheckPolicyTarget(args[0], target); err != nil {
				return err
			}
			pool, err := a.OpenFirst(ctx)
			if err != nil {
				return err
			}
			defer pool.Close()
			var rows []PolicyRow
			if err := a.Read(ctx, pool, func(tx pgx.Tx) error {
				var at time.Time
				rows, at, err = ApplyingPolicies(ctx, tx, args[0], target, false)
				Judge(rows, at)
				return err
			}); err != nil {
				return err
			}
			return a.Print(rows, func(w io.Writer) {
				printPolicies(w, rows, "there is none, so the policy in the code holds")
			})
		}),
	}
	a.AddTimeout(cmd)
	a.AddJSON(cmd)
	return cmd
}

// printPolicies prints rows as a table. The comment comes last, because it may be long.
func printPolicies(w io.Writer, rows []PolicyRow, none string) {
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
func (r *PolicyRow) line() string {
	from, until, policy, by := "always", "", "", cli.Printable(r.ChangedBy)
	if r.ValidFrom != nil {
		from = cli.Instant(*r.ValidFrom)
	}
	if r.ValidUntil != nil {
		until = cli.Instant(*r.ValidUntil)
	}
	if r.Policy != nil {
		policy = cli.Printable(*r.Policy)
	}
	if r.Automatic {
		by += " (limiter)"
	}
	return strings.Join([]string{
		cli.Printable(r.Limiter), r.Target().String(), cli.Printable(r.Mode), policy, from, until, by,
		cli.Printable(r.Comment),
	}, "\t")
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

// Target returns whom the flags name.
func (f *targetFlags) Target(cmd *cobra.Command) (t PolicyTarget) {
	if cmd.Flags().Changed("key") {
		t.Key = &f.key
	}
	if cmd.Flags().Changed("prefix") {
		t.prefix = &f.prefix
	}
	return t
}

// CheckPolicyTarget refuses what cannot be in the table, before the database is asked.
func CheckPolicyTarget(name string, t PolicyTarget) error {
	wrong := func(text *string, most int) bool { return text != nil && (*text == "" || len(*text) > most) }
	switch {
	case wrong(&name, 128):
		return cli.Usage(errors.New("NAME is the name of a limiter, of 1 to 128 bytes"))
	case wrong(t.Key, 512):
		return cli.Usage(errors.New("a key has 1 to 512 bytes"))
	case wrong(t.prefix, 512):
		return cli.Usage(errors.New("a prefix has 1 to 512 bytes; --everybody is for all keys"))
	}
	return nil
}

// PolicyChange is what a command has changed, or would change.
type PolicyChange struct {
	DryRun  bool        `json:"dry_run"`
	Removed []PolicyRow `json:"removed"`
	Added   *PolicyRow  `json:"added"` // null if nothing is
	// Overrides is the row for the same that would be in force when the added one begins, and stays.
	Overrides *PolicyRow `json:"overrides"`
	Lowers    bool       `json:"lowers"` // the limit, or may do so, which needs --force
	at        time.Time
	because   string // it lowers which limit
}

// changePolicies has decide look at the rows that apply to a target, and say what is to change. Nobody else can change
// policies meanwhile.
func changePolicies(
	ctx context.Context, a *cli.App, pool *pgxpool.Pool, name string, target PolicyTarget, dry bool,
	decide func(rows []PolicyRow, change *PolicyChange) error,
) (change PolicyChange, err error) {
	transaction := a.Write
	if dry {
		transaction = a.Read
	}
	err = transaction(ctx, pool, func(tx pgx.Tx) error {
		change = PolicyChange{DryRun: dry, Removed: []PolicyRow{}}
		if !dry {
			if _, err := tx.Exec(ctx, policyTurnSQL); err != nil {
				return err
			}
		}
		rows, at, err := ApplyingPolicies(ctx, tx, name, target, true)
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
func printPolicyChange(a *cli.App, change *PolicyChange, removed, added, none string) error {
	return a.Print(change, func(w io.Writer) {
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

// readable tells whether limiters can read a row, which a newer release may have written.
func (r *PolicyRow) readable() bool { return r.ObeyedBy(nil) }

// ObeyedBy tells whether a limiter with a policy in the code obeys a row.
func (r *PolicyRow) ObeyedBy(code ratelimit.Policy) bool {
	switch r.Mode {
	case ModeOff, ModeDeny:
		return true
	case ModeShadow:
		return r.Policy != nil && sameKind(*r.Policy, nil)
	case ModeEnforce:
		return r.Policy != nil && sameKind(*r.Policy, code)
	}
	return false
}

// sameKind tells whether the text of a policy can be read, and is of the kind of another policy, if that is known.
func sameKind(text string, code ratelimit.Policy) bool {
	row, err := algorithm.Parse(text)
	if err != nil || code == nil {
		return err == nil
	}
	mine, err := algorithm.Parse(code.String())
	for i := range min(len(row), len(mine)) {
		if row[i].Algorithm != mine[i].Algorithm {
			return false
		}
	}
	return err == nil
}
