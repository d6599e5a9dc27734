package upkeep

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit/cleanup"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

// SweepResult is a cleanup.Result in the output.
type SweepResult struct {
	Deleted      int64 `json:"deleted"`
	ScannedPages int64 `json:"scanned_pages"`
	Batches      int   `json:"batches"`
	Complete     bool  `json:"complete"`
	Skipped      bool  `json:"skipped"`
	TookUS       int64 `json:"took_us"`
}

func SweepCommand(a *cli.App) *cobra.Command {
	var every time.Duration
	var config cleanup.Config
	cmd := &cobra.Command{
		Use:   "sweep",
		Short: "Delete the rows that have expired",
		Long: `Deletes rows that expired at least a minute ago, in small transactions that wait for no locks. A pass,
for cron, takes at most ten minutes, and the next pass continues where the previous pass stopped. With
--every, the command keeps running, and logs a line for each pass that deleted rows. Sweeping changes no
decision, because an expired row means the same as no row.`,
		Example: `  pgratelimit sweep
  pgratelimit sweep --every 5m
  pgratelimit sweep --existing login --existing api`,
		Args: cobra.NoArgs,
		RunE: a.OnDatabase(func(ctx context.Context, db cli.DB, _ []string) error {
			config.Logger = slog.New(slog.DiscardHandler) // the command prints the result of its only pass
			if every != 0 {
				config.Interval, config.Logger = every, logger(a)
			}
			if _, err := cleanup.New(db.Pool, config); err != nil { // checks config before the database is used
				return err
			}
			schema, err := db.Home(ctx)
			if err != nil {
				return err
			}
			config.Schema = schema
			bar := a.NewBar("sweeping")
			if every == 0 {
				config.Progress = bar.Update
			}
			sweeper, err := cleanup.New(db.Pool, config)
			if err != nil {
				return err
			}
			if every != 0 {
				return sweeper.Run(ctx)
			}
			result, err := sweeper.RunOnce(ctx)
			bar.Remove()
			if err != nil && result.Deleted == 0 {
				return err
			}
			return errors.Join(err, printSweep(a, result))
		}),
	}
	cmd.PreRunE = func(cmd *cobra.Command, _ []string) error { // for cleanup, 0 means the default
		switch {
		case cmd.Flags().Changed("every") && every == 0:
			return cli.Usage(errors.New("--every must be at least 1s"))
		case cmd.Flags().Changed("share") && config.Share == 0:
			return cli.Usage(errors.New("--share must be above 0 and at most 1"))
		}
		return nil
	}
	cmd.Flags().DurationVar(&every, "every", 0, "keep running; one pass per interval of at least 1s")
	cmd.Flags().Float64Var(&config.Share, "share", 0.2,
		"share of the time in which a pass works, at most 1; it pauses for the rest")
	cmd.Flags().StringArrayVar(&config.Names, "existing", nil,
		"`name` of a limiter that exists; name ALL of them: rows of all others are deleted, EXPIRED OR NOT")
	a.AddJSON(cmd)
	return cmd
}

func logger(a *cli.App) *slog.Logger {
	if a.JSON {
		return slog.New(slog.NewJSONHandler(a.Stdout, nil))
	}
	return slog.New(slog.NewTextHandler(a.Stdout, nil))
}

func printSweep(a *cli.App, r cleanup.Result) error {
	s := SweepResult{r.Deleted, r.Scanned, r.Batches, r.Complete, r.Skipped, r.Took.Microseconds()}
	return a.Print(s, func(w io.Writer) {
		if s.Skipped {
			fmt.Fprintln(w, "skipped: another sweeper is at work")
			return
		}
		fmt.Fprintf(w, "deleted %s, read %s, in %s and %s",
			cli.Count(s.Deleted, "row"), cli.Count(s.ScannedPages, "page"),
			cli.Count(s.Batches, "batch"), cli.Span(s.TookUS))
		if !s.Complete {
			fmt.Fprintf(w, "; the next sweep goes on from there")
		}
		fmt.Fprintln(w)
	})
}
