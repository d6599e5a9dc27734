// Package pgtest gives each test its own Postgres database. So all tests can run in parallel, and none has to clean up.
// Each database is a clone of a migrated template. It has 300 files. A clone takes 10 ms in memory (a server started
// with TMPDIR=/dev/shm) and up to 100 ms on a disk.
//
//	func TestMain(m *testing.M) { pgtest.Main(m) }
//
//	func TestSomething(t *testing.T) {
//		t.Parallel()
//		db := pgtest.New(t)
//		…
//	}
//
// The databases are on the server at RATELIMIT_TEST_DATABASE_URL. Its user needs CREATEDB. Without that variable,
// package pgserver starts a server. Several test binaries can share a server. The template's name contains a hash of
// the migrations. The first binary makes the template, and drops those of other migrations. On a given server the
// template stays, for later runs. Nothing else on that server changes.
//
// RATELIMIT_TEST_POSTGRES_MAJOR=17 selects the major version to test. A given server of another version is an error.
//
// DB.Pool belongs to the owner. Tests use it to read and change tables. DB.NewPool is like an application's pool: its
// role has only the grants in docs/operating.md. So the tests prove that an application needs no more. If the server's
// user may not take that role, these pools belong to the owner too.
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

	// maxConns is the size of a pool. Tests rarely need more, and many parallel tests still fit into the default of 100
	// connections.
	maxConns = 8

	// atOnce is the smallest number of tests that run in parallel.
	atOnce = 4

	// patience limits each step at the end of a test. Such a step takes milliseconds unless the test left something
	// behind.
	patience = time.Minute
)

// shared is the server of one test binary, for New and Empty. Only these functions start it, and only Main stops it.
var shared = newShared()

func newShared() *cluster {
	if n := Shards(); n > 0 {
		return newProxy(n)
	}
	return &cluster{config: func() pgserver.Config { return pgserver.Config{URL: os.Getenv(urlVariable)} }}
}

// given tells whether the environment names a server for the tests. Some tests may still need their own server.
var given = os.Getenv(urlVariable) != ""

// DB is the database of one test.
type DB struct {
	// Pool has up to 8 connections. It is closed at the end of the test.
	Pool *pgxpool.Pool

	// URL is the connection string, for other programs and drivers.
	URL string

	// Shards are the shards' databases, if this is a proxy's.
	Shards []*DB

	// application is the role of NewPool, or "". It gets its grants when a test first uses it, so that other tests see
	// only the migrations' objects.
	application string
	granting    sync.Once
}

// Main is the whole body of TestMain. It runs the tests, stops the server if it started one, and exits. On a small
// machine it runs more parallel tests than there are processors, because most of them often wait for the database or
// for time to pass. The flag -parallel overrides that. It gives calls a long timeout, and hides DATABASE_URL from
// tests.
func Main(m *testing.M) {
	if runtime.GOMAXPROCS(0) < atOnce {
		_ = flag.Set("test.parallel", strconv.Itoa(atOnce)) // the command line is read later and overrides this
	}
	deadline.Default = testkit.Amply
	_ = os.Unsetenv("DATABASE_URL") // the developer's server may be shared with others
	code := m.Run()
	if err := shared.close(); err != nil {
		fmt.Fprintln(os.Stderr, "pgtest: close the server:", err)
		code = max(code, 1)
	}
	os.Exit(code)
}

// New returns a database with all migrations applied, in schema public. It is dropped at the end of the test, even if
// there are still connections. If there is no Postgres, the test fails with an error that says how to provide one.
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

// Empty is New without the migrations.
func Empty(t testing.TB) *DB {
	t.Helper()
	return shared.newDB(t, emptyTemplate)
}

// NewPool returns a pool of the same database with an application's rights. It is closed at the end of the test t.
// configure may change its configuration first; it may be nil.
func (db *DB) NewPool(t testing.TB, configure func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	if db.application == "" {
		return db.OwnerPool(t, configure)
	}
	db.granting.Do(func() {
		functions := strings.Join(append(algorithm.Functions(),
			"rate_limit_policies", "rate_limit_ban", "rate_limit_report"), ", ")
		Exec(t, db.Pool, "GRANT EXECUTE ON FUNCTION "+functions+" TO "+quote(db.application))
	})
	return db.OwnerPool(t, func(config *pgxpool.Config) {
		config.ConnConfig.RuntimeParams["role"] = db.application
		if configure != nil {
			configure(config)
		}
	})
}

// OwnerPool is NewPool with the rights of the database's owner.
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
			pool.Close() // waits until all connections are returned
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

// Server starts a server of the test's own, for tests that stop or kill it. It is closed at the end of the test. It is
// started even if RATELIMIT_TEST_DATABASE_URL is set. It has no migrations.
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

// OwnServer skips a test that starts a server in another way, in the cases where Server would skip it.
func OwnServer(t testing.TB) {
	t.Helper()
	need(t, pgserver.Available(t.Context(), pgserver.Config{Major: major()}))
}

// need ends the test if it cannot have a server. It skips a test that stops, kills or configures its server if only a
// given server is available.
func need(t testing.TB, err error) {
	t.Helper()
	if given && errors.Is(err, pgserver.ErrNotFound) {
		t.Skip("a server of the test's own: install Postgres (Debian: postgresql), Docker, or npm")
	}
	if err != nil {
		t.Fatal(err)
	}
}

// major is the version to test, or "".
func major() string { return os.Getenv("RATELIMIT_TEST_POSTGRES_MAJOR") }

// startServer refuses a given server if its version is not the one to test. Otherwise a test of 17 could pass on 15.
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

// open connects a test to a database, and drops the database at the end.
func (c *cluster) open(t testing.TB, name, template string) *DB {
	t.Helper()
	t.Cleanup(func() {
		// By then the test's context has ended.
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
