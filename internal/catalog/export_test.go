package catalog

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// All returns the catalog after each migration.
func All() map[int64]Catalog { return all() }

// ReadNames reads the objects that have the given names.
func ReadNames(ctx context.Context, tx pgx.Tx, schema string, names []string) (Catalog, error) {
	return read(ctx, tx, schema, names)
}
