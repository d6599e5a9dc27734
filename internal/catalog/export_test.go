package catalog

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// All is the catalog after each migration.
func All() map[int64]Catalog { return all() }

// ReadNames is Read for other names than ours.
func ReadNames(ctx context.Context, tx pgx.Tx, schema string, names []string) (Catalog, error) {
	return read(ctx, tx, schema, names)
}
