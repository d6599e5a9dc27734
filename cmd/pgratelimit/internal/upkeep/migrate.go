// Package upkeep has the commands that an operator runs regularly: migrate and sweep.
package upkeep

import (
	"context"
	_ "embed"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit/internal/catalog"
	"github.com/pgratelimit/ratelimit/internal/shards"
	"github.com/pgratelimit/ratelimit/migrations"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/doctor"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/shard"
)

//go:embed sql/owner.sql
var ownerSQL string

func MigrateCommand(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "migrate",
		Short: "Make the tables and functions, or remove them",
		Long: `Makes the tables and functions of the limiters in the schema of --schema, which must exist. Without
--schema, the command uses the first schema of search_path. Connect to Postgres itself, and not to a
pooler.`,
		Args: cli.KnownCommand,
		RunE: cli.MissingCommand,
	}
	cmd.AddCommand(migrateUpCommand(a), migrateDownCommand(a), migrateStatusCommand(a), migratePrintCommand(a))
	for _, sub := range cmd.Commands() {
		a.AddJSON(sub)
	}
	return cmd
}

func migrateUpCommand(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:   "up",
		Short: "Apply all migrations that the database does not have",
		Example: `  pgratelimit migrate up
  pgratelimit migrate up --schema limits`,
		Args: cobra.NoArgs,
		RunE: cli.Action(func(ctx context.Context, _ []string) error {
			return migrate(ctx, a, func(db cli.DB) error { return migrateUp(ctx, db) })
		}),
	}
}

// migrateUp applies all migrations. migrateUp returns an error if no migration is pending but an object is missing.
// migrateUp prints a warning if the objects do not belong to the schema's owner, and this role may act as the owner.
func migrateUp(ctx context.Context, db cli.DB) error {
	before, err := migrations.Status(ctx, db.Pool)
	first := err == nil && !slices.ContainsFunc(before, func(m migrations.Migration) bool { return m.Applied })
	pending := err != nil || slices.ContainsFunc(before, func(m migrations.Migration) bool { return !m.Applied })
	if err := migrations.Up(ctx, db.Pool); err != nil {
		return err
	}
	if !pending {
		return requireAll(ctx, db)
	}
	if !first {
		return nil
	}
	type owners struct{ Me, Schema, Owner string }
	var found []owners
	// As this role, migrations change rows only in the version table.
	err = db.Transaction(ctx, pgx.ReadOnly, cli.AccessShare, true, func(tx cli.Tx) (err error) {
		found, err = cli.Rows[owners](ctx, tx, ownerSQL)
		return err
	})
	for _, f := range found {
		e := doctor.Examination{DB: db, Server: doctor.Server{OwnerSQL: f.Owner}}
		fmt.Fprintln(db.Stderr, cli.Printable(fmt.Sprintf(
			"warning: the new tables and functions belong to %s, and the functions run with the rights of %s. "+
				"Schema %s belongs to %s. To give everything to %s, run %s, "+
				"`DROP TABLE %s.rate_limit_goose_version`, then %s. That loses all counts, policies and bans made "+
				"meanwhile", f.Me, f.Me, f.Schema, f.Owner, f.Owner,
			e.Command("migrate down --to 0"), f.Schema, e.AsOwner(e.Command("migrate up")))))
	}
	return err
}

// requireAll returns an error if an object of the migrations is missing.
func requireAll(ctx context.Context, db cli.DB) error {
	e := &doctor.Examination{DB: db}
	if err := e.ReadServer(ctx); err != nil {
		return err
	}
	f, err := e.CheckMigrations(ctx)
	if err != nil {
		return err
	}
	if e.Server.Tables > 0 && f.Level == cli.Fine {
		made, _ := catalog.Made(e.Applied) // made is empty if a newer release has this version
		var missing []string
		for _, d := range e.Found.Differences(made, e.Server.Owner) {
			if doctor.InPlace(d, made) && (d.Aspect == "" || e.Found[d.Object].Aspects[d.Aspect] == "") {
				missing = append(missing, d.Text)
			}
		}
		if len(missing) == 0 {
			return nil
		}
		f = cli.Problem.Finding(
			e.Command("doctor --fix")+" makes it anew, and `pgratelimit doctor` says what that loses",
			"%s", strings.Join(missing, "; "))
	}
	if f.Level == cli.Problem {
		return fmt.Errorf("nothing is pending, but %s: %s", f.Found, f.Do)
	}
	return nil
}

func migrateDownCommand(a *cli.App) *cobra.Command {
	var to int64
	var yes bool
	cmd := &cobra.Command{
		Use:   "down",
		Short: "Roll back the migration that was applied last",
		Long: `Rolls back the last migration, or all migrations above a version. This removes what the migrations made,
and makes functions that they replaced again as they were. The first migration made the tables, so
rolling it back loses all counts, policies and history. While
shards are being divided, the command refuses to change the shards and the proxy. 'pgratelimit shard
grow' finishes the division, and 'pgratelimit shard grow --undo' takes it back.`,
		Example: `  pgratelimit migrate down
  pgratelimit migrate down --to 0 --yes`,
		Args: cobra.NoArgs,
	}
	cmd.RunE = cli.Action(func(ctx context.Context, _ []string) error {
		down := func(db cli.DB) error { return migrations.Down(ctx, db.Pool) }
		question := "Roll back the last migration? What it has made goes with it."
		if cmd.Flags().Changed("to") {
			question = fmt.Sprintf("Roll back all migrations above version %d? "+
				"What they have made goes with them, and calls may fail without it. The counts and policies stay.", to)
			if to < 1 {
				question = "Roll back all migrations? The tables go too, and with them all counts and policies."
			}
			down = func(db cli.DB) error { return migrations.DownTo(ctx, db.Pool, to) }
		}
		if err := a.Confirm(ctx, question, yes); err != nil {
			return err
		}
		return migrate(ctx, a, func(db cli.DB) error {
			if err := refuseDivided(ctx, db); err != nil {
				return err
			}
			return down(db)
		})
	})
	cmd.Flags().Int64Var(&to, "to", 0, "roll back all migrations above this `version`; 0: all")
	cli.AddYes(cmd, &yes)
	return cmd
}

// refuseDivided returns an error if the database takes part in an unfinished growth, because a rollback of migrations
// could drop the only counts of some keys.
func refuseDivided(ctx context.Context, db cli.DB) error {
	var growth *shards.Growth
	state := shard.NewState(db.App)
	if err := db.Transaction(ctx, pgx.ReadOnly, cli.AccessShare, true, func(tx cli.Tx) (err error) {
		if growth, err = shards.ReadGrowth(ctx, tx); err == nil {
			err = state.Read(ctx, tx)
		}
		return err
	}); err != nil {
		return ctx.Err() // if the database cannot be read, allow the rollback
	}
	if growth == nil && !state.Divides() {
		return nil
	}
	return fmt.Errorf("nothing was changed: shards are being divided, and this database is one of theirs, or their "+
		"proxy, so counts could be lost, and calls fail. For the proxy, %s goes on with that, and if no key has moved "+
		"yet, %s takes it back; `pgratelimit shard list` tells how far it is. If there is no proxy any more, and "+
		"nobody needs the counts, execute what `pgratelimit migrate print --down` prints",
		db.Command("shard grow"), db.Command("shard grow --undo"))
}

func migrateStatusCommand(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "List the migrations, and when each was applied",
		Args:  cobra.NoArgs,
		RunE: cli.Action(func(ctx context.Context, _ []string) error {
			return migrate(ctx, a, func(cli.DB) error { return nil })
		}),
	}
}

// MigrationStatus is a migration in the output.
type MigrationStatus struct {
	Version   int64      `json:"version"`
	Name      string     `json:"name"`
	Applied   bool       `json:"applied"`
	AppliedAt *time.Time `json:"applied_at"` // null if the migration is not applied, or if the time is not known
}

// migrate changes the database, and then prints the applied migrations.
func migrate(ctx context.Context, a *cli.App, change func(db cli.DB) error) error {
	pool, err := a.Open(ctx, a.InSchema)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := change(cli.DB{App: a, Pool: pool}); err != nil {
		return err
	}
	all, err := migrations.Status(ctx, pool)
	if err != nil {
		return err
	}
	list := make([]MigrationStatus, len(all))
	for i, migration := range all {
		list[i] = MigrationStatus{Version: migration.Version, Name: migration.Name, Applied: migration.Applied}
		if !migration.AppliedAt.IsZero() {
			list[i].AppliedAt = &migration.AppliedAt
		}
	}
	return a.Print(list, func(w io.Writer) {
		fmt.Fprintf(w, "VERSION\tNAME\tAPPLIED\n")
		for _, migration := range list {
			applied := "no"
			switch {
			case migration.AppliedAt != nil:
				applied = cli.Instant(*migration.AppliedAt)
			case migration.Applied:
				applied = "yes" // another tool applied it, or this role may not see the time
			}
			name := migration.Name
			if name == "" {
				name = "(of a newer version of this command)"
			}
			fmt.Fprintf(w, "%d\t%s\t%s\n", migration.Version, name, applied)
		}
	})
}

func migratePrintCommand(a *cli.App) *cobra.Command {
	var down bool
	cmd := &cobra.Command{
		Use:   "print [VERSION...]",
		Short: "Print the SQL, for another migration tool",
		Example: `  pgratelimit migrate print > migrations/20261121_rate_limit.up.sql
  pgratelimit migrate print --down > migrations/20261121_rate_limit.down.sql
  pgratelimit migrate print 2`,
		RunE: cli.Action(func(_ context.Context, args []string) error {
			all, err := choose(args)
			if err != nil {
				return err
			}
			if down {
				slices.Reverse(all)
			}
			for i := range all {
				all[i].SQL = all[i].Up
				if down {
					all[i].SQL = all[i].Down
				}
			}
			return a.Print(all, func(w io.Writer) {
				for _, migration := range all {
					fmt.Fprintf(w, "-- %s\n\n%s\n", migration.File, migration.SQL)
				}
			})
		}),
	}
	cmd.Flags().BoolVar(&down, "down", false, "print what rolls the migrations back, the last one first")
	return cmd
}

// choose returns the migrations that have the given versions, or all migrations if versions is empty.
func choose(versions []string) ([]cli.Migration, error) {
	all, wanted := cli.ReadMigrations(), map[int64]bool{}
	for _, text := range versions {
		version, err := strconv.ParseInt(text, 10, 64)
		if err != nil || !slices.ContainsFunc(all, func(m cli.Migration) bool { return m.Version == version }) {
			return nil, cli.Usage(fmt.Errorf("there is no migration %q", text))
		}
		wanted[version] = true
	}
	return slices.DeleteFunc(all, func(m cli.Migration) bool { return len(wanted) > 0 && !wanted[m.Version] }), nil
}
