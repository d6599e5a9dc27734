package faults

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// outageCall is the outcome of one call.
type outageCall struct {
	key    string
	result ratelimit.Result
	began  time.Time
	took   time.Duration
}

// Postgres is stopped or frozen while 32 callers make a thousand or more calls a second, and returns later. No caller
// gets an error. During the outage, the only connection attempts are the breaker's: one probe per pause. Each key gets
// its limit from the database, and beyond that only what the failure mode allows.
func TestOutageUnderLoad(t *testing.T) {
	t.Parallel()

	const (
		callers, keys = 32, 20
		limit, shared = 300, 30
		pauses        = 500 * time.Millisecond // the pause between two probes of the breaker
	)
	for name, mode := range map[string]ratelimit.FailureMode{
		"open": ratelimit.FailOpen(), "closed": ratelimit.FailClosed(), "fallback": ratelimit.FallbackLocal(0.1),
	} {
		for _, frozen := range []bool{false, true} {
			t.Run(name+map[bool]string{false: ", stopped", true: ", frozen"}[frozen], func(t *testing.T) {
				t.Parallel() // the test spends most of its time waiting
				server, pool := newServer(t, pgserver.Config{})
				var attempts, statements atomic.Int64
				limited := newPool(t, server.URL(), func(config *pgxpool.Config) {
					config.BeforeConnect = func(context.Context, *pgx.ConnConfig) error {
						attempts.Add(1)
						return nil
					}
				})
				transitions := make(chan ratelimit.BreakerEvent, 100)
				config := ratelimit.Config{
					Name: "test", Policy: ratelimit.FixedWindow{Limit: limit, Window: year}, OnFailure: mode, NoDenialCache: true,
				}
				clientConfig := ratelimit.ClientConfig{
					Observer: &ratelimit.Observer{
						Statement: func(ratelimit.StatementEvent) { statements.Add(1) },
						Breaker:   func(e ratelimit.BreakerEvent) { transitions <- e },
					},
				}
				// A machine that stalls for a second looks like a frozen server, and also causes an outage.
				strict := !frozen
				if frozen {
					clientConfig.Timeout = time.Second
				}
				limiter := limitertest.New(t, limited, config, clientConfig)

				var mu sync.Mutex
				var calls []outageCall
				ctx, stop := context.WithCancel(t.Context())
				var wg sync.WaitGroup
				for i := range callers {
					wg.Go(func() {
						for n := i; ctx.Err() == nil; n++ {
							c := outageCall{key: keyNumber(n % keys), began: time.Now()}
							var err error
							c.result, err = limiter.Allow(context.Background(), c.key)
							c.took = time.Since(c.began)
							if frozen && errors.Is(err, ratelimit.ErrTimeout) &&
								!errors.Is(err, ratelimit.ErrOutcomeUnknown) {
								// The statement was waiting for a row's lock when the server froze, and kept waiting
								// until the thaw. OnFailure does not answer this error, and nothing was taken.
								continue
							}
							if err != nil {
								t.Error(err)
							}
							mu.Lock()
							calls = append(calls, c)
							mu.Unlock()
							pause(ctx, 4*time.Millisecond)
						}
					})
				}
				defer wg.Wait()
				defer stop()
				since := func(from time.Time) (later []outageCall) {
					mu.Lock()
					defer mu.Unlock()
					for _, c := range calls {
						if c.began.After(from) {
							later = append(later, c)
						}
					}
					return later
				}
				transition := func(open bool) (at time.Time) {
					t.Helper()
					for {
						select {
						case e := <-transitions:
							if e.Open == open {
								return time.Now()
							}
							require.False(t, strict, e)
						case <-time.After(amply):
							require.Fail(t, "the breaker does not change", "open: %v", open)
						}
					}
				}
				testkit.WaitUntil(t, func() bool { return len(since(time.Time{})) > 1000 })
				require.True(t, !strict || len(transitions) == 0)

				// The server is away.
				away := time.Now()
				if frozen {
					require.NoError(t, server.Freeze())
				} else {
					require.NoError(t, server.Stop(t.Context(), pgserver.Fast))
				}
				opened := transition(true)
				triedBefore, sentBefore := attempts.Load(), statements.Load()
				testkit.WaitUntil(t, func() bool { return statements.Load() > sentBefore+2 })
				tried, sent := attempts.Load()-triedBefore, statements.Load()-sentBefore
				most := int64(time.Since(opened)/pauses) + 2 // one more probe was in flight when the breaker opened
				require.LessOrEqual(t, sent, most)
				require.LessOrEqual(t, tried, 2*most) // pgx tries twice for each probe

				// The server comes back.
				if frozen {
					require.NoError(t, server.Thaw())
				} else {
					require.NoError(t, server.Restart(t.Context()))
				}
				returned := time.Now()
				closed := transition(false)
				pool.Reset()
				testkit.WaitUntil(t, func() bool {
					counts := counted(t, pool, false)
					for i := range keys {
						if counts[keyNumber(i)] < limit {
							return false
						}
					}
					return true
				})
				quiet := time.Now()
				testkit.WaitUntil(t, func() bool { return len(since(quiet)) > 1000 })
				stop()
				wg.Wait()
				require.True(t, !strict || len(transitions) == 0)

				admitted := map[ratelimit.Source]map[string]int64{}
				for _, c := range calls {
					if admitted[c.result.Source] == nil {
						admitted[c.result.Source] = map[string]int64{}
					}
					if c.result.Allowed {
						admitted[c.result.Source][c.key]++
					}
				}
				counts := counted(t, pool, false)
				for i := range keys {
					key := keyNumber(i)
					require.EqualValues(t, limit, counts[key])
					require.LessOrEqual(t, admitted[ratelimit.SourceDatabase][key], int64(limit))
					if name == "fallback" {
						require.EqualValues(t, shared, admitted[ratelimit.SourceFallback][key])
					}
					require.Zero(t, admitted[ratelimit.SourceFailedClosed][key])
				}
				if strict {
					for _, c := range since(quiet) {
						require.Equal(t, ratelimit.SourceDatabase, c.result.Source)
						require.False(t, c.result.Allowed)
					}
				}

				var until, open []time.Duration
				for _, c := range calls {
					switch ended := c.began.Add(c.took); {
					case ended.Before(away), c.began.After(closed):
					case c.began.Before(opened):
						until = append(until, c.took)
					case c.began.Before(returned):
						open = append(open, c.took)
					}
				}
				t.Logf(
					"until the breaker opened, in %v: %d calls, p99 %v; while it was open: %d calls, p99 %v, %d probes; back after %v",
					opened.Sub(
						away,
					),
					len(until),
					testkit.Quantile(until, 0.99),
					len(open),
					testkit.Quantile(open, 0.99),
					sent,
					closed.Sub(returned),
				)
			})
		}
	}
}

// If the network drops packets, a new connection hangs for the pool's connect_timeout, even after the network is back.
// Such a connection uses one of the pool's places. Even so, the limiter works again. It does not wait for pgx's default
// of two minutes.
func TestOutageThatSwallowsConnections(t *testing.T) {
	t.Parallel()

	var hole atomic.Bool
	var statements atomic.Int64
	pool := pgtest.New(t).OwnerPool(t, func(config *pgxpool.Config) {
		config.MaxConns = 2
		config.ConnConfig.ConnectTimeout = 3 * time.Second
		dial := config.ConnConfig.DialFunc
		config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			if hole.Load() {
				nobody, _ := net.Pipe()
				return nobody, nil
			}
			return dial(ctx, network, address)
		}
	})
	limiter := limitertest.New(t, pool, ratelimit.Config{
		Name: "test", Policy: ratelimit.FixedWindow{Limit: 1, Window: year}, NoDenialCache: true,
		OnFailure: ratelimit.FailClosed(),
	}, ratelimit.ClientConfig{
		Timeout:  3 * time.Second, // enough to connect on a busy machine
		Observer: &ratelimit.Observer{Statement: func(ratelimit.StatementEvent) { statements.Add(1) }},
	})
	source := func() ratelimit.Source {
		result, err := limiter.Allow(t.Context(), "key")
		require.NoError(t, err)
		return result.Source
	}
	testkit.WaitUntil(t, func() bool { return source() == ratelimit.SourceDatabase })
	hole.Store(true)
	pool.Reset()
	testkit.WaitUntil(t, func() bool { return source() == ratelimit.SourceFailedClosed && statements.Load() > 5 })
	hole.Store(false)
	testkit.WaitUntil(t, func() bool { return source() == ratelimit.SourceDatabase })
}
