package policies

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

//go:embed sql/compare.sql
var comparePoliciesSQL string

// Comparison is what a shadow policy would have decided.
type Comparison struct {
	ID        int64         `json:"id"`
	Key       *string       `json:"key"`
	KeyPrefix *string       `json:"key_prefix"`
	Policy    string        `json:"policy"`
	Decided   int64         `json:"decided"`
	Denied    int64         `json:"denied"` // by the policy in force
	WouldDeny int64         `json:"would_deny"`
	Since     time.Time     `json:"since"` // when it began, as the row is now
	Until     *time.Time    `json:"until"` // of the last report; null if nothing has been reported
	Keys      []ComparedKey `json:"keys"`  // those that it would have denied most
}

// ComparedKey is how often a key was denied, and would have been.
type ComparedKey struct {
	Key       string `json:"key"`
	WouldDeny int64  `json:"would_deny"`
	Denied    int64  `json:"denied"`
}

func policyCompareCommand(a *cli.App) *cobra.Command {
	var n int64
	cmd := &cobra.Command{
		Use:   "compare NAME",
		Short: "Show what shadow policies would have denied",
		Long: `Shows how many requests each shadow policy of a limiter has been asked about, how many of them the policy
in force denied and how many the shadow would have denied, and which keys most. The processes report this
every 10 seconds, and lose what they have not reported when they are killed. It begins anew when the row
of the policy changes. Of the keys, each process counts 500 at most in 10 seconds.`,
		Example: `  pgratelimit policy compare login
  pgratelimit policy compare login -n 100 --json`,
		Args: cobra.ExactArgs(1),
	}
	cmd.RunE = cli.Action(func(ctx context.Context, args []string) error {
		if n < 0 {
			return cli.Usage(errors.New("--number must not be negative"))
		}
		return cli.List(ctx, a, scanComparison, printComparisons, comparePoliciesSQL, args[0], n)
	})
	cmd.Flags().Int64VarP(&n, "number", "n", 10, "how many keys to list for each policy")
	a.AddTimeout(cmd)
	a.AddJSON(cmd)
	return cmd
}

func scanComparison(row pgx.CollectableRow) (c Comparison, err error) {
	var keys []string
	var wouldDeny, denied []int64
	err = row.Scan(&c.ID, &c.Key, &c.KeyPrefix, &c.Policy, &c.Decided, &c.Denied, &c.WouldDeny, &c.Since, &c.Until,
		&keys, &wouldDeny, &denied)
	c.Keys = []ComparedKey{}
	for i, key := range keys {
		c.Keys = append(c.Keys, ComparedKey{Key: key, WouldDeny: wouldDeny[i], Denied: denied[i]})
	}
	cli.InUTC(&c.Since, c.Until)
	return c, err
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

// share is a number and which part of all it is.
func share(n, all int64) string {
	if all == 0 {
		return "0"
	}
	return fmt.Sprintf("%d (%.1f %%)", n, 100*float64(n)/float64(all))
}
