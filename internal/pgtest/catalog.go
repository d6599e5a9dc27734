package pgtest

import (
	_ "embed"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

// InSchema returns a pool whose search_path is the schema and then public. InSchema creates a missing schema.
func (db *DB) InSchema(t *testing.T, schema string) *pgxpool.Pool {
	t.Helper()
	quoted := pgx.Identifier{schema}.Sanitize()
	_, err := db.Pool.Exec(t.Context(), "CREATE SCHEMA IF NOT EXISTS "+quoted)
	require.NoError(t, err)
	return db.OwnerPool(t, func(config *pgxpool.Config) {
		config.ConnConfig.RuntimeParams["search_path"] = quoted + ", public"
	})
}

// catalogSQL is a query that describes a schema.
//
//go:embed catalog.sql
var catalogSQL string

// Catalog returns a description of a schema's objects, by object and aspect.
func Catalog(t *testing.T, db Querier, schema string) map[string]string {
	t.Helper()
	rows, err := db.Query(t.Context(), catalogSQL, schema)
	require.NoError(t, err)
	all := map[string]string{}
	var object, value string
	_, err = pgx.ForEachRow(rows, []any{&object, &value}, func() error {
		require.NotContains(t, all, object)
		all[object] = value
		return nil
	})
	require.NoError(t, err)
	return all
}

// WithoutSchema replaces the schema's name in a catalog. WithoutSchema replaces each spelling of the name.
func WithoutSchema(catalog map[string]string, schema string) map[string]string {
	quoted := pgx.Identifier{schema}.Sanitize()
	setting := "'" + strings.ReplaceAll(schema, "'", "''") + "'" // the name's spelling in a function's definition
	array := strings.ReplaceAll(quoted, `"`, `\"`)               // the name's spelling in pg_proc.proconfig
	replacer := strings.NewReplacer(
		array+", pg_temp", "SCHEMA, pg_temp",
		schema+", pg_temp", "SCHEMA, pg_temp",
		setting, "SCHEMA",
		"$functionx$", "$function$", // pg_get_functiondef quotes a body that contains $function$ like this
		quoted+".", "",
		schema+".", "",
	)
	all := make(map[string]string, len(catalog))
	for object, value := range catalog {
		all[replacer.Replace(object)] = replacer.Replace(value)
	}
	return all
}

// Differences lists the differences between two catalogs.
func Differences(want, got map[string]string) []string {
	var all []string
	for object := range want {
		if got[object] != want[object] {
			all = append(all, fmt.Sprintf("%s: want %q, got %q", object, want[object], got[object]))
		}
	}
	for object := range got {
		if _, ok := want[object]; !ok {
			all = append(all, fmt.Sprintf("%s: want nothing, got %q", object, got[object]))
		}
	}
	slices.Sort(all)
	return all
}
