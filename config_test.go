package ratelimit

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/deadline"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/model"
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

// tagged is an application's own DBTX.
type tagged struct {
	*pgxpool.Pool
	tags any
}

// Whether two limiters have the same database is asked by comparing, which panics for some values.
func TestNewRefusesADatabaseThatCannotBeCompared(t *testing.T) {
	t.Parallel()
	pool := unusedPool(t)
	config := Config{Name: "n", Policy: FixedWindow{Limit: 10, Window: time.Minute}}
	for _, db := range []DBTX{tagged{pool, []string{"a"}}, struct {
		*pgxpool.Pool
		tags []string
	}{pool, nil}} {
		_, err := New(db, config)
		var refused *ConfigError
		require.ErrorAs(t, err, &refused)
		require.Equal(t, "db", refused.Field)
		require.ErrorContains(t, err, "pass a pointer to it")
	}
	for _, db := range []DBTX{tagged{pool, "a"}, &tagged{pool, []string{"a"}}} {
		other := newLimiter(t, db, config)
		require.True(t, newLimiter(t, db, config).client.engine.SameRows(other.client.engine))
	}
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
		"no policy":                    {Config{Name: "n"}, "Policy", "SlidingLog or CalendarWindow"},
		"a pointer to a policy":        {policy(&good), "Policy", "not a pointer"},
		"a pointer to a log":           {policy(&SlidingLog{}), "Policy", "not a pointer"},
		"a pointer to no policy":       {policy((*TokenBucket)(nil)), "Policy", "not a pointer"},
		"nothing to flush":             {Config{Name: "n", Policy: good, SynchronousCommit: true}, "SynchronousCommit", "Durable"},
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
		"fixed: beyond the range":      {policy(FixedWindow{Limit: 2049, Window: model.Duration(1 << 51)}), "Policy.Limit", "at most 2048"},
		"fixed: far beyond the range":  {policy(FixedWindow{Limit: math.MaxInt64, Window: time.Second}), "Policy.Limit", "at most 4611686018427"},
		"sliding: zero":                {policy(SlidingWindow{}), "Policy.Limit", "at least 1"},
		"sliding: no window":           {policy(SlidingWindow{Limit: 1}), "Policy.Window", "at least 1µs"},
		"sliding: negative limit":      {policy(SlidingWindow{Limit: -1, Window: time.Second}), "Policy.Limit", "-1"},
		"sliding: negative window":     {policy(SlidingWindow{Limit: 1, Window: -time.Second}), "Policy.Window", "-1s"},
		"sliding: nanoseconds":         {policy(SlidingWindow{Limit: 1, Window: 1500 * time.Nanosecond}), "Policy.Window", "whole microseconds"},
		"sliding: too long":            {policy(SlidingWindow{Limit: 1, Window: model.Duration(1<<51 + 1)}), "Policy.Window", "71 years"},
		"sliding: beyond the range":    {policy(SlidingWindow{Limit: 1<<62 + 1, Window: time.Microsecond}), "Policy.Limit", "at most 4611686018427387904"},
		"calendar: zero":               {policy(CalendarWindow{}), "Policy.Limit", "at least 1"},
		"calendar: too much":           {policy(CalendarWindow{Limit: model.MaxProduct + 1, Unit: CalendarDay}), "Policy.Limit", "at most 2^62"},
		"calendar: no unit":            {policy(CalendarWindow{Limit: 1}), "Policy.Unit", "must be"},
		"calendar: another unit":       {policy(CalendarWindow{Limit: 1, Unit: "year"}), "Policy.Unit", "\"day\""},
		"calendar: an abbreviation":    {policy(CalendarWindow{Limit: 1, Unit: CalendarDay, Zone: "CET"}), "Policy.Zone", "such as Europe/Berlin"},
		"calendar: an offset":          {policy(CalendarWindow{Limit: 1, Unit: CalendarDay, Zone: "<+03>-3"}), "Policy.Zone", "such as Europe/Berlin"},
		"a pointer to a calendar":      {policy(&CalendarWindow{}), "Policy", "not a pointer"},
		"log: zero":                    {policy(SlidingLog{}), "Policy.Limit", "at least 1"},
		"log: no window":               {policy(SlidingLog{Limit: 1}), "Policy.Window", "at least 1µs"},
		"log: negative limit":          {policy(SlidingLog{Limit: -1, Window: time.Second}), "Policy.Limit", "-1"},
		"log: nanoseconds":             {policy(SlidingLog{Limit: 1, Window: 1500 * time.Nanosecond}), "Policy.Window", "whole microseconds"},
		"log: too long":                {policy(SlidingLog{Limit: 1, Window: model.Duration(1<<51 + 1)}), "Policy.Window", "71 years"},
		"log: 1,001":                   {policy(SlidingLog{Limit: 1001, Window: time.Second}), "Policy.Limit", "at most 1000"},
		"log: far above":               {policy(SlidingLog{Limit: math.MaxInt64, Window: time.Second}), "Policy.Limit", "at most 1000"},
		"bucket: zero":                 {policy(TokenBucket{}), "Policy.Capacity", "at least 1"},
		"bucket: no refill":            {policy(TokenBucket{Capacity: 1, Every: time.Second}), "Policy.Refill", "at least 1"},
		"bucket: no interval":          {policy(TokenBucket{Capacity: 1, Refill: 1}), "Policy.Every", "at least 1µs"},
		"bucket: negative capacity":    {policy(TokenBucket{Capacity: -1, Refill: 1, Every: time.Second}), "Policy.Capacity", "-1"},
		"bucket: negative refill":      {policy(TokenBucket{Capacity: 1, Refill: -1, Every: time.Second}), "Policy.Refill", "-1"},
		"bucket: negative interval":    {policy(TokenBucket{Capacity: 1, Refill: 1, Every: -time.Second}), "Policy.Every", "-1s"},
		"bucket: nanoseconds":          {policy(TokenBucket{Capacity: 1, Refill: 1, Every: 1001}), "Policy.Every", "whole microseconds"},
		"bucket: too long an interval": {policy(TokenBucket{Capacity: 1, Refill: 1, Every: model.Duration(1<<51 + 1)}), "Policy.Every", "71 years"},
		"bucket: beyond the range":     {policy(TokenBucket{Capacity: 2049, Refill: math.MaxInt64, Every: model.Duration(1 << 51)}), "Policy.Capacity", "at most 2048"},
		"bucket: fills too slowly":     {policy(TokenBucket{Capacity: 2, Refill: 1, Every: model.Duration(1 << 51)}), "Policy.Refill", "71 years"},
		"bucket: fills 1 µs too late":  {policy(TokenBucket{Capacity: 1<<51 + 1, Refill: 1, Every: time.Microsecond}), "Policy.Refill", "71 years"},
	} {
		limiter, err := New(pool, c.config)
		require.Nil(t, limiter, name)
		var configErr *ConfigError
		require.ErrorAs(t, err, &configErr, name)
		require.Equal(t, "Config."+c.field, configErr.Field, name)
		require.EqualError(t, err, "ratelimit: Config."+c.field+" "+configErr.Reason, name)
		require.Contains(t, err.Error(), c.words, name)
	}
}

// NewClient names the field that is wrong, and says how to mend it.
func TestNewClientRefusesBadConfigurations(t *testing.T) {
	t.Parallel()

	for name, c := range map[string]struct {
		config ClientConfig
		field  string
		words  string // what the message must say, too
	}{
		"a schema with NUL":           {ClientConfig{Schema: "a\x00"}, "Schema", "NUL"},
		"a schema with a line break":  {ClientConfig{Schema: "a\nb"}, "Schema", "line break"},
		"a schema in Latin 1":         {ClientConfig{Schema: "\xe9"}, "Schema", "UTF-8"},
		"a negative timeout":          {ClientConfig{Timeout: -time.Second}, "Timeout", "at least 1ms"},
		"a timeout that is too short": {ClientConfig{Timeout: time.Millisecond - 1}, "Timeout", "at least 1ms"},
		"a negative MaxInFlight":      {ClientConfig{MaxInFlight: -1}, "MaxInFlight", "-1"},
		"a negative MaxBatch":         {ClientConfig{MaxBatch: -1}, "MaxBatch", "-1"},
		"a negative DenialMaxAge":     {ClientConfig{DenialMaxAge: -1}, "DenialMaxAge", "NoDenialCache"},
	} {
		client, err := NewClient(unusedPool(t), c.config)
		require.Nil(t, client, name)
		var refused *ConfigError
		require.ErrorAs(t, err, &refused, name)
		require.Equal(t, "ClientConfig."+c.field, refused.Field, name)
		require.Contains(t, err.Error(), c.words, name)
	}
	for _, config := range []ClientConfig{
		{},
		{Schema: `"; --`, Timeout: time.Millisecond, MaxInFlight: 1, MaxBatch: 1, DenialMaxAge: 1},
		{Timeout: math.MaxInt64, MaxInFlight: math.MaxInt, MaxBatch: math.MaxInt, DenialMaxAge: math.MaxInt64},
	} {
		_, err := NewClient(unusedPool(t), config)
		require.NoError(t, err)
	}
}

// A connection or transaction that is nil is refused where it is passed, and not met in a panic later.
func TestNilIsRefused(t *testing.T) {
	t.Parallel()

	requireRefused := func(t *testing.T, err error, field, says string) {
		t.Helper()
		var refused *ConfigError
		require.ErrorAs(t, err, &refused)
		require.Equal(t, field, refused.Field)
		require.EqualError(t, err, "ratelimit: "+field+" "+says)
	}
	for _, db := range []DBTX{
		nil, (*pgxpool.Pool)(nil), (*pgxpool.Conn)(nil), (*pgx.Conn)(nil), (*pgxpool.Tx)(nil), (*tagged)(nil),
	} {
		limiter, err := New(db, policy(hourly))
		require.Nil(t, limiter)
		requireRefused(t, err, "db", "is nil, and must be a *pgxpool.Pool, a connection or a transaction")
	}

	limiter := newLimiter(t, unusedPool(t), policy(hourly))
	for _, tx := range []pgx.Tx{nil, (*pgxpool.Tx)(nil)} {
		for name, call := range everyTxCall(limiter, tx, "key") {
			t.Run(name, func(t *testing.T) {
				requireRefused(t, call(), "tx", "is nil, and must be a transaction that has begun")
			})
		}
	}
}

// withConn, withPgConn and hidden are an application's own DBTX around a single connection.
type withConn struct {
	DBTX

	conn *pgx.Conn
}

func (w withConn) Conn() *pgx.Conn { return w.conn }

type withPgConn struct {
	DBTX

	conn *pgconn.PgConn
}

func (w withPgConn) PgConn() *pgconn.PgConn { return w.conn }

type hidden struct{ DBTX }

// A wrapper hides that there is one connection for all, which concurrent calls would then use at the same time. It is
// refused if it lends the connection, and else as soon as two meet on it.
func TestWrappedConnectionIsRefused(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	conn := pgtest.Connect(t, db)
	pooled, err := db.Pool.Acquire(t.Context())
	require.NoError(t, err)
	defer pooled.Release()
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	for _, wrapped := range []DBTX{
		struct{ *pgx.Conn }{conn}, &struct{ *pgx.Conn }{conn}, &struct{ *pgxpool.Conn }{pooled},
		withConn{conn, conn}, withConn{tx, nil}, withPgConn{conn, conn.PgConn()}, &withPgConn{tx, nil},
		&withConn{db.Pool, nil}, // of which nobody can tell that it is a pool
	} {
		errOf := func(_ any, err error) error { return err }
		for what, err := range map[string]error{
			"New":         errOf(New(wrapped, policy(hourly))),
			"NewClient":   errOf(NewClient(wrapped, ClientConfig{})),
			"NewPolicies": errOf(NewPolicies(wrapped, PoliciesConfig{})),
		} {
			var refused *ConfigError
			require.ErrorAs(t, err, &refused, "%s: %T", what, wrapped)
			require.Equal(t, "db", refused.Field)
			require.ErrorContains(t, err, "pass the connection itself, or wrap a *pgxpool.Pool or a pgx.Tx")
		}
	}
	for _, accepted := range []DBTX{
		db.Pool, conn, pooled, tx, tagged{db.Pool, 1}, &tagged{db.Pool, 1}, &taggedTx{Tx: tx},
		struct{ pgx.Tx }{tx}, connless{tx}, newModelDB(),
	} {
		newLimiter(t, accepted, policy(hourly))
	}
	require.NoError(t, tx.Rollback(t.Context()))

	other := pgtest.Connect(t, db)
	for conn, inUse := range map[*pgx.Conn]DBTX{conn: hidden{conn}, other: other} {
		limiter := newLimiter(t, inUse, Config{Name: "n", Policy: hourly, OnFailure: FailOpen()})
		rows, err := conn.Query(t.Context(), "SELECT generate_series(1, 9)")
		require.NoError(t, err)
		_, err = limiter.Allow(t.Context(), "personal")
		requireKinds(t, err, ErrSetup)
		require.ErrorContains(t, err, "a *pgxpool.Pool")
		rows.Close()
		result, err := limiter.Allow(t.Context(), "personal")
		require.NoError(t, err, "%T", inUse)
		require.Equal(t, SourceDatabase, result.Source)
	}
}

// New refuses what a single connection cannot do, if the caller would miss it.
func TestNewRefusesSynchronousCommitOfAConnection(t *testing.T) {
	t.Parallel()

	conn := pgtest.Connect(t, pgtest.New(t))
	config := Config{Name: "n", Policy: hourly, Durable: true, SynchronousCommit: true}
	_, err := New(conn, config)
	var configErr *ConfigError
	require.ErrorAs(t, err, &configErr)
	require.Equal(t, "Config.SynchronousCommit", configErr.Field)
	require.Contains(t, err.Error(), "SET synchronous_commit = on")
	config.SynchronousCommit = false
	_ = newLimiter(t, conn, config)
}

func policy(p Policy) Config { return Config{Name: "n", Policy: p} }

func TestNewAcceptsTheEndsOfTheRange(t *testing.T) {
	t.Parallel()

	pool := unusedPool(t)
	good := FixedWindow{Limit: 1, Window: time.Microsecond}
	for _, config := range []Config{
		{Name: "n", Policy: good},
		{Name: strings.Repeat("ä", 64), Policy: good},
		{Name: " \n\t'\"\\$1", Policy: good},
		{Name: "n", Policy: good, Durable: true, SynchronousCommit: true},
		policy(FixedWindow{Limit: 1 << 62, Window: time.Microsecond}),
		policy(FixedWindow{Limit: 1 << 11, Window: model.Duration(1 << 51)}),
		policy(SlidingWindow{Limit: 1 << 62, Window: time.Microsecond}),
		policy(SlidingWindow{Limit: 1 << 11, Window: model.Duration(1 << 51)}),
		policy(SlidingLog{Limit: 1000, Window: model.Duration(1 << 51)}),
		policy(TokenBucket{Capacity: 1 << 62, Refill: 1 << 11, Every: time.Microsecond}),
		policy(TokenBucket{Capacity: 1 << 11, Refill: 1 << 11, Every: model.Duration(1 << 51)}),
		policy(TokenBucket{Capacity: 1, Refill: math.MaxInt64, Every: time.Microsecond}),
	} {
		_, err := New(pool, config)
		require.NoError(t, err)
	}
}

func TestDefaults(t *testing.T) {
	t.Parallel()

	limiter, err := New(unusedPool(t), policy(FixedWindow{Limit: 1, Window: time.Second}))
	require.NoError(t, err)
	require.Equal(t, deadline.Default, limiter.client.engine.Settings.Timeout)
	require.Equal(t, 2, limiter.client.engine.Settings.MaxInFlight)
	require.Equal(t, 500, limiter.client.engine.Settings.MaxBatch)
	require.Equal(t, time.Second, limiter.client.engine.Settings.DenialMaxAge)
	require.NotNil(t, limiter.client.engine.Denials)
	require.Equal(t, deadline.Default/4, limiter.client.engine.Batcher.Held.Patience())
}

// A lock_timeout of 0 would wait for ever, and one beyond 2^31 - 1 is an error.
func TestLockTimeout(t *testing.T) {
	t.Parallel()

	for d, want := range map[time.Duration]int32{
		0: 1, time.Microsecond: 1, time.Millisecond: 1, 1999 * time.Microsecond: 1, time.Second: 1000, math.MaxInt64: 1 << 30,
	} {
		require.Equal(t, want, *engine.LockTimeout(d), d)
	}
}
