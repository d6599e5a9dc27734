package pgtest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
)

// Refused runs a statement that the database must refuse with this SQLSTATE. The error's message must say what is wrong
// or how to fix it.
func Refused(t testing.TB, db Executor, what, sql, code string) {
	t.Helper()
	_, err := db.Exec(t.Context(), sql)
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr, "%s: %s", what, sql)
	require.Equal(t, code, pgErr.Code, "%s: %s: %v", what, sql, pgErr)
	if code == "22023" && !strings.Contains(sql, "lock_timeout_ms") {
		require.Contains(t, pgErr.Message, "rate_limit: ", "%s: %s", what, sql)
		require.NotEmpty(t, pgErr.Hint, "%s: %s", what, sql)
	}
}

// AgeBans moves all bans into the past by an interval such as "1 hour".
func AgeBans(t testing.TB, db Executor, by string) {
	t.Helper()
	Exec(t, db, `UPDATE rate_limit_policy
		SET valid_from = valid_from - $1::interval, valid_until = valid_until - $1::interval`, by)
}

// BanLasts returns the length of a key's newest ban.
func BanLasts(t testing.TB, db Querier, key string) time.Duration {
	t.Helper()
	return Scalar[time.Duration](t, db,
		"SELECT valid_until - valid_from FROM rate_limit_policy WHERE key = $1 ORDER BY valid_until DESC LIMIT 1", key)
}

// Application returns a pool of a role that has only the grants in docs/operating.md. Every connection tries to make
// Postgres use other objects than the limiter's. pg_temp has tables, types and functions with the limiter's names.
// search_path begins with a schema that also has such objects, operators and another clock.
func Application(t testing.TB, db *DB, root string) *pgxpool.Pool {
	t.Helper()
	if !Scalar[bool](t, db.Pool, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user") {
		t.Skip("foreign roles: the URL of the server has to name a superuser") // the tests' servers have a superuser
	}
	const role = "pg_monitor" // every server has this role, and it has no rights here
	document, err := os.ReadFile(filepath.Join(root, "docs/operating.md"))
	require.NoError(t, err)
	grants := regexp.MustCompile(`(?s)GRANT [^;]* TO app;`).FindAllString(string(document), -1)
	require.Len(t, grants, 2)
	Exec(t, db.Pool, strings.ReplaceAll(strings.Join(grants, "\n"), "TO app;", "TO "+role+";"))
	Exec(t, db.Pool, "CREATE SCHEMA decoy AUTHORIZATION "+role)

	decoys := func(schema string) string {
		const columns = `(prefix text, key text, algorithm smallint DEFAULT 0, count bigint DEFAULT 0,
			prev_count bigint DEFAULT 0, window_start bigint DEFAULT 0, credit bigint DEFAULT 0, scale bigint DEFAULT 0,
			expires_at bigint DEFAULT 0, log bigint[],
			CONSTRAINT rate_limit_%s_pkey PRIMARY KEY (key, prefix));`
		return strings.ReplaceAll(fmt.Sprintf(`
			CREATE TABLE IF NOT EXISTS $.rate_limit_ephemeral `+columns+`
			CREATE TABLE IF NOT EXISTS $.rate_limit_durable `+columns+`
			CREATE OR REPLACE FUNCTION $.clock_timestamp() RETURNS timestamptz LANGUAGE sql
				AS 'SELECT ''2001-01-01Z''::timestamptz';
			CREATE OR REPLACE FUNCTION $.set_config(text, text, boolean) RETURNS text LANGUAGE sql
				AS 'SELECT (1 / 0)::text';
			CREATE OR REPLACE FUNCTION $.cardinality(anyarray) RETURNS integer LANGUAGE sql AS 'SELECT 0';
			CREATE OR REPLACE FUNCTION $.rate_limit_all(integer[], text[], text[], boolean[], smallint[],
				bigint[], bigint[], bigint[], bigint[], bigint[],
				integer, boolean, timestamptz, bigint[], bigint[], bigint[], bigint[], boolean, text[], bigint[],
				boolean[], bigint[], uuid[], bigint[], jsonb[])
				RETURNS SETOF public.rate_limit_decision LANGUAGE sql
				AS 'SELECT NULL::public.rate_limit_decision WHERE false';
			CREATE OR REPLACE FUNCTION $._rate_limit_late() RETURNS boolean LANGUAGE sql AS 'SELECT true';
			CREATE OR REPLACE FUNCTION $.yes(bigint, bigint) RETURNS boolean LANGUAGE sql AS 'SELECT true';`,
			"ephemeral", "durable"), "$", schema)
	}
	Exec(t, db.Pool, "SET ROLE "+role+";"+decoys("decoy")+`
		CREATE OPERATOR decoy.<= (FUNCTION = decoy.yes, LEFTARG = bigint, RIGHTARG = bigint);
		CREATE OPERATOR decoy.>= (FUNCTION = decoy.yes, LEFTARG = bigint, RIGHTARG = bigint);
		RESET ROLE`)
	pool := db.OwnerPool(t, func(config *pgxpool.Config) {
		config.ConnConfig.RuntimeParams["role"] = role
		config.ConnConfig.RuntimeParams["search_path"] = "decoy, pg_catalog, public"
		config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, decoys("pg_temp"))
			return err
		}
	})
	require.Equal(t, role, Scalar[string](t, pool, "SELECT current_user"))
	require.Equal(t, 2001, Scalar[time.Time](t, pool, "SELECT clock_timestamp()").Year()) // the decoys' clock is used
	return pool
}

// RowColumns are the columns that ScanRow reads.
const RowColumns = `prefix, key, algorithm, count, prev_count, window_start, credit, coalesce(scale, 0),
	expires_at, log, coalesce(since, 0), coalesce(capacity, 0), coalesce(refill, 0), coalesce(returned, 0)`

// ScanRow scans a row that has RowColumns.
func ScanRow(rows pgx.CollectableRow) (id modeltest.RowID, row modeltest.Row, err error) {
	var log []int64
	err = rows.Scan(
		&id.Name,
		&id.Key,
		&row.Algorithm,
		&row.Count,
		&row.PrevCount,
		&row.WindowStart,
		&row.Credit,
		&row.Scale,
		&row.ExpiresAt,
		&log,
		&row.Since,
		&row.Capacity,
		&row.Refill,
		&row.Returned,
	)
	row.Log = model.NewEntries(log)
	return id, row, err
}

// StoredRows returns all rows of a table.
func StoredRows(t testing.TB, db Executor, durable bool) map[modeltest.RowID]modeltest.Row {
	t.Helper()
	rows, err := db.Query(t.Context(), "SELECT "+RowColumns+" FROM "+Table(durable))
	require.NoError(t, err)
	stored := map[modeltest.RowID]modeltest.Row{}
	_, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (struct{}, error) {
		id, is, err := ScanRow(row)
		stored[id] = is
		return struct{}{}, err
	})
	require.NoError(t, err)
	return stored
}
