// Package migrations creates and updates the tables and functions that this version of the module needs. Its files are
// goose migrations.
//
//	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
//	…
//	err = migrations.Up(ctx, pool)
//
// Everything is created in the first schema of the pool's search_path. That schema must exist, and the user needs
// CREATE on it. To use another schema, set search_path in the connection string:
// "postgres://localhost/app?search_path=limits".
//
// # With the goose command
//
// The plain goose command can run the same migrations, from a copy of this folder or from FS:
//
//	goose -dir migrations -table rate_limit_goose_version postgres "$DATABASE_URL" up
//
// With -table rate_limit_goose_version, you can use the command and this package on the same database. Without -table,
// goose uses the table goose_db_version. That works only if nothing else in the database uses goose_db_version: an
// application's migrations have the same numbers, so goose would believe that ours are applied. The functions of this
// package never read goose_db_version.
//
// # After another tool
//
// Another tool may have created the tables and functions, for example with the output of "pgratelimit migrate print",
// or goose with another table. If they are exactly what our migrations make, Up adopts them: it writes the version
// table, and continues from there. Otherwise Up changes nothing, and its error lists the differences. Grants, comments
// and autovacuum settings may differ. Down rolls back what another tool has applied, even if objects are missing or
// changed. The role must own all of these objects.
//
// # If others may create in the schema
//
// Use the functions of this package, and not goose. goose writes to any table with the name of its version table, and
// so runs the triggers of that table.
//
// # With a connection pooler
//
// Migrate on a direct connection if you can. With a pooler in transaction mode, set DefaultQueryExecMode to
// QueryExecModeExec. If you need a search_path, set it for the role or the database.
//
// # Waiting for a lock
//
// A migration that has waited for a lock for a second logs to slog.Default() who holds the lock, and since when.
package migrations

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pressly/goose/v3"

	"github.com/pgratelimit/ratelimit/internal/catalog"
	"github.com/pgratelimit/ratelimit/internal/lockholders"
	"github.com/pgratelimit/ratelimit/internal/pg"
)

// FS has the migrations in goose's format, as files with names like 00001_verb_object.sql.
//
//go:embed *.sql
var FS embed.FS

// DB is a pool: a *pgxpool.Pool, or a *sql.DB in sqldb.Pool.
type DB interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// Migration is one migration, as Status reports it.
type Migration struct {
	// Version is the number at the beginning of the file's name.
	Version int64

	// Name is the rest of the file's name, for example "create_tables". It is empty if a newer version of this module
	// applied the migration.
	Name string

	// Applied tells whether the database has the migration.
	Applied bool

	// AppliedAt is when the migration was applied or adopted, by the database's clock. It is the zero time if the
	// migration is not applied, if another tool applied it, or if this role may not read the version table.
	AppliedAt time.Time
}

// Up applies all missing migrations, each in a separate transaction. If no migration is missing, Up writes nothing and
// waits for no lock. It finds that out with small queries that any role may run, so an application may call Up with its
// own role at every start. If this role may not apply a missing migration, the error names the migration and a role
// that may.
//
// If another tool has applied migrations, and this role owns their objects, Up adopts them first. If it cannot, its
// error says what differs.
//
// Up returns an error if a stranger could have made the version table or the function rate_limit_version. A role with
// this role's rights is not a stranger. The owners of the schema and of the database are not strangers for the
// function. The owner of the schema is not a stranger for the table, unless this role is a superuser.
//
// A proxy for shards has no tables to migrate. On a proxy, Up does nothing if the functions are those of this release,
// and otherwise returns an error. Down and Status always return an error on a proxy. Migrate each shard instead.
//
// Several processes may call Up at once: one of them migrates, and the others wait for an advisory lock until their
// context ends. The waiting processes log who holds the lock. If a migration fails or the context ends, the earlier
// migrations stay applied, and the next call continues after them. Up needs one connection of the pool.
func Up(ctx context.Context, pool DB) error {
	return wrap("up", acquire(ctx, pool, func(conn *pgx.Conn) error {
		all, in, err := status(ctx, conn)
		if in.proxy && in.says() == latest() { // applications may call this at every start
			return nil
		}
		if err != nil {
			return err
		}
		var missing []string
		for _, migration := range all {
			if !migration.Applied {
				missing = append(missing, fmt.Sprintf("%d %s", migration.Version, migration.Name))
			}
		}
		says := in.says()
		switch {
		case len(missing) == 0 && (!in.astray || says > 0 && !in.owned):
			return nil
		case !in.create || in.table && !in.readable || in.astray && says > 0 && !in.owned:
			return fmt.Errorf("not applied: %s; this role may not apply it "+
				"(the user needs CREATE on the schema, and to own what is there): run this as %s",
				cmp.Or(strings.Join(missing, ", "), "rate_limit_version"), in.owner)
		}
		if in.astray || says == 0 {
			if err := in.adopt(ctx, conn, true); err != nil {
				return err
			}
		}
		for {
			next := int64(0)
			err := in.step(ctx, conn, func(tx pgx.Tx, applied []Migration) error {
				for _, migration := range all {
					// Another process may have applied migrations while this one waited.
					if !slices.ContainsFunc(applied, func(m Migration) bool { return m.Version == migration.Version }) {
						next = migration.Version
						return in.run(ctx, tx, next, true)
					}
				}
				return nil
			})
			switch {
			case err != nil && next > 0:
				return fmt.Errorf("migration %d: %w", next, err)
			case err != nil || next == 0:
				return err
			}
		}
	}))
}

func latest() int64 {
	files, _ := fs.Glob(FS, "*.sql") // the pattern is valid
	return int64(len(files))
}

// adopt makes the version table record the version of rate_limit_version. If build is true (for Up), the schema must be
// exactly what the migrations up to this version make. If build is false (for Down), it may be damaged.
func (s schema) adopt(ctx context.Context, conn *pgx.Conn, build bool) error {
	return s.step(ctx, conn, func(tx pgx.Tx, applied []Migration) error {
		now, err := look(ctx, tx)
		switch {
		case err != nil:
			return err
		case now.foreignFunction != "":
			return foreign(now.foreignFunction)
		}
		says := now.says()
		if says > 0 && !now.goneAstray(applied) {
			return nil // another process has adopted while this one waited
		}
		if !build {
			if !now.owned {
				return fmt.Errorf("rate_limit_version belongs to another role: run this as %s", s.owner)
			}
			return s.record(ctx, tx, says)
		}
		found, err := catalog.Read(ctx, tx, s.name)
		if err != nil {
			return err
		}
		made, _ := catalog.Made(says)
		if differences := found.Differences(made, now.me); len(differences) > 0 {
			if says == 0 { // a part is missing, and nothing is superfluous
				says = found.Nearest(now.me)
				made, _ = catalog.Made(says)
				differences = found.Differences(made, now.me)
			}
			texts := make([]string, len(differences))
			for i, difference := range differences {
				texts[i] = difference.Text
			}
			return fmt.Errorf("the version table does not record what is in schema %s, and that is not what the "+
				"migrations up to version %d make: %s. Nothing was changed. Mend it; or migrate as the owner of it "+
				"all; or drop what is ours, and the counts with it, by the SQL of 'pgratelimit migrate print --down'",
				s.name, says, strings.Join(texts, "; "))
		}
		return s.record(ctx, tx, says)
	})
}

// record makes the version table record exactly the migrations up to version.
func (s schema) record(ctx context.Context, tx pgx.Tx, version int64) error {
	_, err := tx.Exec(ctx, fmt.Sprintf(recordSQL, s.quoted(), version), pgx.QueryExecModeSimpleProtocol)
	return err
}

// Down rolls back the last applied migration, as "goose down" does. If no migration is applied, it does nothing.
// DownTo(ctx, pool, 0) rolls back all migrations.
//
// A rollback drops the objects that the migration made, and makes functions that it replaced again as they were. Grants
// on functions stay if their arguments stay. The rollback of the first migration drops the tables with all counts.
// Objects that are already missing cause no error.
func Down(ctx context.Context, pool DB) error { return down(ctx, pool, "down", 0, true) }

// DownTo rolls back all migrations above a version, the last one first. Version 0 means all migrations. A second call
// does nothing.
//
// Like the goose command, DownTo keeps the version table, with only the row of version 0. To remove the table, run DROP
// TABLE rate_limit_goose_version afterwards.
func DownTo(ctx context.Context, pool DB, version int64) error {
	return down(ctx, pool, fmt.Sprintf("down to %d", version), version, false)
}

func down(ctx context.Context, pool DB, operation string, to int64, once bool) error {
	return wrap(operation, acquire(ctx, pool, func(conn *pgx.Conn) error {
		all, in, err := status(ctx, conn)
		switch {
		case err != nil:
			return err
		case to < 0:
			return fmt.Errorf("invalid version: %d", to)
		case !slices.ContainsFunc(all, func(migration Migration) bool { return migration.Applied }):
			return nil
		}
		if _, known := catalog.Made(in.says()); !known && in.recorded < in.says() {
			return fmt.Errorf("version %d: %w", in.says(), goose.ErrVersionNotFound)
		}
		if in.astray && in.says() > 0 {
			if err := in.adopt(ctx, conn, false); err != nil {
				return err
			}
		}
		for more := true; more; {
			if err := in.step(ctx, conn, func(tx pgx.Tx, applied []Migration) error {
				if more = len(applied) > 0 && applied[len(applied)-1].Version > to; !more {
					return nil
				}
				more = !once
				return in.run(ctx, tx, applied[len(applied)-1].Version, false)
			}); err != nil {
				return err
			}
		}
		return nil
	}))
}

// Status returns all migrations, ordered by version. It writes nothing, and waits for no lock of another migration. It
// works without the version table.
func Status(ctx context.Context, pool DB) ([]Migration, error) {
	var all []Migration
	err := acquire(ctx, pool, func(conn *pgx.Conn) (err error) {
		all, _, err = status(ctx, conn)
		return err
	})
	if err != nil {
		return nil, wrap("status", err)
	}
	return all, nil
}

// transaction runs do in a transaction without JIT compilation. With enable_nestloop off, Postgres estimates the
// catalog queries as expensive, and would compile them for seconds. If a statement waits for a lock, lockholders says
// who holds the lock.
//
// The transaction is read committed, regardless of the pool's default, so that each statement sees all earlier commits.
func transaction(ctx context.Context, conn *pgx.Conn, mode pgx.TxAccessMode, do func(tx pgx.Tx) error) error {
	options := pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: mode}
	return pgx.BeginTxFunc(ctx, conn, options, func(tx pgx.Tx) error {
		var pid uint32
		if err := tx.QueryRow(ctx, "SELECT pg_catalog.pg_backend_pid(), pg_catalog.set_config('jit', 'off', true)").
			Scan(&pid, nil); err != nil {
			return err
		}
		defer lockholders.Watch(ctx, conn, pid)()
		return do(tx)
	})
}

// acquire runs do with one of the pool's connections.
func acquire(ctx context.Context, pool DB, do func(*pgx.Conn) error) error {
	if pg.IsNil(pool) {
		return errors.New("the pool is nil")
	}
	return pg.Cause(pg.Use(ctx, pool, do)) // gives errors the same kinds as those of a limiter
}

// wrap adds the operation to an error, and says how to fix the error if the caller can.
func wrap(operation string, err error) error {
	if err == nil {
		return nil
	}

	if _, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		return fmt.Errorf("ratelimit/migrations: %s: cannot connect to Postgres; check the pool's connection string "+
			"(an empty one, as of an unset variable, means a local server): %w", operation, err)
	}
	var hint string
	const (
		insufficientPrivilege = "42501"
		duplicateFunction     = "42723"
		duplicateTable        = "42P07"
		duplicateObject       = "42710"
		ambiguousFunction     = "42725"
		uniqueViolation       = "23505" // in a catalog
	)
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		switch pgErr.Code {
		case insufficientPrivilege:
			hint = " (the user needs CREATE on the schema, and to have made what is rolled back)"
		case uniqueViolation:
			hint = " (somebody else made something of that name meanwhile)"
		case ambiguousFunction:
			hint = " (somebody made another function of that name, which is not ours: drop it)"
		case duplicateTable, duplicateFunction, duplicateObject:
			hint = " (it is not ours: drop it, or take another schema)"
		}
	}
	if errors.Is(err, goose.ErrVersionNotFound) {
		hint = " (it was applied by a newer version of this module: roll it back with that one)"
	}
	return fmt.Errorf("ratelimit/migrations: %s: %w%s", operation, err, hint)
}
