package pgserver

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
)

// given is a server given by its URL. It is used, and never stopped or changed.
type given struct{ connString string }

var _ engine = given{}

// start connects once. If the server is not there, that is the caller's mistake, and waiting would only hide it.
func (g given) start(ctx context.Context) (version string, err error) {
	version, err = attempt(ctx, g.connString, "")
	if err != nil {
		return "", fmt.Errorf("pgserver: use the server of the given URL: %w", err)
	}
	return version, nil
}

func (g given) url() string { return g.connString }

func (g given) origin() string {
	config, err := pgx.ParseConfig(g.connString)
	if err != nil {
		return "from the given URL"
	}

	address := net.JoinHostPort(config.Host, strconv.Itoa(int(config.Port)))
	if strings.HasPrefix(config.Host, "/") {
		address = config.Host
	}
	return "from the given URL, at " + address
}

func (given) stop(context.Context, Mode) error { return ErrNotOwned }
func (given) kill() error                      { return ErrNotOwned }
func (given) freeze() error                    { return ErrNotOwned }
func (given) thaw() error                      { return ErrNotOwned }
func (given) close() error                     { return nil }
func (given) dataDir() string                  { return "" }
func (given) pid() int                         { return 0 }
func (given) pids() ([]int, error)             { return nil, nil }
