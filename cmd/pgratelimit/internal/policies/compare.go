package policies

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

//go:embed sql/compare.sql
var compareSQL string

// Comparison shows how a shadow policy would have decided.
type Comparison struct {
	ID        int64         `json:"id"`
	Key       *string       `json:"key"`
	KeyPrefix *string       `json:"key_prefix"`
	Policy    string        `json:"policy"`
	Decided   int64         `json:"decided"`
	Denied    int64         `json:"denied"` // denials of the policy in force
	WouldDeny int64         `json:"would_deny"`
	Since     time.Time     `json:"since"` // when the row began or was last changed
	Until     *time.Time    `json:"until"` // the time of the last report; null if there is no report
	Keys      []ComparedKey `json:"keys"`  // the keys that the shadow policy would have denied most often
}

// ComparedKey is how often a key was denied, and how often the shadow policy would have denied it.
type ComparedKey struct {
	Key       string `json:"key"`
	WouldDeny int64  `json:"would_deny"`
	Denied    int64  `json:"denied"`
}

func compareCommand(a *cli.App) *cobra.Command {
	var n int64
	cmd := &cobra.Command{
		Use:   "compare NAME",
		Short: "Show what shadow policies would have denied",
		Long: `Shows for each shadow policy of a limiter how many requests it decided, how many of these the policy in
force denied, and how many the shadow policy would have denied. The command also shows the keys that the
shadow policy would have denied most. Processes report their counts every 10 seconds, and count at most
500 keys in this time. A process that is killed loses what it has not reported. The counts begin anew
when the row of the policy changes.`,
		Example: `  pgratelimit policy compare login
  pgratelimit policy compare login -n 100 --json`,
		Args: cobra.ExactArgs(1),
	}
	cmd.RunE = cli.Action(func(ctx context.Context, args []string) error {
		if n < 0 {
			return cli.Usage(errors.New("--number must not be negative"))
		}
		return show(ctx, a, func(tx cli.Tx) ([]Comparison, error) {
			return cli.Rows[Comparison](ctx, tx, compareSQL, args[0], n)
		}, printComparisons)
	})
	cmd.Flags().Int64VarP(&n, "number", "n", 10, "how many keys to list for each policy")
	return a.Finish(cmd)
}

func printComparisons(w io.Writer, all []Comparison) {
	if len(all) == 0 {
		fmt.Fprintln(w, "there is no shadow policy")
		return
	}
	fmt.Fprintln(w, "FOR\tSHADOW POLICY\tDECIDED\tDENIED\tWOULD BE DENIED\tSINCE")
	for _, c := range all {
		since := cli.Instant(c.Since)
		if c.Until == nil {
			since += ", nothing reported yet"
		}
		fmt.Fprintf(w, "%v\t%s\t%d\t%s\t%s\t%s\n", PolicyTarget{c.Key, c.KeyPrefix}, cli.Printable(c.Policy), c.Decided,
			share(c.Denied, c.Decided), share(c.WouldDeny, c.Decided), since)
		for _, k := range c.Keys {
			fmt.Fprintf(w, "  %s\t\t\t%d\t%d\t\n", cli.Short(k.Key), k.Denied, k.WouldDeny)
		}
	}
}

// share formats the number n, and its percentage of the number all.
func share(n, all int64) string {
	if all == 0 {
		return "0"
	}
	return fmt.Sprintf("%d (%.1f %%)", n, 100*float64(n)/float64(all))
}
