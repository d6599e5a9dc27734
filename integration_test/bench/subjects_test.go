package bench

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	envoy "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/service"
)

// window is the window of every limit. The window is so long that nothing refills during the benchmark, so the rows
// must count all the units that callers took.
const window = 12 * time.Hour

// patience is the timeout of this library's calls. A busy machine should not fail the run.
const patience = 10 * time.Second

// subject is a limiter in the comparison.
type subject struct {
	title string
	ours  bool
	open  func(a *arena, data dataset) *store
}

// store is a subject's data set.
type store struct {
	data    dataset
	missing string                    // why this subject cannot run here; then the other fields are empty
	connect func(far bool) *contender // connects to the store
	table   string                    // "" if it has no table in Postgres
	taken   func() int64              // returns the sum of all units taken, from the table; nil if it is not checked

	expected int64 // the value that taken must return, from the callers' answers
	place    int   // arena.schemas when the store was opened, which is in the name of its schema
}

// contender is a subject that is connected to its store.
type contender struct {
	*store
	take take
	back func(context.Context) error // returns leased units; nil if there are no leases
	pids func() []int                // returns the server's processes; none if the subject runs in this process
	pool *pgxpool.Pool               // nil if the subject does not use Postgres
}

// warmUp returns the length of the warm-up.
func (c *contender) warmUp(plan plan, w workload) time.Duration {
	if c.back != nil {
		return max(plan.WarmUp, w.warmUp)
	}
	return plan.WarmUp
}

func (c *contender) giveBack(a *arena) {
	a.b.Helper()
	if c.back != nil {
		require.NoError(a.b, c.back(a.ctx()))
	}
}

type contenderID struct {
	subject *subject
	data    string
	far     bool
}

// contender returns a subject that is ready for a workload. At the first call, its table is created and filled.
func (a *arena) contender(s *subject, w workload) *contender {
	a.b.Helper()
	id := contenderID{subject: s, data: w.data.title}
	kept, ok := a.stores[id]
	if !ok {
		a.progress("filling: %s, %s", s.title, w.data.title)
		place := a.schemas
		kept = s.open(a, w.data)
		kept.place = place
		a.stores[id] = kept
		a.fill(kept)
	}
	id.far = w.far
	if a.contenders[id] == nil && kept.missing == "" {
		c := kept.connect(w.far)
		c.store = kept
		a.contenders[id] = c
	}
	return a.contenders[id]
}

// missing returns why a subject has no contender for a workload.
func (a *arena) missing(s *subject, w workload) string {
	return a.stores[contenderID{subject: s, data: w.data.title}].missing
}

// fill takes once from each key, so that later calls find the rows. It does nothing if the keys already have rows.
func (a *arena) fill(s *store) {
	a.b.Helper()
	if s.missing != "" {
		return
	}
	if s.taken != nil {
		s.expected = s.taken()
	}
	if s.expected > 0 || s.data.size == 0 {
		return
	}
	c := s.connect(false)
	const callers = 512
	errs := make([]error, callers)
	var filling sync.WaitGroup
	for i := range callers {
		filling.Go(func() {
			for j := i; j < s.data.size && errs[i] == nil; j += callers {
				var admitted bool
				if admitted, errs[i] = c.take(a.ctx(), s.data.key(j)); !admitted && errs[i] == nil {
					errs[i] = fmt.Errorf("key %d was denied before anybody took from it", j)
				}
			}
		})
	}
	filling.Wait()
	for _, err := range errs {
		require.NoError(a.b, err)
	}
	s.expected += int64(s.data.size)
}

// These are the rivals. Three of them use Redis: with as many connections as the other subjects, with the driver's
// default number, and with a new kind of client that also coalesces commands.
var (
	redisPool16 = redisRate("redis_rate, pool of 16", 0, redis.Options{PoolSize: poolSize}, false)
	redisStock  = redisRate("redis_rate, go-redis's default pool", 1, redis.Options{}, false)
	redisAuto   = redisRate(
		"redis_rate, auto-pipelining client (experimental)",
		2,
		redis.Options{PoolSize: poolSize},
		true,
	)

	fiveRoundTrips = &subject{title: "five round trips, sliding window", open: openFiveRoundTrips}
	plainUpdate    = &subject{title: "UPDATE by key", open: openPlainUpdate}
	selectOne      = &subject{title: "SELECT 1", open: openSelectOne}
	inProcess      = &subject{title: "golang.org/x/time/rate, in this process", open: openInProcess}
)

// These are the subjects of this library.
var (
	slidingWindow = library("sliding window", sliding, ratelimit.Config{})
	fixedWindow   = library("fixed window", fixed, ratelimit.Config{})
	tokenBucket   = library("token bucket", bucket, ratelimit.Config{})
	durable       = library("sliding window, durable", sliding, ratelimit.Config{Durable: true})
	durableSync   = library(
		"sliding window, durable, SynchronousCommit",
		sliding,
		ratelimit.Config{Durable: true, SynchronousCommit: true},
	)
	leased         = library("sliding window, Lease", sliding, ratelimit.Config{Lease: &ratelimit.Lease{}})
	served         = throughService("sliding window, through a service", sliding)
	envoys         = &subject{title: "ratelimit, fixed window, for Envoy over gRPC", ours: true, open: openForEnvoy}
	held           = calls("Hold and Settle, sliding window", sliding, ratelimit.Config{}, holdAndSettle)
	withoutDenials = library("sliding window, NoDenialCache", sliding, ratelimit.Config{NoDenialCache: true})
	allOfTwo       = sets("AllowAll of two limits, one shared", 2)
	allOfThree     = sets("AllowAll of three limits, one shared", 3)
)

// algorithm is one of this library's algorithms.
type algorithm struct {
	policy func(limit int64) ratelimit.Policy
	taken  string // SQL for the sum of all units taken
	clock  ratelimit.TestConfig
}

var (
	sliding = algorithm{
		policy: func(limit int64) ratelimit.Policy { return ratelimit.SlidingWindow{Limit: limit, Window: window} },
		taken:  "sum(count)",
	}
	fixed = algorithm{
		policy: func(limit int64) ratelimit.Policy { return ratelimit.FixedWindow{Limit: limit, Window: window} },
		taken:  "sum(count)",
	}
	bucket = algorithm{
		policy: func(limit int64) ratelimit.Policy {
			return ratelimit.TokenBucket{Capacity: limit, Refill: 10_000, Every: window}
		},
		taken: "sum(count / scale)",
		clock: ratelimit.TestConfig{Now: standstill},
	}
)

// standstill is the clock of token buckets. This clock does not move, because a refill would hide how much was taken.
func standstill() time.Time { return time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC) }

// library returns a limiter of this library as a subject. Its store has a schema of its own.
func library(title string, kind algorithm, config ratelimit.Config) *subject {
	return calls(title, kind, config, func(l *ratelimit.Limiter) take {
		return func(ctx context.Context, key string) (bool, error) {
			result, err := l.Allow(ctx, key)
			return result.Allowed, err
		}
	})
}

// holdAndSettle holds 1 and settles the hold at once with 1.
func holdAndSettle(l *ratelimit.Limiter) take {
	return func(ctx context.Context, key string) (bool, error) {
		held, err := l.Hold(ctx, key, 1, time.Minute)
		if err != nil || !held.Allowed {
			return false, err
		}
		_, err = held.Hold.Settle(ctx, 1)
		return true, err
	}
}

// calls returns a limiter of this library as a subject whose callers make other calls than Allow.
func calls(title string, kind algorithm, config ratelimit.Config, of func(*ratelimit.Limiter) take) *subject {
	s := &subject{title: "ratelimit, " + title, ours: true}
	config.Name = "bench"
	s.open = func(a *arena, data dataset) *store {
		config := config
		config.Policy = kind.policy(data.limit)
		schema := a.migratedSchema()
		table := "rate_limit_ephemeral"
		if config.Durable {
			table = "rate_limit_durable"
		}
		table = pgx.Identifier{schema, table}.Sanitize()
		if data.bySQL {
			a.fillBySQL(table, config.Name, data)
		}
		taken := fmt.Sprintf(
			"SELECT coalesce(%s, 0)::bigint FROM %s WHERE prefix = $1",
			kind.taken,
			table,
		)
		return &store{
			data:  data,
			table: table,
			taken: func() int64 { return a.count(taken, config.Name) },
			connect: func(far bool) *contender {
				pool := a.pool(far)
				client := limitertest.NewClient(a.b, pool, ratelimit.ClientConfig{
					Schema: schema, Timeout: patience, Test: kind.clock,
				})
				limiter := limitertest.Of(a.b, client, config)
				c := &contender{
					pool: pool,
					pids: a.postgresPIDs,
					take: of(limiter),
				}
				if config.Lease != nil {
					c.back = client.ReturnLeases
				}
				return c
			},
		}
	}
	return s
}

// throughService returns a limiter of this library as a subject for several processes. They ask a service, which is in
// the process that started them.
func throughService(title string, kind algorithm) *subject {
	s := library(title, kind, ratelimit.Config{})
	direct := s.open
	s.open = func(a *arena, data dataset) *store {
		kept := direct(a, data)
		schema := fmt.Sprintf("bench_%d", a.schemas) // made by direct
		var once sync.Once
		kept.connect = func(far bool) *contender {
			pool := a.pool(far)
			starter := os.Getpid()
			if a.attached {
				starter = os.Getppid()
			}
			socket := filepath.Join(os.TempDir(), fmt.Sprintf("bench-%d-%s", starter, schema))
			config := ratelimit.ClientConfig{Timeout: patience, Test: kind.clock}
			var client *ratelimit.Client
			if a.attached {
				service, err := ratelimit.NewService("unix:"+socket, ratelimit.ServiceConfig{})
				require.NoError(a.b, err)
				a.b.Cleanup(service.Close)
				client = limitertest.NewClient(a.b, service, config)
			} else {
				few := func(config *pgxpool.Config) { config.MaxConns = 3 }
				config.Schema = schema
				client = limitertest.NewClient(a.b, a.newPool(few), config)
				once.Do(func() { a.serve(client, socket) })
			}
			limiter := limitertest.Of(a.b, client, ratelimit.Config{Name: "bench", Policy: kind.policy(data.limit)})
			return &contender{
				pool: pool, pids: a.postgresPIDs,
				take: func(ctx context.Context, key string) (bool, error) {
					result, err := limiter.Allow(ctx, key)
					return result.Allowed, err
				},
			}
		}
		return kept
	}
	return s
}

// openForEnvoy opens a service in this process that is asked by Envoy's protocol. All callers share one connection.
func openForEnvoy(a *arena, data dataset) *store {
	schema := a.migratedSchema()
	table := pgx.Identifier{schema, "rate_limit_ephemeral"}.Sanitize()
	ask := sync.OnceValue(func() envoy.RateLimitServiceClient { return a.serveEnvoy(schema, data.limit) })
	return &store{
		data: data, table: table,
		taken: func() int64 { return a.count("SELECT coalesce(sum(count), 0)::bigint FROM " + table) },
		connect: func(far bool) *contender {
			return &contender{
				pool: a.pool(far), pids: a.postgresPIDs,
				take: func(ctx context.Context, key string) (bool, error) {
					answer, err := ask().ShouldRateLimit(ctx, &envoy.RateLimitRequest{
						Domain: "bench",
						Descriptors: []*common.RateLimitDescriptor{{
							Entries: []*common.RateLimitDescriptor_Entry{{Key: "user", Value: key}},
						}},
					})
					return answer.GetOverallCode() == envoy.RateLimitResponse_OK, err
				},
			}
		},
	}
}

// serveEnvoy starts a service with a pool of 3 connections, until the benchmark ends, and returns its only client.
func (a *arena) serveEnvoy(schema string, limit int64) envoy.RateLimitServiceClient {
	a.b.Helper()
	dir := a.b.TempDir()
	file := fmt.Sprintf("domain: bench\ndescriptors:\n  - key: user\n    rate_limit: {unit: year, requests_per_unit: %d}\n", limit)
	require.NoError(a.b, os.WriteFile(filepath.Join(dir, "bench.yaml"), []byte(file), 0o600))
	socket := "unix:" + filepath.Join(a.b.TempDir(), "s")
	ctx, cancel := context.WithCancel(context.Background())
	started, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- service.Run(ctx, service.Options{
			DB: a.newPool(func(config *pgxpool.Config) { config.MaxConns = 3 }), Schema: schema, Dir: dir, GRPC: socket,
			Timeout: patience, Logger: slog.New(slog.DiscardHandler),
			Started: func(net.Addr, net.Addr, net.Addr) { close(started) },
		})
	}()
	select {
	case <-started:
	case err := <-ended:
		require.NoError(a.b, err)
	}
	conn, err := grpc.NewClient(socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(a.b, err)
	a.b.Cleanup(func() {
		require.NoError(a.b, conn.Close())
		cancel()
		require.NoError(a.b, <-ended)
	})
	return envoy.NewRateLimitServiceClient(conn)
}

// serve serves what client decides on a Unix socket, until the benchmark ends.
func (a *arena) serve(client *ratelimit.Client, socket string) {
	a.b.Helper()
	listener, err := net.Listen("unix", socket)
	require.NoError(a.b, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- client.Serve(ctx, listener, ratelimit.ServeConfig{Grace: time.Millisecond}) }()
	a.b.Cleanup(func() {
		cancel()
		require.NoError(a.b, <-ended)
	})
}

// sets returns a subject that takes from several limiters of this library at once. The last limiter uses a key that all
// callers share. The other limiters use the caller's key.
func sets(title string, limits int) *subject {
	s := &subject{title: "ratelimit, " + title, ours: true}
	s.open = func(a *arena, data dataset) *store {
		schema := a.migratedSchema()
		table := pgx.Identifier{schema, "rate_limit_ephemeral"}.Sanitize()
		return &store{
			data:  data,
			table: table,
			taken: func() int64 {
				limits := " FROM (SELECT sum(count) AS taken FROM " + table + " GROUP BY prefix) AS limits"
				require.LessOrEqual(
					a.b,
					a.count("SELECT count(DISTINCT taken)"+limits),
					int64(1),
					"from all limits, or from none",
				)
				return a.count("SELECT coalesce(max(taken), 0)::bigint" + limits)
			},
			connect: func(far bool) *contender {
				pool := a.pool(far)
				client, err := ratelimit.NewClient(pool, ratelimit.ClientConfig{Schema: schema, Timeout: patience})
				require.NoError(a.b, err)
				limiters := make([]*ratelimit.Limiter, limits)
				for i := range limiters {
					limiters[i], err = client.Limiter(ratelimit.Config{
						Name: fmt.Sprintf("limit %d", i+1), Policy: sliding.policy(data.limit),
					})
					require.NoError(a.b, err)
				}
				return &contender{
					pool: pool,
					pids: a.postgresPIDs,
					take: func(ctx context.Context, key string) (bool, error) {
						requests := make([]ratelimit.Request, limits)
						for i, limiter := range limiters {
							requests[i] = limiter.Request(key, 1)
						}
						requests[limits-1] = limiters[limits-1].Request("all", 1)
						results, err := ratelimit.AllowAll(ctx, requests...)
						return results.Allowed, err
					},
				}
			},
		}
	}
	return s
}

// migratedSchema creates a schema with a new name and this library's tables and functions.
func (a *arena) migratedSchema() string {
	a.b.Helper()
	a.schemas++
	name := fmt.Sprintf("bench_%d", a.schemas)
	if a.attached {
		return name
	}
	a.exec("CREATE SCHEMA " + name)
	pool := a.newPool(inSchema(name))
	defer pool.Close()
	require.NoError(a.b, migrations.Up(a.ctx(), pool))
	return name
}

func inSchema(name string) func(*pgxpool.Config) {
	return func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["search_path"] = name }
}

// fillBySQL creates many million rows a minute. It turns autovacuum off, because autovacuum and its statistics would
// disturb the measurement at random times.
func (a *arena) fillBySQL(table, name string, data dataset) {
	a.b.Helper()
	a.exec("ALTER TABLE " + table + " SET (autovacuum_enabled = false)")
	a.insertRows(table, name, data)
}

// insertRows creates a sliding window's rows, as if each key had taken 1.
func (a *arena) insertRows(table, name string, data dataset) {
	a.b.Helper()
	if a.attached {
		return
	}
	a.exec(`
		INSERT INTO `+table+` (prefix, key, algorithm, count, window_start, expires_at)
		SELECT $1, $2::text || i, 2, 1, clock, clock + 2 * $4::bigint
		FROM generate_series(0, $3::integer - 1) AS i, (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS clock) AS c`,
		name, data.prefix, data.size, window.Microseconds())
}

// openFiveRoundTrips opens this library's first design: a transaction whose statements are sent one by one. The row
// stays locked while the client computes.
func openFiveRoundTrips(a *arena, data dataset) *store {
	table := a.plainTable(data)
	insert := "INSERT INTO " + table + " (key) VALUES ($1) ON CONFLICT DO NOTHING"
	// The statement reads the clock after it has the lock.
	lock := `SELECT count, prev_count, window_start, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
		FROM (SELECT count, prev_count, window_start FROM ` + table + ` WHERE key = $1 FOR UPDATE) AS locked`
	update := "UPDATE " + table + " SET count = $2, prev_count = $3, window_start = $4 WHERE key = $1"
	return a.plainStore(data, table, func(pool *pgxpool.Pool) take {
		return func(ctx context.Context, key string) (admitted bool, err error) {
			err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				if _, err := tx.Exec(ctx, insert, key); err != nil {
					return err
				}
				var count, before, start, now int64
				if err := tx.QueryRow(ctx, lock, key).Scan(&count, &before, &start, &now); err != nil {
					return err
				}
				now = max(now, start)
				switch age, window := now-start, window.Microseconds(); {
				case age >= 2*window:
					count, before, start = 0, 0, now
				case age >= window:
					count, before, start = 0, count, start+window
				}
				rest := start + window.Microseconds() - now
				if (data.limit-count-1)*window.Microseconds() < before*rest {
					return nil
				}
				admitted = true
				_, err := tx.Exec(ctx, update, key, count+1, before, start)
				return err
			})
			return admitted && err == nil, err
		}
	})
}

// openPlainUpdate opens the minimum for any limiter on Postgres: each call is one statement that counts in a row of
// this library's table. The statement decides nothing. A new key needs an INSERT first.
func openPlainUpdate(a *arena, data dataset) *store {
	data.limit = ample // so that no request is denied
	schema := a.migratedSchema()
	table := pgx.Identifier{schema, "rate_limit_ephemeral"}.Sanitize()
	sql := "UPDATE " + table + " SET count = count + 1 WHERE prefix = $1 AND key = $2"
	if data.size == 0 {
		sql = "INSERT INTO " + table + ` AS r (prefix, key, count) VALUES ($1, $2, 1)
			ON CONFLICT (prefix, key) DO UPDATE SET count = r.count + 1`
	}
	const prefix = "bench"
	a.insertRows(table, prefix, data)
	return a.plainStore(data, table, func(pool *pgxpool.Pool) take {
		return func(ctx context.Context, key string) (bool, error) {
			tag, err := pool.Exec(ctx, sql, prefix, key)
			return tag.RowsAffected() == 1, err
		}
	})
}

// openSelectOne opens a subject with the shortest possible round trip to Postgres.
func openSelectOne(a *arena, data dataset) *store {
	s := a.plainStore(data, "", func(pool *pgxpool.Pool) take {
		return func(ctx context.Context, _ string) (bool, error) {
			var one int
			err := pool.QueryRow(ctx, "SELECT 1").Scan(&one)
			return one == 1, err
		}
	})
	s.data.size, s.taken = 0, nil
	return s
}

// plainTable creates an unlogged table with a new name, for subjects that do not use this library. Each key has taken
// 1.
func (a *arena) plainTable(data dataset) string {
	a.b.Helper()
	a.schemas++
	table := fmt.Sprintf("bench_%d", a.schemas)
	a.exec(`
		CREATE UNLOGGED TABLE ` + table + ` (
			key          text COLLATE "C" PRIMARY KEY,
			count        bigint NOT NULL DEFAULT 0,
			prev_count   bigint NOT NULL DEFAULT 0,
			window_start bigint NOT NULL DEFAULT 0
		) WITH (fillfactor = 90)`)
	a.exec(`
		INSERT INTO `+table+` (key, count, window_start)
		SELECT $1::text || i, 1, (extract(epoch FROM now()) * 1000000)::bigint
		FROM generate_series(0, $2::integer - 1) AS i`, data.prefix, data.size)
	return table
}

func (a *arena) plainStore(data dataset, table string, open func(pool *pgxpool.Pool) take) *store {
	return &store{
		data:  data,
		table: table,
		taken: func() int64 { return a.count("SELECT coalesce(sum(count), 0)::bigint FROM " + table) },
		connect: func(far bool) *contender {
			pool := a.pool(far)
			return &contender{pool: pool, pids: a.postgresPIDs, take: open(pool)}
		},
	}
}

// openInProcess opens a limiter in one process for each key. Such a limiter does not limit several processes together.
func openInProcess(_ *arena, data dataset) *store {
	var limiters sync.Map
	c := &contender{pids: func() []int { return nil }, take: func(_ context.Context, key string) (bool, error) {
		limiter, ok := limiters.Load(key)
		if !ok {
			burst := int(data.limit)
			if burst == ample {
				burst = math.MaxInt32 // it makes so many decisions that ample would not be enough
			}
			limiter, _ = limiters.LoadOrStore(key, rate.NewLimiter(rate.Every(window/time.Duration(data.limit)), burst))
		}
		return limiter.(*rate.Limiter).Allow(), nil
	}}
	return &store{data: data, connect: func(bool) *contender { return c }}
}

func (a *arena) count(sql string, args ...any) int64 {
	a.b.Helper()
	var n int64
	require.NoError(a.b, a.admin.QueryRow(a.ctx(), sql, args...).Scan(&n))
	return n
}
