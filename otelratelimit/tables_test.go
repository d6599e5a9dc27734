package otelratelimit_test

import (
	"context"
	"database/sql"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric/noop"
	sdk "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/cleanup"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/otelratelimit"
	"github.com/pgratelimit/ratelimit/sqldb"
)

// observeTables returns a function that collects the metrics of tables. The keys are name and table.
func observeTables(t *testing.T, db ratelimit.DBTX, schema string) (collect func() (map[string]float64, error)) {
	t.Helper()
	reader := sdk.NewManualReader()
	meter := sdk.NewMeterProvider(sdk.WithReader(reader)).Meter("test")
	registration, err := otelratelimit.ObserveTables(meter, db, schema)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, registration.Unregister()) })
	return func() (map[string]float64, error) {
		var all metricdata.ResourceMetrics
		err := reader.Collect(t.Context(), &all)
		found := map[string]float64{}
		for _, scope := range all.ScopeMetrics {
			for _, m := range scope.Metrics {
				switch data := m.Data.(type) {
				case metricdata.Gauge[int64]:
					add(found, m.Name, data.DataPoints)
				case metricdata.Sum[int64]:
					require.True(t, data.IsMonotonic)
					add(found, m.Name, data.DataPoints)
				case metricdata.Gauge[float64]:
					add(found, m.Name, data.DataPoints)
				default:
					require.Fail(t, "unexpected", "%s is a %T", m.Name, m.Data)
				}
			}
		}
		return found, err
	}
}

func add[N int64 | float64](found map[string]float64, name string, points []metricdata.DataPoint[N]) {
	for _, point := range points {
		table, _ := point.Attributes.Value(attribute.Key("table"))
		found[name+" "+table.AsString()] = float64(point.Value)
	}
}

func TestTables(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Fill(t, db.Pool, pgtest.Table(false), "a", 1000, time.Now().Add(-time.Hour))
	pgtest.Fill(t, db.Pool, pgtest.Table(false), "b", 200, time.Now().Add(time.Hour))
	pgtest.Fill(t, db.Pool, pgtest.Table(true), "a", 30, time.Now().Add(-time.Hour))
	collect := observeTables(t, db.Pool, "")
	// Postgres shows the statistics of a session to all sessions a second later.
	requireSoon := func(want map[string]float64) map[string]float64 {
		t.Helper()
		var found map[string]float64
		testkit.WaitUntil(t, func() bool {
			var err error
			if found, err = collect(); err != nil {
				t.Log(err) // a busy machine may need longer than a collection waits
				return false
			}
			for name, value := range want {
				if found[name] != value {
					return false
				}
			}
			return true
		})
		return found
	}
	found := requireSoon(map[string]float64{
		"ratelimit.table.rows ephemeral": 1200, "ratelimit.table.rows durable": 30,
		"ratelimit.table.deleted ephemeral": 0, "ratelimit.table.deleted durable": 0,
	})
	require.InDelta(t, pgtest.Scalar[int64](t, db.Pool, "SELECT pg_total_relation_size('rate_limit_ephemeral')"),
		found["ratelimit.table.size ephemeral"], 0)
	require.InDelta(t, pgtest.Scalar[int64](t, db.Pool, "SELECT pg_total_relation_size('rate_limit_durable')"),
		found["ratelimit.table.size durable"], 0)
	require.Len(t, found, 12, "nobody has swept")

	sweeper, err := cleanup.New(db.Pool, cleanup.Config{})
	require.NoError(t, err)
	_, err = sweeper.RunOnce(t.Context())
	require.NoError(t, err)
	found = requireSoon(map[string]float64{
		"ratelimit.table.rows ephemeral": 200, "ratelimit.table.rows durable": 0,
		"ratelimit.table.deleted ephemeral": 1000, "ratelimit.table.deleted durable": 30,
	})
	require.Positive(t, found["ratelimit.sweep.age "])
	require.Less(t, found["ratelimit.sweep.age "], testkit.Amply.Seconds())

	pgtest.Exec(t, db.Pool, "UPDATE rate_limit_sweeper SET completed_at = clock_timestamp() - interval '2 days'")
	// A role that may create in a schema of search_path cannot make the statement call its functions.
	pgtest.Exec(t, db.Pool, `CREATE FUNCTION decoy(oid, regtype) RETURNS boolean LANGUAGE plpgsql
		AS 'BEGIN RAISE EXCEPTION $$decoy$$; END'`)
	pgtest.Exec(t, db.Pool, "CREATE OPERATOR = (LEFTARG = oid, RIGHTARG = regtype, FUNCTION = decoy)")
	found, err = collect()
	require.NoError(t, err)
	require.InDelta(t, 2*24*3600, found["ratelimit.sweep.age "], testkit.Amply.Seconds())
}

// ObserveTables works in a schema of any name, with a role that has only the required rights, and with database/sql.
func TestTablesInASchema(t *testing.T) {
	t.Parallel()

	const schema = `it's "mine"`
	db := pgtest.Empty(t)
	if !pgtest.Scalar[bool](t, db.Pool, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user") {
		t.Skip("foreign roles: the URL of the server has to name a superuser") // the servers that tests start do so
	}
	require.NoError(t, migrations.Up(t.Context(), db.InSchema(t, schema)))
	quoted := pgx.Identifier{schema}.Sanitize()
	asRole := db.OwnerPool(t, func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["role"] = pgtest.DecoyRole })
	collect := observeTables(t, asRole, schema)

	_, err := collect()
	require.ErrorContains(t, err, "permission denied for schema")
	pgtest.Exec(t, db.Pool, "GRANT USAGE ON SCHEMA "+quoted+" TO "+pgtest.DecoyRole)
	_, err = collect()
	require.ErrorContains(t, err, "GRANT USAGE on the schema, and SELECT on its table rate_limit_sweeper")
	pgtest.Exec(t, db.Pool, "GRANT SELECT ON "+quoted+".rate_limit_sweeper TO "+pgtest.DecoyRole)
	found, err := collect()
	require.NoError(t, err)
	require.Len(t, found, 12)

	pool, err := sql.Open("pgx", db.URL)
	require.NoError(t, err)
	defer pool.Close()
	pgtest.Exec(t, db.Pool, "SELECT "+quoted+".rate_limit_sweep()")
	found, err = observeTables(t, sqldb.Pool(pool), schema)()
	require.NoError(t, err)
	require.Len(t, found, 13)

	_, err = observeTables(t, db.Pool, "")()
	require.ErrorContains(t, err, "ask for the tables of the limiters")
}

// If client_encoding would make the server read another schema name, ObserveTables and limiters return the same error.
func TestTablesInASchemaThatTheEncodingGarbles(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	require.NoError(t, migrations.Up(t.Context(), db.InSchema(t, "été")))
	for encoding, text := range map[string]string{
		"LATIN1": "client_encoding is LATIN1, in which the server would read the name of the schema as another one",
		"SJIS":   "client_encoding is SJIS, in which pgx does not write; set it to UTF8",
		"UTF8":   "",
	} {
		pool := db.NewPool(t, func(config *pgxpool.Config) {
			config.ConnConfig.RuntimeParams["client_encoding"] = encoding
		})
		config := pool.Config().ConnConfig
		std := stdlib.OpenDB(*config)
		t.Cleanup(func() { require.NoError(t, std.Close()) })
		for _, db := range []ratelimit.DBTX{pool, sqldb.Pool(std), struct{ ratelimit.DBTX }{pool}} {
			_, err := observeTables(t, db, "été")()
			_, wrapped := db.(struct{ ratelimit.DBTX }) // hides its connection
			switch {
			case text == "":
				require.NoError(t, err, "%T", db)
			case wrapped:
				require.ErrorContains(t, err, "ask for the tables of the limiters")
			default:
				require.ErrorIs(t, err, ratelimit.ErrSetup, "%T", db)
				require.ErrorContains(t, err, text, "%T", db)
			}
		}
	}
}

// If Postgres does not answer, a collection takes two seconds, and contains the other metrics.
func TestTablesDuringAnOutage(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pool := db.NewPool(t, func(config *pgxpool.Config) { config.MaxConns = 1 })
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()

	reader := sdk.NewManualReader()
	meter := sdk.NewMeterProvider(sdk.WithReader(reader)).Meter("test")
	_, err = otelratelimit.ObserveTables(meter, pool, "")
	require.NoError(t, err)
	observer, err := otelratelimit.New(meter)
	require.NoError(t, err)
	observer.Breaker(ratelimit.BreakerEvent{Limits: "durable", Open: true})
	var all metricdata.ResourceMetrics
	err = reader.Collect(t.Context(), &all)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Len(t, all.ScopeMetrics, 1)
	require.Len(t, all.ScopeMetrics[0].Metrics, 1)
	require.Equal(t, "ratelimit.breaker.open", all.ScopeMetrics[0].Metrics[0].Name)
}

func TestTablesOfNoPool(t *testing.T) {
	t.Parallel()

	for _, db := range []ratelimit.DBTX{nil, (*pgxpool.Pool)(nil), &pgx.Conn{}, &pgxpool.Conn{}, &pgxpool.Tx{}} {
		_, err := otelratelimit.ObserveTables(noop.Meter{}, db, "")
		var refused *ratelimit.ConfigError
		require.ErrorAs(t, err, &refused, "%T", db)
		require.Equal(t, "db", refused.Field)
	}
}
