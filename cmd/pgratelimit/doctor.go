package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"
)

// level says how bad a finding is.
type level string

const (
	fine    level = "ok"
	warning level = "warning"
	problem level = "problem"
)

// finding is what a check has found.
type finding struct {
	Check string `json:"check"`
	Level level  `json:"level"`
	Found string `json:"found"`
	Do    string `json:"do,omitempty"` // what to do about it
}

func ok(found string, args ...any) finding {
	return finding{Level: fine, Found: fmt.Sprintf(found, args...)}
}

func (l level) finding(do, found string, args ...any) finding {
	return finding{Level: l, Found: fmt.Sprintf(found, args...), Do: do}
}

func (a *app) doctorCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Examine the database, and say what to do",
		Long: `Examines the database and says what to do about whatever it finds. It only reads: catalogs and statistics, and of each table a random
sample of at most 100 MB. The exit code is 1 if there is a problem.`,
		Example: `  pgratelimit doctor
  pgratelimit doctor --json | jq '.[] | select(.level != "ok")'`,
		Args: cobra.NoArgs,
		RunE: action(func(ctx context.Context, _ []string) error {
			pool, err := a.open(ctx)
			if err != nil {
				return err
			}
			defer pool.Close()
			findings, err := a.examine(ctx, pool)
			if err != nil {
				return err
			}
			problems := 0
			for _, finding := range findings {
				if finding.Level == problem {
					problems++
				}
			}
			if err := a.print(findings, func(w io.Writer) { printFindings(w, findings) }); err != nil {
				return err
			}
			if problems > 0 {
				return fmt.Errorf("%d of %d checks found a problem", problems, len(findings))
			}
			return nil
		}),
	}
	a.addTimeout(cmd)
	a.addJSON(cmd)
	return cmd
}

func printFindings(w io.Writer, findings []finding) {
	for _, finding := range findings {
		fmt.Fprintf(w, "%s\t%s\t%s\n", finding.Level, finding.Check, finding.Found)
		if finding.Do != "" {
			fmt.Fprintf(w, "\t\t→ %s\n", finding.Do)
		}
	}
}

// examine runs all checks that make sense for this database.
func (a *app) examine(ctx context.Context, pool *pgxpool.Pool) ([]finding, error) {
	e := &examination{app: a, pool: pool}
	if err := e.readServer(ctx); err != nil {
		return nil, err
	}
	checks := []check{
		{"server", e.checkServer},
		{"connection", e.checkConnection},
		{"standby", e.checkStandby},
		{"statistics", e.checkStatistics},
		{"long transactions", e.checkHorizon},
		{"migrations", e.checkMigrations},
	}
	if e.server.hasTables {
		checks = append(checks, check{"functions", e.checkFunctions}, check{"rights", e.checkRights}, check{"schema", e.checkStrangers})
	}
	var findings []finding
	for _, check := range checks {
		finding, err := check.look(ctx)
		if err := could(err, &finding); err != nil {
			return nil, err
		}
		finding.Check = check.name
		findings = append(findings, finding)
	}
	if e.server.hasTables {
		of, err := e.checkTables(ctx)
		if err != nil {
			return nil, err
		}
		findings = append(findings, of...)
	}
	return findings, nil
}

// check is one of the doctor's.
type check struct {
	name string
	look func(context.Context) (finding, error)
}

// could makes a finding of an error that the database gave to this check alone.
func could(err error, f *finding) error {
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		*f = warning.finding("run it as a role that may look, such as a member of the reader in deploy/grants.sql",
			"could not be looked at: %s (SQLSTATE %s)", pgErr.Message, pgErr.Code)
		return nil
	}
	return err
}
