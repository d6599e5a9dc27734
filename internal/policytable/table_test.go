package policytable_test

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/memdb"
	"github.com/pgratelimit/ratelimit/internal/policytable"
	"github.com/pgratelimit/ratelimit/internal/rulebook"
)

// BenchmarkPolicies measures what rows cost a decision: 100,000 rows for single keys, and 1,000 for prefixes.
func BenchmarkPolicies(b *testing.B) {
	keys := make([]string, 1024)
	for i := range keys {
		keys[i] = fmt.Sprintf("customer:%d", rand.IntN(100_000))
	}
	for _, with := range []bool{false, true} {
		var p *ratelimit.Policies
		var err error
		if with {
			p, err = ratelimit.NewPolicies(&pgxpool.Pool{}, ratelimit.PoliciesConfig{}) // no query is sent to this pool
			require.NoError(b, err)
			close(limitertest.Table(p).Ready)
			limitertest.Table(p).Clock.Store(&policytable.DatabaseClock{Micros: limitertest.T0.UnixMicro(), At: time.Now()})
			var rules []*policytable.Row
			shared := limitertest.Model(ratelimit.FixedWindow{Limit: 1, Window: time.Hour})
			before := heap()
			for id := range int64(101_000) {
				r := &policytable.Row{ID: id, Name: "api", Target: rulebook.Key, Text: fmt.Sprintf("customer:%d", id)}
				r.Value = policytable.Ruling{Mode: policytable.ModeEnforce, From: policytable.AlwaysBegun, Until: policytable.NoEnd, Policy: shared}
				if id >= 100_000 {
					r.Target, r.Text = rulebook.Prefix, fmt.Sprintf("tenant:%d:", id)
				}
				rules = append(rules, r)
			}
			require.Zero(b, limitertest.Table(p).Book.Update(rules, nil, true, len(rules)))
			rules = nil
			b.Logf("%d bytes for each row", (heap()-before)/101_000)
		}
		client, err := ratelimit.NewClient(&memdb.DB{}, ratelimit.ClientConfig{DenialMaxAge: time.Hour})
		require.NoError(b, err)
		l, err := client.Limiter(ratelimit.Config{Name: "api", Policy: ratelimit.FixedWindow{Limit: 1, Window: time.Hour}, Policies: p})
		require.NoError(b, err)
		for _, key := range keys {
			for range 2 {
				_, err := l.Allow(b.Context(), key)
				require.NoError(b, err)
			}
		}
		b.Run(fmt.Sprintf("cached denial with policies %v", with), func(b *testing.B) {
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				_, _ = l.Allow(b.Context(), keys[i%len(keys)])
				i++
			}
		})
	}
}

func heap() uint64 {
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return stats.HeapAlloc
}
