// Command gensql writes the migrations from the sources in sql/, which are what people edit:
//
//	go run ./internal/gensql           # writes migrations/*.sql
//	go run ./internal/gensql -check    # only tells whether they are up to date
//
// A migration that was released is never changed: it leaves this list, and what changes goes into a new one.
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
)

// migration is a file of package migrations and what it is made of. Its number is its place in the list.
type migration struct {
	file    string
	comment string
	sources []string // of sql/; version.sql is part of each
}

func migrations() []migration {
	return []migration{
		{
			file:    "00001_create_tables.sql",
			comment: `Makes the tables, in the schema that search_path names first. Down drops them, and every count with them.`,
			sources: []string{"tables.sql"},
		},
		{
			file: "00002_create_functions.sql",
			comment: `Makes the functions that decide, in the schema that search_path names first; they look for the tables of 00001 there, and
nowhere else. Down drops them and keeps the tables.`,
			sources: []string{"types.sql", "all.sql", "limit.sql", "reset.sql", "access.sql"},
		},
		{
			file:    "00003_create_sweep.sql",
			comment: `Makes the sweeper, in the schema that search_path names first. Down drops it and keeps the rows that it would have swept.`,
			sources: []string{"sweep.sql", "access.sql"},
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
const pin = `-- Whoever migrates may be a superuser, with a search_path of several schemas where others create: now only ours is looked into,
-- after pg_catalog.
SELECT pg_catalog.set_config('search_path', pg_catalog.format('%I, pg_temp', pg_catalog.current_schema()), true);
`

// table is one of those that hold limits.
type table struct {
	Name, Kind, Comment string
	If, Elsif           string // for what is to be done to the first table and to the second
	IfPart              string
	Is                  string // that a request is for this table
	Alias               string
}

// Of is the condition that a row of an alias is in the table.
func (t table) Of(alias string) string { return strings.Replace(t.Is, "durable", alias+".durable", 1) }

// algorithm is one that decides; a file of its name in sql/ has its rules.
type algorithm struct {
	Code                int
	Name                string
	Title               string
	Function            string
	Arguments           []string
	Limit, Span, Refill string // which arguments are these
	Above               string // the column that holds credit above the limit
}

// data is what the sources are written for.
type data struct {
	Tables     []table
	Algorithms []algorithm
	Few        int // of so many keys, one statement for all costs more than two for each
}

func schema() data {
	window := []string{"max_count", "window_us"}
	return data{
		Few: 8,
		Tables: []table{
			{Name: "ephemeral", Kind: "UNLOGGED TABLE", Comment: "Limits for abuse protection. Unlogged: fast, and empty again after a crash of the server.",
				If: "IF durable IS NOT TRUE THEN", Elsif: "ELSIF durable IS NOT TRUE THEN", IfPart: "IF NOT durables[part] THEN", Is: "NOT durable", Alias: "d"},
			{Name: "durable", Kind: "TABLE", Comment: "Limits for quotas and billing. Logged: kept over a crash of the server.",
				If: "ELSE", Elsif: "ELSE", IfPart: "ELSE", Is: "durable", Alias: "l"},
		},
		Algorithms: []algorithm{
			{1, "fixed", "The fixed window; see fixed.go", "rate_limit_fixed_window", window, "max_count", "window_us", "0::bigint", "credit"},
			{2, "sliding", "The sliding window counter; see sliding.go", "rate_limit_sliding_window", window, "max_count", "window_us", "0::bigint", "credit"},
			{3, "tokenbucket", "The token bucket; see tokenbucket.go", "rate_limit_token_bucket", []string{"capacity", "refill", "every_us"}, "capacity", "every_us", "refill", "count"},
			{4, "slidinglog", "The sliding window log; see slidinglog.go", "rate_limit_sliding_log", window, "max_count", "window_us", "0::bigint", "credit"},
		},
	}
}

// parse reads all sources. They are templates, so that what stands in several functions is written once.
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
		"split":  func(list string) []string { return strings.Split(list, ", ") },
		"prefix": func(with, list string) string { return with + strings.ReplaceAll(list, ", ", ", "+with) },
		"hang":   func(n int, text string) string { return strings.ReplaceAll(text, "\n", "\n"+strings.Repeat(" ", n)) },
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
	read := func(source string) (string, error) {
		var text strings.Builder
		err := sources.ExecuteTemplate(&text, source, schema())
		return text.String(), err
	}
	for _, source := range m.sources {
		content, err := read(source)
		if err != nil {
			return nil, err
		}
		write(&up, content)
		made = append(made, drops(content)...)
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
	if number > 1 {
		write(&up, says(number))
		write(&down, says(number-1))
	} else {
		write(&up, strings.Replace(says(number), "OR REPLACE ", "", 1)) // somebody else's would stay theirs
		down.WriteString(strings.Join(drops(version), "\n") + "\n")
	}
	head := "-- Generated by internal/gensql from sql/; do not edit.\n--\n-- " + strings.ReplaceAll(m.comment, "\n", "\n-- ")
	return fmt.Appendf(nil, "%s\n\n-- +goose Up\n%s%s\n-- +goose Down\n%s%s", head, pin, up.String(), pin, down.String()), nil
}

// versionMark stands in version.sql for the number of the migration.
const versionMark = "{version}"

// write writes a source in the format of goose, which splits at semicolons and does not know of dollar quotes.
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

// leadingComment splits a block behind the comment that it begins with.
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

// drops returns the statements that drop what a source makes, in the order in which it makes them.
func drops(source string) []string {
	var statements []string
	for _, at := range makes.FindAllStringSubmatchIndex(source, -1) {
		kind, name := strings.TrimPrefix(source[at[2]:at[3]], "UNLOGGED "), source[at[4]:at[5]]
		statement := "DROP " + kind + " " + name
		if kind == "FUNCTION" {
			statement += "(" + strings.Join(argumentTypes(source[at[5]:]), ", ") + ")"
		}
		statements = append(statements, statement+";")
	}
	return statements
}

// argumentTypes returns the types of a function's input arguments; the text begins with their parenthesis, and each argument has
// a line of its own, or all of them share one without defaults that contain a comma.
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
