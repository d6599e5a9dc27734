// Command gensql generates the migrations from the files in sql/:
//
//	go run ./internal/gensql           # writes migrations/*.sql
//	go run ./internal/gensql -check    # fails if a migration would change
//
// A migration consists of some of these files, annotations for goose, and statements for the way down. A released
// migration never changes. CONTRIBUTING.md describes the way to the next one.
package main

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// migration describes a file of package migrations. The number of a migration is its place in the list, from 1.
type migration struct {
	file    string
	comment string
	sources []string // names of files in sql/, without .sql; version.sql is added to each migration

	// released is the SHA-256 of the file as it was released. The file is then never written again.
	released string

	// up and down are statements that the two halves begin with: DROP FUNCTION for a function that goes, or whose
	// arguments or result change, and for its twin; ALTER TABLE. With the arguments, a function loses its grants.
	up, down string
}

func migrations() []migration {
	return []migration{
		{
			file: "00001_create_tables.sql",
			comment: `Makes the tables in the schema that search_path names first. Down drops the tables with all counts
and policies.`,
			sources: []string{"tables", "rights"},
		},
		{
			file: "00002_create_functions.sql",
			comment: `Makes the functions in the schema that search_path names first. They use only the tables in this
schema. Down drops the functions and keeps the tables.`,
			sources: []string{
				"types", "fixed", "sliding", "tokenbucket", "slidinglog", "calendar", "concurrency", "all", "refund",
				"charge", "reserve", "hold", "left", "takeall", "reset", "policy", "allow", "twins", "sweep",
				"policies",
				"access",
			},
		},
		{
			file: "00003_create_triggers.sql",
			comment: `Makes the triggers that check policies and record who changed a policy. Revokes the rights of
other roles to change the tables. Down drops the triggers.`,
			sources: []string{"triggers", "rights"},
		},
	}
}

func main() {
	root := flag.String("root", ".", "the root of the repository")
	check := flag.Bool("check", false, "write nothing, and fail if a file would change")
	flag.Parse()
	if err := generate(*root, migrations(), *check); err != nil {
		fmt.Fprintln(os.Stderr, "gensql:", err)
		os.Exit(1)
	}
}

func generate(root string, list []migration, check bool) error {
	made := map[string][]string{} // by the migrations so far; see record
	for i, m := range list {
		path := filepath.Join(root, "migrations", m.file)
		is, err := os.ReadFile(path) //nolint:gosec // a file of this repository
		if m.released != "" {
			if sum := sha256.Sum256(is); hex.EncodeToString(sum[:]) != m.released {
				return fmt.Errorf("%s is not what was released: restore it", path)
			}
			record(made, string(is))
			continue
		}
		want, textErr := m.text(filepath.Join(root, "sql"), i+1, made)
		if textErr != nil {
			return textErr
		}
		record(made, string(want))
		switch {
		case err == nil && bytes.Equal(is, want):
		case check:
			return fmt.Errorf("%s is not what sql/ says: run make sql", path)
		default:
			if err := os.WriteFile(path, want, 0o644); err != nil { //nolint:gosec // the mode that git would use
				return err
			}
		}
	}
	return nil
}

// pin begins the up half and the down half of each migration. The setting ends with the migration's transaction.
const pin = `-- From here on, Postgres looks for names only in pg_catalog and then in the schema of the limiter.
-- The migration may run as a superuser, and search_path may name schemas where other users can create objects.
SELECT pg_catalog.set_config('search_path', pg_catalog.format('%I, pg_temp', pg_catalog.current_schema()), true);
`

//go:embed keep.sql
var keep string // remembers who may execute the functions

//go:embed give.sql
var give string // gives these rights back

// text returns the migration with this number in goose's format. Each half is marked as one statement, because goose
// splits statements at semicolons even within dollar quotes. made has what the earlier migrations make.
//
// If the migration changes functions of earlier ones, it replaces them and keeps their grants, and runs the blocks of
// twins.sql and access.sql again. Its way down makes the earlier functions again.
func (m migration) text(dir string, number int, made map[string][]string) ([]byte, error) {
	read := func(names ...string) (string, error) {
		var all strings.Builder
		for _, name := range names {
			content, err := os.ReadFile(filepath.Join(dir, name+".sql")) //nolint:gosec // a file of this repository
			if err != nil {
				return "", err
			}
			all.WriteString("\n" + string(content))
		}
		return all.String(), nil
	}
	sources, err := read(m.sources...)
	if err != nil {
		return nil, err
	}
	version, err := read("version")
	if err != nil {
		return nil, err
	}
	says := func(number int) string {
		return versionIn.ReplaceAllString(version, fmt.Sprintf("SELECT %d::bigint", number))
	}
	// Drop the previous version's function first. A replaced function keeps its owner, who may not be trusted.
	drop := "\n" + drops(version, nil)
	up, down := m.up+sources, m.down+"\n"+drops(sources, made)
	var names, again []string // the functions that change or go, and the statements that make the earlier ones
	changes := word.FindAllStringSubmatch(m.up, -1)
	for _, match := range append(changes, makes.FindAllStringSubmatch(sources, -1)...) {
		name := match[len(match)-1]
		if statements := made[name]; len(statements) > 0 && !slices.Contains(names, "'"+name+"'") {
			names, again = append(names, "'"+name+"'"), append(again, statements...)
		}
	}
	if len(names) > 0 {
		rest, err := read("twins", "access")
		if err != nil {
			return nil, err
		}
		keep := "\n" + strings.Replace(keep, "'names'", fold("            "+strings.Join(names, ", ")), 1)
		replace := func(sql string) string { return creates.ReplaceAllString(sql, "CREATE OR REPLACE FUNCTION ") }
		up = keep + m.up + replace(sources) + rest + "\n" + give
		down = keep + m.down + "\n" + drops(sources+rest, made) +
			"\n" + replace(strings.Join(slices.Concat(again, made[blocks]), "\n")) + "\n" + give
	}
	up, down = pin+up, pin+down+drop
	if number > 1 {
		up, down = up+drop, down+says(number-1)
	}
	up += says(number)
	return fmt.Appendf(nil, "-- Generated by internal/gensql from sql/; do not edit.\n--\n-- %s\n\n"+
		"-- +goose Up\n-- +goose StatementBegin\n%s-- +goose StatementEnd\n\n"+
		"-- +goose Down\n-- +goose StatementBegin\n%s-- +goose StatementEnd\n",
		strings.ReplaceAll(m.comment, "\n", "\n-- "), up, down), nil
}

// blocks is the key in made of the blocks of twins.sql and access.sql. It is no name of an object.
const blocks = ""

// record adds to made what a migration makes: for each function and type, by its name, the statements that make and
// describe it, and the blocks that follow the functions.
func record(made map[string][]string, migration string) {
	up, _, _ := strings.Cut(migration, "-- +goose Down\n")
	for _, twin := range twinsIn(up) {
		made[twin] = nil
	}
	var does []string
	functions, inBody, statement := false, false, ""
	for line := range strings.Lines(up) {
		if statement == "" && (strings.HasPrefix(line, "--") || strings.TrimSpace(line) == "") {
			continue
		}
		statement += line
		inBody = inBody != (strings.Count(line, "$$")%2 == 1)
		if inBody || !strings.HasSuffix(line, ";\n") {
			continue
		}
		found := describes.FindStringSubmatch(statement)
		switch {
		case found != nil && found[2] == "rate_limit_version":
		case found != nil && found[1] != "COMMENT ON ":
			made[found[2]] = []string{statement}
			functions = true
		case found != nil:
			made[found[2]] = append(made[found[2]], statement)
		case strings.HasPrefix(statement, "DO ") && !strings.Contains(statement, "rate_limit.grants"):
			does = append(does, statement)
		}
		statement = ""
	}
	if functions {
		made[blocks] = does
	}
}

var (
	// versionIn matches the number of the last migration in version.sql.
	versionIn = regexp.MustCompile(`SELECT \d+::bigint`)

	makes   = regexp.MustCompile(`(?m)^CREATE (?:UNLOGGED )?(TABLE|TYPE|FUNCTION) (\w+)`)
	word    = regexp.MustCompile(`\w+`)
	creates = regexp.MustCompile(`(?m)^CREATE (?:OR REPLACE )?FUNCTION `)
	// describes matches the statements that make a function or type, or comment on it.
	describes = regexp.MustCompile(`^(CREATE (?:OR REPLACE )?|COMMENT ON )(?:FUNCTION|TYPE) (\w+)`)
	triggers  = regexp.MustCompile(`(?m)^CREATE TRIGGER (\w+) .* ON (\w+)$`)
	// twins matches calls of the functions that twins.sql generates, and originals matches the names in its list.
	twins     = regexp.MustCompile(`\b_rate_limit_\w+_durable\b`)
	originals = regexp.MustCompile(`'(_rate_limit_\w+_)ephemeral'`)
)

// drops returns DROP IF EXISTS for the objects of sources that are not in made, so that "down" and "up" can repair a
// damaged schema.
func drops(sources string, made map[string][]string) string {
	names := map[string][]string{}
	add := func(kind, name string) {
		if _, there := made[name]; !there && !slices.Contains(names[kind], name) {
			names[kind] = append(names[kind], name)
		}
	}
	for _, match := range makes.FindAllStringSubmatch(sources, -1) {
		add(match[1], match[2])
	}
	for _, twin := range twinsIn(sources) {
		add("FUNCTION", twin)
	}
	var statements strings.Builder
	for _, match := range triggers.FindAllStringSubmatch(sources, -1) {
		fmt.Fprintf(&statements, "DROP TRIGGER IF EXISTS %s ON %s;\n", match[1], match[2])
	}
	for _, kind := range []string{"TABLE", "FUNCTION", "TYPE"} { // functions are dropped before the types that they use
		if len(names[kind]) > 0 {
			statements.WriteString(fold("DROP "+kind+" IF EXISTS "+strings.Join(names[kind], ", ")) + ";\n")
		}
	}
	return statements.String()
}

// twinsIn returns the functions that twins.sql makes, as far as sources call or list them.
func twinsIn(sources string) []string {
	all := twins.FindAllString(sources, -1)
	for _, match := range originals.FindAllStringSubmatch(sources, -1) {
		all = append(all, match[1]+"durable")
	}
	return all
}

// fold breaks a list into lines of at most 120 columns.
func fold(list string) string {
	var text strings.Builder
	column := 0
	for i, item := range strings.Split(list, ", ") {
		switch {
		case i == 0:
		case column+len(", ")+len(item)+len(",") > 120:
			text.WriteString(",\n    ")
			column = 4
		default:
			text.WriteString(", ")
			column += len(", ")
		}
		text.WriteString(item)
		column += len(item)
	}
	return text.String()
}
