package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/schollz/progressbar/v3"
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
		Long: `Deletes the rows that expired a minute ago or more, in small transactions that wait for nobody, and uses a set share of the time.
One pass, for cron, takes ten minutes at most; the next one goes on where it stopped. With --every it stays, and logs a line for each
pass that deleted something. Sweeping changes no decision: an expired row means the same as no row.`,
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
			if every != 0 {
				config.Interval, config.Logger = every, a.logger()
			}
			if _, err := cleanup.New(pool, config); err != nil { // before anything is asked
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
			bar := newBar(a.stderr)
			if isTerminal(a.stderr) && !a.json {
				config.Progress = bar.update
			}
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
	cmd.Flags().DurationVar(&every, "every", 0, "stay, and do a pass in each of these times, at least 1s")
	cmd.Flags().Float64Var(&config.Share, "share", 0.2, "share of the time in which the database works for a pass, at most 1")
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

// bar shows how far a sweep is, from its first update on. If it cannot be drawn, that is no reason to stop.
type bar struct{ *progressbar.ProgressBar }

func newBar(w io.Writer) bar {
	return bar{progressbar.NewOptions64(1,
		progressbar.OptionSetWriter(w),
		progressbar.OptionSetDescription("sweeping"),
		progressbar.OptionSetWidth(40),
		progressbar.OptionSetElapsedTime(false),
		progressbar.OptionThrottle(50*time.Millisecond),
		progressbar.OptionClearOnFinish(),
	)}
}

func (b bar) update(done, total int64) {
	if total > 0 { // else there is nothing to sweep
		b.ChangeMax64(total)
		_ = b.Set64(done)
	}
}

func (b bar) remove() {
	if b.IsStarted() {
		_ = b.Clear()
	}
}

func (a *app) printSweep(r cleanup.Result) error {
	s := sweepResult{r.Deleted, r.Scanned, r.Batches, r.Complete, r.Skipped, r.Took.Microseconds()}
	return a.print(s, func(w io.Writer) {
		if s.Skipped {
			fmt.Fprintln(w, "skipped: another sweeper is at work")
			return
		}
		fmt.Fprintf(w, "deleted %d rows, read %d pages, in %d batches and %v", s.Deleted, s.ScannedPages, s.Batches,
			r.Took.Round(time.Millisecond))
		if !s.Complete {
			fmt.Fprintf(w, "; the next sweep goes on from there")
		}
		fmt.Fprintln(w)
	})
}
