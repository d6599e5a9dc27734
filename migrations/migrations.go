// Package migrations brings a database to the schema that this version of the module needs, with goose, and back.
//
//	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
//	…
//	err = migrations.Up(ctx, pool)
//
// Everything is made in the schema that search_path names first in the pool's connections. That schema must exist, and the
// user needs CREATE on it. To use a schema of its own, set search_path in the connection string:
// "postgres://localhost/app?search_path=limits".
//
// # With the goose command
//
// The same migrations run under the plain goose command, from a copy of this folder or from FS:
//
//	goose -dir migrations -table rate_limit_goose_version postgres "$DATABASE_URL" up
//
// With that table both ways can be mixed. Without it goose keeps its records in goose_db_version, which is right only if
// nothing else in the database does: an application's own migrations have the same numbers, and goose would take ours for
// applied. The functions of this package never look at that table.
//
// # With a connection pooler
//
// A pooler in transaction mode may give the advisory lock, which lets several processes call Up at once, to one session
// and its release to another. Migrate on a direct connection.
package migrations

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
)

// FS holds the migrations: files named 00001_verb_object.sql, in the root, in the format of goose.
//
//go:embed *.sql
var FS embed.FS

// versionTable is the table in which goose records what it has applied. Its name also stands in appliedSQL.
const versionTable = "rate_limit_goose_version"

// schemaSQL asks where Up would work, and what is there: whether there is a version table, and may be read; whose it is, and whether
// that is somebody to trust, because to write to a table runs what its owner wants; what rate_limit_version would answer, read from the
// catalog, for the same reason; and whether the role may create. A version table in a later schema of search_path is not ours.
//
// Whoever migrates may be a superuser, with a search_path of schemas where others create, so every name here has its schema.
const schemaSQL = `
SELECT
    n.nspname,
    c.oid IS NOT NULL,
    coalesce(pg_catalog.has_table_privilege(c.oid, 'SELECT'), false),
    coalesce(o.rolname, ''),
    coalesce((o.rolsuper OR o.rolname OPERATOR(pg_catalog.=) current_user OR o.oid OPERATOR(pg_catalog.=) n.nspowner AND NOT me.rolsuper)
        AND c.relkind OPERATOR(pg_catalog.=) 'r' AND NOT c.relhastriggers AND NOT c.relhasrules, true),
    coalesce((
        SELECT p.prosrc
        FROM pg_catalog.pg_proc AS p
        WHERE p.pronamespace OPERATOR(pg_catalog.=) n.oid
            AND p.proname OPERATOR(pg_catalog.=) 'rate_limit_version' AND p.pronargs OPERATOR(pg_catalog.=) 0::pg_catalog.int2
    ), ''),
    pg_catalog.has_schema_privilege(n.oid, 'CREATE'),
    pg_catalog.pg_get_userbyid(coalesce(c.relowner, n.nspowner))
FROM pg_catalog.pg_namespace AS n
LEFT JOIN pg_catalog.pg_class AS c
    ON c.relnamespace OPERATOR(pg_catalog.=) n.oid AND c.relname OPERATOR(pg_catalog.=) 'rate_limit_goose_version'
LEFT JOIN pg_catalog.pg_roles AS o ON o.oid OPERATOR(pg_catalog.=) c.relowner
JOIN pg_catalog.pg_roles AS me ON me.rolname OPERATOR(pg_catalog.=) current_user
WHERE n.nspname OPERATOR(pg_catalog.=) pg_catalog.current_schema()`

// appliedSQL lists what is applied. The table has local times without a zone, those of the session that wrote them.
const appliedSQL = `
SELECT version_id, pg_catalog.timezone(pg_catalog.current_setting('TimeZone'), tstamp)
FROM %s.rate_limit_goose_version
WHERE version_id OPERATOR(pg_catalog.>) 0 AND is_applied
ORDER BY id`

// Migration is one step of the schema, as Status reports it.
type Migration struct {
	// Version is the number that the file's name begins with.
	Version int64

	// Name is the rest of the file's name, for example "create_tables". It is empty for a migration that is applied but
	// unknown here, because a newer version of this module did it.
	Name string

	// Applied tells whether the database has it.
	Applied bool

	// AppliedAt is when it was applied, by the clock of the database; the zero time if it is not applied, or if nobody has told:
	// another tool applied it, or this role may not read the version table.
	AppliedAt time.Time
}

// Up applies all migrations that the database does not have yet, each in its own transaction. If it has them all, whoever brought
// them there, which takes two small queries to see, then nothing is locked or written; and any role may call it, such as
// the application's at every start. A role that may not do what is missing is told what that is, and who may.
//
// It is safe to call twice, and from several processes at once: one works, and the others wait on an advisory lock for as
// long as their context allows. After a failure or the end of the context, the migrations before that one stay applied, and
// the next call goes on from there. One connection of the pool is enough.
func Up(ctx context.Context, pool *pgxpool.Pool) error {
	all, in, err := status(ctx, pool)
	if err != nil {
		return wrap("up", err)
	}

	var pending []int64
	var missing []string
	for _, migration := range all {
		if !migration.Applied {
			pending = append(pending, migration.Version)
			missing = append(missing, fmt.Sprintf("%d %s", migration.Version, migration.Name))
		}
	}
	switch {
	case len(pending) == 0:
		return nil
	case !in.create || in.table && !in.readable:
		return wrap("up", fmt.Errorf("not applied: %s; this role may not apply it (the user needs CREATE on the schema): run this as %s",
			strings.Join(missing, ", "), in.owner))
	case !in.table && len(pending) < len(all):
		return wrap("up", fmt.Errorf("not applied: %s; %w", strings.Join(missing, ", "), errAnotherTool))
	}
	if err := in.trust(); err != nil {
		return wrap("up", err)
	}

	// Provider.Up makes the version table before it takes the lock: of eight processes, seven would fail at that, and try
	// again a second later. ApplyVersion does everything under the lock.
	return wrap("up", withProvider(pool, func(provider *goose.Provider) error {
		for _, version := range pending {
			_, err := provider.ApplyVersion(ctx, version, true)
			if err != nil && !errors.Is(err, goose.ErrAlreadyApplied) { // by another process, while we waited
				return err
			}
		}
		return nil
	}))
}

// Down rolls back the one migration that was applied last, as "goose down" does; DownTo(ctx, pool, 0) rolls back all. If
// none is applied it does nothing. Called twice it rolls back two.
//
// What a migration has made goes with it: rolling back the first one drops the tables and so forgets every count.
func Down(ctx context.Context, pool *pgxpool.Pool) error {
	return down(ctx, pool, "down", func(provider *goose.Provider) error {
		_, err := provider.Down(ctx)
		if errors.Is(err, goose.ErrNoNextVersion) { // another process was quicker
			return nil
		}
		return err
	})
}

// DownTo rolls back all migrations above a version, the last one first; with version 0, all of them. It is safe to call
// twice.
//
// Like the goose command it leaves the version table, empty but for the row of version 0. To leave no trace at all, drop it
// then: DROP TABLE rate_limit_goose_version.
func DownTo(ctx context.Context, pool *pgxpool.Pool, version int64) error {
	return down(ctx, pool, fmt.Sprintf("down to %d", version), func(provider *goose.Provider) error {
		_, err := provider.DownTo(ctx, version)
		return err
	})
}

var errAnotherTool = errors.New("the others were applied by another tool, or by goose without -table " + versionTable + ": stay with that one")

func down(ctx context.Context, pool *pgxpool.Pool, operation string, run func(*goose.Provider) error) error {
	all, in, err := status(ctx, pool)
	if err != nil {
		return wrap(operation, err)
	}
	// goose would make the version table first.
	if !slices.ContainsFunc(all, func(migration Migration) bool { return migration.Applied }) {
		return nil
	}
	if !in.table {
		return wrap(operation, errAnotherTool)
	}
	if err := in.trust(); err != nil {
		return wrap(operation, err)
	}
	return wrap(operation, withProvider(pool, run))
}

// Status returns all migrations, by version. It only reads: there need not be a version table, and it waits for no lock.
func Status(ctx context.Context, pool *pgxpool.Pool) ([]Migration, error) {
	all, _, err := status(ctx, pool)
	if err != nil {
		return nil, wrap("status", err)
	}
	return all, nil
}

// schema is what schemaSQL tells.
type schema struct {
	name       string
	table      bool   // there is a version table
	readable   bool   // by this role
	tableOwner string // whose it is
	trusted    bool
	version    string // the body of rate_limit_version; empty if there is none
	create     bool   // this role may create
	owner      string // who could run the migrations
}

// trust refuses a version table that somebody has put there for goose to write to: their triggers would run with our rights.
func (s schema) trust() error {
	if s.trusted {
		return nil
	}
	return fmt.Errorf("%s belongs to %s, or has triggers or rules, which could run anything with the rights of this role: migrate as %[2]s, or drop "+
		"that table, or what is on it, if it is not yours",
		versionTable, s.tableOwner)
}

func status(ctx context.Context, pool *pgxpool.Pool) ([]Migration, schema, error) {
	var in schema
	var path string
	if err := pool.QueryRow(ctx, "SHOW search_path").Scan(&path); err != nil {
		return nil, in, err
	}
	if first, rest, _ := strings.Cut(path, ","); first != "pg_catalog" && strings.Contains(rest, "pg_catalog") {
		return nil, in, errors.New("search_path names pg_catalog behind another schema, so whoever may create there could have code run with the " +
			"rights of this role: leave pg_catalog out, which is then the first")
	}
	err := pool.QueryRow(ctx, schemaSQL).Scan(&in.name, &in.table, &in.readable, &in.tableOwner, &in.trusted, &in.version, &in.create, &in.owner)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, in, errors.New("no schema that search_path names exists: create it, or set another search_path")
	}
	if err != nil {
		return nil, in, err
	}

	files, err := fs.Glob(FS, "*.sql")
	if err != nil {
		return nil, in, err
	}
	byVersion := make(map[int64]Migration, len(files))
	for _, file := range files {
		version, err := goose.NumericComponent(file)
		if err != nil {
			return nil, in, err
		}
		_, name, _ := strings.Cut(strings.TrimSuffix(file, ".sql"), "_")
		byVersion[version] = Migration{Version: version, Name: name}
	}

	if in.table && in.readable && in.trusted {
		rows, err := pool.Query(ctx, fmt.Sprintf(appliedSQL, pgx.Identifier{in.name}.Sanitize()))
		if err != nil {
			return nil, in, err
		}
		var version int64
		var at time.Time
		if _, err := pgx.ForEachRow(rows, []any{&version, &at}, func() error {
			byVersion[version] = Migration{Version: version, Name: byVersion[version].Name, Applied: true, AppliedAt: at}
			return nil
		}); err != nil {
			return nil, in, err
		}
	}

	var says int64
	if n, err := fmt.Sscanf(strings.TrimSpace(in.version), "SELECT %d::bigint", &says); err == nil && n == 1 {
		for version, migration := range byVersion {
			if version <= says {
				migration.Applied = true
				byVersion[version] = migration
			}
		}
		if _, known := byVersion[says]; !known {
			byVersion[says] = Migration{Version: says, Applied: true}
		}
	}

	return slices.SortedFunc(maps.Values(byVersion), func(a, b Migration) int { return cmp.Compare(a.Version, b.Version) }), in, nil
}

// withProvider runs goose on connections of the pool. Nothing is taken from goose's package-wide state, where the
// application may have registered its own migrations, and nothing is logged.
func withProvider(pool *pgxpool.Pool, run func(*goose.Provider) error) error {
	db := stdlib.OpenDBFromPool(pool)
	provider, err := goose.NewProvider(goose.DialectPostgres, db, FS,
		goose.WithTableName(versionTable),
		goose.WithSessionLocker(locker{}),
		goose.WithDisableGlobalRegistry(true),
		goose.WithLogger(goose.NopLogger()),
	)
	if err == nil {
		err = run(provider)
	}
	return errors.Join(err, db.Close()) // which leaves the pool open
}

// wrap says where an error comes from and, where the caller can mend it, how.
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
	)
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		switch pgErr.Code {
		case insufficientPrivilege:
			hint = " (the user needs CREATE on the schema, and to have made what is rolled back)"
		case duplicateTable, duplicateFunction, duplicateObject:
			hint = " (was it made by the goose command without -table " + versionTable + "? Then stay with that command)"
		}
	}
	if errors.Is(err, goose.ErrVersionNotFound) {
		hint = " (it was applied by a newer version of this module: roll it back with that one)"
	}
	return fmt.Errorf("ratelimit/migrations: %s: %w%s", operation, err, hint)
}
