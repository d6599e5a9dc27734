// Package pgserver provides a throwaway Postgres for the demo, the tests and the benchmarks. The Postgres can be the
// server of a connection string (url.go), programs on this machine (installed.go), Docker (docker.go), or an npm
// package (npm.go).
//
// A server that Start has started runs until Close, or until this process ends. When the process ends, even by kill -9,
// a watchdog stops the server and removes the server's files.
package pgserver

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	defaultMajor = "17"

	// startTimeout is how long a server may take until it answers queries. On a busy machine, that can be more than a
	// minute.
	startTimeout = 3 * time.Minute
)

// Config says which server Start provides. The zero value is the fastest server that this machine can run.
type Config struct {
	// URL is the connection string of an existing server. If URL is set, Start ignores the other fields. Defaults to
	// "", which means that Start starts a server.
	URL string

	// Major is the server's major version, such as "17". Defaults to the version of the installed programs. Without
	// installed programs, Major defaults to 17.
	Major string

	// Image is a Docker image to run. Defaults to "": Start tries installed programs, then Docker, then npm.
	Image string

	// Fsync keeps the server's default durability settings. Defaults to false, which makes commits fast. Without Fsync,
	// a crash or an Immediate stop loses the last commits.
	Fsync bool

	// Settings are named as in postgresql.conf. Settings override those that this package chooses.
	Settings map[string]string

	// Env is added to the environment of installed programs, such as "LD_PRELOAD=...".
	Env []string
}

// settings returns the server's settings that do not depend on the way it runs.
func (c Config) settings() map[string]string {
	settings := map[string]string{"max_connections": "200", "shared_buffers": "128MB"}
	if !c.Fsync {
		settings["fsync"] = "off"
		settings["full_page_writes"] = "off"
		settings["synchronous_commit"] = "off"
		settings["max_wal_size"] = "256MB" // the write-ahead log may be in memory
	}
	maps.Copy(settings, c.Settings)
	return settings
}

// Server is a Postgres server that Start found or started. The methods may be called concurrently. The methods that
// stop or start a server only work if Start started it.
type Server struct {
	url     string
	version string
	origin  string
	process *process // nil if the server was given by its URL
}

// Start returns a server that answers queries: the server at config.URL, or a new server. If no way to start a server
// works, the error matches ErrNotFound and says why. The end of ctx stops the start, but not a server that has started.
func Start(ctx context.Context, config Config) (*Server, error) {
	if config.URL != "" {
		return given(ctx, config.URL)
	}
	return launch(ctx, config)
}

// URL returns a superuser's connection string for the database "postgres", or Config.URL. URL does not change at a
// Restart.
func (s *Server) URL() string { return s.url }

// Describe returns one line of text without the password: "PostgreSQL 17.5 from /usr/lib/postgresql/17/bin, started on
// 127.0.0.1:21432".
func (s *Server) Describe() string { return fmt.Sprintf("PostgreSQL %s %s", s.version, s.origin) }

// Owned tells whether Start started the server.
func (s *Server) Owned() bool { return s.process != nil }

// Close stops a server that Start started, and removes all of its files. A second call does nothing.
func (s *Server) Close() error {
	if s.process == nil {
		return nil
	}
	return s.process.close()
}

// ask connects once and returns the server's version. ask fails if the server's data directory is not dataDir, because
// another server has taken the port. If dataDir is "", any server is accepted.
func ask(ctx context.Context, url, dataDir string) (version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second) // the server may accept connections before it can answer
	defer cancel()
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close(ctx) }()
	if dataDir != "" {
		var actual string
		if err := conn.QueryRow(ctx, "SHOW data_directory").Scan(&actual); err != nil || actual != dataDir {
			return "", fmt.Errorf("another server answers, with the data directory %q (%w)", actual, err)
		}
	}
	// Distributors append text to the version, such as "17.5 (Debian 17.5-1.pgdg12+1)".
	version, _, _ = strings.Cut(conn.PgConn().ParameterStatus("server_version"), " ")
	return version, nil
}
