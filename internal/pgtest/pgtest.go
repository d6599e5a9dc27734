// Package pgtest gives each test a Postgres database of its own. So all tests can run in parallel, and none has
// to clean up. A database is cloned from a migrated template. It has 300 files, so that takes 10 ms in memory (a
// server started with TMPDIR=/dev/shm) and up to 100 ms on a disk.
//
//	func TestMain(m *testing.M) { pgtest.Main(m) }
//
//	func TestSomething(t *testing.T) {
//		t.Parallel()
//		db := pgtest.New(t)
//		…
//	}
//
// The databases are on the server that RATELIMIT_TEST_DATABASE_URL names, where the user needs CREATEDB. Without
// it they are on one that package pgserver starts. Several test binaries may share a server. The template carries a
// hash of the migrations in its name. Whoever comes first makes it, and drops those of other migrations. On a given
// server it stays, for the next time. Nothing else is touched there.
//
// RATELIMIT_TEST_POSTGRES_MAJOR=17 says which major version is to be tested. A given server of another version fails.
//
// DB.Pool is the owner's, for what tests look up and change in tables. DB.NewPool is an application's: it connects as a
// role that has the grants that docs/operating.md names, and nothing else. So the tests show that an application needs
// no more. Where the server's user may not take that role, these pools are the owner's too.
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

	// maxConns is the size of a pool. It is more than a test usually needs, and few enough for many parallel
	// tests on a server with the default of 100 connections.
	maxConns = 8

	// atOnce is the least number of parallel tests that run at once.
	atOnce = 4

	// patience bounds steps at the end of a test. Each takes milliseconds unless the test has left something behind.
	patience = time.Minute
)

// shared is what New and Empty of one test binary share. Only they start it, and only Main ends it.
var shared = newShared()

func newShared() *cluster {
	if n := Shards(); n > 0 {
		return newProxy(n)
	}
	return &cluster{config: func() pgserver.Config { return pgserver.Config{URL: os.Getenv(urlVariable)} }}
}

// given is whether somebody has given a server to these tests. They may still want one of their own.
var given = os.Getenv(urlVariable) != ""

// DB is the database of one test.
type DB struct {
	// Pool has up to 8 connections, and is closed at the end of the test.
	Pool *pgxpool.Pool

	// URL is the connection string, for other programs and other ways to connect.
	URL string

	// Shards are the databases of the shards, if this one is a proxy's.
	Shards []*DB

	// application is the role of NewPool, or "". It gets its rights when a test first uses it: who looks at what the
	// migrations make finds nothing else.
	application string
	granting    sync.Once
}

// Main is all that TestMain has to do. It runs the tests, closes the server if one was started, and exits. On a
// small machine it runs more tests at once than there are processors, because most of them wait for the database
// now and then, or for time to go by. The flag -parallel overrides that. Calls get ample time, and tests never see a
// DATABASE_URL.
func Main(m *testing.M) {
	if runtime.GOMAXPROCS(0) < atOnce {
		_ = flag.Set("test.parallel", strconv.Itoa(atOnce)) // the command line is read later, and wins
	}
	deadline.Default = testkit.Amply
	_ = os.Unsetenv("DATABASE_URL") // it is the developer's, and may be a server that others share
	code := m.Run()
	if err := shared.close(); err != nil {
		fmt.Fprintln(os.Stderr, "pgtest: close the server:", err)
		code = max(code, 1)
	}
	os.Exit(code)
}

// New returns a database with all migrations applied, in schema public. It is dropped at the end of the test,
// whatever is still connected to it. If there is no Postgres to run on, the test fails with an error that says
// how to provide one.
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

// NewPool returns a pool of the same database as an application has it, which is closed at the end of the test t.
// configure may change its configuration first, and may be nil.
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

// OwnerPool is NewPool for what the owner of the database does.
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
			pool.Close() // waits for all connections
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

// Server returns a server of the test's own, for tests that stop or kill it, and closes it at the end of the
// test. It is started even if RATELIMIT_TEST_DATABASE_URL is set, and has no migrations.
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

// OwnServer skips a test that starts a server without Server, where Server would do so.
func OwnServer(t testing.TB) {
	t.Helper()
	need(t, pgserver.Available(t.Context(), pgserver.Config{Major: major()}))
}

// need ends the test if it cannot have a server. Where somebody has given us one, and there is no other, a test that
// stops, kills or configures its server is skipped.
func need(t testing.TB, err error) {
	t.Helper()
	if given && errors.Is(err, pgserver.ErrNotFound) {
		t.Skip("a server of the test's own: install Postgres (Debian: postgresql), Docker, or npm")
	}
	if err != nil {
		t.Fatal(err)
	}
}

// major is the version that is to be tested, or "".
func major() string { return os.Getenv("RATELIMIT_TEST_POSTGRES_MAJOR") }

// startServer refuses a given server of another version than the one to be tested. Whoever asks for 17 does not want to
// be told that all is well on 15.
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

// open lets a test use a database, and drops it in the end.
func (c *cluster) open(t testing.TB, name, template string) *DB {
	t.Helper()
	t.Cleanup(func() {
		// The context of the test has ended by then.
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
		db.application = "pg_monitor" // which also sees who waits for a lock
	}
	return db
}
