package limitertest

import (
	"context"
	"fmt"
	"net"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// Acquire returns a connection of the pool, and releases it at the end of the test.
func Acquire(t *testing.T, pool *pgxpool.Pool) *pgxpool.Conn {
	t.Helper()
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	t.Cleanup(conn.Release)
	return conn
}

// Begin begins a transaction on a connection of the pool. The end of the test ends the transaction.
func Begin(t *testing.T, pool *pgxpool.Pool) pgx.Tx {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

// Savepoint begins a transaction within a transaction.
func Savepoint(t *testing.T, tx pgx.Tx) pgx.Tx {
	t.Helper()
	inner, err := tx.Begin(t.Context())
	require.NoError(t, err)
	return inner
}

// SmallPools returns n pools of one database, which stand for n processes.
func SmallPools(t *testing.T, db *pgtest.DB, n int) []*pgxpool.Pool {
	t.Helper()
	// The pools' statements wait at most 25 ms for a row. So Postgres must look for deadlocks earlier. Only a superuser
	// may set deadlock_timeout.
	pgtest.Exec(t, db.Pool, `DO $$ BEGIN
		IF (SELECT rolsuper FROM pg_roles WHERE rolname = session_user) THEN
			EXECUTE format('ALTER DATABASE %I SET deadlock_timeout = ''5ms''', current_database());
		END IF;
	END $$`)
	pools := make([]*pgxpool.Pool, n)
	for i := range pools {
		pools[i] = db.NewPool(t, func(config *pgxpool.Config) {
			config.MaxConns = 4
			config.ConnConfig.RuntimeParams["application_name"] = "limiter"
		})
	}
	return pools
}

// Bouncer is a PgBouncer in transaction mode, in front of a test's database.
type Bouncer struct{ url string }

// StartBouncer starts a PgBouncer with this number of connections to the database.
func StartBouncer(t *testing.T, db *pgtest.DB, connections int) Bouncer {
	t.Helper()
	return Bouncer{pgtest.PgBouncer(t, db, "transaction", connections)}
}

// Pool returns a pool of connections to PgBouncer.
func (b Bouncer) Pool(t *testing.T, mode pgx.QueryExecMode, configure ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(b.url)
	require.NoError(t, err)
	config.MaxConns = 8
	config.ConnConfig.DefaultQueryExecMode = mode
	for _, change := range configure {
		change(config)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// PoolOf returns a pool whose server is the function serve. The function gets each new connection.
func PoolOf(t *testing.T, serve func(net.Conn)) *pgxpool.Pool {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				serve(conn)
			}()
		}
	}()
	t.Cleanup(func() { listener.Close() })
	pool, err := pgxpool.New(t.Context(), fmt.Sprintf("postgres://someone@%v/nothing?sslmode=disable", listener.Addr()))
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// Statements counts the statements of a pool. AtOnce is the largest number that ran at the same time.
type Statements struct {
	mu                 sync.Mutex
	total, now, AtOnce int
}

// TraceQueryStart counts a statement that begins. pgx calls it.
func (s *Statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.total++
	s.now++
	s.AtOnce = max(s.AtOnce, s.now)
	return ctx
}

// TraceQueryEnd counts a statement that ends. pgx calls it.
func (s *Statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now--
}

// Count returns how many statements have begun.
func (s *Statements) Count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.total
}

// TracedPool returns a pool of db whose statements are counted.
func TracedPool(t *testing.T, db *pgtest.DB) (*pgxpool.Pool, *Statements) {
	t.Helper()
	counted := &Statements{}
	return db.NewPool(t, func(config *pgxpool.Config) { config.ConnConfig.Tracer = counted }), counted
}

// Connless is a transaction whose Conn returns nil.
type Connless struct{ pgx.Tx }

// Conn returns nil.
func (Connless) Conn() *pgx.Conn { return nil }
