// Package policies has the commands that change and show policies and bans in the database.
package policies

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/algorithm"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

// These are the modes of a row.
const (
	ModeEnforce = "enforce"
	ModeShadow  = "shadow"
	ModeOff     = "off"
	ModeDeny    = "deny"
)

var (
	//go:embed sql/applying.sql
	applyingSQL string
	//go:embed sql/list.sql
	listSQL string
	//go:embed sql/count_bans.sql
	countBansSQL string
	//go:embed sql/turn.sql
	turnSQL string
	//go:embed sql/remove.sql
	removeSQL string
	//go:embed sql/add.sql
	addSQL string
)

// PolicyTarget says which keys a row is for: one key, all keys with a prefix, or all keys if both fields are nil.
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

// is tells whether two targets are equal.
func (t PolicyTarget) is(other PolicyTarget) bool {
	same := func(a, b *string) bool { return (a == nil) == (b == nil) && (a == nil || *a == *b) }
	return same(t.Key, other.Key) && same(t.prefix, other.prefix)
}

// PolicyRow is a row of rate_limit_policy. The queries return its columns in this order.
type PolicyRow struct {
	ID         int64      `json:"id"`
	Limiter    string     `json:"name"`
	Key        *string    `json:"key"`
	KeyPrefix  *string    `json:"key_prefix"` // if KeyPrefix and Key are null, the row is for all keys
	Mode       string     `json:"mode"`
	Policy     *string    `json:"policy"` // null for the modes off and deny
	ValidFrom  *time.Time `json:"valid_from"`
	ValidUntil *time.Time `json:"valid_until"` // null means that the row does not end
	Comment    string     `json:"comment"`
	Automatic  bool       `json:"automatic"` // whether a limiter made this ban
	ChangedBy  string     `json:"changed_by"`
	ChangedAt  time.Time  `json:"changed_at"`
	State      string     `json:"state,omitempty" db:"-"`
}

// These are the states of a row.
const (
	InForce    = "in force"
	overridden = "overridden"  // another row overrides this row now
	PassedOver = "passed over" // limiters of this release cannot read this row
	notYet     = "not yet"
)

func (r *PolicyRow) Target() PolicyTarget { return PolicyTarget{r.Key, r.KeyPrefix} }
func (r *PolicyRow) shadow() bool         { return r.Mode == ModeShadow }

func (r *PolicyRow) begun(at time.Time) bool { return r.ValidFrom == nil || !r.ValidFrom.After(at) }

// Counts tells whether a row has begun, but has not ended.
func (r *PolicyRow) Counts(at time.Time) bool {
	return r.begun(at) && (r.ValidUntil == nil || r.ValidUntil.After(at))
}

// Decides returns the policy of a row. If the row has no policy, Decides returns its mode "off" or "deny".
func (r *PolicyRow) Decides() string {
	if r.Policy != nil {
		return cli.Printable(*r.Policy)
	}
	return r.Mode
}

// First returns the row in force, or nil. The rows must be in order of precedence.
func First(rows []PolicyRow, at time.Time, shadow bool) *PolicyRow {
	for i := range rows {
		if rows[i].shadow() == shadow && rows[i].Counts(at) && rows[i].readable() {
			return &rows[i]
		}
	}
	return nil
}

// Judge sets the states of rows that apply to the same key. The rows must be in order of precedence.
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

// ApplyingPolicies returns the rows for a target in order of precedence, and the database's time.
func ApplyingPolicies(
	ctx context.Context, tx pgx.Tx, name string, target PolicyTarget, ended bool,
) (rows []PolicyRow, at time.Time, err error) {
	if err := tx.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&at); err != nil {
		return nil, at, err
	}
	rows, err = cli.Rows[PolicyRow](ctx, tx, applyingSQL, name, target.Key, target.prefix, ended)
	return rows, at, err
}

// Deciding returns the rows of a limiter that are in force now. Those for the same keys are in order of precedence. It
// leaves out rows of mode shadow, which decide nothing, and bans that limiters made.
func Deciding(ctx context.Context, tx pgx.Tx, name string) ([]PolicyRow, error) {
	var at time.Time
	if err := tx.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&at); err != nil {
		return nil, err
	}
	rows, err := cli.Rows[PolicyRow](ctx, tx, listSQL, name, false)
	return slices.DeleteFunc(rows, func(r PolicyRow) bool { return r.shadow() || !r.Counts(at) }), err
}

func PolicyCommand(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "policy",
		Short: "Change limits without a deploy, by rows of a table",
		Long: `Shows and changes the rows of the table rate_limit_policy. Limiters whose Config.Policies is set obey
these rows. A row for exactly the key comes first, then the row for the longest prefix of the key, then
a row for everybody, and then the policy in the code, which this command does not know. Of several rows
for the same target, the row that began last is in force. Limiters pass over rows that they cannot read,
and rows whose policy is of another kind than the policy in the code. Rows of the mode shadow are looked
up separately in the same order. Their decisions are only reported.`,
		Args: cli.KnownCommand,
		RunE: cli.MissingCommand,
	}
	cmd.AddCommand(listCommand(a), getCommand(a), setCommand(a), unsetCommand(a), compareCommand(a), historyCommand(a))
	return cmd
}

// optional returns the only argument, or nil if there is no argument.
func optional(args []string) *string {
	if len(args) == 0 {
		return nil
	}
	return &args[0]
}

func listCommand(a *cli.App) *cobra.Command {
	var bans bool
	cmd := &cobra.Command{
		Use:   "list [NAME]",
		Short: "List the policies of a limiter, or of all limiters",
		Long: `Lists the policies that have not ended. The command counts the bans that limiters made. With --bans, it
lists these bans.`,
		Example: `  pgratelimit policy list
  pgratelimit policy list login --bans --json`,
		Args: cobra.MaximumNArgs(1),
	}
	cmd.RunE = cli.Action(func(ctx context.Context, args []string) error {
		return show(ctx, a, func(tx cli.Tx) (policyList, error) {
			return readList(ctx, tx, optional(args), bans)
		}, func(w io.Writer, list policyList) {
			printPolicies(w, list.Policies, "there is none")
			if list.Bans > 0 && !bans {
				fmt.Fprintf(w, "\nlimiters made %s; --bans lists them\n", cli.Count(list.Bans, "ban"))
			}
		})
	})
	cmd.Flags().BoolVar(&bans, "bans", false, "list the bans that limiters made, too")
	return a.Finish(cmd)
}

// policyList is the output of the command list.
type policyList struct {
	Policies []PolicyRow `json:"policies"`
	Bans     int64       `json:"automatic_bans"`
}

// readList reads the policies of a limiter, or of all limiters if name is nil.
func readList(ctx context.Context, tx cli.Tx, name *string, bans bool) (list policyList, err error) {
	var at time.Time
	if err := tx.QueryRow(ctx, countBansSQL, name).Scan(&list.Bans, &at); err != nil {
		return list, err
	}
	rows, err := cli.Rows[PolicyRow](ctx, tx, listSQL, name, bans)
	for from, to := 0, 0; from < len(rows); from = to { // all rows in rows[from:to] are for one target
		for to < len(rows) && rows[to].Limiter == rows[from].Limiter && rows[to].Target().is(rows[from].Target()) {
			to++
		}
		Judge(rows[from:to], at)
	}
	list.Policies = rows
	return list, err
}

// show reads from the database that has the policies, and prints the result.
func show[T any](
	ctx context.Context, a *cli.App, read func(tx cli.Tx) (T, error), write func(w io.Writer, value T),
) error {
	var value T
	if err := a.InFirst(ctx, func(db cli.DB) error {
		return db.Read(ctx, func(tx cli.Tx) (err error) {
			value, err = read(tx)
			return err
		})
	}); err != nil {
		return err
	}
	return a.Print(value, func(w io.Writer) { write(w, value) })
}

func getCommand(a *cli.App) *cobra.Command {
	return a.Finish(&cobra.Command{
		Use:   "get NAME [KEY]",
		Short: "Show the policies that apply to a key, best first",
		Long: `Shows the policies that apply to a key in order of precedence, and which policy is in force now. Without
a key, the command shows the policies for everybody.`,
		Example: `  pgratelimit policy get login user:123
  pgratelimit policy get login --json`,
		Args: cobra.RangeArgs(1, 2),
		RunE: cli.Action(func(ctx context.Context, args []string) error {
			target := PolicyTarget{Key: optional(args[1:])}
			if err := CheckPolicyTarget(args[0], target); err != nil {
				return err
			}
			return show(ctx, a, func(tx cli.Tx) ([]PolicyRow, error) {
				rows, at, err := ApplyingPolicies(ctx, tx, args[0], target, false)
				Judge(rows, at)
				return rows, err
			}, func(w io.Writer, rows []PolicyRow) {
				printPolicies(w, rows, "there is none, so the policy in the code is in force")
			})
		}),
	})
}

// printPolicies prints rows as a table, or the argument none if there are no rows.
func printPolicies(w io.Writer, rows []PolicyRow, none string) {
	if len(rows) == 0 {
		fmt.Fprintln(w, none)
		return
	}
	fmt.Fprintf(w, "STATE\t%s\n", header)
	for i := range rows {
		fmt.Fprintf(w, "%s\t%s\n", rows[i].State, rows[i].line())
	}
}

// The comment is the last column, because it may be long.
const header = "LIMITER\tFOR\tMODE\tPOLICY\tFROM\tUNTIL\tBY\tCOMMENT"

// line returns a row as a line of the table whose heading is header.
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
	return strings.Join([]string{cli.Printable(r.Limiter), r.Target().String(), cli.Printable(r.Mode), policy, from,
		until, by, cli.Printable(r.Comment)}, "\t")
}

// targetFlags are the flags that say which keys a policy is for.
type targetFlags struct {
	PolicyTarget

	everybody bool
}

func (f *targetFlags) add(cmd *cobra.Command) {
	text := func(text string) (*string, error) { return &text, nil }
	cmd.Flags().Var(cli.Parsed(&f.Key, "string", text), "key", "for this key")
	cmd.Flags().Var(cli.Parsed(&f.prefix, "string", text), "prefix", "for all keys that begin with this")
	cmd.Flags().BoolVar(&f.everybody, "everybody", false, "for all keys of the limiter")
	cmd.MarkFlagsMutuallyExclusive("key", "prefix", "everybody")
}

// CheckPolicyTarget returns an error for an invalid name or target, so that the database need not check it.
func CheckPolicyTarget(name string, t PolicyTarget) error {
	wrong := func(text *string, most int) bool { return text != nil && (*text == "" || len(*text) > most) }
	switch {
	case wrong(&name, 128):
		return cli.Usage(errors.New("NAME is the name of a limiter, and has 1 to 128 bytes"))
	case wrong(t.Key, 512):
		return cli.Usage(errors.New("a key has 1 to 512 bytes"))
	case wrong(t.prefix, 512):
		return cli.Usage(errors.New("a prefix has 1 to 512 bytes; --everybody is for all keys"))
	}
	return nil
}

// readable tells whether limiters can read a row. Limiters cannot read some rows of newer releases.
func (r *PolicyRow) readable() bool { return r.ObeyedBy(nil) }

// ObeyedBy tells whether a limiter obeys a row. The argument code is the policy in the application's code, or nil.
func (r *PolicyRow) ObeyedBy(code ratelimit.Policy) bool {
	switch r.Mode {
	case ModeOff, ModeDeny:
		return true
	case ModeShadow:
		return r.Policy != nil && sameKind(*r.Policy, nil) && !HasSlots(*r.Policy) &&
			(code == nil || !HasSlots(code.String()))
	case ModeEnforce:
		return r.Policy != nil && sameKind(*r.Policy, code)
	}
	return false
}

// HasSlots tells whether text is a policy with slots. Limiters decide no shadow with slots, or beside slots.
func HasSlots(text string) bool {
	numbers, err := algorithm.Parse(text)
	return err == nil && slices.ContainsFunc(numbers, algorithm.Numbers.HasSlots)
}

// sameKind tells whether text is a valid policy. If code is not nil, text must also have code's algorithm, and slots
// only if code has some.
func sameKind(text string, code ratelimit.Policy) bool {
	row, err := algorithm.Parse(text)
	if err != nil || code == nil {
		return err == nil
	}
	if HasSlots(text) != HasSlots(code.String()) {
		return false
	}
	mine, err := algorithm.Parse(code.String())
	for i := range min(len(row), len(mine)) {
		if row[i].Algorithm != mine[i].Algorithm {
			return false
		}
	}
	return err == nil
}
