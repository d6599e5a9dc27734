package bench

import (
	"context"
	"runtime"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/maypok86/otter/v2"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
)

// cachedKeys is the largest number of denials in this library's cache, which has two generations. otter's cache has the
// same size.
const cachedKeys = 2 * 8192

// BenchmarkDenialCache compares this library's cache of denials with otter, a cache library that stores the same data.
// Both caches are in front of a database that denies everything immediately, as in a limiter.
//
//	hit     requests for a denied key. For this library that is the whole Allow, including the decision. For otter it is
//	        only the look-up and the checks that every caller needs, so otter is favoured.
//	insert  requests for new keys, which the database denies and the cache remembers, at most 16,384 keys. Nearly all of
//	        the time is the round trip to the database, so compare with "insert/none", which remembers nothing. When
//	        this library's cache is full, it adds nothing until its denials are too old. So there are runs with
//	        1s, the default, and with 10ms. otter evicts an old key for each new key.
func BenchmarkDenialCache(b *testing.B) {
	ctx := b.Context()
	for _, width := range []struct {
		name string
		run  func(b *testing.B, call func(i int) bool)
	}{{"single", single}, {"parallel", parallel}} {
		for _, keys := range []int{1, 1_000} {
			name := "hit/" + strconv.Itoa(keys) + "-keys/" + width.name
			b.Run(name+"/ratelimit", func(b *testing.B) {
				limiter := denyingLimiter(b, ratelimit.Config{}, ratelimit.ClientConfig{DenialMaxAge: time.Hour})
				users := keyNames(keys)
				for i := range users {
					require.True(b, denies(ctx, limiter, users[i]))
				}
				width.run(b, func(i int) bool { return denies(ctx, limiter, users[i%keys]) })
			})
			b.Run(name+"/otter", func(b *testing.B) {
				cache := newOtter(time.Hour)
				users := keyNames(keys)
				for i := range users {
					cache.Set(users[i], remembered())
				}
				begin := time.Now()
				width.run(b, func(i int) bool {
					known, ok := cache.GetIfPresent(users[i%keys])
					return ok && time.Since(begin) >= known.asked
				})
			})
		}

		users := keyNames(1 << 20)
		for _, variant := range []struct {
			name   string
			config ratelimit.Config
			client ratelimit.ClientConfig
		}{
			{name: "none", config: ratelimit.Config{NoDenialCache: true}},
			{name: "ratelimit-1s"},
			{name: "ratelimit-10ms", client: ratelimit.ClientConfig{DenialMaxAge: 10 * time.Millisecond}},
		} {
			b.Run("insert/"+width.name+"/"+variant.name, func(b *testing.B) {
				limiter := denyingLimiter(b, variant.config, variant.client)
				width.run(b, func(i int) bool { return denies(ctx, limiter, users[i%len(users)]) })
			})
		}
		b.Run("insert/"+width.name+"/otter", func(b *testing.B) {
			limiter := denyingLimiter(b, ratelimit.Config{NoDenialCache: true}, ratelimit.ClientConfig{})
			cache := newOtter(time.Second)
			width.run(b, func(i int) bool {
				key := users[i%len(users)]
				if _, ok := cache.GetIfPresent(key); ok {
					return true
				}
				denied := denies(ctx, limiter, key)
				cache.Set(key, remembered())
				return denied
			})
		})
	}
	b.Run("bytes-per-key", func(b *testing.B) {
		users := keyNames(cachedKeys)
		before := heap()
		limiter := denyingLimiter(b, ratelimit.Config{}, ratelimit.ClientConfig{DenialMaxAge: time.Hour})
		for _, user := range users {
			require.True(b, denies(ctx, limiter, user))
		}
		b.ReportMetric(
			float64(heap()-before)/cachedKeys*2,
			"ratelimit-B/key",
		) // fills half of the cache, which is one generation
		before = heap()
		cache := newOtter(time.Hour)
		for _, user := range users {
			cache.Set(user, remembered())
		}
		cache.CleanUp()
		b.ReportMetric(float64(heap()-before)/cachedKeys, "otter-B/key")
		b.ReportMetric(0, "ns/op")
		runtime.KeepAlive(limiter)
		runtime.KeepAlive(cache)
	})
}

// single runs one caller, and parallel runs one caller for each core. A call returns whether it succeeded.
func single(b *testing.B, call func(i int) bool) {
	b.Helper()
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if !call(i) {
			b.Fatal("not denied")
		}
	}
}

func parallel(b *testing.B, call func(i int) bool) {
	b.Helper()
	b.ReportAllocs()
	var callers atomic.Int64
	b.RunParallel(func(pb *testing.PB) {
		for i := int(callers.Add(1)) << 18; pb.Next(); i++ { // a number far from the other callers' keys
			if !call(i) {
				b.Error("not denied")
			}
		}
	})
}

func keyNames(n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = "user:" + strconv.Itoa(i)
	}
	return names
}

// denial has the size of a denial that this library remembers.
type denial struct {
	asked   time.Duration
	numbers [10]int64
}

func remembered() denial { return denial{numbers: [10]int64{1}} }

func newOtter(maxAge time.Duration) *otter.Cache[string, denial] {
	return otter.Must(&otter.Options[string, denial]{
		MaximumSize:      cachedKeys,
		ExpiryCalculator: otter.ExpiryWriting[string, denial](maxAge),
	})
}

func denyingLimiter(b *testing.B, config ratelimit.Config, client ratelimit.ClientConfig) *ratelimit.Limiter {
	b.Helper()
	config.Name, config.Policy = "denied", ratelimit.SlidingWindow{Limit: 1, Window: window}
	return limitertest.New(b, denier{}, config, client)
}

func denies(ctx context.Context, limiter *ratelimit.Limiter, key string) bool {
	result, err := limiter.Allow(ctx, key)
	return err == nil && !result.Allowed
}

// denier is a database that denies everything, with the results of the SQL functions.
type denier struct{}

var _ ratelimit.DBTX = denier{}

func (denier) Query(_ context.Context, _ string, args ...any) (pgx.Rows, error) {
	return &denials{rows: int64(len(args[1].([]string))), now: time.Now()}, nil
}

// denials are the result rows of a batch.
type denials struct {
	pgx.Rows
	row, rows int64
	now       time.Time
}

func (d *denials) Next() bool { d.row++; return d.row <= d.rows }
func (d *denials) Err() error { return nil }
func (d *denials) Close()     {}
func (d *denials) FieldDescriptions() []pgconn.FieldDescription {
	return make([]pgconn.FieldDescription, 12)
}
func (d *denials) CommandTag() pgconn.CommandTag { return pgconn.CommandTag{} }

// Scan fills ord, granted, remaining, retry_after_us, reset_after_us, decided_at in microseconds, count, prev_count,
// window_start, credit, scale and expires_at.
func (d *denials) Scan(dest ...any) error {
	now := d.now.UnixMicro()
	retryAfter := window.Microseconds()
	*dest[3].(**int64) = &retryAfter
	for i, value := range map[int]int64{
		0: d.row, 1: 0, 2: 0, 4: 2 * retryAfter, 5: now, 6: 1, 7: 0, 8: now, 9: 0, 10: 0, 11: now + 2*retryAfter,
	} {
		*dest[i].(*int64) = value
	}
	return nil
}
