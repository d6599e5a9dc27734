package policies

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

//go:embed sql/history.sql
var historySQL string

// PolicyEvent is a row of rate_limit_policy_history.
type PolicyEvent struct {
	Version int64      `json:"version"`
	At      time.Time  `json:"at"`
	By      string     `json:"by"`
	Action  string     `json:"action"`
	Before  *PolicyRow `json:"before"`
	After   *PolicyRow `json:"after"`
}

func historyCommand(a *cli.App) *cobra.Command {
	var target targetFlags
	var n int64
	cmd := &cobra.Command{
		Use:   "history [NAME]",
		Short: "List who changed which policies, the last change first",
		Long: `Lists the changes of policies, the last one first. It shows the row before and after each change, and
the role that logged in to make it.`,
		Example: `  pgratelimit policy history
  pgratelimit policy history api --key customer:42 --json`,
		Args: cobra.MaximumNArgs(1),
	}
	cmd.RunE = cli.Action(func(ctx context.Context, args []string) error {
		if n < 1 {
			return cli.Usage(errors.New("--number must be at least 1"))
		}
		return show(ctx, a, func(tx cli.Tx) ([]PolicyEvent, error) {
			return cli.Rows[PolicyEvent](ctx, tx, historySQL,
				optional(args), target.Key, target.prefix, target.everybody, n)
		}, printHistory)
	})
	target.add(cmd)
	cmd.Flags().Int64VarP(&n, "number", "n", 50, "how many changes to list")
	return a.Finish(cmd)
}

func printHistory(w io.Writer, events []PolicyEvent) {
	if len(events) == 0 {
		fmt.Fprintln(w, "there is none")
		return
	}
	fmt.Fprintf(w, "AT\tBY\tACTION\t%s\n", strings.Replace(header, "\tBY\t", "\tROW BY\t", 1))
	for _, e := range events {
		action, row := e.Action, e.Before
		switch {
		case e.Before == nil:
			row = e.After
		case e.After != nil:
			action += " of"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", cli.Instant(e.At), cli.Printable(e.By), action, row.line())
		if e.Before != nil && e.After != nil {
			fmt.Fprintf(w, "\t\tto\t%s\n", e.After.line())
		}
	}
}
