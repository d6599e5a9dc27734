// Package shards generates the SQL for a proxy's database and its shards.
package shards

import (
	"bytes"
	"context"
	"embed"
	"slices"
	"strings"
	"text/template"

	"github.com/jackc/pgx/v5"
)

// Server is the name of the foreign server. Its options p0, p1 and so on are the shards' connection strings.
const Server = "rate_limit_shards"

// Source is the part of a migrated database that a proxy needs.
type Source struct {
	Version   int64
	Decision  []Argument // the columns of rate_limit_decision
	Functions []Function
}

// Function is a function that applications call.
type Function struct {
	Name      string
	Arguments string // as declared
	Result    string
	Set       bool // it returns rows
	In, Out   []Argument

	ByKey     bool // it has one key argument
	Policy    bool // and a policy's text
	ByKeys    bool // it decides many keys
	Together  bool // it decides many keys, and all must be on the same shard
	Sets      bool // and each may be a set of keys
	Sweeps    bool
	Transacts bool // it can run within the caller's transaction
}

// Argument is a function's argument, or a column.
type Argument struct{ Name, Type string }

// PerKey tells whether the argument is an array with an element for each key, in a function that decides many keys.
func (a Argument) PerKey() bool { return strings.HasSuffix(a.Type, "[]") }

// PerKey returns the arguments with an element for each key.
func (f Function) PerKey() []Argument {
	return slices.DeleteFunc(slices.Clone(f.In), func(a Argument) bool { return !a.PerKey() })
}

// readSQL reads the functions that applications call.
const readSQL = `
SELECT p.proname::text,
    pg_catalog.pg_get_function_arguments(p.oid),
    pg_catalog.pg_get_function_result(p.oid),
    p.proretset,
    p.proargnames,
    ARRAY(SELECT pg_catalog.format_type(t.type, NULL)
        FROM pg_catalog.unnest(coalesce(p.proallargtypes, p.proargtypes::pg_catalog.oid[]))
            WITH ORDINALITY AS t (type, place) ORDER BY t.place),
    p.pronargs::integer
FROM pg_catalog.pg_proc AS p
WHERE p.pronamespace = $1::pg_catalog.regnamespace AND (p.proname IN (
        'rate_limit_allow', 'rate_limit_peek', 'rate_limit_reset', 'rate_limit_sweep',
        'rate_limit_policies', 'rate_limit_ban', 'rate_limit_report')
    OR p.proretset AND p.prorettype = pg_catalog.to_regtype($1 || '.rate_limit_decision') AND p.proname LIKE 'rate%'
    OR p.prorettype = 'bigint[]'::pg_catalog.regtype AND p.proname LIKE 'rate#_limit#_take#_%' ESCAPE '#')
    -- The proxy's superuser will run what is made of this, so a stranger's functions do not count.
    AND p.proname ~ '^[a-z_]+$'
    AND NOT EXISTS (SELECT FROM pg_catalog.unnest(p.proargnames) AS a (name) WHERE a.name !~ '^[a-z_]+$')
    AND p.proowner = (SELECT c.relowner FROM pg_catalog.pg_class AS c
        WHERE c.oid = pg_catalog.to_regclass($1 || '.rate_limit_ephemeral'))
ORDER BY p.proname`

// Read reads the data for a proxy from a migrated database.
func Read(ctx context.Context, conn *pgx.Conn, schema string) (s Source, err error) {
	quoted := pgx.Identifier{schema}.Sanitize()
	// Any role that may create in the schema could have made the function, so it is only read and never called.
	if err := conn.QueryRow(ctx, `
SELECT pg_catalog.substring(p.prosrc, '[0-9]+')::bigint FROM pg_catalog.pg_proc AS p
WHERE p.pronamespace = $1::pg_catalog.regnamespace AND p.proname = 'rate_limit_version' AND p.pronargs = 0`, quoted,
	).Scan(&s.Version); err != nil {
		return s, err
	}
	rows, err := conn.Query(ctx, `
SELECT a.attname::text, pg_catalog.format_type(a.atttypid, a.atttypmod)
FROM pg_catalog.pg_attribute AS a
WHERE a.attrelid = pg_catalog.to_regclass($1 || '.rate_limit_decision') AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum`, quoted)
	if err == nil {
		s.Decision, err = pgx.CollectRows(rows, pgx.RowToStructByPos[Argument])
	}
	if err != nil {
		return s, err
	}
	if rows, err = conn.Query(ctx, readSQL, quoted); err != nil {
		return s, err
	}
	s.Functions, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (f Function, err error) {
		var names, types []string
		var inputs int
		if err := row.Scan(&f.Name, &f.Arguments, &f.Result, &f.Set, &names, &types, &inputs); err != nil {
			return f, err
		}
		for i := range names {
			if a := (Argument{names[i], types[i]}); i < inputs {
				f.In = append(f.In, a)
			} else {
				f.Out = append(f.Out, a)
			}
		}
		f.classify(quoted)
		return f, nil
	})
	return s, err
}

// classify determines how a function's calls are routed to the shards.
func (f *Function) classify(schema string) {
	has := func(name string) bool {
		return slices.ContainsFunc(f.In, func(a Argument) bool { return a.Name == name })
	}
	if strings.HasSuffix(f.Result, "rate_limit_decision") {
		f.Result, f.ByKeys, f.Sets = "SETOF "+schema+".rate_limit_decision", true, has("requests")
	}
	f.Sweeps = f.Name == "rate_limit_sweep"
	switch f.Name {
	case "rate_limit_allow", "rate_limit_peek", "rate_limit_reset":
		f.ByKey, f.Policy = true, has("policy")
	}
	f.Together = f.Result == "bigint[]"
	f.Transacts = has("lock_timeout_ms") && (f.ByKey || f.ByKeys || f.Together)
}

//go:embed *.tmpl.sql
var files embed.FS

//nolint:gochecknoglobals // nobody changes them
var templates = template.Must(template.New("").Funcs(template.FuncMap{"literal": literal}).ParseFS(files, "*.tmpl.sql"))

// Proxy returns the SQL that creates or replaces a proxy's functions, for their owner. Only a superuser can run it.
func (s Source) Proxy(schema, owner string, shards int) (string, error) {
	var text bytes.Buffer
	err := templates.ExecuteTemplate(&text, "proxy.tmpl.sql", struct {
		Source

		Schema, Owner string
		Shards        int
	}{s, pgx.Identifier{schema}.Sanitize(), owner, shards})
	return text.String(), err
}

// Shard returns the SQL that a migrated database needs to become a shard.
func (s Source) Shard(schema string) (string, error) {
	var text bytes.Buffer
	err := templates.ExecuteTemplate(&text, "shard.tmpl.sql", struct {
		Source

		Schema string
	}{s, pgx.Identifier{schema}.Sanitize()})
	return text.String(), err
}

// literal quotes a text for SQL, for any value of standard_conforming_strings.
func literal(text string) string {
	return "E'" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(text) + "'"
}
