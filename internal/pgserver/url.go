package pgserver

import (
	"context"
	"fmt"
	"net"
	"strconv"

	"github.com/jackc/pgx/v5"
)

// given returns the server of a connection string. No method stops or changes this server. given does not wait for the
// server to answer, because the URL may be wrong.
func given(ctx context.Context, url string) (*Server, error) {
	version, err := ask(ctx, url, "")
	if err != nil {
		return nil, fmt.Errorf("pgserver: use the server of the given URL: %w", err)
	}
	config, err := pgx.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	address := net.JoinHostPort(config.Host, strconv.Itoa(int(config.Port)))
	return &Server{url: url, version: version, origin: "from the given URL, at " + address}, nil
}
