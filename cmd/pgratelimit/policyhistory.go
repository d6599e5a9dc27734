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
	"github.com/spf13/cobra"
)

//go:embed sql/policy/history.sql
var policyHistorySQL string

// policyEvent is a row of rate_limit_policy_history.
type policyEvent struct {
	Version int64      `json:"version"`
	At      time.Time  `json:"at"`
	By      string     `json:"by"`
	Action  string     `json:"action"`
	Before  *policyRow `json:"before"`
	After   *policyRow `json:"after"`
}

func (a *app) policyHistoryCommand() *cobra.Command {
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
	cmd.RunE = action(func(ctx context.Context, args []string) error {
		if n < 1 {
			return usageError{errors.New("--number must be at least 1")}
		}
		var name *string
		if len(args) > 0 {
			name = &args[0]
		}
		to := target.target(cmd)
		return list(ctx, a, scanPolicyEvent, printPolicyHistory, policyHistorySQL,
			name, to.key, to.prefix, target.everybody, n)
	})
	target.add(cmd)
	cmd.Flags().Int64VarP(&n, "number", "n", 50, "how many changes to list")
	a.addTimeout(cmd)
	a.addJSON(cmd)
	return cmd
}

// historic is a row as the history has it. All of its columns are NULL if there was none.
type historic struct {
	policyRow

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

func (h *historic) row() *policyRow {
	if h.id == nil {
		return nil
	}
	r := h.policyRow
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

func scanPolicyEvent(row pgx.CollectableRow) (e policyEvent, err error) {
	var before, after historic
	columns := append([]any{&e.Version, &e.At, &e.By, &e.Action}, before.columns()...)
	err = row.Scan(append(columns, after.columns()...)...)
	e.At, e.Before, e.After = e.At.UTC(), before.row(), after.row()
	return e, err
}

func printPolicyHistory(w io.Writer, events []policyEvent) {
	if len(events) == 0 {
		fmt.Fprintln(w, "there is none")
		return
	}
	fmt.Fprintf(w, "AT\tBY\tACTION\t%s\n", strings.Replace(policyHeader, "\tBY\t", "\tROW BY\t", 1))
	for _, e := range events {
		switch {
		case e.Before == nil:
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", instant(e.At), printable(e.By), e.Action, e.After.line())
		case e.After == nil:
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", instant(e.At), printable(e.By), e.Action, e.Before.line())
		default:
			fmt.Fprintf(w, "%s\t%s\t%s of\t%s\n", instant(e.At), printable(e.By), e.Action, e.Before.line())
			fmt.Fprintf(w, "\t\tto\t%s\n", e.After.line())
		}
	}
}
