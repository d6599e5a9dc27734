//go:build !unix

package pgserver

import (
	"context"
	"errors"
)

type process struct{}

// launch returns an error. Without a shell and signals, no watchdog could stop the server when this process ends.
func launch(context.Context, Config) (*Server, error) {
	return nil, errors.New("pgserver: no server can be started on this system: set DATABASE_URL to use one that runs")
}

func (*process) close() error { return nil }
