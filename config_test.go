package ratelimit_test

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/deadline"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// unusedPool returns a pool for tests that never use it.
func unusedPool(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/nothing")
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

type tagged struct {
	*pgxpool.Pool
	tags any
}

// New refuses a database that cannot be compared, because Refund compares databases with ==.
func TestNewRefusesADatabaseThatCannotBeCompared(t *testing.T) {
	t.Parallel()
	pool := unusedPool(t)
	config := ratelimit.Config{Name: "n", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Minute}}
	for _, db := range []ratelimit.DBTX{tagged{pool, []string{"a"}}, struct {
		*pgxpool.Pool
		tags []string
	}{pool, nil}} {
		_, err := ratelimit.New(db, config)
		var refused *ratelimit.ConfigError
		require.ErrorAs(t, err, &refused)
		require.Equal(t, "db", refused.Field)
		require.ErrorContains(t, err, "pass a pointer to it")
	}
	for _, db := range []ratelimit.DBTX{tagged{pool, "a"}, &tagged{pool, []string{"a"}}} {
		other := limitertest.New(t, db, config)
		require.True(t, limitertest.Engine(limitertest.New(t, db, config)).SameRows(limitertest.Engine(other)))
	}
}

func TestNewRefusesWhatCannotWork(t *testing.T) {
	t.Parallel()

	pool := unusedPool(t)
	good := ratelimit.FixedWindow{Limit: 10, Window: time.Minute}
	for name, c := range map[string]struct {
		config ratelimit.Config
		field  string
		words  string // the message must contain this
	}{
		"nothing":                      {ratelimit.Config{}, "Name", "required"},
		"no name":                      {ratelimit.Config{Policy: good}, "Name", "required"},
		"a name that is too long":      {ratelimit.Config{Name: strings.Repeat("ä", 64) + "x", Policy: good}, "Name", "128"},
		"a name with NUL":              {ratelimit.Config{Name: "a\x00b", Policy: good}, "Name", "NUL"},
		"a name in Latin 1":            {ratelimit.Config{Name: "caf\xe9", Policy: good}, "Name", "UTF-8"},
		"no policy":                    {ratelimit.Config{Name: "n"}, "Policy", "CalendarWindow or Concurrency"},
		"a pointer to a policy":        {policy(&good), "Policy", "not a pointer"},
		"a pointer to a log":           {policy(&ratelimit.SlidingLog{}), "Policy", "not a pointer"},
		"a pointer to no policy":       {policy((*ratelimit.TokenBucket)(nil)), "Policy", "not a pointer"},
		"nothing to flush":             {ratelimit.Config{Name: "n", Policy: good, SynchronousCommit: true}, "SynchronousCommit", "Durable"},
		"a share of nothing":           {ratelimit.Config{Name: "n", Policy: good, OnFailure: ratelimit.FallbackLocal(0)}, "OnFailure", "above 0"},
		"a negative share":             {ratelimit.Config{Name: "n", Policy: good, OnFailure: ratelimit.FallbackLocal(-0.1)}, "OnFailure", "-0.1"},
		"a share of more than all":     {ratelimit.Config{Name: "n", Policy: good, OnFailure: ratelimit.FallbackLocal(1.01)}, "OnFailure", "at most 1"},
		"no share":                     {ratelimit.Config{Name: "n", Policy: good, OnFailure: ratelimit.FallbackLocal(math.NaN())}, "OnFailure", "NaN"},
		"fixed: zero":                  {policy(ratelimit.FixedWindow{}), "Policy.Limit", "at least 1"},
		"fixed: no window":             {policy(ratelimit.FixedWindow{Limit: 1}), "Policy.Window", "at least 1µs"},
		"fixed: negative limit":        {policy(ratelimit.FixedWindow{Limit: -1, Window: time.Second}), "Policy.Limit", "-1"},
		"fixed: least limit":           {policy(ratelimit.FixedWindow{Limit: math.MinInt64, Window: time.Second}), "Policy.Limit", "at least 1"},
		"fixed: negative window":       {policy(ratelimit.FixedWindow{Limit: 1, Window: -time.Second}), "Policy.Window", "-1s"},
		"fixed: least window":          {policy(ratelimit.FixedWindow{Limit: 1, Window: math.MinInt64}), "Policy.Window", "at least 1µs"},
		"fixed: nanoseconds":           {policy(ratelimit.FixedWindow{Limit: 1, Window: 1500 * time.Nanosecond}), "Policy.Window", "whole microseconds"},
		"fixed: longest window":        {policy(ratelimit.FixedWindow{Limit: 1, Window: math.MaxInt64 / 1000 * 1000}), "Policy.Window", "71 years"},
		"fixed: beyond the range":      {policy(ratelimit.FixedWindow{Limit: 2049, Window: model.Duration(1 << 51)}), "Policy.Limit", "at most 2048"},
		"fixed: far beyond the range":  {policy(ratelimit.FixedWindow{Limit: math.MaxInt64, Window: time.Second}), "Policy.Limit", "at most 4611686018427"},
		"sliding: zero":                {policy(ratelimit.SlidingWindow{}), "Policy.Limit", "at least 1"},
		"sliding: no window":           {policy(ratelimit.SlidingWindow{Limit: 1}), "Policy.Window", "at least 1µs"},
		"sliding: negative limit":      {policy(ratelimit.SlidingWindow{Limit: -1, Window: time.Second}), "Policy.Limit", "-1"},
		"sliding: negative window":     {policy(ratelimit.SlidingWindow{Limit: 1, Window: -time.Second}), "Policy.Window", "-1s"},
		"sliding: nanoseconds":         {policy(ratelimit.SlidingWindow{Limit: 1, Window: 1500 * time.Nanosecond}), "Policy.Window", "whole microseconds"},
		"sliding: too long":            {policy(ratelimit.SlidingWindow{Limit: 1, Window: model.Duration(1<<51 + 1)}), "Policy.Window", "71 years"},
		"sliding: beyond the range":    {policy(ratelimit.SlidingWindow{Limit: 1<<62 + 1, Window: time.Microsecond}), "Policy.Limit", "at most 4611686018427387904"},
		"calendar: zero":               {policy(ratelimit.CalendarWindow{}), "Policy.Limit", "at least 1"},
		"calendar: too much":           {policy(ratelimit.CalendarWindow{Limit: model.MaxProduct + 1, Unit: ratelimit.CalendarDay}), "Policy.Limit", "at most 2^62"},
		"calendar: no unit":            {policy(ratelimit.CalendarWindow{Limit: 1}), "Policy.Unit", "must be"},
		"calendar: another unit":       {policy(ratelimit.CalendarWindow{Limit: 1, Unit: "year"}), "Policy.Unit", "\"day\""},
		"calendar: an abbreviation":    {policy(ratelimit.CalendarWindow{Limit: 1, Unit: ratelimit.CalendarDay, Zone: "CET"}), "Policy.Zone", "such as Europe/Berlin"},
		"calendar: an offset":          {policy(ratelimit.CalendarWindow{Limit: 1, Unit: ratelimit.CalendarDay, Zone: "<+03>-3"}), "Policy.Zone", "such as Europe/Berlin"},
		"a pointer to a calendar":      {policy(&ratelimit.CalendarWindow{}), "Policy", "not a pointer"},
		"log: zero":                    {policy(ratelimit.SlidingLog{}), "Policy.Limit", "at least 1"},
		"log: no window":               {policy(ratelimit.SlidingLog{Limit: 1}), "Policy.Window", "at least 1µs"},
		"log: negative limit":          {policy(ratelimit.SlidingLog{Limit: -1, Window: time.Second}), "Policy.Limit", "-1"},
		"log: nanoseconds":             {policy(ratelimit.SlidingLog{Limit: 1, Window: 1500 * time.Nanosecond}), "Policy.Window", "whole microseconds"},
		"log: too long":                {policy(ratelimit.SlidingLog{Limit: 1, Window: model.Duration(1<<51 + 1)}), "Policy.Window", "71 years"},
		"log: 1,001":                   {policy(ratelimit.SlidingLog{Limit: 1001, Window: time.Second}), "Policy.Limit", "at most 1000"},
		"log: far above":               {policy(ratelimit.SlidingLog{Limit: math.MaxInt64, Window: time.Second}), "Policy.Limit", "at most 1000"},
		"bucket: zero":                 {policy(ratelimit.TokenBucket{}), "Policy.Capacity", "at least 1"},
		"bucket: no refill":            {policy(ratelimit.TokenBucket{Capacity: 1, Every: time.Second}), "Policy.Refill", "at least 1"},
		"bucket: no interval":          {policy(ratelimit.TokenBucket{Capacity: 1, Refill: 1}), "Policy.Every", "at least 1µs"},
		"bucket: negative capacity":    {policy(ratelimit.TokenBucket{Capacity: -1, Refill: 1, Every: time.Second}), "Policy.Capacity", "-1"},
		"bucket: negative refill":      {policy(ratelimit.TokenBucket{Capacity: 1, Refill: -1, Every: time.Second}), "Policy.Refill", "-1"},
		"bucket: negative interval":    {policy(ratelimit.TokenBucket{Capacity: 1, Refill: 1, Every: -time.Second}), "Policy.Every", "-1s"},
		"bucket: nanoseconds":          {policy(ratelimit.TokenBucket{Capacity: 1, Refill: 1, Every: 1001}), "Policy.Every", "whole microseconds"},
		"bucket: too long an interval": {policy(ratelimit.TokenBucket{Capacity: 1, Refill: 1, Every: model.Duration(1<<51 + 1)}), "Policy.Every", "71 years"},
		"bucket: beyond the range":     {policy(ratelimit.TokenBucket{Capacity: 2049, Refill: math.MaxInt64, Every: model.Duration(1 << 51)}), "Policy.Capacity", "at most 2048"},
		"bucket: fills too slowly":     {policy(ratelimit.TokenBucket{Capacity: 2, Refill: 1, Every: model.Duration(1 << 51)}), "Policy.Refill", "71 years"},
		"bucket: fills 1 µs too late":  {policy(ratelimit.TokenBucket{Capacity: 1<<51 + 1, Refill: 1, Every: time.Microsecond}), "Policy.Refill", "71 years"},
	} {
		limiter, err := ratelimit.New(pool, c.config)
		require.Nil(t, limiter, name)
		var configErr *ratelimit.ConfigError
		require.ErrorAs(t, err, &configErr, name)
		require.Equal(t, "Config."+c.field, configErr.Field, name)
		require.EqualError(t, err, "ratelimit: Config."+c.field+" "+configErr.Reason, name)
		require.Contains(t, err.Error(), c.words, name)
	}
}

// The error of NewClient names the wrong field, and says how to fix it.
func TestNewClientRefusesBadConfigurations(t *testing.T) {
	t.Parallel()

	for name, c := range map[string]struct {
		config ratelimit.ClientConfig
		field  string
		words  string // the message must contain this
	}{
		"a schema with NUL":           {ratelimit.ClientConfig{Schema: "a\x00"}, "Schema", "NUL"},
		"a schema with a line break":  {ratelimit.ClientConfig{Schema: "a\nb"}, "Schema", "line break"},
		"a schema in Latin 1":         {ratelimit.ClientConfig{Schema: "\xe9"}, "Schema", "UTF-8"},
		"a negative timeout":          {ratelimit.ClientConfig{Timeout: -time.Second}, "Timeout", "at least 1ms"},
		"a timeout that is too short": {ratelimit.ClientConfig{Timeout: time.Millisecond - 1}, "Timeout", "at least 1ms"},
		"a negative MaxInFlight":      {ratelimit.ClientConfig{MaxInFlight: -1}, "MaxInFlight", "-1"},
		"a negative MaxBatch":         {ratelimit.ClientConfig{MaxBatch: -1}, "MaxBatch", "-1"},
		"a negative DenialMaxAge":     {ratelimit.ClientConfig{DenialMaxAge: -1}, "DenialMaxAge", "NoDenialCache"},
	} {
		client, err := ratelimit.NewClient(unusedPool(t), c.config)
		require.Nil(t, client, name)
		var refused *ratelimit.ConfigError
		require.ErrorAs(t, err, &refused, name)
		require.Equal(t, "ClientConfig."+c.field, refused.Field, name)
		require.Contains(t, err.Error(), c.words, name)
	}
	for _, config := range []ratelimit.ClientConfig{
		{},
		{Schema: `"; --`, Timeout: time.Millisecond, MaxInFlight: 1, MaxBatch: 1, DenialMaxAge: 1},
		{Timeout: math.MaxInt64, MaxInFlight: math.MaxInt, MaxBatch: math.MaxInt, DenialMaxAge: math.MaxInt64},
	} {
		_, err := ratelimit.NewClient(unusedPool(t), config)
		require.NoError(t, err)
	}
}

// A nil connection or transaction is refused when it is passed, instead of causing a panic later.
func TestNilIsRefused(t *testing.T) {
	t.Parallel()

	requireRefused := func(t *testing.T, err error, field, says string) {
		t.Helper()
		var refused *ratelimit.ConfigError
		require.ErrorAs(t, err, &refused)
		require.Equal(t, field, refused.Field)
		require.EqualError(t, err, "ratelimit: "+field+" "+says)
	}
	for _, db := range []ratelimit.DBTX{
		nil, (*pgxpool.Pool)(nil), (*pgxpool.Conn)(nil), (*pgx.Conn)(nil), (*pgxpool.Tx)(nil), (*tagged)(nil),
	} {
		limiter, err := ratelimit.New(db, policy(limitertest.Hourly))
		require.Nil(t, limiter)
		requireRefused(t, err, "db", "is nil, and must be a *pgxpool.Pool, a connection or a transaction")
	}

	limiter := limitertest.New(t, unusedPool(t), policy(limitertest.Hourly))
	for _, tx := range []pgx.Tx{nil, (*pgxpool.Tx)(nil)} {
		for name, call := range limitertest.TxCalls(limiter, tx, "key") {
			t.Run(name, func(t *testing.T) {
				requireRefused(t, call(), "tx", "is nil, and must be a transaction that has begun")
			})
		}
	}
}

// withConn, withPgConn and hidden are DBTX types of an application that wrap a single connection.
type withConn struct {
	ratelimit.DBTX

	conn *pgx.Conn
}

func (w withConn) Conn() *pgx.Conn { return w.conn }

type withPgConn struct {
	ratelimit.DBTX

	conn *pgconn.PgConn
}

func (w withPgConn) PgConn() *pgconn.PgConn { return w.conn }

type hidden struct{ ratelimit.DBTX }

// With a wrapper around a connection, concurrent calls would use the same connection. New refuses a wrapper whose
// connection it can find. With any other wrapper, a call fails while the connection is in use.
func TestWrappedConnectionIsRefused(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	conn := pgtest.Connect(t, db)
	pooled, err := db.Pool.Acquire(t.Context())
	require.NoError(t, err)
	defer pooled.Release()
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	for _, wrapped := range []ratelimit.DBTX{
		struct{ *pgx.Conn }{conn}, &struct{ *pgx.Conn }{conn}, &struct{ *pgxpool.Conn }{pooled},
		withConn{conn, conn}, withConn{tx, nil}, withPgConn{conn, conn.PgConn()}, &withPgConn{tx, nil},
		&withConn{db.Pool, nil}, // nothing shows that this is a pool
	} {
		errOf := func(_ any, err error) error { return err }
		for what, err := range map[string]error{
			"New":         errOf(ratelimit.New(wrapped, policy(limitertest.Hourly))),
			"NewClient":   errOf(ratelimit.NewClient(wrapped, ratelimit.ClientConfig{})),
			"NewPolicies": errOf(ratelimit.NewPolicies(wrapped, ratelimit.PoliciesConfig{})),
		} {
			var refused *ratelimit.ConfigError
			require.ErrorAs(t, err, &refused, "%s: %T", what, wrapped)
			require.Equal(t, "db", refused.Field)
			require.ErrorContains(t, err, "pass the connection itself, or wrap a *pgxpool.Pool or a pgx.Tx")
		}
	}
	for _, accepted := range []ratelimit.DBTX{
		db.Pool, conn, pooled, tx, tagged{db.Pool, 1}, &tagged{db.Pool, 1}, &taggedTx{Tx: tx},
		struct{ pgx.Tx }{tx}, limitertest.Connless{Tx: tx}, limitertest.NewModelDB(),
	} {
		limitertest.New(t, accepted, policy(limitertest.Hourly))
	}
	require.NoError(t, tx.Rollback(t.Context()))

	other := pgtest.Connect(t, db)
	for conn, inUse := range map[*pgx.Conn]ratelimit.DBTX{conn: hidden{conn}, other: other} {
		limiter := limitertest.New(t, inUse, ratelimit.Config{Name: "n", Policy: limitertest.Hourly, OnFailure: ratelimit.FailOpen()})
		rows, err := conn.Query(t.Context(), "SELECT generate_series(1, 9)")
		require.NoError(t, err)
		_, err = limiter.Allow(t.Context(), "personal")
		limitertest.RequireKinds(t, err, ratelimit.ErrSetup)
		require.ErrorContains(t, err, "a *pgxpool.Pool")
		rows.Close()
		result, err := limiter.Allow(t.Context(), "personal")
		require.NoError(t, err, "%T", inUse)
		require.Equal(t, ratelimit.SourceDatabase, result.Source)
	}
}

// New refuses SynchronousCommit on a single connection, because it would have no effect.
func TestNewRefusesSynchronousCommitOfAConnection(t *testing.T) {
	t.Parallel()

	conn := pgtest.Connect(t, pgtest.New(t))
	config := ratelimit.Config{Name: "n", Policy: limitertest.Hourly, Durable: true, SynchronousCommit: true}
	_, err := ratelimit.New(conn, config)
	var configErr *ratelimit.ConfigError
	require.ErrorAs(t, err, &configErr)
	require.Equal(t, "Config.SynchronousCommit", configErr.Field)
	require.Contains(t, err.Error(), "SET synchronous_commit = on")
	config.SynchronousCommit = false
	_ = limitertest.New(t, conn, config)
}

func policy(p ratelimit.Policy) ratelimit.Config { return ratelimit.Config{Name: "n", Policy: p} }

func TestNewAcceptsTheEndsOfTheRange(t *testing.T) {
	t.Parallel()

	pool := unusedPool(t)
	good := ratelimit.FixedWindow{Limit: 1, Window: time.Microsecond}
	for _, config := range []ratelimit.Config{
		{Name: "n", Policy: good},
		{Name: strings.Repeat("ä", 64), Policy: good},
		{Name: " \n\t'\"\\$1", Policy: good},
		{Name: "n", Policy: good, Durable: true, SynchronousCommit: true},
		policy(ratelimit.FixedWindow{Limit: 1 << 62, Window: time.Microsecond}),
		policy(ratelimit.FixedWindow{Limit: 1 << 11, Window: model.Duration(1 << 51)}),
		policy(ratelimit.SlidingWindow{Limit: 1 << 62, Window: time.Microsecond}),
		policy(ratelimit.SlidingWindow{Limit: 1 << 11, Window: model.Duration(1 << 51)}),
		policy(ratelimit.SlidingLog{Limit: 1000, Window: model.Duration(1 << 51)}),
		policy(ratelimit.TokenBucket{Capacity: 1 << 62, Refill: 1 << 11, Every: time.Microsecond}),
		policy(ratelimit.TokenBucket{Capacity: 1 << 11, Refill: 1 << 11, Every: model.Duration(1 << 51)}),
		policy(ratelimit.TokenBucket{Capacity: 1, Refill: math.MaxInt64, Every: time.Microsecond}),
	} {
		_, err := ratelimit.New(pool, config)
		require.NoError(t, err)
	}
}

func TestDefaults(t *testing.T) {
	t.Parallel()

	limiter, err := ratelimit.New(unusedPool(t), policy(ratelimit.FixedWindow{Limit: 1, Window: time.Second}))
	require.NoError(t, err)
	require.Equal(t, deadline.Default, limitertest.Engine(limiter).Settings.Timeout)
	require.Equal(t, 2, limitertest.Engine(limiter).Settings.MaxInFlight)
	require.Equal(t, 500, limitertest.Engine(limiter).Settings.MaxBatch)
	require.Equal(t, time.Second, limitertest.Engine(limiter).Settings.DenialMaxAge)
	require.NotNil(t, limitertest.Engine(limiter).Denials)
	require.Equal(t, deadline.Default/4, limitertest.Engine(limiter).Batcher.Held.Patience())
}

// A lock_timeout of 0 would wait forever, and a lock_timeout above 2^31 - 1 ms is an error.
func TestLockTimeout(t *testing.T) {
	t.Parallel()

	for d, want := range map[time.Duration]int32{
		0: 1, time.Microsecond: 1, time.Millisecond: 1, 1999 * time.Microsecond: 1, time.Second: 1000, math.MaxInt64: 1 << 30,
	} {
		require.Equal(t, want, *engine.LockTimeout(d), d)
	}
}
