package doctor

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/catalog"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

var (
	//go:embed sql/grants.sql
	grantsSQL string
	//go:embed sql/count_on.sql
	countOnSQL string
	//go:embed sql/version_home.sql
	versionHomeSQL string
)

// mostRounds is how often fix may repeat its checks. A round may need the results of the previous round.
const mostRounds = 6

// definitions returns statements of the migrations up to a version. The first result has the statements that create
// each object, by the object's name. The second result has the statements that set rights and search_path.
func definitions(version int64) (of map[string][]string, settle []string) {
	of = map[string][]string{}
	head := regexp.MustCompile(`^(CREATE (?:TABLE|UNLOGGED TABLE|FUNCTION|TYPE)|CREATE INDEX \w+ ON|` +
		`CREATE TRIGGER [^;]+? ON|ALTER TABLE|COMMENT ON \w+|GRANT EXECUTE ON FUNCTION) (\w+)`)
	add := func(statement string) {
		if rest, replaces := strings.CutPrefix(statement, "CREATE OR REPLACE "); replaces {
			statement = "CREATE " + rest
		}
		switch found := head.FindStringSubmatch(statement); {
		case found != nil && strings.HasPrefix(found[1], "CREATE ") && !strings.HasSuffix(found[1], " ON"):
			of[found[2]] = []string{statement}
		case found != nil:
			of[found[2]] = append(of[found[2]], statement)
		case strings.HasPrefix(statement, "DO "):
			settle = append(settle, statement)
		}
	}
	for _, migration := range cli.ReadMigrations() {
		if migration.Version > version {
			break
		}
		inBody, statement := false, ""
		for line := range strings.Lines(migration.Up) {
			if statement == "" && (strings.HasPrefix(line, "--") || strings.TrimSpace(line) == "") {
				continue
			}
			statement += line
			inBody = inBody != (strings.Count(line, "$$")%2 == 1)
			if !inBody && strings.HasSuffix(line, ";\n") {
				add(statement)
				statement = ""
			}
		}
	}
	return of, settle
}

// InPlace tells whether fix can remove a difference from an object that the migrations make.
func InPlace(d catalog.Difference, made catalog.Catalog) bool {
	object, expected := made[d.Object]
	kind, _, _ := strings.Cut(d.Object, " ")
	switch {
	case !expected || d.Aspect == "persistence" || d.Aspect == "fillfactor" || d.Aspect == "row security":
		return false
	case kind != "table":
		return true
	case d.Aspect == "":
		return strings.HasSuffix(d.Text, " is missing")
	}
	return object.Aspects[d.Aspect] != ""
}

// emptied returns the tables that fix must create again without rows. Such a table lacks a column that is NOT NULL and
// has no default.
func emptied(differences []catalog.Difference, made, found catalog.Catalog) (tables []string) {
	for _, d := range differences {
		name := catalog.Name(d.Object)
		if strings.HasPrefix(d.Object, "table ") && InPlace(d, made) && strings.HasPrefix(d.Aspect, "column ") &&
			renamed(d.Object, made, found)[d.Aspect] == "" &&
			found[d.Object].Aspects[d.Aspect] == "" &&
			strings.Contains(made[d.Object].Aspects[d.Aspect], " not null") &&
			!strings.Contains(made[d.Object].Aspects[d.Aspect], " default ") && !slices.Contains(tables, name) {
			tables = append(tables, name)
		}
	}
	return tables
}

// renamed maps each missing column of a table to an unknown column, which may be the missing column under another name.
func renamed(object string, made, found catalog.Catalog) map[string]string {
	names := map[string]string{} // the keys are the names that the columns should have
	for _, is := range slices.Sorted(maps.Keys(found[object].Aspects)) {
		if !strings.HasPrefix(is, "column ") || made[object].Aspects[is] != "" {
			continue
		}
		for _, want := range slices.Sorted(maps.Keys(made[object].Aspects)) {
			if found[object].Aspects[want] == "" && names[want] == "" && strings.HasPrefix(want, "column ") &&
				made[object].Aspects[want] == found[object].Aspects[is] {
				names[want] = is
				break
			}
		}
	}
	return names
}

// isDivided tells whether the database is a shard that is being divided.
func isDivided(found catalog.Catalog) bool {
	for _, durable := range []bool{false, true} {
		of := found["table "+cli.Table(durable)].Aspects
		if of["trigger rate_limit_note_deleted"] != "" || of["trigger rate_limit_note_truncated"] != "" {
			return true
		}
	}
	return false
}

// repairs returns statements that remove differences, or that prepare the next round.
func repairs(differences []catalog.Difference, made, found catalog.Catalog, of map[string][]string) []string {
	var types, tables, functions, rest []string
	those := func(name, text string) []string { // the object's statements that contain the text
		return slices.DeleteFunc(slices.Clone(of[name]), func(s string) bool { return !strings.Contains(s, text) })
	}
	counts := false
	done := map[string]bool{}
	empty := emptied(differences, made, found)
	for _, d := range differences {
		kind, signature, _ := strings.Cut(d.Object, " ")
		name := catalog.Name(d.Object)
		missing := found[d.Object].Aspects == nil
		aspect, part, _ := strings.Cut(d.Aspect, " ")
		is := made[d.Object].Aspects[d.Aspect]
		whole := kind != "table" || missing || slices.Contains(empty, name)
		switch {
		case !InPlace(d, made) || whole && done[d.Object]:
		case kind == "type":
			if !missing {
				for other := range found { // the next round creates the functions that use the type
					if _, ours := made[other]; ours && strings.HasPrefix(other, "function ") && (strings.Contains(
						other, name) || strings.Contains(found[other].Aspects["result"], name)) {
						types = append(types, "DROP FUNCTION IF EXISTS "+strings.TrimPrefix(other, "function "))
					}
				}
				types = append(types, "DROP TYPE "+name)
			}
			types = append(types, of[name]...)
		case kind == "function":
			if !missing && (d.Aspect == "" || aspect == "result" || aspect == "arguments") {
				functions = append(functions, "DROP FUNCTION "+signature)
			}
			for _, statement := range of[name] {
				if rest, makes := strings.CutPrefix(statement, "CREATE "); makes {
					statement = "CREATE OR REPLACE " + rest
				}
				functions = append(functions, statement)
			}
		case whole:
			tables = append(tables, "DROP TABLE IF EXISTS "+name)
			tables = append(tables, slices.DeleteFunc(slices.Clone(of[name]), func(statement string) bool {
				return strings.Contains(statement, "TRIGGER ")
			})...)
			counts = counts || strings.HasPrefix(name, "rate_limit_policy")
		case aspect == "column":
			now, later := alterColumn(name, part, found[d.Object].Aspects[d.Aspect], is)
			tables, rest = append(tables, now...), append(rest, later...)
			tables = append(tables, those(name, "COMMENT ON COLUMN "+name+"."+part+" ")...)
			counts = counts || strings.Contains(is, " generated ")
		case aspect == "trigger":
			rest = append(rest, fmt.Sprintf("DROP TRIGGER IF EXISTS %s ON %s", part, name))
			rest = append(rest, those(name, "TRIGGER "+part)...)
		case aspect == "constraint":
			rest = append(rest, fmt.Sprintf("ALTER TABLE %s DROP CONSTRAINT IF EXISTS %s", name, part))
			// If a key has several rows, keep the row that expires last.
			if name == cli.Table(false) || name == cli.Table(true) {
				rest = append(rest, fmt.Sprintf("DELETE FROM %s AS a USING %[1]s AS b WHERE a.prefix = b.prefix "+
					"AND a.key = b.key AND (a.expires_at, a.ctid) < (b.expires_at, b.ctid)", name))
			}
			rest = append(rest, fmt.Sprintf("ALTER TABLE %s ADD CONSTRAINT %s %s", name, part, is))
		case aspect == "index" && made[d.Object].Aspects["constraint "+part] == "":
			rest = append(rest, "DROP INDEX IF EXISTS "+part, is)
		case aspect == "index" && found[d.Object].Aspects["constraint "+part] != "": // a constraint's index changed
			rest = append(rest, fmt.Sprintf("ALTER TABLE %s DROP CONSTRAINT %s", name, part))
		}
		done[d.Object] = done[d.Object] || whole
	}
	if counts && len(tables)+len(rest) > 0 {
		rest = append(rest, countOnSQL)
	}
	return slices.Concat(types, tables, functions, rest)
}

// columnText parses the catalog's description of a column: type, NOT NULL, default, collation, generation, storage.
var columnText = regexp.MustCompile(
	`^(.+?)( not null)?(?: default (.+?))?(?: collate (\S+))?(?: generated (\w+))? storage (\w)$`)

// alterColumn returns the statements that repair a column. The statements in later may fire triggers, so fix runs them
// after it has created the functions. The table keeps its rows and whatever others have added to it.
func alterColumn(table, column, was, is string) (now, later []string) {
	old, want := columnText.FindStringSubmatch(was), columnText.FindStringSubmatch(is)
	if want == nil {
		return nil, nil
	}
	if old == nil {
		old = make([]string, len(want))
	}
	quoted := pgx.Identifier{column}.Sanitize()
	alter := fmt.Sprintf("ALTER TABLE %s ALTER COLUMN %s ", table, quoted)
	kind := want[1]
	if want[4] != "" {
		kind += " COLLATE " + want[4]
	}
	retyped := was != "" && (old[1] != want[1] || old[4] != want[4])
	switch {
	case was == "" && want[3] != "":
		now = append(now, fmt.Sprintf("ALTER TABLE %s ADD COLUMN %s %s DEFAULT %s", table, quoted, kind, want[3]))
	case was == "":
		now = append(now, fmt.Sprintf("ALTER TABLE %s ADD COLUMN %s %s", table, quoted, kind))
	case old[5] == "s":
		now = append(now, alter+"DROP EXPRESSION")
	case old[5] != "" && want[5] == "":
		now = append(now, alter+"DROP IDENTITY")
	case old[3] != "" && (want[3] == "" || retyped):
		now = append(now, alter+"DROP DEFAULT")
	}
	if retyped {
		now = append(now, fmt.Sprintf("%sTYPE %s USING %s::%s", alter, kind, quoted, want[1]))
	}
	if want[3] != "" && was != "" && (old[3] != want[3] || retyped) {
		now = append(now, alter+"SET DEFAULT "+want[3])
	}
	if old[6] != want[6] {
		now = append(now, alter+"SET STORAGE "+map[string]string{
			"p": "PLAIN", "e": "EXTERNAL", "x": "EXTENDED", "m": "MAIN"}[want[6]])
	}
	switch {
	case old[2] != "" && want[2] == "":
		now = append(now, alter+"DROP NOT NULL")
	case old[2] == "" && want[2] != "":
		if want[3] != "" && was != "" {
			later = append(later, fmt.Sprintf("UPDATE %s SET %s = DEFAULT WHERE %[2]s IS NULL", table, quoted))
		}
		later = append(later, alter+"SET NOT NULL")
	}
	switch {
	case want[5] == "" || old[5] == want[5]:
	case old[5] == "":
		later = append(later, alter+"ADD GENERATED ALWAYS AS IDENTITY")
	default:
		later = append(later, alter+"SET GENERATED ALWAYS")
	}
	return now, later
}

// mend repairs missing or changed objects of the migrations in one transaction, and keeps grants. mend returns the
// repaired objects.
func mend(ctx context.Context, db cli.DB, yes bool) (mended []string, err error) {
	e := &Examination{DB: db}
	if err := e.ReadServer(ctx); err != nil {
		return nil, err
	}
	if _, err := e.CheckMigrations(ctx); err != nil {
		return nil, err
	}
	made, known := catalog.Made(e.Applied)
	if !known || e.Applied == 0 {
		return nil, nil // the finding about the migrations has advice
	}
	of, settle := definitions(e.Applied)
	// Ask the user before the transaction begins, because the transaction locks all tables.
	differences := e.Found.Differences(made, e.Server.Owner)
	if e.Server.Tables > 0 && len(repairs(differences, made, e.Found, of)) == 0 {
		return nil, nil
	}
	for object := range made {
		for want, is := range renamed(object, made, e.Found) {
			return nil, fmt.Errorf("nothing was changed, because %s lacks %s and has %s, which may be the same under "+
				"another name: rename it, as 'pgratelimit doctor' says, or drop it if it is not", object, want, is)
		}
	}
	asked := emptied(differences, made, e.Found)
	if len(asked) > 0 {
		if err := e.Confirm(ctx, "This loses all rows of "+strings.Join(asked, " and ")+
			", of which columns are missing, and what others have added to them, such as publications, triggers and "+
			"settings. Do it?", yes); err != nil {
			return nil, err
		}
	}
	err = e.Transaction(ctx, pgx.ReadWrite, cli.AccessExclusive, true, func(qualified cli.Tx) error {
		tx, schema, owner := qualified.Tx, qualified.Schema, e.Server.Owner
		if e.Server.Tables == 0 { // without tables, the schema is not known
			if schema, owner, err = e.versionHome(ctx); err != nil {
				return err
			}
		}
		// The statements of the migrations name no schema, so they need search_path.
		path := fmt.Sprintf("SET LOCAL search_path = %s, pg_temp", pgx.Identifier{schema}.Sanitize())
		var grants []grant
		for round := 0; ; round++ {
			found, err := catalog.Read(ctx, tx, schema) // Read sets search_path to pg_catalog
			if err != nil {
				return err
			}
			differences := found.Differences(made, owner)
			statements := repairs(differences, made, found, of)
			switch {
			case len(statements) == 0 && round == 0:
				return nil
			case round == 0:
				if isDivided(found) && slices.ContainsFunc(statements, func(s string) bool {
					return strings.HasPrefix(s, "DROP TABLE ")
				}) {
					return errors.New("nothing was changed, because this database is a shard that is being divided, " +
						"and a table that is made anew loses what is to be copied: do first what " +
						"'pgratelimit shard list' says for its proxy")
				}
				if !slices.Equal(emptied(differences, made, found), asked) {
					return errors.New("nothing was changed, because somebody else has changed the tables meanwhile: " +
						"run this again")
				}
				if grants, err = cli.Rows[grant](ctx, tx, grantsSQL, schema, owner); err != nil {
					return err
				}
				statements = append([]string{
					"SET LOCAL ROLE " + pgx.Identifier{owner}.Sanitize(),
					"SET LOCAL check_function_bodies = off", // a function may be created before one that it calls
				}, statements...)
				for _, d := range differences {
					if InPlace(d, made) {
						mended = append(mended, d.Text)
					}
				}
			case len(statements) == 0:
				return grantAgain(ctx, tx, grants)
			case round == mostRounds:
				return errors.New("nothing was changed, because it would not become what the migrations made: " +
					strings.Join(statements, "; "))
			}
			for _, statement := range slices.Concat([]string{path}, statements, settle) {
				if _, err := tx.Exec(ctx, statement, pgx.QueryExecModeSimpleProtocol); err != nil {
					return err
				}
			}
		}
	})
	if _, locked := errors.AsType[cli.LockedError](err); locked {
		held, err := e.ReadLocks(ctx, e.Timeout)
		if err != nil {
			return nil, err
		}
		text := fmt.Sprintf("nothing was changed, because others had locks on the tables for %v; wait longer with "+
			"--timeout", e.Timeout)
		if f := JudgeLocks(held); len(held) > 0 {
			text += ", or end who has them still: " + f.Found + "; " + f.Do
		}
		return nil, errors.New(text)
	}
	return mended, err
}

// grant is a row of grantsSQL: the name of a table, sequence or function, and the statement that grants a right on it.
type grant struct{ Object, Statement string }

// grantAgain repeats the grants on those objects that exist.
func grantAgain(ctx context.Context, tx pgx.Tx, grants []grant) error {
	for _, g := range grants {
		there, find := false, "to_regclass"
		if strings.HasSuffix(g.Object, ")") {
			find = "to_regprocedure"
		}
		err := tx.QueryRow(ctx, "SELECT "+find+"($1) IS NOT NULL", g.Object).Scan(&there)
		if err == nil && there {
			_, err = tx.Exec(ctx, g.Statement)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// versionHome returns the first schema of search_path, and the owner of the function rate_limit_version in it.
func (e *Examination) versionHome(ctx context.Context) (schema, owner string, err error) {
	pool, err := e.Open(ctx, e.InSchema)
	if err != nil {
		return "", "", err
	}
	defer pool.Close()
	err = pool.QueryRow(ctx, versionHomeSQL).Scan(&schema, &owner)
	return schema, owner, err
}
