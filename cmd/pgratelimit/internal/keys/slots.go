package keys

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/rowsql"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/policies"
)

// SlotList is the output of the command slots.
type SlotList struct {
	Limiter string      `json:"limiter"`
	At      time.Time   `json:"at"` // the time of the database (of shard 0)
	Tables  []SlotTable `json:"tables"`
}

// SlotTable has the slots in one table, and the places in the lines. The numbers count those too that are not listed.
type SlotTable struct {
	Table        string `json:"table"`
	Slots        int64  `json:"slots"`
	Units        int64  `json:"units"`
	Waiting      int64  `json:"waiting"`
	WaitingUnits int64  `json:"waiting_units"`
	Listed       []Slot `json:"listed"`
}

// Slot is a slot, or a place in a line.
type Slot struct {
	Slot    string    `json:"slot"`
	Key     string    `json:"key"`
	Waiting bool      `json:"waiting"`
	Place   int64     `json:"place,omitempty"` // in the order of the requests for the key: 1 for the first that waits
	Units   int64     `json:"units"`
	Holder  string    `json:"holder"`
	Group   string    `json:"group"`
	Weight  int64     `json:"weight"`
	MadeAt  time.Time `json:"made_at"` // the time of the request
	EndsAt  time.Time `json:"ends_at"`
	Fence   int64     `json:"fence,omitempty"` // 0 for a place in a line

	name string        // the name in the row
	left time.Duration // until EndsAt
}

func SlotsCommand(a *cli.App) *cobra.Command {
	var n int64
	var watch bool
	cmd := &cobra.Command{
		Use:   "slots NAME [KEY]",
		Short: "List who holds the slots of a limiter, and who waits for one",
		Long: `Lists the slots that are held under a policy such as "concurrent 5", and who waits in line for one, of
all keys of a limiter or of one key: who it says it is, its group, its units, when it asked, when it ends
if it is not renewed, and its fence. Those who wait for a key are in the order in which they asked. But
groups take turns, so the first one is not always next. The command lists the slots of both tables, and
waits for no locks. It lists a limiter with the name release by 'pgratelimit slots -- release'.`,
		Example: `  pgratelimit slots imports
  pgratelimit slots imports tenant:7 --watch
  pgratelimit slots imports --json | jq -r '.tables[].listed[].holder'`,
		Args: cobra.RangeArgs(1, 2),
		RunE: cli.Action(func(ctx context.Context, args []string) error {
			if n < 1 {
				return cli.Usage(errors.New("--number must be at least 1"))
			}
			var to policies.PolicyTarget
			if len(args) == 2 {
				to.Key = &args[1]
			}
			if err := policies.CheckPolicyTarget(args[0], to); err != nil {
				return err
			}
			return a.Show(ctx, watch, func() (func() error, error) {
				list, err := listSlots(ctx, a, args[0], to.Key, n)
				return func() error { return a.Print(list, list.print) }, err
			})
		}),
	}
	cmd.Flags().Int64VarP(&n, "number", "n", 100, "how many slots and places to list")
	cmd.Flags().BoolVar(&watch, "watch", false, cli.WatchUsage)
	cmd.AddCommand(releaseCommand(a))
	return a.Finish(cmd)
}

// listSlots reads at most n slots and places from each table. If key is nil, listSlots reads those of all keys.
func listSlots(ctx context.Context, a *cli.App, limiter string, key *string, n int64) (SlotList, error) {
	list := SlotList{Limiter: limiter, Tables: []SlotTable{
		{Table: cli.Table(false), Listed: []Slot{}}, {Table: cli.Table(true), Listed: []Slot{}},
	}}
	err := a.InStores(ctx, func(store cli.DB) error {
		return store.Read(ctx, func(tx cli.Tx) error {
			if list.At.IsZero() {
				if err := tx.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&list.At); err != nil {
					return err
				}
			}
			for i := range list.Tables {
				if err := list.Tables[i].add(ctx, tx, algorithm.RowNames(limiter), key, n); err != nil {
					return err
				}
			}
			return nil
		})
	})
	return list, err
}

// add adds the slots and the places of a database.
func (t *SlotTable) add(ctx context.Context, tx cli.Tx, names []string, key *string, n int64) error {
	var s Slot
	var more SlotTable
	var made, ends, now int64
	// rows may contain an error
	rows, _ := tx.Query(ctx, rowsql.InTable(rowsql.Slots, t.Table == cli.Table(true)), names, key, n)
	_, err := pgx.ForEachRow(rows, []any{&s.Slot, &s.name, &s.Key, &s.Waiting, &s.Place, &s.Units, &s.Holder, &s.Group,
		&s.Weight, &made, &ends, &s.Fence, &now, &more.Slots, &more.Units, &more.Waiting, &more.WaitingUnits,
	}, func() error {
		s.MadeAt, s.EndsAt = time.UnixMicro(made).UTC(), time.UnixMicro(ends).UTC()
		s.left = time.Duration(ends-now) * time.Microsecond
		if s.Waiting {
			s.Fence = 0
		}
		t.Listed = append(t.Listed, s)
		return nil
	})
	t.Slots, t.Units = t.Slots+more.Slots, t.Units+more.Units
	t.Waiting, t.WaitingUnits = t.Waiting+more.Waiting, t.WaitingUnits+more.WaitingUnits
	// Each database has sorted its rows, and a key is in one of them.
	slices.SortStableFunc(t.Listed, func(a, b Slot) int {
		return cmp.Or(cmp.Compare(a.Key, b.Key), cmp.Compare(a.name, b.name))
	})
	t.Listed = t.Listed[:min(int(n), len(t.Listed))]
	return err
}

func (l SlotList) print(w io.Writer) {
	found := false
	for _, t := range l.Tables {
		if t.Slots+t.Waiting == 0 {
			continue
		}
		found = true
		fmt.Fprintf(w, "KEY\tSTATE\tUNITS\tHOLDER\tGROUP\tSINCE\tENDS AFTER\tFENCE\tSLOT\n")
		for _, s := range t.Listed {
			state, fence, group := "held", strconv.FormatInt(s.Fence, 10), cli.Short(s.Group)
			if s.Waiting {
				state, fence = fmt.Sprintf("waits, place %d", s.Place), ""
			}
			if s.Weight != 1 {
				group += fmt.Sprintf(" (weight %d)", s.Weight)
			}
			fmt.Fprintf(w, "%s\t%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s\n",
				cli.Short(s.Key), state, s.Units, cli.Short(s.Holder), group,
				cli.Instant(s.MadeAt), cli.Span(s.left.Microseconds()), fence, s.Slot)
		}
		fmt.Fprintf(w, "\n%s held in %s", cli.Count(t.Units, "unit"), cli.Count(t.Slots, "slot"))
		if t.Waiting > 0 {
			fmt.Fprintf(w, ", and %d in line for %s", t.Waiting, cli.Count(t.WaitingUnits, "unit"))
		}
		fmt.Fprintf(w, ", of limiter %s in %s, at %s", cli.Printable(l.Limiter), t.Table, cli.Instant(l.At))
		if rest := t.Slots + t.Waiting - int64(len(t.Listed)); rest > 0 {
			fmt.Fprintf(w, "; %d are not listed: see --number", rest)
		}
		fmt.Fprintln(w)
	}
	if !found {
		fmt.Fprintf(w, "nobody holds a slot of limiter %s or waits for one, at %s\n",
			cli.Printable(l.Limiter), cli.Instant(l.At))
	}
}

// unlessRenewed completes a sentence about the times after which slots are free.
const unlessRenewed = "if no holder renews or releases its slot"

// slotTimes says how many units of a key are held in slots, and when they end. Times are in microseconds.
func slotTimes(held, retryAfter, resetAfter int64) string {
	switch {
	case held == 0:
		return ", none held"
	case retryAfter == 0:
		return fmt.Sprintf(", %d held, all free after %s %s", held, cli.Span(resetAfter), unlessRenewed)
	}
	return fmt.Sprintf(", %d held, one free after %s and all after %s %s",
		held, cli.Span(retryAfter), cli.Span(resetAfter), unlessRenewed)
}

var (
	//go:embed sql/find_slot.sql
	findSlotSQL string

	slotText = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
)

// Released is the output of the command slots release.
type Released struct {
	Limiter string `json:"limiter"`
	Table   string `json:"table"`
	Slot
}

func (r Released) print(w io.Writer) {
	holder := cli.Short(cmp.Or(r.Holder, "a holder without a name"))
	where := fmt.Sprintf("key %s of limiter %s in %s", cli.Short(r.Key), cli.Printable(r.Limiter), r.Table)
	if r.Waiting {
		fmt.Fprintf(w, "removed %s from the line of %s: it had asked for %s at %s\n",
			holder, where, cli.Count(r.Units, "unit"), cli.Instant(r.MadeAt))
		return
	}
	fmt.Fprintf(w, "released %s of %s, which %s had asked for at %s\n",
		cli.Count(r.Units, "unit"), where, holder, cli.Instant(r.MadeAt))
}

func releaseCommand(a *cli.App) *cobra.Command {
	return a.Finish(&cobra.Command{
		Use:   "release SLOT",
		Short: "Take a slot, or a place in a line, away from its holder",
		Long: `Takes a slot, or a place in a line, away from its holder, for example because the holder hangs. The
units go to the next ones in line. SLOT is in the last column of 'pgratelimit slots'. The holder learns
of it when it renews, which is after a third of the slot's TTL at most. Until then it works on, beside
those who have got its units. Then its context ends with ErrSlotLost, in Go. Who waits by Acquire, and
loses the place, goes to the end of the line. The command needs the rights of both rate_limit_reader and
rate_limit_app.`,
		Example: `  pgratelimit slots release 9b6589b3-2c61-4774-9439-b17871d7b4d4`,
		Args:    cobra.ExactArgs(1),
		RunE: a.OnDatabase(func(ctx context.Context, db cli.DB, args []string) error {
			if !slotText.MatchString(args[0]) {
				return cli.Usage(errors.New(
					"the slot cannot be read: pass the whole text in the column SLOT of 'pgratelimit slots NAME'"))
			}
			r, err := findSlot(ctx, a, args[0])
			if err != nil {
				return err
			}
			known := r.Limiter != ""
			if known {
				err = db.Call(ctx, func(tx cli.Tx) error {
					return tx.QueryRow(ctx, "SELECT rate_limit_release($1::uuid)", args[0]).Scan(&known)
				})
			}
			switch {
			case err != nil:
				return err
			case !known:
				return errors.New("there is no such slot: it has ended, was released, or is in another database or " +
					"schema; 'pgratelimit slots NAME' lists those that are left")
			}
			return a.Print(r, r.print)
		}),
	})
}

// findSlot returns a slot or a place that is live. If there is none with the id, Limiter is "".
func findSlot(ctx context.Context, a *cli.App, id string) (found Released, err error) {
	err = a.InStores(ctx, func(store cli.DB) error {
		return store.Read(ctx, func(tx cli.Tx) error {
			for _, durable := range []bool{false, true} {
				var name, key string
				switch err := tx.QueryRow(ctx, rowsql.InTable(findSlotSQL, durable), id).Scan(&name, &key); {
				case errors.Is(err, pgx.ErrNoRows):
					continue
				case err != nil:
					return err
				}
				t := SlotTable{Table: cli.Table(durable)}
				if err := t.add(ctx, tx, []string{name}, &key, math.MaxInt32); err != nil {
					return err
				}
				if i := slices.IndexFunc(t.Listed, func(s Slot) bool { return s.Slot == id }); i >= 0 {
					found = Released{name, t.Table, t.Listed[i]}
				}
			}
			return nil
		})
	})
	return found, err
}
