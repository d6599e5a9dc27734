package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit/cleanup"
)

// sweepResult is a cleanup.Result in the output.
type sweepResult struct {
	Deleted      int64 `json:"deleted"`
	ScannedPages int64 `json:"scanned_pages"`
	Batches      int   `json:"batches"`
	Complete     bool  `json:"complete"`
	Skipped      bool  `json:"skipped"`
	TookUS       int64 `json:"took_us"`
}

func (a *app) sweepCommand() *cobra.Command {
	var every time.Duration
	var config cleanup.Config
	cmd := &cobra.Command{
		Use:   "sweep",
		Short: "Delete the rows that have expired",
		Long: `Deletes the rows that expired a minute ago or more, in small transactions that wait for nobody, and
uses a set share of the time. One pass, for cron, takes ten minutes at most, and the next one goes on
where it stopped. With --every the command stays, and logs a line for each pass that deleted
something. Sweeping changes no decision: an expired row means the same as no row.`,
		Example: `  pgratelimit sweep
  pgratelimit sweep --every 5m
  pgratelimit sweep --existing login --existing api`,
		Args: cobra.NoArgs,
		RunE: action(func(ctx context.Context, _ []string) error {
			pool, err := a.open(ctx)
			if err != nil {
				return err
			}
			defer pool.Close()
			config.Logger = slog.New(slog.DiscardHandler) // what one pass has done is printed
			if every != 0 {
				config.Interval, config.Logger = every, a.logger()
			}
			if _, err := cleanup.New(pool, config); err != nil { // checks config before the database is asked
				return err
			}
			if config.Schema, err = a.home(ctx, pool); err != nil {
				return err
			}
			if every != 0 {
				sweeper, err := cleanup.New(pool, config)
				if err != nil {
					return err
				}
				return sweeper.Run(ctx)
			}
			bar := a.newBar("sweeping")
			config.Progress = bar.update
			sweeper, err := cleanup.New(pool, config)
			if err != nil {
				return err
			}
			result, err := sweeper.RunOnce(ctx)
			bar.remove()
			if err != nil && result.Deleted == 0 {
				return err
			}
			return errors.Join(err, a.printSweep(result))
		}),
	}
	cmd.PreRunE = func(cmd *cobra.Command, _ []string) error { // a zero would be taken for the default
		switch {
		case cmd.Flags().Changed("every") && every == 0:
			return usageError{errors.New("--every must be at least 1s")}
		case cmd.Flags().Changed("share") && config.Share == 0:
			return usageError{errors.New("--share must be above 0 and at most 1")}
		}
		return nil
	}
	cmd.Flags().DurationVar(&every, "every", 0, "stay, and do a pass in each of these times, at least 1s")
	cmd.Flags().Float64Var(&config.Share, "share", 0.2,
		"share of the time in which the database works for a pass, at most 1")
	cmd.Flags().StringArrayVar(&config.Names, "existing", nil,
		"`name` of a limiter that exists; name ALL of them, since the rows of all others are deleted, EXPIRED OR NOT")
	a.addJSON(cmd)
	return cmd
}

func (a *app) logger() *slog.Logger {
	if a.json {
		return slog.New(slog.NewJSONHandler(a.stdout, nil))
	}
	return slog.New(slog.NewTextHandler(a.stdout, nil))
}

func (a *app) printSweep(r cleanup.Result) error {
	s := sweepResult{r.Deleted, r.Scanned, r.Batches, r.Complete, r.Skipped, r.Took.Microseconds()}
	return a.print(s, func(w io.Writer) {
		if s.Skipped {
			fmt.Fprintln(w, "skipped: another sweeper is at work")
			return
		}
		fmt.Fprintf(w, "deleted %s, read %s, in %s and %s", count(s.Deleted, "row"), count(s.ScannedPages, "page"),
			count(s.Batches, "batch"), wait(s.TookUS))
		if !s.Complete {
			fmt.Fprintf(w, "; the next sweep goes on from there")
		}
		fmt.Fprintln(w)
	})
}
