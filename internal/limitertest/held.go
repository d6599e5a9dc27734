package limitertest

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// Hold begins a transaction that locks the row of a key until it ends, as WithTx(tx).Allow does. The row must exist.
func Hold(t *testing.T, db *pgtest.DB, config ratelimit.Config, key string) pgx.Tx {
	t.Helper()
	return HoldOn(t, pgtest.Connect(t, db.Of(key)), config, key)
}

// HoldOn does the same as Hold, on a given connection.
func HoldOn(t *testing.T, conn *pgx.Conn, config ratelimit.Config, key string) pgx.Tx {
	t.Helper()
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	tag, err := tx.Exec(
		t.Context(),
		"SELECT FROM "+pgtest.Table(config.Durable)+" WHERE prefix = $1 AND key = $2 FOR UPDATE",
		config.Name,
		key,
	)
	require.NoError(t, err)
	require.EqualValues(t, 1, tag.RowsAffected())
	return tx
}
