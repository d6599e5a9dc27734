package catalog

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// All is what there is after each migration.
func All() map[int64]Catalog { return all() }

// ReadNames is Read for other names.
func ReadNames(ctx context.Context, tx pgx.Tx, schema string, names []string) (Catalog, error) {
	return read(ctx, tx, schema, names)
}
