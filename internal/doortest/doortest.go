// Package doortest puts a service between limiters and their database, for tests.
package doortest

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/door"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// Main runs the tests of a package. If RATELIMIT_TEST_DOOR is set, each engine that has a pool asks a service of its
// own, which has the pool and the engine's settings.
func Main(m *testing.M) {
	if Between() {
		engine.Through = through
	}
	pgtest.Main(m)
}

// Between returns whether there is a service between limiters and their database.
func Between() bool { return os.Getenv("RATELIMIT_TEST_DOOR") != "" }

// Not skips a test that cannot run through a service.
func Not(t testing.TB, why string) {
	t.Helper()
	if Between() {
		t.Skip("not through a service: " + why)
	}
}

//nolint:gochecknoglobals // names of sockets must differ in all engines of the process
var sockets atomic.Int64

// through starts a service on a Unix socket. It ends with the process. There is none for a database that a test makes
// up.
func through(db pg.DB, s engine.Settings) engine.Door {
	if _, ok := db.(*pgxpool.Pool); !ok {
		return nil
	}
	path := filepath.Join(os.TempDir(), fmt.Sprintf("ratelimit-door-%d-%d", os.Getpid(), sockets.Add(1)))
	listener, err := net.Listen("unix", path)
	if err != nil {
		panic(err) //nolint:forbidigo // there is no test to fail
	}
	s.Hooks = engine.Hooks{}
	s.Timeout -= s.Timeout / 10 // so that the service's errors come before those of the client
	e := engine.NewServing(db, s)
	e.Database.ShadowWait = 200
	go func() {
		_ = door.Serve(context.Background(), listener, e, door.Options{
			Valid: func(algorithm.Numbers) bool { return true },
		})
	}()
	return door.NewClient(door.ClientConfig{Address: "unix:" + path})
}
