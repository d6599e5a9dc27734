package ratelimit

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// unusedPool is a pool that a test never uses.
func unusedPool(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/nothing")
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

func TestNewRefusesWhatCannotWork(t *testing.T) {
	t.Parallel()

	pool := unusedPool(t)
	good := FixedWindow{Limit: 10, Window: time.Minute}
	for name, c := range map[string]struct {
		config Config
		field  string
		words  string // what the message must say, too
	}{
		"nothing":                      {Config{}, "Name", "required"},
		"no name":                      {Config{Policy: good}, "Name", "required"},
		"a name that is too long":      {Config{Name: strings.Repeat("ä", 64) + "x", Policy: good}, "Name", "128"},
		"a name with NUL":              {Config{Name: "a\x00b", Policy: good}, "Name", "NUL"},
		"a name in Latin 1":            {Config{Name: "caf\xe9", Policy: good}, "Name", "UTF-8"},
		"no policy":                    {Config{Name: "n"}, "Policy", "TokenBucket or SlidingLog"},
		"a pointer to a policy":        {policy(&good), "Policy", "not a pointer"},
		"a pointer to a log":           {policy(&SlidingLog{}), "Policy", "not a pointer"},
		"a pointer to no policy":       {policy((*TokenBucket)(nil)), "Policy", "not a pointer"},
		"nothing to flush":             {Config{Name: "n", Policy: good, SynchronousCommit: true}, "SynchronousCommit", "Durable"},
		"a schema with NUL":            {Config{Name: "n", Policy: good, Schema: "a\x00"}, "Schema", "NUL"},
		"a schema in Latin 1":          {Config{Name: "n", Policy: good, Schema: "\xe9"}, "Schema", "UTF-8"},
		"a negative timeout":           {Config{Name: "n", Policy: good, Timeout: -time.Second}, "Timeout", "at least 1ms"},
		"a timeout that is too short":  {Config{Name: "n", Policy: good, Timeout: time.Millisecond - 1}, "Timeout", "at least 1ms"},
		"a negative MaxInFlight":       {Config{Name: "n", Policy: good, MaxInFlight: -1}, "MaxInFlight", "-1"},
		"a negative MaxBatch":          {Config{Name: "n", Policy: good, MaxBatch: -1}, "MaxBatch", "-1"},
		"a negative DenialMaxAge":      {Config{Name: "n", Policy: good, DenialMaxAge: -1}, "DenialMaxAge", "NoDenialCache"},
		"a share of nothing":           {Config{Name: "n", Policy: good, OnFailure: FallbackLocal(0)}, "OnFailure", "above 0"},
		"a negative share":             {Config{Name: "n", Policy: good, OnFailure: FallbackLocal(-0.1)}, "OnFailure", "-0.1"},
		"a share of more than all":     {Config{Name: "n", Policy: good, OnFailure: FallbackLocal(1.01)}, "OnFailure", "at most 1"},
		"no share":                     {Config{Name: "n", Policy: good, OnFailure: FallbackLocal(math.NaN())}, "OnFailure", "NaN"},
		"fixed: zero":                  {policy(FixedWindow{}), "Policy.Limit", "at least 1"},
		"fixed: no window":             {policy(FixedWindow{Limit: 1}), "Policy.Window", "at least 1µs"},
		"fixed: negative limit":        {policy(FixedWindow{Limit: -1, Window: time.Second}), "Policy.Limit", "-1"},
		"fixed: least limit":           {policy(FixedWindow{Limit: math.MinInt64, Window: time.Second}), "Policy.Limit", "at least 1"},
		"fixed: negative window":       {policy(FixedWindow{Limit: 1, Window: -time.Second}), "Policy.Window", "-1s"},
		"fixed: least window":          {policy(FixedWindow{Limit: 1, Window: math.MinInt64}), "Policy.Window", "at least 1µs"},
		"fixed: nanoseconds":           {policy(FixedWindow{Limit: 1, Window: 1500 * time.Nanosecond}), "Policy.Window", "whole microseconds"},
		"fixed: longest window":        {policy(FixedWindow{Limit: 1, Window: math.MaxInt64 / 1000 * 1000}), "Policy.Window", "71 years"},
		"fixed: beyond the range":      {policy(FixedWindow{Limit: 2049, Window: duration(1 << 51)}), "Policy.Limit", "at most 2048"},
		"fixed: far beyond the range":  {policy(FixedWindow{Limit: math.MaxInt64, Window: time.Second}), "Policy.Limit", "at most 4611686018427"},
		"sliding: zero":                {policy(SlidingWindow{}), "Policy.Limit", "at least 1"},
		"sliding: no window":           {policy(SlidingWindow{Limit: 1}), "Policy.Window", "at least 1µs"},
		"sliding: negative limit":      {policy(SlidingWindow{Limit: -1, Window: time.Second}), "Policy.Limit", "-1"},
		"sliding: negative window":     {policy(SlidingWindow{Limit: 1, Window: -time.Second}), "Policy.Window", "-1s"},
		"sliding: nanoseconds":         {policy(SlidingWindow{Limit: 1, Window: 1500 * time.Nanosecond}), "Policy.Window", "whole microseconds"},
		"sliding: too long":            {policy(SlidingWindow{Limit: 1, Window: duration(1<<51 + 1)}), "Policy.Window", "71 years"},
		"sliding: beyond the range":    {policy(SlidingWindow{Limit: 1<<62 + 1, Window: time.Microsecond}), "Policy.Limit", "at most 4611686018427387904"},
		"log: zero":                    {policy(SlidingLog{}), "Policy.Limit", "at least 1"},
		"log: no window":               {policy(SlidingLog{Limit: 1}), "Policy.Window", "at least 1µs"},
		"log: negative limit":          {policy(SlidingLog{Limit: -1, Window: time.Second}), "Policy.Limit", "-1"},
		"log: nanoseconds":             {policy(SlidingLog{Limit: 1, Window: 1500 * time.Nanosecond}), "Policy.Window", "whole microseconds"},
		"log: too long":                {policy(SlidingLog{Limit: 1, Window: duration(1<<51 + 1)}), "Policy.Window", "71 years"},
		"log: 1,001":                   {policy(SlidingLog{Limit: 1001, Window: time.Second}), "Policy.Limit", "at most 1000"},
		"log: far above":               {policy(SlidingLog{Limit: math.MaxInt64, Window: time.Second}), "Policy.Limit", "at most 1000"},
		"bucket: zero":                 {policy(TokenBucket{}), "Policy.Capacity", "at least 1"},
		"bucket: no refill":            {policy(TokenBucket{Capacity: 1, Every: time.Second}), "Policy.Refill", "at least 1"},
		"bucket: no interval":          {policy(TokenBucket{Capacity: 1, Refill: 1}), "Policy.Every", "at least 1µs"},
		"bucket: negative capacity":    {policy(TokenBucket{Capacity: -1, Refill: 1, Every: time.Second}), "Policy.Capacity", "-1"},
		"bucket: negative refill":      {policy(TokenBucket{Capacity: 1, Refill: -1, Every: time.Second}), "Policy.Refill", "-1"},
		"bucket: negative interval":    {policy(TokenBucket{Capacity: 1, Refill: 1, Every: -time.Second}), "Policy.Every", "-1s"},
		"bucket: nanoseconds":          {policy(TokenBucket{Capacity: 1, Refill: 1, Every: 1001}), "Policy.Every", "whole microseconds"},
		"bucket: too long an interval": {policy(TokenBucket{Capacity: 1, Refill: 1, Every: duration(1<<51 + 1)}), "Policy.Every", "71 years"},
		"bucket: beyond the range":     {policy(TokenBucket{Capacity: 2049, Refill: math.MaxInt64, Every: duration(1 << 51)}), "Policy.Capacity", "at most 2048"},
		"bucket: fills too slowly":     {policy(TokenBucket{Capacity: 2, Refill: 1, Every: duration(1 << 51)}), "Policy.Refill", "71 years"},
		"bucket: fills 1 µs too late":  {policy(TokenBucket{Capacity: 1<<51 + 1, Refill: 1, Every: time.Microsecond}), "Policy.Refill", "71 years"},
	} {
		limiter, err := New(pool, c.config)
		require.Nil(t, limiter, name)
		var configErr *ConfigError
		require.ErrorAs(t, err, &configErr, name)
		require.Equal(t, c.field, configErr.Field, name)
		require.Contains(t, err.Error(), "ratelimit: Config."+c.field+" ", name)
		require.Contains(t, err.Error(), c.words, name)
	}

	limiter, err := New(nil, Config{Name: "n", Policy: good})
	require.Nil(t, limiter)
	require.ErrorContains(t, err, "*pgxpool.Pool")
}

// What a single connection cannot do, and would be missed, is refused.
func TestNewRefusesSynchronousCommitOfAConnection(t *testing.T) {
	t.Parallel()

	conn := connect(t, pgtest.New(t))
	config := Config{Name: "n", Policy: hourly, Durable: true, SynchronousCommit: true}
	_, err := New(conn, config)
	var configErr *ConfigError
	require.ErrorAs(t, err, &configErr)
	require.Equal(t, "SynchronousCommit", configErr.Field)
	require.Contains(t, err.Error(), "SET synchronous_commit = on")
	config.SynchronousCommit = false
	_ = newLimiter(t, conn, config)

	for _, db := range []DBTX{nil, (*pgxpool.Pool)(nil), (*pgxpool.Conn)(nil), (*pgx.Conn)(nil)} {
		_, err := New(db, policy(hourly))
		require.ErrorAs(t, err, &configErr)
		require.Equal(t, "db", configErr.Field)
	}
}

func policy(p Policy) Config { return Config{Name: "n", Policy: p} }

func TestNewAcceptsTheEndsOfTheRange(t *testing.T) {
	t.Parallel()

	pool := unusedPool(t)
	good := FixedWindow{Limit: 1, Window: time.Microsecond}
	for _, config := range []Config{
		{Name: "n", Policy: good},
		{Name: strings.Repeat("ä", 64), Policy: good, Schema: `"; --`, Timeout: time.Millisecond, MaxInFlight: 1, MaxBatch: 1, DenialMaxAge: 1},
		{Name: " \n\t'\"\\$1", Policy: good, Timeout: math.MaxInt64, MaxInFlight: math.MaxInt, MaxBatch: math.MaxInt, DenialMaxAge: math.MaxInt64},
		{Name: "n", Policy: good, Durable: true, SynchronousCommit: true},
		policy(FixedWindow{Limit: 1 << 62, Window: time.Microsecond}),
		policy(FixedWindow{Limit: 1 << 11, Window: duration(1 << 51)}),
		policy(SlidingWindow{Limit: 1 << 62, Window: time.Microsecond}),
		policy(SlidingWindow{Limit: 1 << 11, Window: duration(1 << 51)}),
		policy(SlidingLog{Limit: 1000, Window: duration(1 << 51)}),
		policy(TokenBucket{Capacity: 1 << 62, Refill: 1 << 11, Every: time.Microsecond}),
		policy(TokenBucket{Capacity: 1 << 11, Refill: 1 << 11, Every: duration(1 << 51)}),
		policy(TokenBucket{Capacity: 1, Refill: math.MaxInt64, Every: time.Microsecond}),
	} {
		_, err := New(pool, config)
		require.NoError(t, err)
	}
}

func TestDefaults(t *testing.T) {
	t.Parallel()

	limiter := newLimiter(t, unusedPool(t), policy(FixedWindow{Limit: 1, Window: time.Second}))
	require.Equal(t, time.Second, limiter.config.Timeout)
	require.Equal(t, 2, limiter.config.MaxInFlight)
	require.Equal(t, 500, limiter.config.MaxBatch)
	require.Equal(t, time.Second, limiter.config.DenialMaxAge)
	require.NotNil(t, limiter.denials)
	require.EqualValues(t, 250, *limiter.settings.lockTimeout)
	require.Nil(t, limiter.settings.synchronousCommit)
}

// A lock_timeout of 0 would wait for ever, and one beyond 2^31 - 1 is an error.
func TestMillis(t *testing.T) {
	t.Parallel()

	for d, want := range map[time.Duration]int32{
		0: 1, time.Microsecond: 1, time.Millisecond: 1, 1999 * time.Microsecond: 1, time.Second: 1000, math.MaxInt64: 1 << 30,
	} {
		require.Equal(t, want, *millis(d), d)
	}
}

func TestNewRefusesAPoolThatIsNil(t *testing.T) {
	t.Parallel()
	_, err := New((*pgxpool.Pool)(nil), Config{Name: "test", Policy: FixedWindow{Limit: 1, Window: time.Second}})
	var config *ConfigError
	require.ErrorAs(t, err, &config)
	require.Equal(t, "db", config.Field)
}
