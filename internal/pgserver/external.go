package pgserver

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
)

// external is a server given by its URL: it is used and never touched.
type external struct{ connString string }

var _ engine = external{}

// start connects once. A server that is not there is the caller's mistake, and waiting would only hide it.
func (e external) start(ctx context.Context) (version string, err error) {
	version, err = attempt(ctx, e.connString, "")
	if err != nil {
		return "", fmt.Errorf("pgserver: use the server of the given URL: %w", err)
	}
	return version, nil
}

func (e external) url() string { return e.connString }

func (e external) origin() string {
	config, err := pgx.ParseConfig(e.connString)
	if err != nil {
		return "from the given URL"
	}

	address := net.JoinHostPort(config.Host, strconv.Itoa(int(config.Port)))
	if strings.HasPrefix(config.Host, "/") {
		address = config.Host
	}
	return "from the given URL, at " + address
}

func (external) stop(context.Context, Mode) error { return ErrNotOwned }
func (external) kill() error                      { return ErrNotOwned }
func (external) freeze() error                    { return ErrNotOwned }
func (external) thaw() error                      { return ErrNotOwned }
func (external) close() error                     { return nil }
func (external) dataDir() string                  { return "" }
func (external) pid() int                         { return 0 }
func (external) pids() ([]int, error)             { return nil, nil }
