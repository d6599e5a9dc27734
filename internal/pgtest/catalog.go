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

// InSchema returns a pool whose search_path names the schema first, and then public. It makes the schema if need
// be.
func (db *DB) InSchema(t *testing.T, schema string) *pgxpool.Pool {
	t.Helper()
	quoted := pgx.Identifier{schema}.Sanitize()
	_, err := db.Pool.Exec(t.Context(), "CREATE SCHEMA IF NOT EXISTS "+quoted)
	require.NoError(t, err)
	return db.OwnerPool(t, func(config *pgxpool.Config) {
		config.ConnConfig.RuntimeParams["search_path"] = quoted + ", public"
	})
}

// catalogSQL describes a schema.
//
//go:embed catalog.sql
var catalogSQL string

// Catalog returns what the catalogs say about a schema, by object and aspect.
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

// WithoutSchema returns a catalog without the name of its schema, in whatever way that is written.
func WithoutSchema(catalog map[string]string, schema string) map[string]string {
	quoted := pgx.Identifier{schema}.Sanitize()
	setting := "'" + strings.ReplaceAll(schema, "'", "''") + "'" // as a function's definition has it
	array := strings.ReplaceAll(quoted, `"`, `\"`)               // as pg_proc.proconfig has it
	replacer := strings.NewReplacer(
		array+", pg_temp", "SCHEMA, pg_temp",
		schema+", pg_temp", "SCHEMA, pg_temp",
		setting, "SCHEMA",
		"$functionx$", "$function$", // how a definition quotes a body that has the other in it
		quoted+".", "",
		schema+".", "",
	)
	all := make(map[string]string, len(catalog))
	for object, value := range catalog {
		all[replacer.Replace(object)] = replacer.Replace(value)
	}
	return all
}

// Differences lists what differs between two catalogs.
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
