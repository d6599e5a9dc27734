package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/shardkey"
	"github.com/pgratelimit/ratelimit/internal/shards"
)

// errNoPLProxy says that the proxy's server does not have what it takes to be one.
var errNoPLProxy = errors.New("PL/Proxy: install this extension of the server (Debian: postgresql-15-plproxy)")

// shardsVariable is how many shards New gives a database, or 0.
func shardsVariable() int {
	n, _ := strconv.Atoi(os.Getenv("RATELIMIT_TEST_SHARDS"))
	return n
}

// Fleet is a proxy and its shards, each on a server of its own.
type Fleet struct {
	*DB

	ProxyServer  *pgserver.Server
	ShardServers []*pgserver.Server
}

// Sharded starts a fleet for a test that stops or kills servers. It is closed at the end of the test. Where there is no
// PL/Proxy, the test is skipped, unless RATELIMIT_TEST_PLPROXY is set.
func Sharded(t testing.TB, n int) *Fleet {
	t.Helper()
	c := newProxy(n)
	t.Cleanup(func() {
		if err := c.close(); err != nil {
			t.Errorf("pgtest: close the servers: %v", err)
		}
	})
	fleet := &Fleet{DB: c.newMigrated(t), ProxyServer: c.server}
	for _, shard := range c.shards {
		fleet.ShardServers = append(fleet.ShardServers, shard.server)
	}
	return fleet
}

// Of returns a pool of the database that has the rows of a key.
func (db *DB) Of(key string) *pgxpool.Pool {
	if len(db.Shards) == 0 {
		return db.Pool
	}
	return db.Shards[shardkey.Of(key, len(db.Shards))]
}

// newProxy is a proxy's server, with those of its shards.
func newProxy(n int) *cluster {
	own := func() pgserver.Config { return pgserver.Config{} }
	c := &cluster{config: own, shards: make([]*cluster, n)}
	for i := range c.shards {
		c.shards[i] = &cluster{config: own, place: i, of: n}
	}
	return c
}

// each does something with all shards at once.
func (c *cluster) each(do func(shard *cluster) error) error {
	errs := make([]error, len(c.shards))
	var all sync.WaitGroup
	for i, shard := range c.shards {
		all.Go(func() { errs[i] = do(shard) })
	}
	all.Wait()
	return errors.Join(errs...)
}

// own makes the template of a shard.
func (c *cluster) own(ctx context.Context, pool *pgxpool.Pool) error {
	return pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
		if err := shards.Own(ctx, conn.Conn(), "public", c.place, c.of); err != nil {
			return err
		}
		rows, err := conn.Query(ctx, `
			SELECT c.relname, array_agg(format('%I %s', a.attname, format_type(a.atttypid, a.atttypmod)) ORDER BY a.attnum)
			FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid
			WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r' AND a.attnum > 0 AND NOT a.attisdropped
			GROUP BY c.relname`)
		if err != nil {
			return err
		}
		c.tables = map[string][]string{}
		var table string
		var columns []string
		if _, err := pgx.ForEachRow(rows, []any{&table, &columns}, func() error {
			c.tables[table] = slices.Clone(columns)
			return nil
		}); err != nil {
			return err
		}
		c.source, err = shards.Read(ctx, conn.Conn(), "public")
		return err
	})
}

// install makes the template of a proxy, whose connection strings lead nowhere yet.
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
	// Instead of tables it has views, in which tests find the rows of all shards.
	views := "CREATE USER MAPPING FOR CURRENT_USER SERVER " + shards.Server + " OPTIONS (user 'postgres');\n"
	for table, columns := range c.shards[0].tables {
		views += fmt.Sprintf(`
			CREATE FUNCTION test_%[1]s() RETURNS TABLE (%[2]s) LANGUAGE plproxy
			AS $$ CLUSTER '%[3]s'; RUN ON ALL; SELECT * FROM %[1]s; $$;
			CREATE VIEW %[1]s AS SELECT * FROM test_%[1]s();`, table, strings.Join(columns, ", "), shards.Server)
	}
	return pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
		if err := shards.Install(ctx, conn.Conn(), c.shards[0].source, shards.Config{
			Schema: "public", Connections: make([]string, len(c.shards)), User: "postgres",
		}); err != nil {
			return err
		}
		_, err := conn.Exec(ctx, views)
		return err
	})
}

// connectShards gives a proxy's database its shards.
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
	var options []string
	for i, shard := range c.shards {
		db.Shards = append(db.Shards, shard.open(t, names[i], shard.template).Pool)
		to := db.Shards[i].Config().ConnConfig
		options = append(options, fmt.Sprintf("SET p%d 'host=%s port=%d dbname=%s'", i, to.Host, to.Port, to.Database))
	}
	Exec(t, db.Pool, "ALTER SERVER "+shards.Server+" OPTIONS ("+strings.Join(options, ", ")+")")
}
