package sql_test

import (
	"context"
	"fmt"
	"math"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// These fuzz targets need a database. "make fuzz" gives these targets fewer inputs than those in internal/model.

// hostile returns texts that could have a special meaning between the caller and the table.
func hostile() []string {
	return []string{
		"", "user:123", " ", "\x00", "a\x00b", "\xff", "\xc0\x80", "\xed\xa0\x80", "ключ", "\u00a0", "\ufeff", "\U0010ffff", "\n\t\r",
		`'`, `''`, `"`, `""`, `\`, `\'`, `$1`, `$$`, `{a,b}`, `{`, `NULL`, `null`, `%s`, `rate_limit_`, `pg_temp`, `public`,
		`'; DROP TABLE rate_limit_ephemeral; --`, `"; DROP SCHEMA public CASCADE; --`, `x', 'y`, `x","y`, `/*`, `--`, `;`, `E'\047'`,
		strings.Repeat(
			"k",
			128,
		), strings.Repeat("k", 129), strings.Repeat("ä", 256), strings.Repeat("k", 513), strings.Repeat(`'`, 128),
	}
}

// textPool returns a pool that sends arguments as literals in the statement's text.
func textPool(f *testing.F, db *pgtest.DB) *pgxpool.Pool {
	f.Helper()
	return db.NewPool(
		f,
		func(config *pgxpool.Config) { config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol },
	)
}

// FuzzDatabaseKeys checks any name and key in all query modes. The limiter either refuses the name or key without
// sending a statement, or stores and finds the key's row. No other row changes.
func FuzzDatabaseKeys(f *testing.F) {
	for _, text := range hostile() {
		f.Add("name", text)
		f.Add(text, "key")
		f.Add(text, text)
	}
	db := pgtest.New(f)
	text := textPool(f, db)
	f.Fuzz(func(t *testing.T, name, key string) {
		policy := ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}
		one, err := ratelimit.New(
			text,
			ratelimit.Config{Name: name, Policy: policy, NoDenialCache: true},
		)
		if len(name) < 1 || len(name) > 128 || strings.Contains(name, "\x00") || !utf8.ValidString(name) {
			var refused *ratelimit.ConfigError
			require.ErrorAs(t, err, &refused)
			require.Equal(t, "Config.Name", refused.Field)
			return
		}
		require.NoError(t, err)
		result, err := one.Allow(context.Background(), key)
		if len(key) < 1 || len(key) > 512 || strings.Contains(key, "\x00") || !utf8.ValidString(key) {
			require.ErrorIs(t, err, ratelimit.ErrInvalidKey)
			require.Zero(t, result)
			return
		}
		require.NoError(t, err)
		require.True(t, result.Allowed)
		require.EqualValues(t, 9, result.Remaining)

		other := limitertest.New(t, db.Pool, one.Config())
		result, err = other.AllowN(context.Background(), key, 4)
		require.NoError(t, err)
		require.EqualValues(t, 5, result.Remaining)
		require.EqualValues(
			t,
			5,
			pgtest.Scalar[int64](
				t,
				db.Pool,
				"SELECT count FROM rate_limit_ephemeral WHERE prefix = $1 AND key = $2",
				name,
				key,
			),
		)
		require.NoError(t, one.Reset(context.Background(), key))
		require.Zero(
			t,
			pgtest.Scalar[int64](
				t,
				db.Pool,
				"SELECT count(*) FROM rate_limit_ephemeral WHERE prefix = $1 AND key = $2",
				name,
				key,
			),
		)
	})
}

// FuzzDatabaseSchemas checks that a schema's name is never used as anything else.
func FuzzDatabaseSchemas(f *testing.F) {
	for _, text := range hostile() {
		f.Add(text)
	}
	db := pgtest.New(f)
	text := textPool(f, db)
	f.Fuzz(func(t *testing.T, schema string) {
		for _, pool := range []*pgxpool.Pool{db.Pool, text} {
			client, err := ratelimit.NewClient(pool, ratelimit.ClientConfig{Schema: schema})
			if strings.ContainsAny(schema, "\x00\n\r") || !utf8.ValidString(schema) {
				var refused *ratelimit.ConfigError
				require.ErrorAs(t, err, &refused)
				require.Equal(t, "ClientConfig.Schema", refused.Field)
				return
			}
			require.NoError(t, err)
			limiter := limitertest.Of(t, client, ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 1000, Window: limitertest.Year}})
			for name, call := range limitertest.Calls(limiter, "key") {
				if err := call(); schema == "" || schema == "public" {
					require.NoError(t, err, name)
				} else {
					require.ErrorIs(t, err, ratelimit.ErrNotMigrated, name)
				}
			}
		}
		require.True(t, pgtest.Scalar[bool](t, db.Pool, "SELECT to_regclass('public.rate_limit_ephemeral') IS NOT NULL"))
	})
}

// FuzzDatabaseNumbers calls functions with any numbers. A function must refuse the numbers, or decide as the model
// does.
func FuzzDatabaseNumbers(f *testing.F) {
	for _, n := range []int64{math.MinInt64, -1, 0, 1, 10, 1 << 31, model.MaxSpan, model.MaxSpan + 1, model.MaxProduct, model.MaxProduct + 1, math.MaxInt64} {
		f.Add(n, int64(1000), int64(1), int64(1), int64(1))
		f.Add(int64(10), n, int64(1), int64(1), int64(1))
		f.Add(int64(10), int64(1000), n, int64(1), int64(1))
		f.Add(int64(10), int64(1000), int64(1), n, int64(1))
		f.Add(int64(10), int64(1000), int64(1), int64(1), n)
		f.Add(n, n, n, n, n)
	}
	f.Add(int64(2048), int64(model.MaxSpan), int64(math.MaxInt64), int64(2048), int64(7))
	f.Add(int64(model.MaxProduct), int64(1), int64(2048), int64(model.MaxProduct-1), int64(1))
	for _, unit := range modeltest.Units() {
		f.Add(int64(model.MaxProduct), unit.Microseconds(), int64(1), int64(model.MaxProduct-1), int64(2))
	}
	db := pgtest.New(f)
	var calls atomic.Int64
	f.Fuzz(func(t *testing.T, limit, span, refill, cost, count int64) {
		clock := limitertest.T0.UnixMicro()
		length := model.Duration(span)
		for _, policy := range []model.Rules{
			model.FixedWindow{Limit: limit, Window: length}, model.SlidingWindow{Limit: limit, Window: length},
			model.SlidingLog{Limit: limit, Window: length}, model.TokenBucket{Capacity: limit, Refill: refill, Every: length},
			model.CalendarWindow{Limit: limit, Span: length, Zone: "Europe/Berlin"},
		} {
			if cost > 0 && min(limit/cost, count) > 1000 {
				count = 1000 // the model would decide more requests one by one
			}
			name := fmt.Sprint(calls.Add(1))
			args := limitertest.ArgumentsOfAll(name, []string{"key"}, policy.Numbers())
			args[6] = []int64{span} // any number of microseconds, even too many for a time.Duration
			args[8], args[9], args[12] = []int64{cost}, []int64{count}, time.UnixMicro(clock)
			var got model.Decision
			err := queryDecisions(
				context.Background(),
				db.Pool,
				engine.Text("all", ""),
				args,
				func(_ int64, d model.Decision) { got = d },
			)
			exact := 1 <= span && span <= model.MaxSpan && modeltest.InRange(policy)
			if !exact || count < 1 {
				var refused *pgconn.PgError
				require.ErrorAs(t, err, &refused)
				require.Equal(t, "22023", refused.Code, refused)
				require.Contains(t, refused.Message, "rate_limit: ")
				continue
			}
			require.NoError(t, err)
			model := modeltest.NewRows()
			s := modeltest.Step{
				Policy:   policy,
				Name:     name,
				Clock:    clock,
				Elements: []modeltest.Element{{Key: "key", Cost: cost, Count: count}},
			}
			model.Decide(s)
			want := s.Elements[0].Decision
			got.DecidedAt = got.DecidedAt.UTC()
			got.State.Capacity, got.State.Refill = want.State.Capacity, want.State.Refill // the database does not return them
			require.Equal(t, want, got, "%#v, cost %d, count %d", policy, cost, count)
		}
	})
}
