// Package catalog compares the tables, types and functions in a database with those that the migrations create. So
// differences show objects that were changed or created without the migrations.
package catalog

import (
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

//go:embed read.sql
var readSQL string

// madeJSON describes the schema after each migration. "make sql" writes it from a database, and TestMade compares it
// with the database on each version of Postgres.
//
//go:embed made.json
var madeJSON []byte

// Catalog holds the limiter's objects in a schema, by kind and name: "table rate_limit_durable", "function
// _rate_limit_late()".
type Catalog map[string]Object

// Object describes a table, type or function.
type Object struct {
	// Owner is the role that owns the object. Owner is "" in made.json, because any role may run the migrations.
	Owner string `json:"owner,omitempty"`

	// Aspects holds the object's properties by name, such as "column key" or "body". The value of "body" is a hash.
	Aspects map[string]string `json:"aspects"`
}

// Made returns the objects that exist after the migrations up to a version. The result ok is false if this release does
// not know the version. Version 0 is a database without migrations.
func Made(version int64) (made Catalog, ok bool) {
	if version == 0 {
		return Catalog{}, true
	}
	made, ok = all()[version]
	return made, ok
}

func all() map[int64]Catalog {
	made := map[int64]Catalog{}
	// madeJSON is embedded, and TestMade reads all of it
	_ = json.Unmarshal(madeJSON, &made)
	return made
}

// Names returns the names of all tables, types and functions that exist after any migration.
func Names() []string {
	names := map[string]bool{}
	for _, made := range all() {
		for object := range made {
			names[Name(object)] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// Name returns the name of an object without its kind and arguments: "f" for "function f(text)".
func Name(object string) string {
	_, name, _ := strings.Cut(object, " ")
	name, _, _ = strings.Cut(name, "(")
	return name
}

// Read returns the objects in a schema that have names of the limiter's objects, no matter who created them. Read sets
// search_path to pg_catalog until the transaction ends, so that Postgres qualifies all names of other schemas.
func Read(ctx context.Context, tx pgx.Tx, schema string) (Catalog, error) {
	return read(ctx, tx, schema, Names())
}

func read(ctx context.Context, tx pgx.Tx, schema string, names []string) (Catalog, error) {
	if _, err := tx.Exec(ctx, "SELECT pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true), "+
		"pg_catalog.set_config('quote_all_identifiers', 'off', true)"); err != nil {
		return nil, err
	}
	rows, err := tx.Query(ctx, readSQL, schema, names)
	if err != nil {
		return nil, err
	}
	found := Catalog{}
	var object, owner, aspect, value string
	_, err = pgx.ForEachRow(rows, []any{&object, &owner, &aspect, &value}, func() error {
		if _, ok := found[object]; !ok {
			found[object] = Object{Owner: owner, Aspects: map[string]string{}}
		}
		found[object].Aspects[aspect] = value
		return nil
	})
	return found, err
}

// Difference is a difference between a database and the migrations.
type Difference struct {
	Object string
	Aspect string // "" if the whole object is missing or unexpected, or has another owner
	Text   string // a complete clause, such as "table rate_limit_durable lacks column key"
}

// Differences compares the found objects with those that the migrations make. The role owner should own all objects of
// the migrations. An object that the migrations do not make is a difference only if it belongs to owner.
func (found Catalog) Differences(made Catalog, owner string) []Difference {
	var all []Difference
	for _, object := range slices.Sorted(maps.Keys(made)) {
		got, ok := found[object]
		switch {
		case !ok:
			all = append(all, Difference{Object: object, Text: object + " is missing"})
		case got.Owner != owner:
			all = append(all, Difference{Object: object, Text: fmt.Sprintf(
				"%s belongs to %s, and not to %s", object, got.Owner, owner)})
		default:
			all = append(all, aspects(object, made[object].Aspects, got.Aspects)...)
		}
	}
	for _, object := range slices.Sorted(maps.Keys(found)) {
		if _, ok := made[object]; !ok && found[object].Owner == owner {
			all = append(all, Difference{Object: object, Text: object + " should not be there"})
		}
	}
	return all
}

func aspects(object string, made, found map[string]string) []Difference {
	var all []Difference
	add := func(aspect, text string, args ...any) {
		all = append(all, Difference{object, aspect, object + " " + fmt.Sprintf(text, args...)})
	}
	// The order of a table's columns does not matter, because statements name the columns. The order of a type's
	// columns is reported only if no column is missing.
	const order = "order of columns"
	for _, aspect := range slices.Sorted(maps.Keys(made)) {
		switch got, ok := found[aspect]; {
		case aspect == order || got == made[aspect]:
		case !ok:
			add(aspect, "lacks %s", aspect)
		case aspect == "body":
			add(aspect, "has another body")
		default:
			add(aspect, "has %s %q instead of %q", aspect, got, made[aspect])
		}
	}
	for _, aspect := range slices.Sorted(maps.Keys(found)) {
		if _, ok := made[aspect]; !ok {
			add(aspect, "has %s, which should not be there", aspect)
		}
	}
	if len(all) == 0 && found[order] != made[order] && !strings.HasPrefix(object, "table ") {
		add(order, "has its columns in another order")
	}
	return all
}

// Nearest returns the version above 0 that has the fewest differences from the found objects.
func (found Catalog) Nearest(owner string) (nearest int64) {
	least := -1
	for version, made := range all() {
		n := len(found.Differences(made, owner))
		if least < 0 || n < least || n == least && version > nearest {
			nearest, least = version, n
		}
	}
	return nearest
}
