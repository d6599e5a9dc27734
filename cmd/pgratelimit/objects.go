package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit/internal/catalog"
	"github.com/pgratelimit/ratelimit/migrations"
)

// command is a command line of this command for the same schema, between backquotes.
func (a *app) command(line string) string {
	if a.schema != "" {
		line += " --schema '" + strings.ReplaceAll(a.schema, "'", `'\''`) + "'"
	}
	return "`pgratelimit " + line + "`"
}

func (e *examination) command(line string) string { return e.app.command(line) }

// checkMigrations also finds out what is there.
func (e *examination) checkMigrations(ctx context.Context) (finding, error) {
	all, err := readMigrations()
	if err != nil {
		return finding{}, err
	}
	pool, err := e.app.open(ctx, e.app.inSchema)
	if err != nil {
		return finding{}, err
	}
	defer pool.Close()
	if !e.server.usable {
		return problem.finding(fmt.Sprintf("`GRANT USAGE ON SCHEMA %s TO %s`", e.server.schema, e.server.role),
			"this role may not use schema %s, where the tables are", e.server.schema), nil
	}
	if e.server.tables > 0 {
		if err := e.readCatalog(ctx); err != nil {
			return finding{}, err
		}
	}
	// The connection strings of shards may lead to a pooler, which takes no search_path. Then the functions tell.
	if e.app.connection != "" && e.pooled && e.server.tables > 0 {
		if err := e.row(ctx, mapSQL, nil, &e.applied); err != nil {
			return finding{}, err
		}
		if e.applied == all[len(all)-1].Version {
			e.told = true
			return ok("up to date, at version %d in schema %s, as its functions say", e.applied, e.server.schema), nil
		}
	}
	if e.app.schema != "" && e.server.tables > 0 {
		var current *string
		if err := pool.QueryRow(ctx, "SELECT pg_catalog.current_schema()").Scan(&current); err != nil {
			return finding{}, err
		}
		if current == nil || *current != e.app.schema {
			return warning.finding("connect to Postgres itself rather than to a pooler",
				"could not be looked at: this connection does not take the search_path of --schema"), nil
		}
	}
	status, err := migrations.Status(ctx, pool)
	if err != nil && e.server.tables == 0 {
		return e.elsewhere(oneLine(err)), ctx.Err()
	}
	if _, answered := errors.AsType[*pgconn.PgError](err); err != nil && (answered || ctx.Err() != nil) {
		return finding{}, err
	}
	e.told = true
	if err != nil { // for example because of a stranger's version table or function
		e.applied = e.found.Nearest(e.server.owner)
		return problem.finding("do what it says", "%s", oneLine(err)), nil
	}
	var pending []string
	for _, migration := range status {
		if migration.Applied {
			e.applied = max(e.applied, migration.Version)
		} else {
			pending = append(pending, fmt.Sprintf("%d %s", migration.Version, migration.Name))
		}
	}
	latest := all[len(all)-1].Version
	switch {
	case e.server.tables == 0 && e.applied == 0:
		return e.elsewhere("the tables are not there"), nil
	case e.server.tables == 0:
		return problem.finding(e.command("migrate down --to 0")+", then "+e.command("migrate up")+
			"; then grant the rights again, as in deploy/grants.sql",
			"somebody has dropped the tables: migrations up to %d are applied, and no table is there", e.applied), nil
	case e.applied == 0:
		e.applied = e.found.Nearest(e.server.owner)
		name := e.server.name("rate_limit_version()")
		return problem.finding(fmt.Sprintf("`CREATE FUNCTION %s RETURNS bigint LANGUAGE sql IMMUTABLE "+
			"AS ' SELECT %d::bigint '`, `GRANT EXECUTE ON FUNCTION %s TO PUBLIC`, then %s",
			name, e.applied, name, e.command("migrate up")),
			"there are tables, and nothing says which version they are of; they are most like those of version %d",
			e.applied), nil
	case e.applied > latest:
		return ok("at version %d, of a newer release than this command", e.applied), nil
	case len(pending) > 0:
		return problem.finding("run "+e.command("migrate up"), "not applied: %s", strings.Join(pending, ", ")), nil
	}
	return ok("up to date, at version %d in schema %s", e.applied, e.server.schema), nil
}

// elsewhere is the finding that the tables are not where this role looks. found says so.
func (e *examination) elsewhere(found string) finding {
	switch {
	case len(e.server.usableIn) > 0:
		return problem.finding(fmt.Sprintf("name the schema with --schema, or run %s", e.command("migrate up")),
			"%s; tables of these names are in schema %s", found, strings.Join(e.server.usableIn, ", "))
	case len(e.server.lockedIn) > 0:
		return problem.finding(fmt.Sprintf("`GRANT USAGE ON SCHEMA %s TO %s`, if it is the right one",
			e.server.lockedIn[0], e.server.role),
			"%s; tables of these names are in schema %s, which this role may not use",
			found, strings.Join(e.server.lockedIn, ", "))
	}
	return problem.finding("run "+e.command("migrate up")+", or say with --schema where they are", "%s", found)
}

// readCatalog reads what there is in the schema of the tables.
func (e *examination) readCatalog(ctx context.Context) error {
	return e.app.look(ctx, e.pool, func(tx pgx.Tx) (err error) {
		q, _ := tx.(qualified) // catalog names the schema itself
		e.found, err = catalog.Read(ctx, q.Tx, q.schema)
		return err
	})
}

// checkObjects compares what is there with what the migrations make.
func (e *examination) checkObjects(context.Context) (finding, error) {
	if !e.told {
		return warning.finding("mend what keeps the migrations from being looked at",
			"could not be looked at, because nothing tells what the migrations have made"), nil
	}
	made, known := catalog.Made(e.applied)
	if !known {
		return ok("of a newer release than this command, which cannot tell whether they are right"), nil
	}
	return e.judgeObjects(made), nil
}

// judgeObjects leaves to the checks of the tables what can be mended and keeps the counts.
func (e *examination) judgeObjects(made catalog.Catalog) finding {
	var wrong, mend []string
	damaged := map[string]bool{} // of the two tables
	remake, version, divided := false, false, false
	var drop []string // tables first, because functions may belong to their triggers
	for _, d := range e.found.Differences(made, e.server.owner) {
		name := catalog.Name(d.Object)
		_, expected := made[d.Object]
		_, index := strings.CutPrefix(d.Aspect, "index ")
		switch {
		case d.Aspect == "trigger rate_limit_note_deleted" || d.Aspect == "trigger rate_limit_note_truncated":
			divided = true
			continue
		case d.Aspect == "persistence" || d.Aspect == "fillfactor" || index && made[d.Object].Aspects[d.Aspect] == "":
			continue // judgeKind
		case !expected:
			kind, signature, _ := strings.Cut(d.Object, " ")
			drop = append(drop, fmt.Sprintf("`DROP %s %s`", strings.ToUpper(kind), e.server.name(signature)))
		case name == table(false) || name == table(true):
			damaged[name] = true
		case name == "rate_limit_version":
			version = true
		default:
			remake = true
		}
		wrong = append(wrong, d.Text)
	}
	for _, tables := range []bool{true, false} {
		for _, statement := range drop {
			if strings.HasPrefix(statement, "`DROP TABLE ") == tables {
				mend = append(mend, statement)
			}
		}
	}
	if len(wrong) == 0 {
		return ok("the %d that the migrations made, unchanged", len(made))
	}
	if divided {
		mend = append(mend, "first see that nothing is in progress: this database is a shard that is being divided, "+
			"and what is made anew loses counts that others need, so run `pgratelimit shard list` for its proxy, and "+
			"do what it says")
	}
	if version {
		name := e.server.name("rate_limit_version()")
		mend = append(mend, fmt.Sprintf("`DROP FUNCTION IF EXISTS %s`, `CREATE FUNCTION %s RETURNS bigint "+
			"LANGUAGE sql IMMUTABLE AS ' SELECT %d::bigint '`, `GRANT EXECUTE ON FUNCTION %s TO PUBLIC`",
			name, name, e.applied, name))
	}
	for _, durable := range []bool{false, true} {
		if name := e.server.name(table(durable)); len(damaged) == 1 && damaged[table(durable)] {
			kind := map[bool]string{false: "UNLOGGED TABLE", true: "TABLE"}[durable]
			mend = append(mend, fmt.Sprintf("make it anew, which loses its counts: "+
				"`DROP TABLE IF EXISTS %s`, `CREATE %s %s (LIKE %s INCLUDING ALL) WITH (fillfactor = 50)`, "+
				"`ALTER TABLE %s OWNER TO %s`",
				name, kind, name, e.server.name(table(!durable)), name, e.server.ownerSQL))
		}
	}
	switch {
	case len(damaged) == 2:
		mend = append(mend, "make all anew, which loses all counts: "+
			e.command("migrate down --to 0")+", then "+e.command("migrate up"))
	case remake:
		mend = append(mend, "make the functions anew, which keeps the counts, while calls fail: "+
			e.command("migrate down --to 1")+", then "+e.command("migrate up"))
	}
	aside, back := "", ""
	if len(damaged) == 2 || remake {
		aside, back = e.keepPolicies(made)
	}
	return problem.finding(
		aside+strings.Join(mend, "; then ")+"; then grant the rights again, as in deploy/grants.sql"+back,
		"not what the migrations made: %s", strings.Join(wrong, "; "))
}

// policyColumns are those of rate_limit_policy that people write.
const policyColumns = "name, key, key_prefix, mode, policy, valid_from, valid_until, comment, automatic"

// keepPolicies returns what puts the policies aside while all is made anew, and what brings them back.
func (e *examination) keepPolicies(made catalog.Catalog) (aside, back string) {
	const object = "table rate_limit_policy"
	if _, expected := made[object]; !expected {
		return "", ""
	}
	for column := range strings.SplitSeq(policyColumns, ", ") {
		if e.found[object].Aspects["column "+column] == "" {
			return "", ". This loses all policies"
		}
	}
	policies, kept := e.server.name("rate_limit_policy"), e.server.name("kept_policies")
	return fmt.Sprintf("put the policies aside: `CREATE TABLE %s AS SELECT %s FROM %s`; then ",
			kept, policyColumns, policies),
		fmt.Sprintf("; then bring the policies back, without their history: "+
			"`INSERT INTO %s (%s) SELECT %s FROM %s`, `DROP TABLE %s`",
			policies, policyColumns, policyColumns, kept, kept)
}
