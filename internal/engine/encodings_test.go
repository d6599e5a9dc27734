package engine_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/migrations"
)

// Only the caller of the key that the encoding refuses gets an error. The error does not show the key.
func TestKeyThatTheEncodingRefuses(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	const emoji = "caller \U0001F600"
	for name, open := range map[string]func(t *testing.T) *pgxpool.Pool{
		"client_encoding": func(t *testing.T) *pgxpool.Pool {
			return pgtest.New(t).OwnerPool(t, func(config *pgxpool.Config) {
				config.ConnConfig.RuntimeParams["client_encoding"] = "EUC_JP"
			})
		},
		"server_encoding": func(t *testing.T) *pgxpool.Pool {
			db := pgtest.New(t)
			other := db.Pool.Config().ConnConfig.Database + "_win1252"
			pgtest.Exec(t, db.Pool, fmt.Sprintf("CREATE DATABASE %s ENCODING WIN1252 LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0", other))
			pool := db.OwnerPool(t, func(config *pgxpool.Config) {
				config.ConnConfig.Database = other
				// With another client_encoding, the key's bytes would be other valid characters, without an error.
				config.ConnConfig.RuntimeParams["client_encoding"] = "UTF8"
			})
			t.Cleanup(func() {
				pool.Close()
				_, err := db.Pool.Exec(context.Background(), "DROP DATABASE "+other)
				require.NoError(t, err)
			})
			require.NoError(t, migrations.Up(t.Context(), pool))
			return pool
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := open(t)
			limiter := limitertest.New(
				t,
				pool,
				ratelimit.Config{
					Name:      "test",
					Policy:    ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year},
					OnFailure: ratelimit.FailOpen(),
				},
			)
			var calls []*engine.Request
			for i := range 64 {
				key := fmt.Sprint("caller ", i)
				if i == 17 {
					key = emoji
				}
				calls = append(calls, requestsFor(limiter, key, 1)...)
			}
			send(limiter, calls)
			results, errs := outcomes(calls)
			refused := func(err error) {
				t.Helper()
				var wrong *ratelimit.KeyError
				require.ErrorAs(t, err, &wrong)
				require.ErrorIs(t, err, ratelimit.ErrInvalidKey)
				require.NotContains(t, err.Error(), "0x")
				require.NotContains(t, err.Error(), emoji)
			}
			for i := range calls {
				if i == 17 {
					require.ErrorIs(t, errs[i], pg.ErrKeyRefused)
					continue
				}
				require.NoError(t, errs[i])
				require.Equal(t, ratelimit.SourceDatabase, results[i].Source)
			}
			peeked, err := limiter.Peek(t.Context(), emoji)
			require.Zero(t, peeked)
			refused(err)
			refused(limiter.Reset(t.Context(), emoji))
			_, err = limiter.Grant(t.Context(), emoji, 1)
			refused(err)
			_, err = ratelimit.AllowAll(t.Context(), limiter.Request("plain", 1), limiter.Request(emoji, 1))
			refused(err)
			var which *ratelimit.RequestError
			require.ErrorAs(t, err, &which)
			require.Equal(t, 1, which.Index)
			tx := limitertest.Begin(t, pool)
			_, err = limiter.WithTx(tx).Allow(t.Context(), emoji)
			refused(err)
			require.NoError(t, tx.Rollback(t.Context()))
			require.Len(t, pgtest.StoredRows(t, pool, false), 63)
		})
	}
}

// Every method returns different errors for a refused name and for a refused key. A name is refused if the encoding
// does not have its characters, or if the encoding makes the name too long.
func TestNameThatTheEncodingRefuses(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	db := pgtest.New(t)
	open := func(encoding string) *pgxpool.Pool {
		return db.NewPool(
			t,
			func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["client_encoding"] = encoding },
		)
	}
	// A client in LATIN1 sends each byte of UTF-8 as a character. In the database, a character outside of ASCII has two
	// bytes.
	eucJP, latin1 := open("EUC_JP"), open("LATIN1")
	long := strings.Repeat("\u00E4", 256)
	for _, c := range []struct {
		pool      *pgxpool.Pool
		name, key string
		isKey     bool
	}{
		{eucJP, "name \U0001F600", "key", false},
		{eucJP, "name \U0001F600", "key \U0001F600", false},
		{eucJP, "name \u00E9", "key \U0001F600", true},
		{latin1, long[:128], "key", false},
		{latin1, "name", long, true},
	} {
		for _, policy := range []ratelimit.Policy{limitertest.Hourly, ratelimit.SlidingLog{Limit: 10, Window: time.Hour}} {
			limiter := limitertest.New(
				t,
				c.pool,
				ratelimit.Config{Name: c.name, Policy: policy, OnFailure: ratelimit.FailOpen()},
			)
			several := limiter
			if len(c.name) < 128 {
				several = limitertest.With(t, limiter, ratelimit.All(policy, limitertest.Hourly))
			}
			ctx := context.Background()
			for name, call := range map[string]func() error{
				"Allow":  func() error { _, err := limiter.Allow(ctx, c.key); return err },
				"AllowN": func() error { _, err := several.AllowN(ctx, c.key, 2); return err },
				"Peek":   func() error { _, err := limiter.Peek(ctx, c.key); return err },
				"Grant":  func() error { _, err := limiter.Grant(ctx, c.key, 1); return err },
				"Reset":  func() error { return several.Reset(ctx, c.key) },
				"AllowAll": func() error {
					_, err := ratelimit.AllowAll(ctx, limiter.Request(c.key, 1), limiter.Request("other", 1))
					return err
				},
			} {
				err := call()
				require.Equal(t, c.isKey, errors.Is(err, ratelimit.ErrInvalidKey), "%s: %v", name, err)
				var config *ratelimit.ConfigError
				require.Equal(
					t,
					!c.isKey,
					errors.As(err, &config) && config.Field == "Config.Name",
					"%s: %v",
					name,
					err,
				)
				require.NotContains(t, err.Error(), "0x")
			}
		}
	}
	require.Empty(t, pgtest.StoredRows(t, db.Pool, false))
}

// One statement is for several limiters. The encoding refuses the name of one limiter, and one key of another limiter.
// Only the callers of that name and of that key get an error.
func TestMixedBatchWithARefusedName(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	const emoji = "name \U0001F600"
	db := pgtest.New(t)
	long := strings.Repeat("\u00E4", 64)
	for encoding, names := range map[string][]string{
		"EUC_JP": {"a", "b", emoji, "name \u00E9", "c", "d"},
		// On a LATIN1 connection, each byte of UTF-8 is a character, with two bytes in the database.
		"LATIN1": {"a", "b", long, "name \u00E9", "c", "d"},
	} {
		pool := db.NewPool(t, func(config *pgxpool.Config) {
			config.ConnConfig.RuntimeParams["client_encoding"] = encoding
		})
		client := limitertest.NewClient(t, pool, ratelimit.ClientConfig{})
		var batch []*engine.Request
		wrong := map[int]bool{}
		for i, name := range names {
			limiter := limitertest.Of(t, client, ratelimit.Config{Name: name, Policy: limitertest.Hourly, Durable: i%2 == 0})
			for _, key := range []string{"x", "y"} {
				wrong[len(batch)] = i == 2
				batch = append(batch, requestsFor(limiter, key, 1)...)
			}
		}
		first := limitertest.Of(t, client, ratelimit.Config{Name: "a", Policy: limitertest.Hourly})
		refusedKey := -1
		if encoding == "EUC_JP" {
			refusedKey = len(batch)
			batch = append(batch, requestsFor(first, "key \U0001F600", 1)...)
		}
		send(first, batch)
		results, errs := outcomes(batch)
		for i := range batch {
			switch {
			case wrong[i]:
				require.ErrorIs(t, errs[i], pg.ErrNameRefused)
			case i == refusedKey:
				require.ErrorIs(t, errs[i], pg.ErrKeyRefused)
			default:
				require.NoError(t, errs[i], i)
				require.True(t, results[i].Allowed)
			}
		}
		require.Len(t, pgtest.StoredRows(t, db.Pool, false), 3*2)
		require.Len(t, pgtest.StoredRows(t, db.Pool, true), 2*2)
		pgtest.Exec(t, db.Pool, "TRUNCATE rate_limit_ephemeral, rate_limit_durable")
	}
}

// A schema whose name is not ASCII needs a connection in UTF-8. A connection in another encoding would use another
// schema's name, so it returns an error.
func TestSchemaThatIsNotASCII(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	const schema = "régie"
	for _, encoding := range []string{"UTF8", "LATIN1"} { // the encoding of the database
		t.Run(encoding, func(t *testing.T) {
			t.Parallel()
			db := pgtest.Empty(t)
			name := pgtest.Scalar[string](t, db.Pool, "SELECT current_database()") + "_" + strings.ToLower(encoding)
			pgtest.Exec(t, db.Pool, "CREATE DATABASE "+name+" ENCODING '"+encoding+"' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'")
			t.Cleanup(func() {
				_, err := (&pgtest.DB{URL: db.URL}).NewPool(t, nil).Exec(context.WithoutCancel(t.Context()), "DROP DATABASE "+name+" WITH (FORCE)")
				require.NoError(t, err)
			})
			open := func(clientEncoding string) *pgxpool.Pool {
				return db.OwnerPool(t, func(config *pgxpool.Config) {
					config.ConnConfig.Database = name
					config.ConnConfig.RuntimeParams["client_encoding"] = clientEncoding
					config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
						_, err := conn.Exec(ctx, `SET search_path = U&"r\00e9gie"`)
						return err
					}
				})
			}
			utf8 := open("UTF8")
			pgtest.Exec(t, utf8, `CREATE SCHEMA "régie"`)
			for client, pool := range map[string]*pgxpool.Pool{"UTF8": utf8, "LATIN1": open("LATIN1")} {
				require.NoError(t, migrations.Up(t.Context(), pool), client)
				config := ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 9, Window: time.Hour}, OnFailure: ratelimit.FailOpen()}
				_, err := limitertest.New(t, pool, config).Allow(t.Context(), "key")
				require.NoError(t, err, client)
				clientConfig := ratelimit.ClientConfig{Schema: schema}
				limiter := limitertest.New(t, pool, config, clientConfig)
				policies, err := ratelimit.NewPolicies(pool, ratelimit.PoliciesConfig{Schema: schema})
				require.NoError(t, err)
				for call, err := range map[string]error{
					"Allow": func() error { _, err := limiter.Allow(t.Context(), "key"); return err }(),
					"Reset": limiter.Reset(t.Context(), "key"),
					"load":  limitertest.Table(policies).ReadChanges(t.Context(), pool, testkit.Amply),
				} {
					if client == "UTF8" {
						require.NoError(t, err, call)
						continue
					}
					require.ErrorIs(t, err, ratelimit.ErrSetup, call)
					require.ErrorContains(t, err, "client_encoding is "+client, call)
					require.NotErrorIs(t, err, ratelimit.ErrNotMigrated, call)
				}
			}
		})
	}
}
