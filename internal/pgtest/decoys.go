package pgtest

import (
	"context"
	_ "embed"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/testkit"
)

//go:embed decoys.sql
var decoysSQL string

// DecoyRole is the role that creates the decoys. Every server has this role, and the limiter does not use it.
const DecoyRole = "pg_monitor"

var calls = regexp.MustCompile(`(\w+)\s*\(`)

// Decoys creates overloads of Postgres's functions and operators in the schema and in public. An overload fails with
// the word "decoy". Decoys overloads everything that the schema's functions call or that the texts contain, and also
// the schema's functions. The overloads belong to a role that can only create objects in these schemas. If
// RATELIMIT_TEST_ROUNDS is more than 1, two arguments have all combinations of types, and Decoys takes twice as long.
func (db *DB) Decoys(t testing.TB, schema string, texts ...string) {
	t.Helper()
	const types = "text name bigint integer smallint boolean numeric timestamptz tid " +
		"text[] bigint[] integer[] smallint[] boolean[]"
	mixed := "text name bigint integer smallint boolean numeric"
	if testkit.Rounds(t, "RATELIMIT_TEST_ROUNDS", 1) > 1 {
		mixed = types
	}
	db.decoys(t, types, mixed, schema, texts)
}

// SomeDecoys creates decoys for the most frequent types only, in less time.
func (db *DB) SomeDecoys(t testing.TB, schema string, texts ...string) {
	t.Helper()
	db.decoys(t, "text bigint integer boolean text[] bigint[]", "text bigint integer boolean", schema, texts)
}

// Statements returns the statements of the limiters and of the sweeper. root is the path of the repository.
func Statements(t testing.TB, root string) (statements []string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(root, "internal", "*", "call", "*.sql"))
	if err != nil || files == nil {
		t.Fatal("no statements: ", err)
	}
	for _, file := range append(files, filepath.Join(root, "cleanup", "sweep.sql")) {
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		statements = append(statements, string(content))
	}
	return statements
}

func (db *DB) decoys(t testing.TB, types, mixed, schema string, texts []string) {
	t.Helper()
	rows, err := db.Pool.Query(t.Context(), "SELECT prosrc FROM pg_proc "+
		"WHERE pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = $1)", schema)
	if err != nil {
		t.Fatal(err)
	}
	bodies, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Join(append(texts, bodies...), "\n")
	var names []string
	for _, match := range calls.FindAllStringSubmatch(text, -1) {
		names = append(names, match[1])
	}
	slices.Sort(names)
	// Create decoys in the schema last. If decoys got decoys, there would be four times as many.
	schemas := []string{"public", schema}
	for _, where := range slices.Compact(schemas) {
		if err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), "GRANT USAGE, CREATE ON SCHEMA "+quote(where)+", "+quote(schema)+
				" TO "+DecoyRole+"; SET LOCAL ROLE "+DecoyRole); err != nil {
				return err
			}
			for name, value := range map[string]string{
				"text": text, "names": strings.Join(slices.Compact(names), " "),
				"schema": where, "ours": schema, "types": types, "mixed": mixed,
			} {
				if _, err := tx.Exec(t.Context(),
					"SELECT set_config('decoys.' || $1::text, $2, true)", name, value); err != nil {
					return err
				}
			}
			_, err := tx.Exec(context.WithoutCancel(t.Context()), decoysSQL, pgx.QueryExecModeSimpleProtocol)
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
}
