// Package pgtest gives each test a new Postgres database. So all tests can run in parallel, and no test has to clean
// up. Each database is a clone of a migrated template, and has 300 files. Cloning takes 10 ms in memory (a server
// started with TMPDIR=/dev/shm) and up to 100 ms on a disk.
//
//	func TestMain(m *testing.M) { pgtest.Main(m) }
//
//	func TestSomething(t *testing.T) {
//		t.Parallel()
//		db := pgtest.New(t)
//		…
//	}
//
// The databases are on the server at RATELIMIT_TEST_DATABASE_URL, whose user needs CREATEDB. If this variable is not
// set, package pgserver starts a server. Several test binaries can share a server. The template's name contains a hash
// of the migrations. The first test binary creates the template, and drops the templates of other migrations. On the
// server at RATELIMIT_TEST_DATABASE_URL, only the template remains.
//
// RATELIMIT_TEST_POSTGRES_MAJOR=17 selects the major version to test. If the server at the URL has another version,
// tests fail.
//
// DB.Pool connects as the owner. Tests use DB.Pool to read and change tables. DB.NewPool connects as an application's
// role, which has only the grants in docs/operating.md. So the tests prove that an application needs no other rights.
// If the server's user may not take that role, NewPool connects as the owner.
package pgtest

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/deadline"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

const (
	urlVariable = "RATELIMIT_TEST_DATABASE_URL"

	// maxConns is the size of a pool. Larger pools of parallel tests would not fit into the default of 100 connections.
	maxConns = 8

	// atOnce is the smallest number of tests that run in parallel.
	atOnce = 4

	// patience is the timeout of each step at the end of a test. A step takes milliseconds unless the test left
	// something running.
	patience = time.Minute
)

// shared is the server of this test binary. New and Empty start the server, and Main stops it.
var shared = newShared()

func newShared() *cluster {
	if n := Shards(); n > 0 {
		return newProxy(n)
	}
	return &cluster{config: func() pgserver.Config { return pgserver.Config{URL: os.Getenv(urlVariable)} }}
}

// given tells whether the environment names a server for the tests. Some tests start another server nevertheless.
var given = os.Getenv(urlVariable) != ""

// DB is a test's database.
type DB struct {
	// Pool has up to 8 connections. The end of the test closes Pool.
	Pool *pgxpool.Pool

	// URL is the connection string, for other programs and drivers.
	URL string

	// Shards are the databases of the shards, if the database is a proxy.
	Shards []*DB

	// application is the role of NewPool, or "". The role gets its grants when a test first calls NewPool, so that
	// other tests see only the objects of the migrations.
	application string
	granting    sync.Once
}

// Main runs the tests, stops the server, and exits. A TestMain should only call Main.
func Main(m *testing.M) { os.Exit(Run(m)) }

// Run runs the tests, stops the server, and returns the exit code. On a small machine, Run sets -parallel to more than
// the number of processors, because most tests often wait. Calls get a long timeout, and DATABASE_URL is hidden from
// the tests.
func Run(m *testing.M) (code int) {
	if runtime.GOMAXPROCS(0) < atOnce {
		_ = flag.Set("test.parallel", strconv.Itoa(atOnce)) // a -parallel on the command line is read later
	}
	deadline.Default = testkit.Amply
	_ = os.Unsetenv("DATABASE_URL") // the server of DATABASE_URL may have other users
	code = m.Run()
	if err := shared.close(); err != nil {
		fmt.Fprintln(os.Stderr, "pgtest: close the server:", err)
		code = max(code, 1)
	}
	return code
}

// New returns a database that has all migrations in schema public. The end of the test drops the database, even if
// there are still connections. If no Postgres is found, the test fails, and the error says how to get one.
func New(t testing.TB) *DB {
	t.Helper()
	return shared.newMigrated(t)
}

func (c *cluster) newMigrated(t testing.TB) *DB {
	t.Helper()
	template, err := c.migratedTemplate()
	need(t, err)
	db := c.newDB(t, template)
	c.connectShards(t, db)
	return db
}

// Empty returns a database without migrations. The end of the test drops the database.
func Empty(t testing.TB) *DB {
	t.Helper()
	return shared.newDB(t, emptyTemplate)
}

// NewPool returns a pool that connects to the database as an application's role. The end of the test closes the pool.
// The function configure may change the pool's configuration, or may be nil.
func (db *DB) NewPool(t testing.TB, configure func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	if db.application == "" {
		return db.OwnerPool(t, configure)
	}
	db.granting.Do(func() {
		functions := strings.Join(append(algorithm.Functions(),
			"rate_limit_find_hold", "rate_limit_slots", "rate_limit_acquire", "rate_limit_renew",
			"rate_limit_renew_all", "rate_limit_release", "rate_limit_policies", "rate_limit_ban",
			"rate_limit_report"), ", ")
		Exec(t, db.Pool, "GRANT EXECUTE ON FUNCTION "+functions+" TO "+quote(db.application))
	})
	return db.OwnerPool(t, func(config *pgxpool.Config) {
		config.ConnConfig.RuntimeParams["role"] = db.application
		if configure != nil {
			configure(config)
		}
	})
}

// OwnerPool does the same as NewPool, but the pool connects as the database's owner.
func (db *DB) OwnerPool(t testing.TB, configure func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(db.URL)
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	config.MaxConns = maxConns
	if configure != nil {
		configure(config)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}

	t.Cleanup(func() {
		closed := make(chan struct{})
		go func() {
			pool.Close() // Close waits until all connections are returned
			close(closed)
		}()
		select {
		case <-closed:
		case <-time.After(patience):
			t.Errorf("pgtest: the test has ended without giving back %d connections of a pool",
				pool.Stat().AcquiredConns())
		}
	})
	return pool
}

// Server starts a server for a test that stops or kills it, even if RATELIMIT_TEST_DATABASE_URL is set. The server has
// no migrations. The end of the test closes the server.
func Server(t testing.TB, config pgserver.Config) *pgserver.Server {
	t.Helper()
	server, err := startServer(t.Context(), config)
	need(t, err)
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Errorf("pgtest: close the server: %v", err)
		}
	})
	return server
}

// OwnServer skips a test that needs to start a server itself, if only a given server is available.
func OwnServer(t testing.TB) {
	t.Helper()
	need(t, pgserver.Available(t.Context(), pgserver.Config{Major: major()}))
}

// need fails the test if no server can be had. need skips the test if only a given server is available.
func need(t testing.TB, err error) {
	t.Helper()
	if given && errors.Is(err, pgserver.ErrNotFound) {
		t.Skip("a server of the test's own: install Postgres (Debian: postgresql), Docker, or npm")
	}
	if err != nil {
		t.Fatal(err)
	}
}

// major returns the major version to test, or "".
func major() string { return os.Getenv("RATELIMIT_TEST_POSTGRES_MAJOR") }

// startServer refuses a given server whose version is not the one to test. Otherwise a test of 17 could pass on 15.
func startServer(ctx context.Context, config pgserver.Config) (*pgserver.Server, error) {
	config.Major = major()
	server, err := pgserver.Start(ctx, config)
	if err != nil {
		return nil, err
	}
	if major() != "" && !strings.HasPrefix(server.Describe(), "PostgreSQL "+major()+".") {
		err := fmt.Errorf("pgtest: RATELIMIT_TEST_POSTGRES_MAJOR is %s, and the server is %s",
			major(), server.Describe())
		return nil, errors.Join(err, server.Close())
	}
	return server, nil
}

// newDB clones a template for a test.
func (c *cluster) newDB(t testing.TB, template string) *DB {
	t.Helper()
	name, err := c.create(t.Context(), template)
	need(t, err)
	return c.open(t, name, template)
}

// open connects a test to a database. At the end of the test, open drops the database.
func (c *cluster) open(t testing.TB, name, template string) *DB {
	t.Helper()
	t.Cleanup(func() {
		// The test's context has ended before the cleanup.
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := c.drop(ctx, name); err != nil {
			t.Error(err)
		}
	})

	url, err := withDatabase(c.server.URL(), name)
	if err != nil {
		t.Fatal(err)
	}
	db := &DB{URL: url}
	db.Pool = db.OwnerPool(t, nil)
	if template != emptyTemplate && c.monitors && c.of == 0 && c.shards == nil {
		db.application = "pg_monitor" // this role also sees who waits for a lock
	}
	return db
}
