package main

import (
	"context"
	_ "embed"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pressly/goose/v3"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit/internal/catalog"
	"github.com/pgratelimit/ratelimit/internal/shards"
	"github.com/pgratelimit/ratelimit/migrations"
)

//go:embed sql/owner.sql
var ownerSQL string

func (a *app) migrateCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "migrate",
		Short: "Make the tables and functions, or remove them",
		Long: `Makes the tables and functions of the limiters in the schema of --schema, which has to exist, or in
the one that search_path names first. Connect to Postgres itself, not through a pooler.`,
		Args: knownCommand,
		RunE: missingCommand,
	}
	cmd.AddCommand(a.migrateUpCommand(), a.migrateDownCommand(), a.migrateStatusCommand(), a.migratePrintCommand())
	return cmd
}

func (a *app) migrateUpCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Apply all migrations that the database does not have",
		Example: `  pgratelimit migrate up
  pgratelimit migrate up --schema limits`,
		Args: cobra.NoArgs,
		RunE: action(func(ctx context.Context, _ []string) error { return a.migrate(ctx, a.migrateUp) }),
	}
	a.addJSON(cmd)
	return cmd
}

// migrateUp applies all migrations. If there was none to apply, but something that they have made is missing, it
// returns an error. If it made everything as another role than the owner of the schema, although it
// could have taken that role, it says so.
func (a *app) migrateUp(ctx context.Context, pool *pgxpool.Pool) error {
	before, err := migrations.Status(ctx, pool)
	first := err == nil && !slices.ContainsFunc(before, func(m migrations.Migration) bool { return m.Applied })
	pending := err != nil || slices.ContainsFunc(before, func(m migrations.Migration) bool { return !m.Applied })
	if err := migrations.Up(ctx, pool); err != nil {
		return err
	}
	if !pending {
		return a.requireAll(ctx, pool)
	}
	if !first {
		return nil
	}
	type owners struct{ Me, Schema, Owner string }
	var found []owners
	// Migrations change rows as this role, if only those of the version.
	err = a.transaction(ctx, pool, pgx.ReadOnly, accessShare, true, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, ownerSQL)
		if err == nil {
			found, err = pgx.CollectRows(rows, pgx.RowToStructByPos[owners])
		}
		return err
	})
	for _, f := range found {
		e := examination{app: a, server: server{ownerSQL: f.Owner}}
		fmt.Fprintln(a.stderr, printable(fmt.Sprintf(
			"warning: what was made belongs to %s, and its functions run with the rights of %s. "+
				"Schema %s belongs to %s. To have all of it belong to %s, run %s, "+
				"`DROP TABLE %s.rate_limit_goose_version`, then %s. That loses all counts, policies and bans that "+
				"were made meanwhile", f.Me, f.Me, f.Schema, f.Owner, f.Owner,
			e.command("migrate down --to 0"), f.Schema, e.asOwner(e.command("migrate up")))))
	}
	return err
}

// requireAll returns an error if something is missing that the migrations have made.
func (a *app) requireAll(ctx context.Context, pool *pgxpool.Pool) error {
	e := &examination{app: a, pool: pool}
	if err := e.readServer(ctx); err != nil {
		return err
	}
	f, err := e.checkMigrations(ctx)
	if err != nil {
		return err
	}
	if e.server.tables > 0 && f.Level == fine {
		made, _ := catalog.Made(e.applied) // nothing, if it is of a newer release
		var missing []string
		for _, d := range e.found.Differences(made, e.server.owner) {
			if inPlace(d, made) && (d.Aspect == "" || e.found[d.Object].Aspects[d.Aspect] == "") {
				missing = append(missing, d.Text)
			}
		}
		if len(missing) == 0 {
			return nil
		}
		f = problem.finding(e.command("doctor --fix")+" makes it anew, and `pgratelimit doctor` says what that loses",
			"%s", strings.Join(missing, "; "))
	}
	if f.Level == problem {
		return fmt.Errorf("nothing is pending, but %s: %s", f.Found, f.Do)
	}
	return nil
}

func (a *app) migrateDownCommand() *cobra.Command {
	var to int64
	var yes bool
	cmd := &cobra.Command{
		Use:   "down",
		Short: "Roll back the migration that was applied last",
		Long: `Rolls back the migration that was applied last, or all those above a version. What a migration has
made goes with it. To roll back the first one drops the tables, and so every count, all policies and
their history. While shards are being divided, their databases and the proxy refuse it:
'pgratelimit shard grow' goes on with that, or --undo takes it back.`,
		Example: `  pgratelimit migrate down
  pgratelimit migrate down --to 0 --yes`,
		Args: cobra.NoArgs,
	}
	cmd.RunE = action(func(ctx context.Context, _ []string) error {
		down := func(ctx context.Context, pool *pgxpool.Pool) error { return migrations.Down(ctx, pool) }
		question := "Roll back the last migration? What it has made goes with it."
		if cmd.Flags().Changed("to") {
			question = fmt.Sprintf("Roll back all migrations above version %d? "+
				"What they have made goes with them, and calls fail without it. The counts and policies stay.", to)
			if to < 1 {
				question = "Roll back all migrations? The tables go too, and with them all counts and policies."
			}
			down = func(ctx context.Context, pool *pgxpool.Pool) error { return migrations.DownTo(ctx, pool, to) }
		}
		if err := a.confirm(ctx, question, yes); err != nil {
			return err
		}
		return a.migrate(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
			if err := a.refuseDivided(ctx, pool); err != nil {
				return err
			}
			return down(ctx, pool)
		})
	})
	cmd.Flags().Int64Var(&to, "to", 0, "roll back all migrations above this `version`; 0: all")
	addYes(cmd, &yes)
	a.addJSON(cmd)
	return cmd
}

// refuseDivided returns an error if the database is one of those of a growth that is not at its end. What a migration
// has made may then be the only place of some counts.
func (a *app) refuseDivided(ctx context.Context, pool *pgxpool.Pool) error {
	var growth *shards.Growth
	state := a.newState()
	if err := a.transaction(ctx, pool, pgx.ReadOnly, accessShare, true, func(tx pgx.Tx) (err error) {
		if growth, err = shards.ReadGrowth(ctx, tx); err == nil {
			err = state.read(ctx, tx)
		}
		return err
	}); err != nil {
		return ctx.Err() // somebody may roll back because of what cannot be looked at
	}
	if growth == nil && !state.divides() {
		return nil
	}
	return fmt.Errorf("nothing was changed: shards are being divided, and this database is one of theirs, or their "+
		"proxy, so counts could be lost, and calls fail. For the proxy, %s goes on with that, and if no key has moved "+
		"yet, %s takes it back; `pgratelimit shard list` tells how far it is. If there is no proxy any more, and "+
		"nobody needs the counts, execute what `pgratelimit migrate print --down` prints",
		a.command("shard grow"), a.command("shard grow --undo"))
}

func (a *app) migrateStatusCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "List the migrations, and when each was applied",
		Args:  cobra.NoArgs,
		RunE: action(func(ctx context.Context, _ []string) error {
			return a.migrate(ctx, func(context.Context, *pgxpool.Pool) error { return nil })
		}),
	}
	a.addJSON(cmd)
	return cmd
}

// migrationStatus is a migration in the output.
type migrationStatus struct {
	Version   int64      `json:"version"`
	Name      string     `json:"name"`
	Applied   bool       `json:"applied"`
	AppliedAt *time.Time `json:"applied_at"` // null if it is not applied, or if nobody can tell when
}

// migrate changes the database, and prints what is applied afterwards.
func (a *app) migrate(ctx context.Context, change func(context.Context, *pgxpool.Pool) error) error {
	pool, err := a.open(ctx, a.inSchema)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := change(ctx, pool); err != nil {
		return err
	}
	all, err := migrations.Status(ctx, pool)
	if err != nil {
		return err
	}
	list := make([]migrationStatus, len(all))
	for i, migration := range all {
		list[i] = migrationStatus{Version: migration.Version, Name: migration.Name, Applied: migration.Applied}
		if !migration.AppliedAt.IsZero() {
			list[i].AppliedAt = &migration.AppliedAt
		}
	}
	return a.print(list, func(w io.Writer) {
		fmt.Fprintf(w, "VERSION\tNAME\tAPPLIED\n")
		for _, migration := range list {
			applied := "no"
			switch {
			case migration.AppliedAt != nil:
				applied = instant(*migration.AppliedAt)
			case migration.Applied:
				applied = "yes" // another tool has, or this role may not see when
			}
			name := migration.Name
			if name == "" {
				name = "(of a newer version of this command)"
			}
			fmt.Fprintf(w, "%d\t%s\t%s\n", migration.Version, name, applied)
		}
	})
}

func (a *app) migratePrintCommand() *cobra.Command {
	var down bool
	cmd := &cobra.Command{
		Use:   "print [VERSION...]",
		Short: "Print the SQL, for another migration tool",
		Example: `  pgratelimit migrate print > migrations/20261121_rate_limit.up.sql
  pgratelimit migrate print --down > migrations/20261121_rate_limit.down.sql
  pgratelimit migrate print 2`,
		RunE: action(func(_ context.Context, args []string) error {
			all, err := readMigrations()
			if err != nil {
				return err
			}
			if all, err = choose(all, args); err != nil {
				return err
			}
			if down {
				slices.Reverse(all)
			}
			for i := range all {
				all[i].SQL = all[i].up
				if down {
					all[i].SQL = all[i].down
				}
			}
			return a.print(all, func(w io.Writer) {
				for _, migration := range all {
					fmt.Fprintf(w, "-- %s\n\n%s\n", migration.file, migration.SQL)
				}
			})
		}),
	}
	cmd.Flags().BoolVar(&down, "down", false, "print what rolls the migrations back, the last one first")
	a.addJSON(cmd)
	return cmd
}

// migration is a file of package migrations.
type migration struct {
	file     string
	Version  int64  `json:"version"`
	SQL      string `json:"sql"`
	up, down string
}

// readMigrations returns all migrations by version.
func readMigrations() ([]migration, error) {
	files, err := fs.Glob(migrations.FS, "*.sql")
	if err != nil {
		return nil, err
	}
	all := make([]migration, len(files))
	for i, file := range files {
		content, err := fs.ReadFile(migrations.FS, file)
		if err != nil {
			return nil, err
		}
		version, err := goose.NumericComponent(file)
		if err != nil {
			return nil, err
		}
		up, down, _ := strings.Cut(string(content), "-- +goose Down\n")
		_, up, _ = strings.Cut(up, "-- +goose Up\n")
		all[i] = migration{file: file, Version: version, up: withoutGoose(up), down: withoutGoose(down)}
	}
	return all, nil
}

// withoutGoose drops the lines that only goose understands.
func withoutGoose(sql string) string {
	var kept strings.Builder
	for line := range strings.Lines(sql) {
		if !strings.HasPrefix(line, "-- +goose ") {
			kept.WriteString(line)
		}
	}
	return strings.TrimSpace(kept.String()) + "\n"
}

// choose returns the migrations of the given versions, or all if none are given.
func choose(all []migration, versions []string) ([]migration, error) {
	if len(versions) == 0 {
		return all, nil
	}
	wanted := map[int64]bool{}
	for _, text := range versions {
		version, err := strconv.ParseInt(text, 10, 64)
		if err != nil || !slices.ContainsFunc(all, func(m migration) bool { return m.Version == version }) {
			return nil, usageError{fmt.Errorf("there is no migration %q", text)}
		}
		wanted[version] = true
	}
	return slices.DeleteFunc(all, func(m migration) bool { return !wanted[m.Version] }), nil
}
