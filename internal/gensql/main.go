// Command gensql writes the migrations from the sources in sql/, which are what people edit:
//
//	go run ./internal/gensql           # writes migrations/*.sql
//	go run ./internal/gensql -check    # only tells whether they are up to date
//
// A released migration never changes. It leaves the list below, and a new migration brings what changes.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/template"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
)

// migration is a file of package migrations, and what it is made of. Its number is its place in the list.
type migration struct {
	file    string
	comment string
	sources []string // files of sql/; each migration also has version.sql
}

func migrations() []migration {
	return []migration{
		{
			file: "00001_create_tables.sql",
			comment: `Makes the tables in the schema that search_path names first. Down drops them, and every count with
them.`,
			sources: []string{"tables.sql", "access.sql"},
		},
		{
			file: "00002_create_functions.sql",
			comment: `Makes the functions that decide, in the schema that search_path names first. They look for the
tables of 00001 there, and nowhere else. Down drops the functions and keeps the tables.`,
			sources: []string{
				"types.sql", "calendar.sql", "all.sql", "limit.sql", "takeall.sql", "reset.sql", "policy.sql",
				"allow.sql", "access.sql",
			},
		},
		{
			file: "00003_create_sweep.sql",
			comment: `Makes the sweeper in the schema that search_path names first. Down drops it, and keeps the rows
that it would have swept.`,
			sources: []string{"sweep.sql", "access.sql"},
		},
		{
			file: "00004_create_policies.sql",
			comment: `Makes the table of policies in the schema that search_path names first, and what checks and tells
it. Down drops them, and every policy with them.`,
			sources: []string{"policies.sql", "access.sql"},
		},
		{
			file: "00005_create_leases.sql",
			comment: `Makes the table in which processes tell what they hold by leases, in the schema that search_path
names first. Down drops it. No decision reads it.`,
			sources: []string{"leases.sql", "access.sql"},
		},
	}
}

func main() {
	root := flag.String("root", ".", "the root of the repository")
	check := flag.Bool("check", false, "write nothing, and fail if a file would change")
	flag.Parse()
	if err := generate(*root, *check); err != nil {
		fmt.Fprintln(os.Stderr, "gensql:", err)
		os.Exit(1)
	}
}

func generate(root string, check bool) error {
	sources, err := parse(filepath.Join(root, "sql"))
	if err != nil {
		return err
	}
	for i, m := range migrations() {
		want, err := m.text(sources, i+1)
		if err != nil {
			return err
		}
		path := filepath.Join(root, "migrations", m.file)
		switch is, err := os.ReadFile(path); { //nolint:gosec // a file of this repository
		case err == nil && bytes.Equal(is, want):
		case check:
			return fmt.Errorf("%s is not what sql/ says: run make sql", path)
		default:
			if err := os.WriteFile(path, want, 0o644); err != nil { //nolint:gosec // as git would write it
				return err
			}
		}
	}
	return nil
}

// pin begins both halves of a migration. It lasts until the end of their transaction.
const pin = `-- This may run as a superuser, with a search_path of several schemas in which others create. From here on,
-- names are looked up only in pg_catalog and then in our schema.
SELECT pg_catalog.set_config('search_path', pg_catalog.format('%I, pg_temp', pg_catalog.current_schema()), true);
`

// table is one of those that hold limits.
type table struct {
	Name, Kind, Comment string
	If                  string // what begins the branch for this table, by the argument durable
	IfPart              string // and by the element of a part in durables
	Is                  string // the condition that a request is for this table
	Alias               string
}

// Of is the condition that what the alias stands for is in the table.
func (t table) Of(alias string) string { return strings.Replace(t.Is, "durable", alias+".durable", 1) }

// rules are the rules of an algorithm. A file of its name in sql/ holds them.
type rules struct {
	algorithm.Algorithm

	Name                string
	Limit, Span, Refill string // the arguments for these
}

func rulesOf(a algorithm.Algorithm) rules {
	r := rules{Algorithm: a, Name: a.File, Limit: a.Arguments[0], Span: a.Arguments[1], Refill: "0::bigint"}
	if a.Refills() {
		r.Span, r.Refill = a.Arguments[2], a.Arguments[1]
	}
	return r
}

// Title is what people call it.
func (r rules) Title() string {
	return strings.ReplaceAll(strings.TrimPrefix(r.Function, "rate_limit_take_"), "_", " ")
}

// data is what the templates in sql/ are executed with.
type data struct {
	Tables     []table
	Algorithms []rules
	Made       []string // the tables that the migration has made, before access.sql
}

func schema() data {
	var all []rules
	for _, a := range algorithm.All() {
		all = append(all, rulesOf(a))
	}
	return data{
		Tables: []table{
			{
				Name: "ephemeral", Kind: "UNLOGGED TABLE",
				Comment: "Limits for abuse protection. Unlogged: fast, and empty again after a crash of the server.",
				If:      "IF durable IS NOT TRUE THEN",
				IfPart:  "IF NOT durables[part] THEN", Is: "NOT durable", Alias: "d",
			},
			{
				Name: "durable", Kind: "TABLE",
				Comment: "Limits for quotas and billing. Logged: kept over a crash of the server.",
				If:      "ELSE", IfPart: "ELSE", Is: "durable", Alias: "l",
			},
		},
		Algorithms: all,
	}
}

// parse reads all sources. They are templates, so that SQL that several functions share is written once.
func parse(dir string) (*template.Template, error) {
	all := template.New("")
	include := func(name string, about ...any) (string, error) {
		var text strings.Builder
		var of any
		if len(about) > 0 {
			of = about[0]
		}
		err := all.ExecuteTemplate(&text, name, of)
		return strings.Trim(text.String(), "\n"), err
	}
	has := func(name string) bool { return all.Lookup(name) != nil }
	all.Option("missingkey=error").Funcs(template.FuncMap{
		"include": include,
		"has":     has,
		"maybe": func(name string, about any) (string, error) {
			if !has(name) {
				return "", nil
			}
			return include(name, about)
		},
		"dict": func(pairs ...any) map[string]any {
			dict := map[string]any{}
			for i := 0; i < len(pairs); i += 2 {
				dict[pairs[i].(string)] = pairs[i+1] //nolint:forcetypeassert // or the template is wrong
			}
			return dict
		},
		"join":   func(names []string) string { return strings.Join(names, ", ") },
		"type":   algorithm.TypeOf,
		"split":  func(list string) []string { return strings.Split(list, ", ") },
		"prefix": func(with, list string) string { return with + strings.ReplaceAll(list, ", ", ", "+with) },
		"hang": func(n int, text string) string {
			return strings.ReplaceAll(text, "\n", "\n"+strings.Repeat(" ", n))
		},
		"fold": fold,
		"column": func(name, by, column, units string) (string, error) {
			if !has(name + "." + by) {
				return "", nil
			}
			expressions, err := include(name+"."+by, units)
			if err != nil || by != "values" {
				return assigned(expressions, column), err
			}
			columns, err := include(name + ".insert")
			return inserted(columns, expressions, column), err
		},
		"indent": func(n int, text string) string {
			return strings.Repeat(" ", n) + strings.ReplaceAll(text, "\n", "\n"+strings.Repeat(" ", n))
		},
	})
	_, err := all.ParseGlob(filepath.Join(dir, "*.sql"))
	return all, err
}

// text is the migration of a number in the format of goose.
func (m migration) text(sources *template.Template, number int) ([]byte, error) {
	var up, down strings.Builder
	var made []string
	about := schema()
	if number == 1 { // the plain goose command has made it
		about.Made = []string{"rate_limit_goose_version"}
	}
	read := func(source string) (string, error) {
		var text strings.Builder
		err := sources.ExecuteTemplate(&text, source, about)
		return text.String(), err
	}
	for _, source := range m.sources {
		content, err := read(source)
		if err != nil {
			return nil, err
		}
		write(&up, content)
		for _, statement := range drops(content) {
			made = append(made, statement)
			if table, ok := strings.CutPrefix(statement, "DROP TABLE IF EXISTS "); ok {
				about.Made = append(about.Made, strings.TrimSuffix(table, ";"))
			}
		}
	}
	slices.Reverse(made)
	for _, statement := range made {
		down.WriteString("\n" + statement)
	}
	down.WriteString("\n")
	version, err := read("version.sql")
	if err != nil {
		return nil, err
	}
	says := func(number int) string { return strings.ReplaceAll(version, versionMark, strconv.Itoa(number)) }
	// Replacing a function would leave it to its owner, who may be a stranger. So the one of the version before is
	// dropped.
	drop := "\n" + strings.Join(drops(version), "\n") + "\n"
	down.WriteString(drop)
	if number > 1 {
		up.WriteString(drop)
		write(&down, says(number-1))
	}
	write(&up, says(number))
	head := "-- Generated by internal/gensql from sql/; do not edit.\n--\n-- " +
		strings.ReplaceAll(m.comment, "\n", "\n-- ")
	return fmt.Appendf(nil, "%s\n\n-- +goose Up\n%s%s\n-- +goose Down\n%s%s",
		head, pin, up.String(), pin, down.String()), nil
}

// maxColumns is how long a line of SQL may be.
const maxColumns = 120

// fold breaks a list of one line, so that it fits where its lines are indented by n spaces.
func fold(n int, list string) string {
	var text strings.Builder
	column := n
	for i, item := range strings.Split(list, ", ") {
		switch {
		case i == 0:
		case column+len(", ")+len(item)+len(",") > maxColumns:
			text.WriteString(",\n" + strings.Repeat(" ", n))
			column = n
		default:
			text.WriteString(", ")
			column += len(", ")
		}
		text.WriteString(item)
		column += len(item)
	}
	return text.String()
}

// assigned is what a column is set to in a list of assignments, or nothing.
func assigned(list, column string) string {
	for _, item := range items(list) {
		if expression, ok := strings.CutPrefix(item, column+" = "); ok {
			return expression
		}
	}
	return ""
}

// inserted is what a column gets from an INSERT whose columns begin with a prefix and a key, or nothing. The
// expressions are for those behind them.
func inserted(columns, expressions, column string) string {
	place := slices.Index(items(strings.Trim(columns, "()")), column) - len([]string{"prefix", "key"})
	if place < 0 {
		return ""
	}
	return items(expressions)[place]
}

// items splits a list at the commas that are not in parentheses.
func items(list string) []string {
	var all []string
	depth, from := 0, 0
	for i, c := range list {
		switch {
		case c == '(':
			depth++
		case c == ')':
			depth--
		case c == ',' && depth == 0:
			all = append(all, strings.TrimSpace(list[from:i]))
			from = i + 1
		}
	}
	return append(all, strings.TrimSpace(list[from:]))
}

// versionMark stands in version.sql for the number of the migration.
const versionMark = "{version}"

// write writes a source in the format of goose. goose splits at semicolons, and does not know dollar quotes.
func write(to *strings.Builder, source string) {
	for _, block := range blocks(source) {
		to.WriteString("\n")
		if comment, statement := leadingComment(block); strings.Contains(block, "$$") {
			fmt.Fprintf(to, "%s-- +goose StatementBegin\n%s\n-- +goose StatementEnd\n", comment, statement)
		} else {
			to.WriteString(block + "\n")
		}
	}
}

// blocks splits a source at the empty lines between its statements.
func blocks(source string) []string {
	var all []string
	inBody := false
	var block []string
	end := func() {
		if len(block) > 0 {
			all = append(all, strings.Join(block, "\n"))
		}
		block = nil
	}
	for line := range strings.SplitSeq(source, "\n") {
		if line == "" && !inBody {
			end()
			continue
		}
		block = append(block, line)
		if strings.Count(line, "$$")%2 == 1 {
			inBody = !inBody
		}
	}
	end()
	return all
}

// leadingComment splits a block after the comment that it begins with.
func leadingComment(block string) (comment, statement string) {
	statement = block
	for strings.HasPrefix(statement, "--") {
		_, statement, _ = strings.Cut(statement, "\n")
	}
	return strings.TrimSuffix(block, statement), statement
}

var (
	makes    = regexp.MustCompile(`(?m)^CREATE (?:OR REPLACE )?(UNLOGGED TABLE|TABLE|TYPE|FUNCTION) (\w+)`)
	comments = regexp.MustCompile(`\s*--[^\n]*`)
)

// drops returns the statements that drop what a source makes, in the order in which it is made.
func drops(source string) []string {
	var statements []string
	for _, at := range makes.FindAllStringSubmatchIndex(source, -1) {
		kind, name := strings.TrimPrefix(source[at[2]:at[3]], "UNLOGGED "), source[at[4]:at[5]]
		// What is missing is no reason to keep the rest: "down" and "up" mend a schema that somebody has damaged.
		statement := "DROP " + kind + " IF EXISTS " + name
		if kind == "FUNCTION" {
			statement = fold(4, statement+"("+strings.Join(argumentTypes(source[at[5]:]), ", ")+")")
		}
		statements = append(statements, statement+";")
	}
	return statements
}

// argumentTypes returns the types of a function's input arguments. The text begins with their parenthesis. Each
// argument has a line of its own, or all of them share one line and no default contains a comma.
func argumentTypes(text string) []string {
	list, _, _ := strings.Cut(text, ")\n")
	list, _, _ = strings.Cut(list, "\n)") // of a list of several lines
	list = comments.ReplaceAllString(strings.TrimPrefix(list, "("), "")
	var types []string
	for argument := range strings.SplitSeq(list, ",") {
		argument, _, _ = strings.Cut(strings.TrimSpace(argument), " DEFAULT ")
		if name, kind, ok := strings.Cut(argument, " "); ok && name != "OUT" {
			types = append(types, kind)
		}
	}
	return types
}
