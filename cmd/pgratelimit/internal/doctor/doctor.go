// Package doctor examines a database, or a proxy and its shards, and makes anew what is missing.
package doctor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

func Command(a *cli.App) *cobra.Command {
	var fix, yes bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Examine the database, and say what to do",
		Long: `Examines the database, and says what to do about whatever it finds. It only reads: catalogs and
statistics, and of each table a random sample of at most 100 MB. The exit code is 1 if there is a
problem.

With --fix it first makes anew what the migrations have made and is missing or changed: functions,
types, tables, primary keys, indexes and triggers. It does so in one transaction, in which calls wait,
and keeps counts, policies and rights. Only a table that lacks a column without which its rows mean
nothing is made anew. It loses its rows and what others have added to it; then it asks.`,
		Example: `  pgratelimit doctor
  pgratelimit doctor --fix
  pgratelimit doctor --json | jq '.[] | select(.level != "ok")'`,
		Args: cobra.NoArgs,
		RunE: cli.Action(func(ctx context.Context, _ []string) error {
			pool, err := a.Open(ctx)
			if err != nil {
				return err
			}
			defer pool.Close()
			var mended []string
			if fix {
				if mended, err = mend(ctx, a, pool, yes); err != nil {
					return err
				}
			}
			findings, err := examineAll(ctx, a, pool)
			if err != nil {
				return err
			}
			if len(mended) > 0 {
				fixed := cli.OK("what was wrong is mended: %s", strings.Join(mended, "; "))
				fixed.Check = "fixed"
				findings = append([]cli.Finding{fixed}, findings...)
			}
			levels := []cli.Level{cli.Fine, cli.Warning, cli.Problem} // so that what matters most stands last
			slices.SortStableFunc(findings, func(a, b cli.Finding) int {
				return slices.Index(levels, a.Level) - slices.Index(levels, b.Level)
			})
			if err := a.Print(findings, func(w io.Writer) { printFindings(w, findings, colored(a)) }); err != nil {
				return err
			}
			if slices.ContainsFunc(findings, func(f cli.Finding) bool { return f.Level == cli.Problem }) {
				return cli.ErrProblems
			}
			return nil
		}),
	}
	cmd.Flags().BoolVar(&fix, "fix", false, "first make anew, in place, what is missing or changed")
	cli.AddYes(cmd, &yes)
	return a.Finish(cmd)
}

// printFindings ends with a line that counts. Problems are red if that is wanted.
func printFindings(w io.Writer, findings []cli.Finding, colored bool) {
	var text bytes.Buffer
	count := map[cli.Level]int{}
	table := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0) // it takes colors for letters, so they come later
	for _, finding := range findings {
		count[finding.Level]++
		fmt.Fprintf(table, "%s\t%s\t%s\n", finding.Level, finding.Check, finding.Found)
		if finding.Do != "" {
			fmt.Fprintf(table, "\t\t→ %s\n", finding.Do)
		}
	}
	_ = table.Flush() // a buffer takes all
	red := false
	for line := range strings.Lines(text.String()) {
		if !strings.HasPrefix(line, " ") {
			red = strings.HasPrefix(line, string(cli.Problem))
		}
		if red && colored {
			line = "\x1b[31m" + strings.TrimSuffix(line, "\n") + "\x1b[0m\n"
		}
		fmt.Fprint(w, line)
	}
	fmt.Fprintf(w, "%s, %s\n", number(count[cli.Problem], "problem"), number(count[cli.Warning], "warning"))
}

func number(n int, of string) string {
	if n != 1 {
		of += "s"
	}
	return fmt.Sprintf("%d %s", n, of)
}

// colored tells whether the output is for a person at a terminal who has not said no to colors.
func colored(a *cli.App) bool {
	return cli.IsTerminal(a.Stdout) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}

// examine runs all checks that make sense for this database.
func examine(ctx context.Context, a *cli.App, pool *pgxpool.Pool) ([]cli.Finding, error) {
	e := &Examination{App: a, Pool: pool}
	locks, closed, err := e.checkLocks(ctx)
	if err != nil || closed {
		return []cli.Finding{locks}, err
	}
	if err := e.ReadServer(ctx); err != nil {
		return nil, err
	}
	checks := []check{
		{"server", e.CheckServer},
		{"connection", e.checkConnection},
		{"standby", e.checkStandby},
	}
	if !e.Server.standby { // a standby waits for its primary's autovacuum
		checks = append(checks, check{"statistics", e.checkStatistics}, check{"long transactions", e.checkHorizon},
			check{"transaction ids", e.checkAges})
	}
	general := len(checks) // what follows is about what the owner of the tables owns
	checks = append(checks, check{"migrations", e.CheckMigrations})
	if e.Server.Tables > 0 && e.Server.usable {
		checks = append(checks, check{"objects", e.checkObjects})
	}
	if e.Server.hasTables() {
		checks = append(checks,
			check{"rights", e.checkRights}, check{"schema", e.checkStrangers}, check{"additions", e.checkAdditions},
			check{"jit", e.checkJIT})
		if e.Server.policies != nil {
			checks = append(checks, check{"policies", e.checkPolicies})
		}
	}
	findings := []cli.Finding{locks}
	for i, check := range checks {
		finding, err := check.look(ctx)
		if err := could(err, &finding); err != nil {
			return nil, err
		}
		finding.Check = check.name
		if i >= general {
			e.address(&finding)
		}
		findings = append(findings, finding)
	}
	if e.Server.hasTables() {
		of, err := e.checkTables(ctx)
		if err != nil {
			return nil, err
		}
		for i := range of {
			e.address(&of[i])
		}
		findings = append(findings, of...)
	}
	return findings, nil
}

// address says who can do what a finding advises, and where.
func (e *Examination) address(f *cli.Finding) {
	var by []string
	if e.Server.standby {
		by = append(by, "on the primary")
	}
	if owner := e.Server.OwnerSQL; owner != "" && owner != e.Server.role {
		by = append(by, "as "+cli.Printable(owner))
	}
	if f.Do != "" && len(by) > 0 && !f.Anybody {
		f.Do = strings.Join(by, ", ") + ": " + f.Do
	}
	f.Do = e.AsOwner(f.Do)
}

// AsOwner has the lines that migrate run as the owner of the tables, for whoever may take that role.
func (e *Examination) AsOwner(text string) string {
	if owner := e.Server.OwnerSQL; owner != "" && owner != e.Server.role && !strings.Contains(owner, `"`) {
		return strings.ReplaceAll(text, "`pgratelimit migrate", "`PGOPTIONS='-c role="+owner+"' pgratelimit migrate")
	}
	return text
}

// check is one of the doctor's checks.
type check struct {
	name string
	look func(context.Context) (cli.Finding, error)
}

// could turns an error that the database gave to this check alone into a finding.
func could(err error, f *cli.Finding) error {
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		do := "mend what else is found, and run this again"
		if pgErr.Code == "42501" {
			do = "run this as a role that may look, such as a member of rate_limit_reader in deploy/roles.sql"
		}
		*f = cli.Warning.Finding(do, "could not be looked at: %s (SQLSTATE %s)", pgErr.Message, pgErr.Code)
		f.Anybody = true
		return nil
	}
	return err
}
