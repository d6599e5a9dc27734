package pgserver

import (
	"errors"
	"fmt"
	"strings"
)

var (
	// ErrNotFound is matched by the error of Start when there is neither a URL nor binaries nor a Docker engine.
	ErrNotFound = errors.New("pgserver: no Postgres to run on")

	// ErrNotOwned is returned by Stop, Kill, Restart, Freeze and Thaw for a server that was given by Config.URL.
	ErrNotOwned = errors.New("pgserver: the server was given by its URL and is not ours to stop or start")

	// ErrClosed is returned by Restart after Close.
	ErrClosed = errors.New("pgserver: the server is closed")

	// ErrRunning is returned by Restart for a server that has not been stopped.
	ErrRunning = errors.New("pgserver: the server is running already")
)

// notFoundError is ErrNotFound with what was looked at.
type notFoundError struct {
	folders []string
	docker  error
}

// Error names each way to get a server, and why it is not open.
func (e *notFoundError) Error() string {
	return fmt.Sprintf(`%v. Provide one in any of these ways:
  - set DATABASE_URL (for tests RATELIMIT_TEST_DATABASE_URL) to the connection string of a server
  - install the Postgres server, for example "apt-get install postgresql" or "brew install postgresql@17"
    (looked for postgres and initdb in PATH, "pg_config --bindir" and %s)
  - install and start Docker, https://docs.docker.com/get-started/get-docker/ (%v)`,
		ErrNotFound, strings.Join(e.folders, ", "), e.docker)
}

// Is makes errors.Is(err, ErrNotFound) true.
func (e *notFoundError) Is(target error) bool { return target == ErrNotFound }

// Unwrap returns why Docker could not be used.
func (e *notFoundError) Unwrap() error { return e.docker }
