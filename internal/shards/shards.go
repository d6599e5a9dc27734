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

// Server is the name of PL/Proxy's foreign server. The options p0, p1 and so on are the shards' connection strings.
const Server = "rate_limit_shards"

// Source describes the functions of a migrated database that a proxy needs too.
type Source struct {
	Version   int64
	Decision  []Argument // the columns of rate_limit_decision
	Functions []Function
}

// Function describes an SQL function that applications call.
type Function struct {
	Name      string
	Arguments string // the arguments as pg_get_function_arguments prints them
	Result    string
	Set       bool // whether the function returns rows
	In, Out   []Argument

	ByKey     bool // whether the function has the argument key
	ByHold    bool // whether the function has the argument hold, whose text names the shard
	BySlot    bool // whether the function has the argument slot, which names the shard
	BySlots   bool // whether the function has an array of slots
	Policy    bool // whether the function has the arguments key and policy
	ByKeys    bool // whether the function decides an array of keys
	Together  bool // whether all keys of a call must be on the same shard
	Sets      bool // whether the keys of a request must be on the same shard
	Sweeps    bool
	Transacts bool // whether the function can run in the caller's transaction
}

// Argument is an argument of a function, or a column.
type Argument struct{ Name, Type string }

// PerKey tells whether the argument is an array with an element for each key. PerKey is only valid in functions that
// decide many keys.
func (a Argument) PerKey() bool { return strings.HasSuffix(a.Type, "[]") }

// PerKey returns the arguments that have an element for each key.
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
        'rate_limit_allow', 'rate_limit_peek', 'rate_limit_charge', 'rate_limit_reserve', 'rate_limit_reset',
        'rate_limit_hold', 'rate_limit_settle', 'rate_limit_cancel', 'rate_limit_extend', 'rate_limit_find_hold',
        'rate_limit_acquire', 'rate_limit_renew', 'rate_limit_renew_all', 'rate_limit_release', 'rate_limit_sweep',
        'rate_limit_policies', 'rate_limit_ban', 'rate_limit_report')
    OR p.proretset AND p.prorettype = pg_catalog.to_regtype($1 || '.rate_limit_decision') AND p.proname LIKE 'rate%'
    OR p.prorettype = 'bigint[]'::pg_catalog.regtype AND p.proname LIKE 'rate#_limit#_take#_%' ESCAPE '#')
    -- A superuser will run SQL that is made from these rows, so leave out other owners and odd names.
    AND p.proname ~ '^[a-z_]+$'
    AND NOT EXISTS (SELECT FROM pg_catalog.unnest(p.proargnames) AS a (name) WHERE a.name !~ '^[a-z_]+$')
    AND p.proowner = (SELECT c.relowner FROM pg_catalog.pg_class AS c
        WHERE c.oid = pg_catalog.to_regclass($1 || '.rate_limit_ephemeral'))
ORDER BY p.proname`

// Read reads the Source from a migrated database.
func Read(ctx context.Context, conn *pgx.Conn, schema string) (s Source, err error) {
	quoted := pgx.Identifier{schema}.Sanitize()
	// Read the version from the function's text. Calling the function would not be safe, because any role that may
	// create objects in the schema could have created it.
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

// classify sets the fields that say how calls of a function reach the shards.
func (f *Function) classify(schema string) {
	has := func(name string) bool {
		return slices.ContainsFunc(f.In, func(a Argument) bool { return a.Name == name })
	}
	if strings.HasSuffix(f.Result, "rate_limit_decision") {
		f.Result, f.ByKeys, f.Sets = "SETOF "+schema+".rate_limit_decision", true, has("requests")
	}
	f.Sweeps = f.Name == "rate_limit_sweep"
	switch f.Name {
	case "rate_limit_allow", "rate_limit_peek", "rate_limit_charge", "rate_limit_reserve", "rate_limit_hold",
		"rate_limit_reset", "rate_limit_acquire":
		f.ByKey, f.Policy = true, has("policy")
	case "rate_limit_settle", "rate_limit_cancel", "rate_limit_extend", "rate_limit_find_hold":
		f.ByHold = true
	case "rate_limit_renew", "rate_limit_release":
		f.BySlot = true
	case "rate_limit_renew_all":
		f.BySlots = true
	}
	f.Together = f.Result == "bigint[]"
	f.Transacts = has("lock_timeout_ms") && (f.ByKey || f.ByKeys || f.BySlots || f.Together)
}

//go:embed *.tmpl.sql
var files embed.FS

//nolint:gochecknoglobals // nobody changes them
var templates = template.Must(template.New("").Funcs(template.FuncMap{"literal": literal}).ParseFS(files, "*.tmpl.sql"))

// Proxy returns the SQL that a superuser runs to create or replace a proxy's functions. They will belong to owner.
func (s Source) Proxy(schema, owner string, shards int) (string, error) {
	var text bytes.Buffer
	err := templates.ExecuteTemplate(&text, "proxy.tmpl.sql", struct {
		Source

		Schema, Owner string
		Shards        int
	}{s, pgx.Identifier{schema}.Sanitize(), owner, shards})
	return text.String(), err
}

// Shard returns the SQL that turns a migrated database into a shard.
func (s Source) Shard(schema string) (string, error) {
	var text bytes.Buffer
	err := templates.ExecuteTemplate(&text, "shard.tmpl.sql", struct {
		Source

		Schema string
	}{s, pgx.Identifier{schema}.Sanitize()})
	return text.String(), err
}

// literal quotes a text for SQL. The result does not depend on standard_conforming_strings.
func literal(text string) string {
	return "E'" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(text) + "'"
}
