package pgserver

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// attemptTimeout bounds one attempt to connect, because a server may accept connections before it is able to
// answer.
const attemptTimeout = 3 * time.Second

// awaitReady connects again and again until the server answers, and returns its version. It gives up when the
// context ends or when ended returns. ended has to wait for the end of the server or of the context, and to
// return which one it was.
//
// A server that answers but has another data directory than dataDir is not ours. It was quicker on that port.
// With a dataDir of "", any server will do.
func awaitReady(
	ctx context.Context, url, dataDir string, ended func(context.Context) error,
) (version string, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		cancel(ended(ctx))
	}()
	defer func() {
		cancel(nil)
		<-watched
	}()

	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for {
		version, err := attempt(ctx, url, dataDir)
		if err == nil {
			return version, nil
		}
		select {
		case <-ctx.Done():
			return "", fmt.Errorf("pgserver: the server does not answer: %w (last attempt: %w)",
				context.Cause(ctx), err)
		case <-ticker.C:
		}
	}
}

// attempt connects once.
func attempt(ctx context.Context, url, dataDir string) (version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()

	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close(ctx) }()

	if dataDir != "" {
		var actual string
		if err := conn.QueryRow(ctx, "SHOW data_directory").Scan(&actual); err != nil {
			return "", err
		}
		if actual != dataDir {
			return "", fmt.Errorf("pgserver: another server, with data directory %s, answers", actual)
		}
	}

	// Distributors add to the version, for example "17.5 (Debian 17.5-1.pgdg12+1)".
	version, _, _ = strings.Cut(conn.PgConn().ParameterStatus("server_version"), " ")
	return version, nil
}

// withStartTimeout adds the default deadline to a context that has none.
func withStartTimeout(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, startTimeout)
}
