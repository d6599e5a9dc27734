package shards_test

import (
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/shards"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// cluster is a proxy and its shards, all on one server.
type cluster struct {
	proxy       *pgtest.DB
	shards      []*pgtest.DB
	connections []string // PL/Proxy's connection strings for the shards
	more        []*pgtest.DB
	moreStrings []string
}

// newCluster creates a proxy, n shards, and n more databases for a division. If PL/Proxy is missing, the test is
// skipped, or fails if RATELIMIT_TEST_PLPROXY is set.
func newCluster(t *testing.T, n int) *cluster {
	t.Helper()
	pgtest.NeedsProxy(t)
	c := &cluster{proxy: pgtest.Empty(t)}
	available := pgtest.Scalar[bool](t, c.proxy.Pool,
		"SELECT EXISTS (SELECT FROM pg_available_extensions WHERE name = 'plproxy')")
	if !available && os.Getenv("RATELIMIT_TEST_PLPROXY") == "" {
		t.Skip("PL/Proxy: install this extension of the server (Debian: postgresql-15-plproxy)")
	}
	for range n {
		c.shards, c.more = append(c.shards, pgtest.New(t)), append(c.more, pgtest.New(t))
	}
	for i, db := range c.shards {
		c.connections = append(c.connections, keywords(t, db))
		c.moreStrings = append(c.moreStrings, keywords(t, c.more[i]))
		require.NoError(t, shards.Own(t.Context(), connect(t, db), "public", shards.Identity{Place: i, Shards: n, Cluster: "test"}))
	}
	c.install(t, c.proxy)
	return c
}

// install turns a database into another proxy of the shards.
func (c *cluster) install(t *testing.T, db *pgtest.DB) {
	t.Helper()
	source, err := shards.Read(t.Context(), connect(t, c.shards[0]), "public")
	require.NoError(t, err)
	config := connect(t, c.shards[0]).Config()
	require.NoError(t, shards.Install(t.Context(), connect(t, db), source, shards.Config{
		Schema: "public", Connections: c.connections, User: config.User, Password: config.Password,
	}))
	// The user mapping is for the owner of the functions, who owns the schema.
	pgtest.Exec(t, db.Pool, "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA public TO PUBLIC")
}

// connect returns a connection. The end of the test closes the connection.
func connect(t *testing.T, db *pgtest.DB) *pgx.Conn {
	t.Helper()
	pool := db.OwnerPool(t, func(config *pgxpool.Config) { config.MaxConns = 1 })
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	t.Cleanup(conn.Release)
	return conn.Conn()
}

// keywords returns a connection string for libpq, without user and password.
func keywords(t *testing.T, db *pgtest.DB) string {
	t.Helper()
	config := db.Pool.Config().ConnConfig
	quote := func(text string) string {
		return "'" + strings.NewReplacer(`\`, `\\`, "'", `\'`).Replace(text) + "'"
	}
	return "host=" + quote(config.Host) + " port=" + strconv.Itoa(int(config.Port)) + " dbname=" + quote(config.Database)
}
