package httplimit

import (
	"net/http"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/migrations"
)

// Postgres is killed. During the outage, the failure mode answers requests. When the database is back, it answers
// requests again, and still has the earlier usage.
func TestOutage(t *testing.T) {
	t.Parallel()

	server := pgtest.Server(t, pgserver.Config{Fsync: true})
	pool, err := pgxpool.New(t.Context(), server.URL())
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	require.NoError(t, migrations.Up(t.Context(), pool))

	type site struct {
		address string
		log     *testkit.Journal
	}
	sites := map[string]site{}
	for name, mode := range map[string]ratelimit.FailureMode{
		"error": ratelimit.ReturnError(), "open": ratelimit.FailOpen(), "closed": ratelimit.FailClosed(), "fallback": ratelimit.FallbackLocal(0.5),
	} {
		log := &testkit.Journal{}
		limiter := limitertest.New(t, pool, ratelimit.Config{
			Name: name, Policy: ratelimit.FixedWindow{Limit: 4, Window: 365 * 24 * time.Hour},
			Durable: true, SynchronousCommit: true, OnFailure: mode,
		}, ratelimit.ClientConfig{Logger: log.Logger()})
		sites[name] = site{serve(t, limiter, httplimit.Config{
			Key: httplimit.ByIP(), Headers: httplimit.XRateLimit, Logger: log.Logger(),
		}, nil), log}
	}
	client := newClient(t, "127.0.0.1")
	for name, site := range sites {
		status, header := client.get(t, site.address, nil)
		require.Equal(t, http.StatusOK, status, name)
		require.Equal(t, "3", header.Get("X-RateLimit-Remaining"))
	}

	require.NoError(t, server.Kill())
	for name, want := range map[string][]int{
		"error": {503, 503, 503, 503}, "open": {200, 200, 200, 200}, "closed": {503, 503, 503, 503}, "fallback": {200, 200, 429, 429},
	} {
		for i, want := range want {
			status, header := client.get(t, sites[name].address, nil)
			require.Equal(t, want, status, "%s %d", name, i)
			require.Equal(t, want == 200, header.Get("Retry-After") == "", name)
			require.Equal(t, name == "fallback", header.Get("X-RateLimit-Limit") != "", name)
		}
		lines := sites[name].log.Lines()
		require.Len(t, lines, 1, "the client tells of the outage, and the middleware does not tell again")
		require.Contains(t, lines[0], "Postgres is away or slow")
	}

	require.NoError(t, server.Restart(t.Context()))
	for name, site := range sites {
		testkit.WaitUntil(t, func() bool {
			status, header := client.get(t, site.address, nil)
			return status == http.StatusOK && header.Get("X-RateLimit-Limit") == "4" &&
				header.Get("X-RateLimit-Remaining") < "3"
		}, name)
	}
}
