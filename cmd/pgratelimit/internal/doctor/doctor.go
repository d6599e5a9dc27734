// Package doctor checks a database, or a proxy and its shards. The package can also create missing objects again.
package doctor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

func Command(a *cli.App) *cobra.Command {
	var fix, yes bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Find what is wrong with the database, and say what to do",
		Long: `Finds what is wrong with the database, and says what to do. The command only reads: catalogs,
statistics, and a random sample of at most 100 MB of each table. The exit code is 1 if there is a
problem.

With --fix, the command first repairs missing or changed objects of the migrations in one transaction:
functions, types, tables, primary keys, indexes and triggers. Calls wait until the transaction ends.
Counts, policies and rights stay. A table must be made anew only if it lacks a required column without a
default. That loses all rows of the table and what others have added to it, so doctor asks first.`,
		Example: `  pgratelimit doctor
  pgratelimit doctor --fix
  pgratelimit doctor --json | jq '.[] | select(.level != "ok")'`,
		Args: cobra.NoArgs,
		RunE: a.OnDatabase(func(ctx context.Context, db cli.DB, _ []string) error {
			var mended []string
			if fix {
				var err error
				if mended, err = mend(ctx, db, yes); err != nil {
					return err
				}
			}
			findings, err := examineAll(ctx, db)
			if err != nil {
				return err
			}
			if len(mended) > 0 {
				findings = slices.Insert(findings, 0, cli.OK("repaired: %s", strings.Join(mended, "; ")).Of("fixed"))
			}
			levels := []cli.Level{cli.Fine, cli.Warning, cli.Problem} // the most important findings come last
			slices.SortStableFunc(findings, func(a, b cli.Finding) int {
				return slices.Index(levels, a.Level) - slices.Index(levels, b.Level)
			})
			colored := cli.IsTerminal(a.Stdout) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
			if err := a.Print(findings, func(w io.Writer) { printFindings(w, findings, colored) }); err != nil {
				return err
			}
			if slices.ContainsFunc(findings, func(f cli.Finding) bool { return f.Level == cli.Problem }) {
				return cli.ErrProblems
			}
			return nil
		}),
	}
	cmd.Flags().BoolVar(&fix, "fix", false, "first repair what is missing or changed")
	cli.AddYes(cmd, &yes)
	return a.Finish(cmd)
}

// printFindings prints the findings and a line of totals.
func printFindings(w io.Writer, findings []cli.Finding, colored bool) {
	var table strings.Builder
	count := map[cli.Level]int{}
	for _, finding := range findings {
		count[finding.Level]++
		fmt.Fprintf(&table, "%s\t%s\t%s\n", finding.Level, finding.Check, finding.Found)
		if finding.Do != "" {
			fmt.Fprintf(&table, "\t\t→ %s\n", finding.Do)
		}
	}
	red := false
	for line := range strings.Lines(cli.Layout(table.String(), 0)) { // before the color codes, which have no width
		if !strings.HasPrefix(line, " ") {
			red = strings.HasPrefix(line, string(cli.Problem))
		}
		if red && colored {
			line = "\x1b[31m" + strings.TrimSuffix(line, "\n") + "\x1b[0m\n"
		}
		fmt.Fprint(w, line)
	}
	fmt.Fprintf(w, "%s, %s\n", cli.Count(count[cli.Problem], "problem"), cli.Count(count[cli.Warning], "warning"))
}

// examine runs all checks that make sense for this database.
func examine(ctx context.Context, db cli.DB) ([]cli.Finding, error) {
	e := &Examination{DB: db}
	locks, closed, err := e.checkLocks(ctx)
	if err != nil || closed {
		return []cli.Finding{locks}, err
	}
	if err := e.ReadServer(ctx); err != nil {
		return nil, err
	}
	s := &e.Server
	findings, err := run(ctx, []check{
		{"server", true, e.CheckServer},
		{"connection", true, e.checkConnection},
		{"standby", true, e.checkStandby},
		{"statistics", !s.Standby, e.checkStatistics}, // a standby depends on autovacuum of its primary
		{"long transactions", !s.Standby, e.checkHorizon},
		{"transaction ids", !s.Standby, e.checkAges},
	})
	if err != nil {
		return nil, err
	}
	owned, err := run(ctx, []check{ // the tables' owner must fix these problems
		{"migrations", true, e.CheckMigrations},
		{"objects", s.Tables > 0 && s.Usable, e.checkObjects},
		{"rights", s.hasTables(), e.checkRights},
		{"schema", s.hasTables(), e.checkStrangers},
		{"additions", s.hasTables(), e.checkAdditions},
		{"jit", s.hasTables(), e.checkJIT},
		{"policies", s.hasTables() && s.Policies != nil, e.checkPolicies},
	})
	if err == nil && s.hasTables() {
		var tables []cli.Finding
		tables, err = e.checkTables(ctx)
		owned = append(owned, tables...)
	}
	for i := range owned {
		e.address(&owned[i])
	}
	return slices.Concat([]cli.Finding{locks}, findings, owned), err
}

// check is one of doctor's checks.
type check struct {
	name  string
	needs bool // whether the check makes sense for this database
	look  func(context.Context) (cli.Finding, error)
}

// run returns the findings of all checks that make sense.
func run(ctx context.Context, checks []check) (findings []cli.Finding, err error) {
	for _, check := range checks {
		if !check.needs {
			continue
		}
		finding, err := check.look(ctx)
		if err := could(err, &finding); err != nil {
			return nil, err
		}
		findings = append(findings, finding.Of(check.name))
	}
	return findings, nil
}

// address makes a finding's advice say which role must follow the advice, and in which database.
func (e *Examination) address(f *cli.Finding) {
	var by []string
	if e.Server.Standby {
		by = append(by, "on the primary")
	}
	if owner := e.Server.OwnerSQL; owner != "" && owner != e.Server.Role {
		by = append(by, "as "+cli.Printable(owner))
	}
	if f.Do != "" && len(by) > 0 && !f.Anybody {
		f.Do = strings.Join(by, ", ") + ": " + f.Do
	}
	f.Do = e.AsOwner(f.Do)
}

// AsOwner changes migration commands in a text to run as the tables' owner, if this role may act as the owner.
func (e *Examination) AsOwner(text string) string {
	if owner := e.Server.OwnerSQL; owner != "" && owner != e.Server.Role && !strings.Contains(owner, `"`) {
		return strings.ReplaceAll(text, "`pgratelimit migrate", "`PGOPTIONS='-c role="+owner+"' pgratelimit migrate")
	}
	return text
}

// could puts a check's database error into the finding f, because the other checks may succeed.
func could(err error, f *cli.Finding) error {
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		do := "mend what the other checks find, and run this again"
		if pgErr.Code == "42501" {
			do = "run this as a role that may look, such as a member of rate_limit_reader in deploy/roles.sql"
		}
		*f = cli.Warning.Finding(do, "could not be looked at: %s (SQLSTATE %s)", pgErr.Message, pgErr.Code).ForAnybody()
		return nil
	}
	return err
}
