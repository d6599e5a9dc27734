package httplimit

import (
	"context"
	"log/slog"
	"net/http"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// refusing is a database that answers every query with an error.
type refusing struct{ err *pgconn.PgError }

func (r *refusing) Query(context.Context, string, ...any) (pgx.Rows, error) { return nil, r.err }

// Without a Logger, slog.Default gets one line with the cause of the 503s, for every OnFailure. The limiter's client
// writes this line, and the middleware writes no second line.
//
//nolint:paralleltest // it replaces slog.Default
func TestFaultsHaveOneLine(t *testing.T) {
	before := slog.Default()
	defer slog.SetDefault(before)
	for name, c := range map[string]struct {
		err  pgconn.PgError
		says string
	}{
		"not migrated":     {pgconn.PgError{Code: "42883", SeverityUnlocalized: "ERROR"}, "the database is not migrated"},
		"no right":         {pgconn.PgError{Code: "42501", SeverityUnlocalized: "ERROR"}, "GRANT"},
		"refused log-in":   {pgconn.PgError{Code: "28P01", SeverityUnlocalized: "FATAL"}, "pg_hba.conf"},
		"missing database": {pgconn.PgError{Code: "3D000", SeverityUnlocalized: "FATAL"}, "connection string"},
		"any other error":  {pgconn.PgError{Code: "XX001", SeverityUnlocalized: "ERROR"}, "XX001"},
	} {
		for _, mode := range []ratelimit.FailureMode{
			ratelimit.ReturnError(), ratelimit.FailOpen(), ratelimit.FailClosed(), ratelimit.FallbackLocal(0.5),
		} {
			var log testkit.Journal
			slog.SetDefault(log.Logger())
			limiter, err := ratelimit.New(&refusing{&c.err}, ratelimit.Config{
				Name: "login", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Minute}, OnFailure: mode,
			})
			require.NoError(t, err)
			handler := limited(t, limiter, Config{}, nil)
			for range 100 {
				require.Equal(t, http.StatusServiceUnavailable, serve(t, handler).status, "%s, %v", name, mode)
			}
			lines := log.Lines()
			require.Len(t, lines, 1, "%s, %v: %s", name, mode, log.String())
			require.Contains(t, lines[0], "level=ERROR")
			require.Contains(t, lines[0], c.says)
			require.NotContains(t, lines[0], "192.0.2.1")
		}
	}

	// An outage is logged too.
	var log testkit.Journal
	slog.SetDefault(log.Logger())
	limiter, err := ratelimit.New(&refusing{&pgconn.PgError{Code: "57P03", SeverityUnlocalized: "FATAL"}}, ratelimit.Config{
		Name: "login", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Minute}, OnFailure: ratelimit.ReturnError(),
	})
	require.NoError(t, err)
	handler := limited(t, limiter, Config{}, nil)
	for range 100 {
		require.Equal(t, http.StatusServiceUnavailable, serve(t, handler).status)
	}
	require.Len(t, log.Lines(), 1)

	// Lines of the middleware go to slog.Default too.
	fake := allowing()
	fake.err = ratelimit.ErrKeyHeld
	serve(t, limited(t, fake, Config{}, nil))
	require.Len(t, log.Lines(), 1)
}
