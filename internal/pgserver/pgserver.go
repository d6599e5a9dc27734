// Package pgserver provides a throwaway Postgres for the demo, the tests and the benchmarks. Each way to get one has a
// file: a connection string (url.go), programs on this machine (installed.go), Docker (docker.go), and an npm package
// (npm.go).
//
// A server started by Start runs until Close, or until this process ends. When the process ends, even by kill -9, a
// watchdog stops the server and removes its files.
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

	// startTimeout is how long a server may take until it answers queries.
	startTimeout = time.Minute
)

// Config says which server Start should provide. The zero value is the fastest one that this machine can run.
type Config struct {
	// URL is the connection string of an existing server. Then all other fields are ignored. Defaults to starting a
	// server.
	URL string

	// Major is the version, such as "17". Defaults to the installed version, else 17.
	Major string

	// Image is a Docker image to run. Defaults to the first way that works: installed programs, Docker, npm.
	Image string

	// Fsync keeps the server's default durability settings. Defaults to false: commits are fast then, but Kill and an
	// Immediate stop lose the last ones.
	Fsync bool

	// Settings are further server settings, named as in postgresql.conf. They override those of this package.
	Settings map[string]string
}

// settings are the server's settings, except those that depend on the way it runs.
func (c Config) settings() map[string]string {
	settings := map[string]string{"max_connections": "200", "shared_buffers": "128MB"}
	if !c.Fsync {
		settings["fsync"] = "off"
		settings["full_page_writes"] = "off"
		settings["synchronous_commit"] = "off"
		settings["max_wal_size"] = "256MB" // the log may be in memory
	}
	maps.Copy(settings, c.Settings)
	return settings
}

// Server is a Postgres server that Start found or started. Its methods may be called concurrently. The methods that
// stop or start it only work for a server that Start started.
type Server struct {
	url     string
	version string
	origin  string
	process *process // nil if the server was given by its URL
}

// Start returns a server that answers queries: the one at config.URL, or else one that it starts. If there is no way to
// start one, the error matches ErrNotFound and lists all ways. The context limits only the start; the server lives on.
func Start(ctx context.Context, config Config) (*Server, error) {
	if config.URL != "" {
		return given(ctx, config.URL)
	}
	return launch(ctx, config)
}

// URL returns the connection string of the database "postgres" as a superuser. It stays the same after Restart. With
// Config.URL it is that URL.
func (s *Server) URL() string { return s.url }

// Describe returns one line for people, without the password. For example: "PostgreSQL 17.5 from
// /usr/lib/postgresql/17/bin, started on 127.0.0.1:21432".
func (s *Server) Describe() string { return fmt.Sprintf("PostgreSQL %s %s", s.version, s.origin) }

// Owned reports whether Start started the server.
func (s *Server) Owned() bool { return s.process != nil }

// Close stops a server that Start started, and removes everything that belongs to it. A second call does nothing.
func (s *Server) Close() error {
	if s.process == nil {
		return nil
	}
	return s.process.close()
}

// ask connects once and returns the version of the server. A server with another data directory than dataDir is a
// different one, which took the port first. If dataDir is "", any server is accepted.
func ask(ctx context.Context, url, dataDir string) (version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second) // it may accept connections before it can answer
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
	// Distributors add to the version, for example "17.5 (Debian 17.5-1.pgdg12+1)".
	version, _, _ = strings.Cut(conn.PgConn().ParameterStatus("server_version"), " ")
	return version, nil
}
