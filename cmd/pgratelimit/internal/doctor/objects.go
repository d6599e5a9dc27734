package doctor

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

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/shard"
)

// CheckMigrations checks which migrations were applied, and stores the version in e.Applied.
func (e *Examination) CheckMigrations(ctx context.Context) (cli.Finding, error) {
	latest := cli.LatestVersion()
	pool, err := e.Open(ctx, e.InSchema)
	if err != nil {
		return cli.Finding{}, err
	}
	defer pool.Close()
	if !e.Server.Usable {
		return cli.Problem.Finding(fmt.Sprintf("`GRANT USAGE ON SCHEMA %s TO %s`", e.Server.Schema, e.Server.Role),
			"this role may not use schema %s, where the tables are", e.Server.Schema), nil
	}
	if e.Server.Tables > 0 {
		if err := e.Look(ctx, func(tx cli.Tx) (err error) {
			e.Found, err = catalog.Read(ctx, tx.Tx, tx.Schema) // package catalog adds the schema itself
			return err
		}); err != nil {
			return cli.Finding{}, err
		}
	}
	// A pooler does not support search_path, and a shard's connection string may lead to a pooler. If there is a
	// pooler, the functions show the schema.
	if e.Connection != "" && e.pooled && e.Server.Tables > 0 {
		if err := e.row(ctx, shard.MapSQL, nil, &e.Applied); err != nil {
			return cli.Finding{}, err
		}
		if e.Applied == latest {
			e.told = true
			return cli.OK("up to date, at version %d in schema %s, as its functions say", e.Applied, e.Server.Schema),
				nil
		}
	}
	if e.Schema != "" && e.Server.Tables > 0 {
		var current *string
		if err := pool.QueryRow(ctx, "SELECT pg_catalog.current_schema()").Scan(&current); err != nil {
			return cli.Finding{}, err
		}
		if current == nil || *current != e.Schema {
			return cli.Warning.Finding("connect to Postgres itself rather than to a pooler",
				"could not be looked at: this connection does not take the search_path of --schema"), nil
		}
	}
	status, err := migrations.Status(ctx, pool)
	if err != nil && e.Server.Tables == 0 {
		return e.elsewhere(cli.OneLine(err)), ctx.Err()
	}
	if _, answered := errors.AsType[*pgconn.PgError](err); err != nil && (answered || ctx.Err() != nil) {
		return cli.Finding{}, err
	}
	e.told = true
	if err != nil { // for example, the version table or function belongs to another role
		e.Applied = e.Found.Nearest(e.Server.Owner)
		return cli.Problem.Finding("do what it says", "%s", cli.OneLine(err)), nil
	}
	var pending []string
	for _, migration := range status {
		if migration.Applied {
			e.Applied = max(e.Applied, migration.Version)
		} else {
			pending = append(pending, fmt.Sprintf("%d %s", migration.Version, migration.Name))
		}
	}
	switch {
	case e.Server.Tables == 0 && e.Applied == 0:
		return e.elsewhere("the tables are not there"), nil
	case e.Server.Tables == 0:
		return cli.Problem.Finding(
			e.Command("doctor --fix")+", which makes them anew, without the counts, which are lost"+
				"; then grant the rights on them again, as in deploy/grants.sql",
			"somebody has dropped the tables: migrations up to %d are applied, and no table is there", e.Applied), nil
	case e.Applied == 0:
		e.Applied = e.Found.Nearest(e.Server.Owner)
		name := e.Server.name("rate_limit_version()")
		return cli.Problem.Finding(fmt.Sprintf("`CREATE FUNCTION %s RETURNS bigint LANGUAGE sql IMMUTABLE "+
			"AS ' SELECT %d::bigint '`, `GRANT EXECUTE ON FUNCTION %s TO PUBLIC`, then %s",
			name, e.Applied, name, e.Command("migrate up")),
			"nothing says the version of the tables; they are most like those of version %d",
			e.Applied), nil
	case e.Applied > latest:
		return cli.OK("at version %d, of a newer release than this command", e.Applied), nil
	case len(pending) > 0:
		return cli.Problem.Finding("run "+e.Command("migrate up"), "not applied: %s", strings.Join(pending, ", ")), nil
	}
	return cli.OK("up to date, at version %d in schema %s", e.Applied, e.Server.Schema), nil
}

// elsewhere returns a finding which says that the tables are in another schema.
func (e *Examination) elsewhere(found string) cli.Finding {
	switch {
	case len(e.Server.UsableIn) > 0:
		return cli.Problem.Finding(fmt.Sprintf("name the schema with --schema, or run %s", e.Command("migrate up")),
			"%s; tables of these names are in schema %s", found, strings.Join(e.Server.UsableIn, ", "))
	case len(e.Server.LockedIn) > 0:
		return cli.Problem.Finding(fmt.Sprintf("`GRANT USAGE ON SCHEMA %s TO %s`, if it is the right one",
			e.Server.LockedIn[0], e.Server.Role),
			"%s; tables of these names are in schema %s, which this role may not use",
			found, strings.Join(e.Server.LockedIn, ", "))
	}
	return cli.Problem.Finding("run "+e.Command("migrate up")+", or say with --schema where they are", "%s", found)
}

// checkObjects compares the objects in the schema with the objects that the migrations make.
func (e *Examination) checkObjects(context.Context) (cli.Finding, error) {
	if !e.told {
		return cli.Warning.Finding("mend what keeps the migrations from being looked at",
			"could not be looked at, because nothing tells what the migrations have made"), nil
	}
	made, known := catalog.Made(e.Applied)
	if !known {
		return cli.OK("of a newer release than this command, which cannot tell whether they are right"), nil
	}
	return e.judgeObjects(made), nil
}

// judgeObjects returns a finding about the objects. judgeObjects leaves out a difference if a check of the tables
// reports it.
func (e *Examination) judgeObjects(made catalog.Catalog) cli.Finding {
	var wrong, mend, drop, dropTables []string
	inside, gone, how := false, false, cli.Warning
	differences := e.Found.Differences(made, e.Server.Owner)
	for _, d := range differences {
		name := catalog.Name(d.Object)
		_, expected := made[d.Object]
		aspect, part, _ := strings.Cut(d.Aspect, " ")
		extra := expected && made[d.Object].Aspects[d.Aspect] == ""
		alter := "`ALTER TABLE " + e.Server.name(name) + " "
		switch {
		case d.Aspect == "trigger rate_limit_note_deleted" || d.Aspect == "trigger rate_limit_note_truncated":
			continue
		case d.Aspect == "persistence" || d.Aspect == "fillfactor" ||
			harmless(d, made, e.Found) && aspect == "index" && (name == cli.Table(false) || name == cli.Table(true)):
			continue // judgeKind reports this difference
		case !expected:
			kind, signature, _ := strings.Cut(d.Object, " ")
			statement := fmt.Sprintf("`DROP %s %s`", strings.ToUpper(kind), e.Server.name(signature))
			if kind == "table" { // drop tables before functions, because their triggers may use the functions
				dropTables = append(dropTables, statement+", which loses its rows")
			} else {
				drop = append(drop, statement)
			}
		case renamed(d.Object, made, e.Found)[d.Aspect] != "":
			is := strings.TrimPrefix(renamed(d.Object, made, e.Found)[d.Aspect], "column ")
			mend = append(mend, alter+"RENAME COLUMN "+pgx.Identifier{is}.Sanitize()+" TO "+
				pgx.Identifier{part}.Sanitize()+"`, if it is the same column")
		case InPlace(d, made):
			inside, gone = true, gone || e.Found[d.Object].Aspects == nil
		case d.Aspect == "row security":
			for what := range strings.SplitSeq(e.Found[d.Object].Aspects[d.Aspect], ", ") {
				if policy, ok := strings.CutPrefix(what, "policy "); ok {
					mend = append(mend, fmt.Sprintf("`DROP POLICY %s ON %s`",
						pgx.Identifier{policy}.Sanitize(), e.Server.name(name)))
				} else {
					mend = append(mend, alter+"NO FORCE ROW LEVEL SECURITY`")
				}
			}
		case !extra: // the object belongs to another role
			mend = append(mend, alter+"OWNER TO "+e.Server.OwnerSQL+"`, if you have made it")
		case aspect == "column" && slices.Contains(
			slices.Collect(maps.Values(renamed(d.Object, made, e.Found))), d.Aspect):
			// The advice is to rename this column, not to drop it.
		case aspect == "column":
			mend = append(mend, alter+"DROP COLUMN "+pgx.Identifier{part}.Sanitize()+"`, which loses what is in it")
		case aspect == "constraint":
			mend = append(mend, alter+"DROP CONSTRAINT IF EXISTS "+pgx.Identifier{part}.Sanitize()+"`")
		case aspect == "index" && e.Found[d.Object].Aspects["constraint "+part] == "":
			mend = append(mend, "`DROP INDEX IF EXISTS "+e.Server.name(pgx.Identifier{part}.Sanitize())+"`")
		case aspect == "trigger" || aspect == "rule":
			mend = append(mend, fmt.Sprintf("`DROP %s %s ON %s`",
				strings.ToUpper(aspect), pgx.Identifier{part}.Sanitize(), e.Server.name(name)))
		}
		wrong = append(wrong, d.Text)
		if !harmless(d, made, e.Found) {
			how = cli.Problem
		}
	}
	if len(wrong) == 0 {
		return cli.OK("the %d that the migrations made, unchanged", len(made))
	}
	if how == cli.Warning {
		return how.Finding("if nobody needs it, "+strings.Join(mend, "; then "),
			"somebody has added what does no harm: %s",
			strings.ReplaceAll(strings.Join(wrong, "; "), ", which should not be there", ""))
	}
	mend = slices.Concat(dropTables, drop, mend)
	if isDivided(e.Found) {
		mend = append(mend, "first see that nothing is in progress: this database is a shard that is being divided, "+
			"and what is made anew loses counts that others need, so run `pgratelimit shard list` for its proxy, and "+
			"do what it says")
	}
	if inside {
		loses := "which makes it anew in place, and loses nothing"
		if empty := emptied(differences, made, e.Found); len(empty) > 0 {
			loses = "which makes it anew in place, and loses all rows of " + strings.Join(empty, " and ") +
				", of which columns are missing"
		}
		if gone {
			loses += "; then grant the rights on what was missing again, as in deploy/grants.sql"
		}
		mend = append(mend, e.Command("doctor --fix")+", "+loses)
	}
	return how.Finding(strings.Join(mend, "; then "), "not what the migrations made: %s", strings.Join(wrong, "; "))
}

// harmless tells whether a difference is an additional column or index that does not affect the limiter's statements: a
// column that an INSERT may leave out, or an index that is not unique.
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
