package pgserver

import "errors"

var (
	// ErrNotOwned is returned by Stop, Kill, Restart, Freeze and Thaw for a server that was given by Config.URL.
	ErrNotOwned = errors.New("pgserver: the server was given by its URL and is not ours to stop or start")

	// ErrClosed is returned by Restart after Close.
	ErrClosed = errors.New("pgserver: the server is closed")

	// ErrRunning is returned by Restart for a server that has not been stopped.
	ErrRunning = errors.New("pgserver: the server is running already")
)
