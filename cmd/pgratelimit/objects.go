package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
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
		return problem.finding(e.command("doctor --fix")+", which makes them anew, without the counts, which are lost"+
			"; then grant the rights on them again, as in deploy/grants.sql",
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

// judgeObjects leaves to the checks of the tables what those find.
func (e *examination) judgeObjects(made catalog.Catalog) finding {
	var wrong, mend, drop, dropTables []string
	inside, gone, how := false, false, warning
	differences := e.found.Differences(made, e.server.owner)
	for _, d := range differences {
		name := catalog.Name(d.Object)
		_, expected := made[d.Object]
		aspect, part, _ := strings.Cut(d.Aspect, " ")
		extra := expected && made[d.Object].Aspects[d.Aspect] == ""
		alter := "`ALTER TABLE " + e.server.name(name) + " "
		switch {
		case d.Aspect == "trigger rate_limit_note_deleted" || d.Aspect == "trigger rate_limit_note_truncated":
			continue
		case d.Aspect == "persistence" || d.Aspect == "fillfactor" ||
			harmless(d, made, e.found) && aspect == "index" && (name == table(false) || name == table(true)):
			continue // judgeKind
		case !expected:
			kind, signature, _ := strings.Cut(d.Object, " ")
			statement := fmt.Sprintf("`DROP %s %s`", strings.ToUpper(kind), e.server.name(signature))
			if kind == "table" { // before functions, which may belong to its triggers
				dropTables = append(dropTables, statement+", which loses its rows")
			} else {
				drop = append(drop, statement)
			}
		case renamed(d.Object, made, e.found)[d.Aspect] != "":
			is := strings.TrimPrefix(renamed(d.Object, made, e.found)[d.Aspect], "column ")
			mend = append(mend, alter+"RENAME COLUMN "+pgx.Identifier{is}.Sanitize()+" TO "+
				pgx.Identifier{part}.Sanitize()+"`, if it is the same column")
		case inPlace(d, made):
			inside, gone = true, gone || e.found[d.Object].Aspects == nil
		case d.Aspect == "row security":
			for what := range strings.SplitSeq(e.found[d.Object].Aspects[d.Aspect], ", ") {
				if policy, ok := strings.CutPrefix(what, "policy "); ok {
					mend = append(mend, fmt.Sprintf("`DROP POLICY %s ON %s`",
						pgx.Identifier{policy}.Sanitize(), e.server.name(name)))
				} else {
					mend = append(mend, alter+"NO FORCE ROW LEVEL SECURITY`")
				}
			}
		case !extra: // it belongs to somebody else
			mend = append(mend, alter+"OWNER TO "+e.server.ownerSQL+"`, if you have made it")
		case aspect == "column" && slices.Contains(
			slices.Collect(maps.Values(renamed(d.Object, made, e.found))), d.Aspect):
			// it is to be renamed
		case aspect == "column":
			mend = append(mend, alter+"DROP COLUMN "+pgx.Identifier{part}.Sanitize()+"`, which loses what is in it")
		case aspect == "constraint":
			mend = append(mend, alter+"DROP CONSTRAINT IF EXISTS "+pgx.Identifier{part}.Sanitize()+"`")
		case aspect == "index" && e.found[d.Object].Aspects["constraint "+part] == "":
			mend = append(mend, "`DROP INDEX IF EXISTS "+e.server.name(pgx.Identifier{part}.Sanitize())+"`")
		case aspect == "trigger" || aspect == "rule":
			mend = append(mend, fmt.Sprintf("`DROP %s %s ON %s`",
				strings.ToUpper(aspect), pgx.Identifier{part}.Sanitize(), e.server.name(name)))
		}
		wrong = append(wrong, d.Text)
		if !harmless(d, made, e.found) {
			how = problem
		}
	}
	if len(wrong) == 0 {
		return ok("the %d that the migrations made, unchanged", len(made))
	}
	if how == warning {
		return how.finding("if nobody needs it, "+strings.Join(mend, "; then "),
			"somebody has added what does no harm: %s",
			strings.ReplaceAll(strings.Join(wrong, "; "), ", which should not be there", ""))
	}
	mend = slices.Concat(dropTables, drop, mend)
	if isDivided(e.found) {
		mend = append(mend, "first see that nothing is in progress: this database is a shard that is being divided, "+
			"and what is made anew loses counts that others need, so run `pgratelimit shard list` for its proxy, and "+
			"do what it says")
	}
	if inside {
		loses := "which makes it anew in place, and loses nothing"
		if empty := emptied(differences, made, e.found); len(empty) > 0 {
			loses = "which makes it anew in place, and loses all rows of " + strings.Join(empty, " and ") +
				", of which columns are missing"
		}
		if gone {
			loses += "; then grant the rights on what was missing again, as in deploy/grants.sql"
		}
		mend = append(mend, e.command("doctor --fix")+", "+loses)
	}
	return how.finding(strings.Join(mend, "; then "), "not what the migrations made: %s", strings.Join(wrong, "; "))
}

// harmless tells whether a difference is a column or an index that somebody has added to a table, and that refuses no
// row: our statements leave the column out, and the index is not unique.
func harmless(d catalog.Difference, made, found catalog.Catalog) bool {
	if !strings.HasPrefix(d.Object, "table ") || d.Aspect == "" || made[d.Object].Aspects[d.Aspect] != "" {
		return false
	}
	is := found[d.Object].Aspects[d.Aspect]
	aspect, part, _ := strings.Cut(d.Aspect, " ")
	switch aspect {
	case "column":
		column := columnText.FindStringSubmatch(is)
		return column != nil && (column[2] == "" && !strings.HasPrefix(column[1], "domain ") || column[3] != "" ||
			column[5] != "")
	case "index":
		return strings.HasPrefix(is, "CREATE INDEX ") && found[d.Object].Aspects["constraint "+part] == ""
	}
	return false
}
