package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/shardkey"
	"github.com/pgratelimit/ratelimit/internal/shards"
)

// errNoPLProxy means that PL/Proxy is missing on the proxy's server.
var errNoPLProxy = errors.New("PL/Proxy: install this extension of the server (Debian: postgresql-15-plproxy)")

// Shards returns the number of shards of a database from New, or 0 if the database is not a proxy.
func Shards() int {
	n, _ := strconv.Atoi(os.Getenv("RATELIMIT_TEST_SHARDS"))
	return n
}

// NeedsProxy skips a test of a proxy for shards in "make test", because such tests take minutes, and most machines lack
// PL/Proxy. "make test/shards" runs them.
func NeedsProxy(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("a proxy for shards: make test/shards")
	}
}

// NotThroughProxy skips a test if the databases of New are proxies for shards. The argument why says what a proxy lacks
// for the test.
func NotThroughProxy(t testing.TB, why string) {
	t.Helper()
	if Shards() > 0 {
		t.Skip("not through a proxy for shards: " + why)
	}
}

// Fleet is a proxy and its shards. Each of these databases has a separate server.
type Fleet struct {
	*DB

	ShardServers []*pgserver.Server
	Connections  []string // the connection strings of the shards for PL/Proxy

	cluster *cluster
}

// Sharded starts a fleet for a test that stops or kills servers. The end of the test closes the fleet. If PL/Proxy is
// missing, the test is skipped, or fails if RATELIMIT_TEST_PLPROXY is set.
func Sharded(t testing.TB, n int) *Fleet {
	t.Helper()
	c := newProxy(n)
	t.Cleanup(func() {
		if err := c.close(); err != nil {
			t.Errorf("pgtest: close the servers: %v", err)
		}
	})
	_, err := c.migratedTemplate()
	if errors.Is(err, errNoPLProxy) && os.Getenv("RATELIMIT_TEST_PLPROXY") == "" {
		t.Skip(err)
	}
	fleet := &Fleet{DB: c.newMigrated(t), cluster: c}
	for i, shard := range c.shards {
		fleet.ShardServers = append(fleet.ShardServers, shard.server)
		fleet.Connections = append(fleet.Connections, fleet.Shards[i].connection())
	}
	return fleet
}

// Proxy adds a proxy with other connection strings for the shards to a fleet.
func (f *Fleet) Proxy(t testing.TB, connections []string) *DB {
	t.Helper()
	db := f.cluster.newDB(t, f.cluster.template)
	db.Connect(t, connections)
	return db
}

// Connect gives a proxy other connection strings for its shards.
func (db *DB) Connect(t testing.TB, connections []string) {
	t.Helper()
	options := make([]string, len(connections))
	for i, connection := range connections {
		options[i] = fmt.Sprintf("SET p%d '%s'", i, connection)
	}
	Exec(t, db.Pool, "ALTER SERVER "+shards.Server+" OPTIONS ("+strings.Join(options, ", ")+")")
}

// connection returns the connection string of a shard for PL/Proxy.
func (db *DB) connection() string {
	to := db.Pool.Config().ConnConfig
	return fmt.Sprintf("host=%s port=%d dbname=%s", to.Host, to.Port, to.Database)
}

// Of returns the database that has the rows of a key. With shards, this is one of the shards.
func (db *DB) Of(key string) *DB {
	if len(db.Shards) == 0 {
		return db
	}
	return db.Shards[shardkey.Of(key, len(db.Shards))]
}

// All returns the databases that have rows: the shards, or db itself if there are none.
func (db *DB) All() []*DB {
	if len(db.Shards) == 0 {
		return []*DB{db}
	}
	return db.Shards
}

// newProxy returns the server of a proxy with the servers of its shards.
func newProxy(n int) *cluster {
	own := func() pgserver.Config { return pgserver.Config{} }
	c := &cluster{config: own, shards: make([]*cluster, n)}
	for i := range c.shards {
		c.shards[i] = &cluster{config: own, place: i, of: n}
	}
	return c
}

// each calls the function do for all shards at the same time.
func (c *cluster) each(do func(shard *cluster) error) error {
	errs := make([]error, len(c.shards))
	var all sync.WaitGroup
	for i, shard := range c.shards {
		all.Go(func() { errs[i] = do(shard) })
	}
	all.Wait()
	return errors.Join(errs...)
}

// foreignTablesSQL defines foreign tables for a shard's tables. With foreign tables, tests can read, change and lock
// the rows of all shards on the proxy. Real proxies have no such tables. The tables with keys of limits are partitioned
// by key; all other tables are on shard 0.
const foreignTablesSQL = `
WITH columns AS (
	SELECT c.relname, string_agg(format('%I %s', a.attname, format_type(a.atttypid, a.atttypmod)) || CASE
			WHEN a.attidentity <> '' THEN ' GENERATED ALWAYS AS (0) STORED' -- the value is not sent to the shard
			WHEN a.atthasdef THEN ' DEFAULT ' || pg_get_expr(d.adbin, d.adrelid)
			ELSE '' END, ', ' ORDER BY a.attnum) AS columns
	FROM pg_class AS c
	JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
	LEFT JOIN pg_attrdef AS d ON d.adrelid = c.oid AND d.adnum = a.attnum
	WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r'
	GROUP BY c.relname
)
SELECT string_agg(CASE
	WHEN relname IN (
		'rate_limit_ephemeral', 'rate_limit_durable', 'rate_limit_ephemeral_hold', 'rate_limit_durable_hold') THEN
		format('CREATE TABLE %I (%s) PARTITION BY LIST (_rate_limit_shard(key, %s));', relname, columns, $1::integer)
		|| (SELECT string_agg(format('CREATE FOREIGN TABLE %I PARTITION OF %I FOR VALUES IN (%s) '
				'SERVER test_%s OPTIONS (table_name %L);', relname || i, relname, i, i, relname), '')
			FROM generate_series(0, $1 - 1) AS i)
	ELSE format('CREATE FOREIGN TABLE %I (%s) SERVER test_0;', relname, columns) END, '')
FROM columns`

// blockedSQL counts the sessions of all shards that wait for another session's lock.
const blockedSQL = `
CREATE FUNCTION test_blocked() RETURNS SETOF bigint LANGUAGE plproxy AS $$
	CLUSTER 'rate_limit_shards';
	RUN ON ALL;
	SELECT count(*) FROM pg_stat_activity
	WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0;
$$`

// proxies maps the pool of a proxy to its shards.
var proxies sync.Map

// shardsOf returns the databases that have the functions and rows: the shards, or db itself if there are none.
func shardsOf(db Executor) (all []Executor) {
	shards, _ := proxies.Load(db)
	its, _ := shards.([]*DB)
	for _, shard := range its {
		all = append(all, shard.Pool)
	}
	if all == nil {
		return []Executor{db}
	}
	return all
}

// own creates the template of a shard.
func (c *cluster) own(ctx context.Context, pool *pgxpool.Pool) error {
	return pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
		is := shards.Identity{Place: c.place, Shards: c.of, Cluster: "test"}
		if err := shards.Own(ctx, conn.Conn(), "public", is); err != nil {
			return err
		}
		if err := conn.QueryRow(ctx, foreignTablesSQL, c.of).Scan(&c.tables); err != nil {
			return err
		}
		var err error
		c.source, err = shards.Read(ctx, conn.Conn(), "public")
		return err
	})
}

// install creates the template of a proxy. The template's connection strings are not valid.
func (c *cluster) install(ctx context.Context, pool *pgxpool.Pool) error {
	if err := c.each(func(shard *cluster) error {
		_, err := shard.migratedTemplate()
		return err
	}); err != nil {
		return err
	}
	var has bool
	if err := pool.QueryRow(ctx,
		"SELECT EXISTS (SELECT FROM pg_available_extensions WHERE name = 'plproxy')").Scan(&has); err != nil {
		return err
	}
	if !has {
		return errNoPLProxy
	}
	return pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
		if err := shards.Install(ctx, conn.Conn(), c.shards[0].source, shards.Config{
			Schema: "public", Connections: make([]string, len(c.shards)), User: "postgres",
		}); err != nil {
			return err
		}
		var servers strings.Builder
		servers.WriteString("CREATE EXTENSION postgres_fdw;")
		for i := range c.shards {
			fmt.Fprintf(&servers, `
				CREATE SERVER test_%[1]d FOREIGN DATA WRAPPER postgres_fdw
				OPTIONS (host '127.0.0.1', port '', dbname '');
				CREATE USER MAPPING FOR CURRENT_USER SERVER test_%[1]d OPTIONS (user 'postgres');`, i)
		}
		_, err := conn.Exec(ctx, servers.String()+c.shards[0].tables+blockedSQL)
		return err
	})
}

// connectShards gives a proxy's database the connection strings of its shards.
func (c *cluster) connectShards(t testing.TB, db *DB) {
	t.Helper()
	if c.shards == nil {
		return
	}
	names := make([]string, len(c.shards))
	if err := c.each(func(shard *cluster) (err error) {
		names[shard.place], err = shard.create(t.Context(), shard.template)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	var connections []string
	var foreign strings.Builder
	for i, shard := range c.shards {
		db.Shards = append(db.Shards, shard.open(t, names[i], shard.template))
		connections = append(connections, db.Shards[i].connection())
		to := db.Shards[i].Pool.Config().ConnConfig
		fmt.Fprintf(&foreign, "ALTER SERVER test_%d OPTIONS (SET port '%d', SET dbname '%s');", i, to.Port, to.Database)
	}
	db.Connect(t, connections)
	Exec(t, db.Pool, foreign.String())
	proxies.Store(db.Pool, db.Shards)
	t.Cleanup(func() { proxies.Delete(db.Pool) })
}
