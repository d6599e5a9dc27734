//go:build !unix

package pgserver

import (
	"context"
	"errors"
	"runtime"
)

// Without a shell and signals there is no watchdog. A server that might be left behind is not started at all.

func errUnsupported() error {
	return errors.New("pgserver: cannot start a server on " + runtime.GOOS + ": set DATABASE_URL to use one that runs")
}

func newBinaries(context.Context, Config, host, string, string) (engine, error) {
	return nil, errUnsupported()
}

func newContainer(context.Context, Config, host, string) (engine, error) {
	return nil, errUnsupported()
}
