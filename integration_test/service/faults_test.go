package service

import (
	"context"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/migrations"
)

// goroutines is how many ask on each door.
const goroutines = 4

// patient is for services that are not to give up on a slow machine.
var patient = []string{"--durable", "--timeout", testkit.Amply.String(), "--drain", testkit.Amply.String()}

// Two instances share nothing but Postgres. Together they allow the limit, no more and no less.
func TestTwoInstances(t *testing.T) {
	t.Parallel()
	const limit = 3000
	db := pgtest.New(t)
	a := start(t, db.URL, rules(limit, ""), patient...)
	b := start(t, db.URL, rules(limit, ""), patient...)
	h := how{limit: limit}
	l := ask(t, personal, testkit.Amply, goroutines, append(callers(t, h, a), callers(t, h, b)...))
	l.each(t, 1, func(c *told) int64 { return c.allowed.Load() })
	l.each(t, 50, func(c *told) int64 { return c.denied.Load() })
	l.stop()
	l.requireNoFailure(t)
	require.EqualValues(t, limit, l.allowed())
}

// The configuration changes again and again, to good and to bad files, while callers on all doors ask. They notice
// nothing.
func TestReloadUnderLoad(t *testing.T) {
	t.Parallel()
	const limit = 1_000_000
	s := start(t, pgtest.New(t).URL, rules(limit, ""), patient...)
	l := ask(t, personal, testkit.Amply, goroutines, callers(t, how{limit: limit}, s))
	for i := range 20 {
		for _, change := range []struct{ content, told string }{
			{fmt.Sprintf("domain: other\ndescriptors:\n- key: k%d\n  rate_limit: {unit: day, requests_per_unit: 5}\n", i), "is in force"},
			{"domain: other\nsurprise: 1\n", "has a mistake"},
		} {
			before := strings.Count(s.log.String(), change.told)
			s.write(t, "other.yaml", change.content)
			s.signal(t, syscall.SIGHUP)
			testkit.WaitUntil(t, func() bool { return strings.Count(s.log.String(), change.told) > before })
			l.each(t, 1, func(c *told) int64 { return c.allowed.Load() })
		}
	}
	l.stop()
	l.requireNoFailure(t)
	require.Zero(t, l.sum(func(c *told) int64 { return c.denied.Load() }))
}

// Instances end one after the other, as in a rollout, while callers ask on all doors. No call fails: a caller whose
// instance has ended asks the other one, or Postgres.
func TestRolloutUnderLoad(t *testing.T) {
	t.Parallel()
	const limit = 1_000_000
	db := pgtest.New(t)
	a := start(t, db.URL, rules(limit, ""), patient...)
	b := start(t, db.URL, rules(limit, ""), patient...)
	h := how{limit: limit, direct: db.NewPool(t, nil)}
	l := ask(t, personal, testkit.Amply, 48, append(callers(t, h, a, b), callers(t, h, b, a)...))
	for _, s := range []*instance{a, b} {
		l.each(t, 20, func(c *told) int64 { return c.allowed.Load() })
		s.end(t)
		l.each(t, 20, func(c *told) int64 { return c.allowed.Load() })
		s.run(t)
	}
	l.stop()
	l.requireNoFailure(t)
}

// Services are killed, frozen, cut off from Postgres, and lose it, while callers ask on all doors of two instances.
// Nothing is allowed beyond the limit but by OnFailure, all calls end in time, and afterwards the database decides.
func TestFaultsUnderLoad(t *testing.T) {
	t.Parallel()
	for _, mode := range []struct {
		name string
		how  how
	}{
		{"error", how{onFailure: ratelimit.ReturnError()}},
		{"deny", how{onFailure: ratelimit.FailClosed()}},
		{"allow", how{onFailure: ratelimit.FailOpen(), allows: true}},
	} {
		t.Run(mode.name, func(t *testing.T) {
			t.Parallel()
			const limit = 1000
			server := pgtest.Server(t, pgserver.Config{})
			pool := (&pgtest.DB{URL: server.URL()}).OwnerPool(t, nil)
			require.NoError(t, migrations.Up(t.Context(), pool))
			between := newNetwork(t, server.URL())
			var instances [2]*instance
			for i := range instances {
				// A call that takes longer than the timeout costs its connection. On a slow machine, a service with the
				// usual second would never have one that is warm.
				instances[i] = start(t, between.url, rules(limit, mode.name), "--durable", "--on-failure", mode.name,
					"--max-conns", "1", "--timeout", "5s")
			}
			mode.how.limit = limit
			all := append(callers(t, mode.how, instances[0]), callers(t, mode.how, instances[1])...)
			ofFirst, noticing := []int{0, 1, 2}, []int{1, 2, 4, 5} // over gRPC, a denial looks the same without Postgres

			for name, fault := range map[string]func(l *load){
				"killed": func(*load) {
					instances[0].kill(t)
					instances[0].run(t)
				},
				"frozen": func(l *load) {
					instances[0].signal(t, syscall.SIGSTOP)
					l.each(t, goroutines, (*told).trouble, ofFirst...)
					instances[0].signal(t, syscall.SIGCONT)
				},
				"silent network": func(l *load) {
					between.set(loses)
					l.each(t, goroutines, (*told).trouble, noticing...)
					// Connections that are made in vain take all places of the pools: one of each.
					testkit.WaitUntil(t, func() bool { return between.inVain() >= 8 })
					between.set(works)
				},
				"broken network": func(l *load) {
					between.set(breaks)
					l.each(t, goroutines, (*told).trouble, noticing...)
					between.set(works)
				},
				"without Postgres": func(l *load) {
					require.NoError(t, server.Stop(t.Context(), pgserver.Fast))
					l.each(t, goroutines, (*told).trouble, noticing...)
					require.NoError(t, server.Restart(t.Context()))
					pool.Reset()
				},
			} {
				key := personal + " " + name
				within := testkit.Amply / 2 // the services give up much earlier
				if name == "frozen" {
					within = 2 * time.Second
				}
				l := ask(t, key, within, goroutines, all)
				testkit.WaitUntil(t, func() bool { return l.allowed() > limit/10 })
				fault(l)
				for i, c := range all {
					n := 0
					testkit.WaitUntil(t, func() bool {
						n++
						ctx, cancel := context.WithTimeout(t.Context(), within)
						defer cancel()
						got, err := c.ask(ctx, fmt.Sprint(key, " again ", i, n))
						return err == nil && got.allowed && got.counted
					}, "caller %d does not get an answer of the database", i)
				}
				testkit.WaitUntil(t, func() bool { return count(t, pool, key) >= limit })
				l.each(t, 10, func(c *told) int64 { return c.denied.Load() })
				l.stop()
				require.EqualValues(t, limit, count(t, pool, key), name)
				require.LessOrEqual(t, l.allowed(), int64(limit), name)
				require.True(t, mode.how.allows || l.sum(func(c *told) int64 { return c.failedOpen.Load() }) == 0, name)
				require.True(t, name == "frozen" || l.expired.Load() == 0, name)
			}
		})
	}
}

// count returns what the row of a key counts.
func count(t *testing.T, pool *pgxpool.Pool, key string) (n int64) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(),
		"SELECT coalesce(sum(count), 0) FROM rate_limit_durable WHERE key = $1", row(key)).Scan(&n))
	return n
}
