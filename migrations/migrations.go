// Package migrations brings a database to the schema that this version of the module needs, with goose, and back.
//
//	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
//	…
//	err = migrations.Up(ctx, pool)
//
// Everything is made in the schema that search_path names first in the pool's connections. That schema must exist, and
// the user needs CREATE on it. To use a schema of its own, set search_path in the connection string:
// "postgres://localhost/app?search_path=limits".
//
// # With the goose command
//
// The same migrations run under the plain goose command, from a copy of this folder or from FS:
//
//	goose -dir migrations -table rate_limit_goose_version postgres "$DATABASE_URL" up
//
// With that table both ways can be mixed. Without it goose keeps its records in goose_db_version. That works only if
// nothing else in the database uses goose_db_version: an application's own migrations have the same numbers, and goose
// would believe that ours are applied. The functions of this package never look at goose_db_version.
//
// # After another tool
//
// The tables and functions may have come by other means: by what "pgratelimit migrate print" prints, or by goose with
// another table. Up adopts them: if they are exactly what our migrations make, it writes the version table, and goes on
// from there. Else nothing changes, and the error lists what differs. Rights, comments and the settings of autovacuum
// may differ. Down rolls back what another tool has applied, damaged or not. The role has to own it all.
//
// # Who may create in the schema
//
// If others may create in the schema, use the functions of this package. goose writes to whatever table has that name,
// and so runs the triggers on it.
//
// # With a connection pooler
//
// Migrate on a direct connection if you can. Through a pooler in transaction mode, whatever search_path says has to be
// set for the role or the database, and DefaultQueryExecMode has to be QueryExecModeExec.
//
// # Who is in the way
//
// Whoever waits for a lock for a second logs by slog.Default() which process has it, and since when.
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
	"github.com/pgratelimit/ratelimit/internal/lockwait"
	"github.com/pgratelimit/ratelimit/internal/pg"
)

// FS holds the migrations in the format of goose: files in its root, with names like 00001_verb_object.sql.
//
//go:embed *.sql
var FS embed.FS

// DB is a pool: a *pgxpool.Pool, or a *sql.DB in sqldb.Pool.
type DB interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// Migration is one step of the schema, as Status reports it.
type Migration struct {
	// Version is the number that the file's name begins with.
	Version int64

	// Name is the rest of the file's name, for example "create_tables". It is empty if the migration is applied but
	// unknown here, because a newer version of this module applied it.
	Name string

	// Applied tells whether the database has the migration.
	Applied bool

	// AppliedAt is when it was applied or adopted, by the clock of the database. It is the zero time if the migration
	// is not applied, if another tool applied it, or if this role may not read the version table.
	AppliedAt time.Time
}

// Up applies all migrations that the database does not have yet, each in its own transaction. If the database has them
// all, then nothing is written and nobody waits. A few small queries show that, and any role may ask, so an application
// may call Up with its own role at every start. If something is missing that this role may not apply, the error says
// what it is and who may apply it.
//
// If another tool applied them, and this role owns what they made, Up adopts it first, or says what differs.
//
// Up returns an error if a stranger could have made the version table, or the function that tells the version. A role
// with the rights of this one is no stranger. Nor is the owner of the schema, unless this role is a superuser and it is
// about the table. Nor is the owner of the database, if it is about the function.
//
// A proxy of shards has no tables to migrate. If its functions are those of this release, Up has nothing to do.
// Otherwise it returns an error, as Down and Status always do there. Migrate each of the shards.
//
// It is safe to call Up twice, and from several processes at once: one works, and the others wait on an advisory lock
// for as long as their context allows. They say who has it. After a failure or the end of the
// context, the migrations before that one stay applied, and the next call goes on from there. One connection of the
// pool is enough.
func Up(ctx context.Context, pool DB) error {
	return wrap("up", acquire(ctx, pool, func(conn *pgx.Conn) error {
		all, in, err := status(ctx, conn)
		if in.proxy && in.says() == latest() { // as an application may ask at each start
			return nil
		}
		switch {
		case err != nil:
			return err
		case in.older:
			return errOlder
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
					// Others may have been applied before, or by another process while we waited.
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

// latest is the last version that there is.
func latest() int64 {
	files, _ := fs.Glob(FS, "*.sql") // the pattern is right
	return int64(len(files))
}

// adopt makes the version table record what rate_limit_version says. To be built upon, the schema must be what the
// migrations up to that version make. To be rolled back, it may be damaged.
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
			return nil // another process has done it, while we waited
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
			if says == 0 { // a part of it is missing, rather than that it is too much
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

// record makes the version table record the migrations up to a version, and no others.
func (s schema) record(ctx context.Context, tx pgx.Tx, version int64) error {
	_, err := tx.Exec(ctx, fmt.Sprintf(recordSQL, s.quoted(), version), pgx.QueryExecModeSimpleProtocol)
	return err
}

// Down rolls back the one migration that was applied last, as "goose down" does. If none is applied it does nothing.
// Called twice it rolls back two. DownTo(ctx, pool, 0) rolls back all.
//
// Rolling back a migration drops what it has made. Rolling back the first one drops the tables, and with them every
// count. What of it is missing already is no error.
func Down(ctx context.Context, pool DB) error { return down(ctx, pool, "down", 0, true) }

// DownTo rolls back all migrations above a version, the last one first. With version 0 it rolls back all of them. It is
// safe to call twice.
//
// Like the goose command it leaves the version table, with only the row of version 0. To leave no trace at all, drop
// that table afterwards: DROP TABLE rate_limit_goose_version.
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

// Status returns all migrations, ordered by version. It only reads. It needs no version table, and waits for no lock.
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

// transaction calls do in one that is calm and not silent: Postgres compiles none of its statements, and if one waits
// for a lock, then lockwait says who has it. Where enable_nestloop is off, Postgres takes statements that look at its
// catalogs for dear ones, and compiles them for seconds.
//
// It is read committed, whatever the pool's default is, so each statement sees everything that was committed before it.
func transaction(ctx context.Context, conn *pgx.Conn, mode pgx.TxAccessMode, do func(tx pgx.Tx) error) error {
	options := pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: mode}
	return pgx.BeginTxFunc(ctx, conn, options, func(tx pgx.Tx) error {
		var pid uint32
		if err := tx.QueryRow(ctx, "SELECT pg_catalog.pg_backend_pid(), pg_catalog.set_config('jit', 'off', true)").
			Scan(&pid, nil); err != nil {
			return err
		}
		defer lockwait.Watch(ctx, conn, pid)()
		return do(tx)
	})
}

// acquire calls do with one of the pool's connections.
func acquire(ctx context.Context, pool DB, do func(*pgx.Conn) error) error {
	if pg.IsNil(pool) {
		return errors.New("the pool is nil")
	}
	return pg.Cause(pg.Use(ctx, pool, do)) // whose kinds are those of a limiter
}

// wrap says where an error comes from, and how the caller can mend it if that is possible.
func wrap(operation string, err error) error {
	if err == nil {
		return nil
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
