package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
)

//go:embed sql/leases.sql
var leasesSQL string

// heldLease is what a process holds of a key.
type heldLease struct {
	Limiter    string    `json:"limiter"`
	Key        string    `json:"key"`
	Durable    bool      `json:"durable"`
	Process    string    `json:"process"`
	Held       int64     `json:"held"`
	EndsInUS   int64     `json:"ends_in_us"`
	EndsAt     time.Time `json:"ends_at"`
	ReportedAt time.Time `json:"reported_at"`
}

func (a *app) leasesCommand() *cobra.Command {
	var n int64
	cmd := &cobra.Command{
		Use:   "leases [NAME [KEY]]",
		Short: "Show which processes hold how much of which keys",
		Long: `Shows what processes have taken ahead for the leases of their limiters, and have not spent: of all
limiters, of one, or of one key. Those who hold the most come first. It is what the processes have
reported, so it may be 10 seconds old, and each reports its 100 largest leases. What a dead process
held stays until it ends. It is for people: no decision depends on it.`,
		Example: `  pgratelimit leases
  pgratelimit leases api tenant:7 --json`,
		Args: cobra.MaximumNArgs(2),
	}
	cmd.RunE = action(func(ctx context.Context, args []string) error {
		if n < 1 {
			return usageError{errors.New("--number must be at least 1")}
		}
		of := [2]*string{}
		for i := range args {
			of[i] = &args[i]
		}
		return list(ctx, a, scanLease, printLeases, leasesSQL, of[0], of[1], n)
	})
	cmd.Flags().Int64VarP(&n, "number", "n", 100, "how many rows to show at most")
	a.addTimeout(cmd)
	a.addJSON(cmd)
	return cmd
}

func scanLease(row pgx.CollectableRow) (l heldLease, err error) {
	err = row.Scan(&l.Limiter, &l.Key, &l.Durable, &l.Process, &l.Held, &l.EndsInUS, &l.EndsAt, &l.ReportedAt)
	inUTC(&l.EndsAt, &l.ReportedAt)
	return l, err
}

func printLeases(w io.Writer, all []heldLease) {
	if len(all) == 0 {
		fmt.Fprintln(w, "no process has reported that it holds something")
		return
	}
	fmt.Fprintln(w, "LIMITER\tKEY\tPROCESS\tHELD\tENDS IN")
	for _, l := range all {
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%s\n",
			short(l.Limiter), short(l.Key), short(l.Process), l.Held, wait(l.EndsInUS))
	}
	fmt.Fprintln(w, "\nas the processes reported it within the last 10 s; what a dead process held stays until it ends")
}
