package keys

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/policies"
)

// LimiterRows is the usage of a limiter in one table.
type LimiterRows struct {
	Limiter      string     `json:"limiter"`
	Table        string     `json:"table"`
	Algorithms   []string   `json:"algorithms"` // the algorithms of the rows and their holds, such as "sliding"
	Rows         int64      `json:"rows"`
	Live         int64      `json:"live"`                   // rows that have not expired
	Held         int64      `json:"held"`                   // units of holds and slots, some of which may have ended
	Bytes        int64      `json:"bytes"`                  // the size of the rows, without free space and index
	OldestExpiry time.Time  `json:"oldest_expiry,omitzero"` // zero if no row has counted, and nothing is held
	Estimated    bool       `json:"estimated"`              // whether the numbers are estimated from a sample
	DeniedNow    *DeniedNow `json:"denied_now"`             // null if no policy was given
	Warning      string     `json:"warning,omitempty"`
	wroteRows    int64      // Algorithms as a sum of 1 << code
}

// DeniedNow is the number of keys that have no room for a cost of 1.
type DeniedNow struct {
	Keys     int64 `json:"keys"`
	Complete bool  `json:"complete"` // false if Keys is estimated from a sample
}

func LimitsCommand(a *cli.App) *cobra.Command {
	given := cli.PoliciesValue{}
	var exact bool
	var maxRows int64
	cmd := &cobra.Command{
		Use:   "limits",
		Short: "List the limiters, and what each has in the tables",
		Long: `Lists for each limiter the algorithms that wrote its rows, the number of rows, how many rows have not
expired, how many units are held, the size of the rows, and when the first row expired or will expire.
Slots are held too: 'pgratelimit slots' lists them. Units of an ended hold may count until the key's
last hold ends. If a table is larger than 100 MB, the command reads a random sample of 100 MB, and marks
estimates with ~. With --exact, it reads the whole table. To count the keys that are denied now, give
the policy with --policy, because the rows do not have it.`,
		Example: `  pgratelimit limits
  pgratelimit limits --policy "login=sliding 10/1m" \
      --policy "api=bucket 20 5/10s"
  pgratelimit limits --exact --timeout 5m --json`,
		Args: cobra.NoArgs,
		RunE: cli.Action(func(ctx context.Context, _ []string) error {
			if maxRows < 1 {
				return cli.Usage(errors.New("--max-rows must be at least 1"))
			}
			var sizes []cli.TableSize
			var limiters []LimiterRows
			if err := a.InStores(ctx, func(store cli.DB) error {
				moreSizes, more, err := countLimiters(ctx, store, exact)
				if err != nil {
					return err
				}
				for i := range more {
					if err := countDenied(ctx, store, &more[i], given, maxRows); err != nil {
						return err
					}
				}
				sizes, limiters = cli.AddSizes(sizes, moreSizes), addLimiters(limiters, more)
				return nil
			}); err != nil {
				return err
			}
			value := struct {
				Tables   []cli.TableSize `json:"tables"`
				Limiters []LimiterRows   `json:"limiters"`
			}{sizes, limiters}
			return a.Print(value, func(w io.Writer) { printLimiters(w, sizes, limiters) })
		}),
	}
	cmd.Flags().Var(given, "policy", "limit of each key of a limiter, like \"login=sliding 100/1m\"; can be repeated")
	cmd.Flags().BoolVar(&exact, "exact", false, "read the whole tables, however large")
	addMaxRows(cmd, &maxRows)
	return a.Finish(cmd)
}

//go:embed sql/limits.sql
var limitsSQL string

// countLimiters reads the tables, or a sample of each table.
func countLimiters(
	ctx context.Context, db cli.DB, exact bool,
) (sizes []cli.TableSize, limiters []LimiterRows, err error) {
	err = db.Read(ctx, func(tx cli.Tx) error {
		var percent map[string]float64
		if sizes, percent, err = cli.TableSizes(ctx, tx, exact); err != nil {
			return err
		}
		rows, _ := tx.Query(ctx, limitsSQL, percent[cli.Table(false)], percent[cli.Table(true)])
		limiters, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (l LimiterRows, err error) {
			var expires int64
			err = row.Scan(&l.Table, &l.Limiter, &l.wroteRows, &l.Rows, &l.Live, &l.Held, &l.Bytes, &expires)
			l.Algorithms = policies.Words(l.wroteRows)
			if expires > 0 {
				l.OldestExpiry = time.UnixMicro(expires).UTC()
			}
			if share := percent[l.Table] / 100; share < 1 {
				l.Estimated = true
				for _, n := range []*int64{&l.Rows, &l.Live, &l.Held, &l.Bytes} {
					*n = int64(float64(*n) / share)
				}
			}
			return l, err
		})
		return err
	})
	slices.SortFunc(limiters, LimiterRows.compare)
	return sizes, limiters, err
}

func (l LimiterRows) compare(other LimiterRows) int {
	return cmp.Or(cmp.Compare(l.Limiter, other.Limiter), cmp.Compare(other.Table, l.Table))
}

// addLimiters adds the rows of another shard to all. Both lists are sorted.
func addLimiters(all, more []LimiterRows) []LimiterRows {
	for _, m := range more {
		i, found := slices.BinarySearchFunc(all, m, LimiterRows.compare)
		if !found {
			all = slices.Insert(all, i, m)
			continue
		}
		l := &all[i]
		l.Rows, l.Live, l.Held, l.Bytes = l.Rows+m.Rows, l.Live+m.Live, l.Held+m.Held, l.Bytes+m.Bytes
		l.Estimated = l.Estimated || m.Estimated
		if l.OldestExpiry.IsZero() || !m.OldestExpiry.IsZero() && m.OldestExpiry.Before(l.OldestExpiry) {
			l.OldestExpiry = m.OldestExpiry
		}
		l.wroteRows |= m.wroteRows
		l.Algorithms = policies.Words(l.wroteRows)
		if m.DeniedNow != nil { // if one has DeniedNow, both have it
			l.DeniedNow.Keys += m.DeniedNow.Keys
			l.DeniedNow.Complete = l.DeniedNow.Complete && m.DeniedNow.Complete
		}
	}
	return all
}

func countDenied(ctx context.Context, db cli.DB, l *LimiterRows, given cli.PoliciesValue, maxRows int64) error {
	policy, ok := given[l.Limiter]
	if !ok {
		return nil
	}
	if own, others := policies.OtherKinds(policy.String(), l.wroteRows); others != "" {
		l.Warning = policies.OfAnotherKind(own, l.Limiter, others)
	}
	l.DeniedNow = &DeniedNow{}
	of := ratelimit.Config{Name: l.Limiter, Policy: policy, Durable: l.Table == cli.Table(true)}
	states, sample, err := peekAll(ctx, db, of, maxRows)
	for _, state := range states {
		if state.Remaining == 0 {
			l.DeniedNow.Keys++
		}
	}
	if l.DeniedNow.Complete = sample.share == 1; !l.DeniedNow.Complete && err == nil {
		l.DeniedNow.Keys = int64(float64(l.DeniedNow.Keys) / sample.share)
	}
	return err
}

func printLimiters(w io.Writer, sizes []cli.TableSize, limiters []LimiterRows) {
	fmt.Fprintf(w, "LIMITER\tTABLE\tALGORITHM\tROWS\tLIVE\tHELD\tDENIED NOW\tBYTES\tOLDEST EXPIRY\n")
	estimated, sampled, unknown := false, false, false
	for _, l := range limiters {
		about := ""
		if l.Estimated {
			about, estimated = "~", true
		}
		denied := "?"
		switch {
		case l.DeniedNow == nil:
			unknown = true
		case l.DeniedNow.Complete:
			denied = strconv.FormatInt(l.DeniedNow.Keys, 10)
		default:
			denied, sampled = fmt.Sprintf("~%d", l.DeniedNow.Keys), true
		}
		oldest := ""
		if !l.OldestExpiry.IsZero() {
			oldest = about + cli.Instant(l.OldestExpiry)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s%d\t%s%d\t%s%d\t%s\t%s%s\t%s\n",
			cli.Short(l.Limiter), l.Table, strings.Join(l.Algorithms, ", "), about, l.Rows, about, l.Live,
			about, l.Held, denied, about, cli.Size(l.Bytes), oldest)
	}
	if len(limiters) == 0 {
		fmt.Fprintf(w, "no limiter has rows\n")
	}
	fmt.Fprintln(w)
	for i, l := range limiters {
		policies.PrintWarning(w, l.Warning)
		if i > 0 && l.Limiter == limiters[i-1].Limiter && l.Live > 0 && limiters[i-1].Live > 0 {
			fmt.Fprintf(w, "%s has rows in both tables: perhaps somebody left out --durable, or durable => true\n",
				cli.Printable(l.Limiter))
		}
	}
	for _, s := range sizes {
		fmt.Fprintf(w, "%s takes %s, with its index %s\n", s.Table, cli.Size(s.TableBytes), cli.Size(s.TotalBytes))
	}
	if estimated {
		fmt.Fprintf(w, "~ is estimated from a sample of %s; --exact counts\n", cli.Size(cli.SampleBlocks*cli.BlockSize))
	}
	if sampled {
		fmt.Fprintf(w, "~ under DENIED NOW is estimated from a sample; --max-rows reads more\n")
	}
	if unknown {
		fmt.Fprintf(w, "? depends on the policy: --policy \"NAME=sliding 100/1m\"\n")
	}
}
