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
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

//go:embed sql/history.sql
var policyHistorySQL string

// PolicyEvent is a row of rate_limit_policy_history.
type PolicyEvent struct {
	Version int64      `json:"version"`
	At      time.Time  `json:"at"`
	By      string     `json:"by"`
	Action  string     `json:"action"`
	Before  *PolicyRow `json:"before"`
	After   *PolicyRow `json:"after"`
}

func policyHistoryCommand(a *cli.App) *cobra.Command {
	var target targetFlags
	var n int64
	cmd := &cobra.Command{
		Use:   "history [NAME]",
		Short: "List who has changed which policies, the last change first",
		Long: `Lists the changes of policies, the last one first, with the row before and after each, and who made it:
the role that logged in.`,
		Example: `  pgratelimit policy history
  pgratelimit policy history api --key customer:42 --json`,
		Args: cobra.MaximumNArgs(1),
	}
	cmd.RunE = cli.Action(func(ctx context.Context, args []string) error {
		if n < 1 {
			return cli.Usage(errors.New("--number must be at least 1"))
		}
		var name *string
		if len(args) > 0 {
			name = &args[0]
		}
		to := target.Target(cmd)
		return cli.List(ctx, a, scanPolicyEvent, printPolicyHistory, policyHistorySQL,
			name, to.Key, to.prefix, target.everybody, n)
	})
	target.add(cmd)
	cmd.Flags().Int64VarP(&n, "number", "n", 50, "how many changes to list")
	a.AddTimeout(cmd)
	a.AddJSON(cmd)
	return cmd
}

// historic is a row as the history has it. All of its columns are NULL if there was none.
type historic struct {
	PolicyRow

	id        *int64
	name      *string
	mode      *string
	comment   *string
	automatic *bool
	by        *string
	at        *time.Time
}

func (h *historic) columns() []any {
	return []any{&h.id, &h.name, &h.Key, &h.KeyPrefix, &h.mode, &h.Policy, &h.ValidFrom, &h.ValidUntil, &h.comment,
		&h.automatic, &h.by, &h.at}
}

func (h *historic) row() *PolicyRow {
	if h.id == nil {
		return nil
	}
	r := h.PolicyRow
	r.ID, r.Limiter, r.Mode, r.Comment = *h.id, known(h.name), known(h.mode), known(h.comment)
	r.Automatic, r.ChangedBy, r.ChangedAt = known(h.automatic), known(h.by), known(h.at)
	r.inUTC()
	return &r
}

// known is what is pointed at, or the zero value, as of a column that the table did not have then.
func known[T any](p *T) (value T) {
	if p != nil {
		value = *p
	}
	return value
}

func scanPolicyEvent(row pgx.CollectableRow) (e PolicyEvent, err error) {
	var before, after historic
	columns := append([]any{&e.Version, &e.At, &e.By, &e.Action}, before.columns()...)
	err = row.Scan(append(columns, after.columns()...)...)
	e.At, e.Before, e.After = e.At.UTC(), before.row(), after.row()
	return e, err
}

func printPolicyHistory(w io.Writer, events []PolicyEvent) {
	if len(events) == 0 {
		fmt.Fprintln(w, "there is none")
		return
	}
	fmt.Fprintf(w, "AT\tBY\tACTION\t%s\n", strings.Replace(policyHeader, "\tBY\t", "\tROW BY\t", 1))
	for _, e := range events {
		switch {
		case e.Before == nil:
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", cli.Instant(e.At), cli.Printable(e.By), e.Action, e.After.line())
		case e.After == nil:
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", cli.Instant(e.At), cli.Printable(e.By), e.Action, e.Before.line())
		default:
			fmt.Fprintf(w, "%s\t%s\t%s of\t%s\n", cli.Instant(e.At), cli.Printable(e.By), e.Action, e.Before.line())
			fmt.Fprintf(w, "\t\tto\t%s\n", e.After.line())
		}
	}
}
