package demo

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// The demo fails if an answer is wrong.
func TestAnswersAreChecked(t *testing.T) {
	t.Parallel()

	require.NoError(t, answer{"201 Created", "9", ""}.check(1))
	require.NoError(t, answer{"201 Created", "0", ""}.check(10))
	require.NoError(t, answer{"429 Too Many Requests", "0", "66"}.check(11))

	require.Error(t, answer{"201 Created", "8", ""}.check(1))
	require.Error(t, answer{"429 Too Many Requests", "0", "66"}.check(10))
	require.Error(t, answer{"503 Service Unavailable", "", ""}.check(1))
	require.Error(t, answer{"201 Created", "0", ""}.check(11))
	require.Error(t, answer{"429 Too Many Requests", "0", ""}.check(11))
	require.Error(t, answer{"429 Too Many Requests", "0", "0"}.check(11))
	require.Error(t, answer{"429 Too Many Requests", "0", "67"}.check(11))
}

func TestRecordLooksAsInPsql(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	record, err := queryRecord(
		t.Context(),
		db.Pool,
		"SELECT 'shorten' AS prefix, 10 AS count, 1.5::float8 AS window_start",
	)
	require.NoError(t, err)
	require.Equal(t, ""+
		"-[ RECORD 1 ]+--------\n"+
		"prefix       | shorten\n"+
		"count        | 10\n"+
		"window_start | 1.5\n", record.String())
}
