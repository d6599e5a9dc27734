package ratelimit_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/memdb"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// If the server does not know a time zone, each caller that uses this zone gets, at once, an error with the zone's
// name. Other calls in the same statements get no error.
func TestUnknownTimeZone(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	client := limitertest.NewClient(t, db.Pool, ratelimit.ClientConfig{})
	good := limitertest.Of(t, client, ratelimit.Config{Name: "good", Policy: limitertest.SlowCalendar(1000)})
	bad := limitertest.Of(t, client, ratelimit.Config{
		Name: "bad", Policy: ratelimit.CalendarWindow{Limit: 1000, Unit: ratelimit.CalendarMonth, Zone: "Mars/Phobos"}, OnFailure: ratelimit.FailOpen(),
	})
	plain := limitertest.Of(t, client, ratelimit.Config{Name: "plain", Policy: ratelimit.FixedWindow{Limit: 1000, Window: limitertest.Year}})
	requireUnknown := func(err error) {
		t.Helper()
		var refused *ratelimit.ConfigError
		require.ErrorAs(t, err, &refused)
		require.Equal(t, "Config.Policy.Zone", refused.Field)
		require.Contains(t, refused.Reason, `"Mars/Phobos"`)
	}
	testkit.Together(48, func(g int) {
		ctx, key := context.Background(), fmt.Sprint(g)
		for i := range 10 {
			switch l := []*ratelimit.Limiter{good, bad, plain}[g%3]; {
			case i%2 == 0:
				result, err := l.Allow(ctx, key)
				if l == bad {
					requireUnknown(err)
					continue
				}
				require.NoError(t, err)
				require.True(t, result.Allowed)
				require.Equal(t, ratelimit.SourceDatabase, result.Source)
			case l == bad:
				_, err := ratelimit.AllowAll(ctx, plain.Request("{"+key+"}all", 1), bad.Request(key, 1))
				requireUnknown(err)
			default:
				results, err := ratelimit.AllowAll(ctx, plain.Request("{"+key+"}all", 1), good.Request(key, 1))
				require.NoError(t, err)
				require.True(t, results.Allowed)
			}
		}
	})
	for name, call := range limitertest.Calls(bad, "key") {
		if !strings.Contains(name, "Reset") { // Reset needs no time zone
			requireUnknown(call())
		}
	}
	_, err := limitertest.Under(good, ratelimit.CalendarWindow{Limit: 1000, Unit: ratelimit.CalendarMonth, Zone: "Mars/Phobos"}).Allow(t.Context(), "0")
	requireUnknown(err) // although the row of the key has a window
	require.Equal(t, int64(0), pgtest.Scalar[int64](t, db.Pool,
		"SELECT count(*) FROM rate_limit_ephemeral WHERE prefix = 'bad'"))
	require.Equal(t, int64(32*5), pgtest.Scalar[int64](t, db.Pool, // what AllowAll took from the limiter good
		"SELECT sum(count)::bigint FROM rate_limit_ephemeral WHERE prefix = 'plain' AND key ~ 'all'"))

	_, err = db.Pool.Exec(t.Context(), "SELECT * FROM rate_limit_allow('sql', 'key', 'every 5/day Mars/Phobos')")
	require.ErrorContains(t, err, `"Mars/Phobos"`)
}

// A limiter in memory returns an error for a time zone that this process does not know.
func TestUnknownTimeZoneInMemory(t *testing.T) {
	t.Parallel()
	client := limitertest.NewClient(t, &memdb.DB{}, ratelimit.ClientConfig{})
	bad := limitertest.Of(t, client, ratelimit.Config{Name: "bad", Policy: ratelimit.CalendarWindow{Limit: 10, Unit: ratelimit.CalendarDay, Zone: "Mars/Phobos"}})
	good := limitertest.Of(t, client, ratelimit.Config{Name: "good", Policy: ratelimit.CalendarWindow{Limit: 10, Unit: ratelimit.CalendarDay, Zone: "Asia/Tokyo"}})
	testkit.Together(20, func(g int) {
		if g%2 == 0 {
			result, err := good.Allow(context.Background(), fmt.Sprint(g))
			require.NoError(t, err)
			require.True(t, result.Allowed)
			return
		}
		_, err := bad.Allow(context.Background(), fmt.Sprint(g))
		var refused *ratelimit.ConfigError
		require.ErrorAs(t, err, &refused)
		require.Equal(t, "Config.Policy.Zone", refused.Field)
		require.Contains(t, refused.Reason, `"Mars/Phobos"`)
	})
}
