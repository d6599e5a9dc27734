//go:build !unix

package pgserver

import (
	"context"
	"errors"
)

type process struct{}

// launch starts nothing: without a shell and signals there is no watchdog, so the server could stay behind.
func launch(context.Context, Config) (*Server, error) {
	return nil, errors.New("pgserver: no server can be started on this system: set DATABASE_URL to use one that runs")
}

func (*process) close() error { return nil }
