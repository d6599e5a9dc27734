package ratelimit

import (
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/policytable"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// amply is a Timeout that no call comes near, however slow the machine is.
const amply = testkit.Amply

const year = 365 * 24 * time.Hour

// rounds is how many times as long as usual tests of random events go on.
func rounds(t *testing.T) int {
	t.Helper()
	return testkit.Rounds(t, "RATELIMIT_TEST_ROUNDS", 1)
}

// Of the tests' clocks, in microseconds as the models count. c0 is a time.
const (
	second int64 = 1_000_000
	minute       = 60 * second
	hour         = 60 * minute

	c0 = 1_800_000_000 * second
)

// t0 is a time of the tests' clocks.
var t0 = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// slowPolicies are policies of that limit under which time plays no part in a test.
func slowPolicies(limit int64) map[string]Policy {
	return map[string]Policy{
		"fixed window":   FixedWindow{Limit: limit, Window: year},
		"sliding window": SlidingWindow{Limit: limit, Window: year},
		"token bucket":   TokenBucket{Capacity: limit, Refill: 1, Every: 24 * time.Hour},
		"sliding log":    SlidingLog{Limit: limit, Window: year},
		"calendar":       slowCalendar(limit),
	}
}

// slowCalendar is a month that does not end while a test runs.
func slowCalendar(limit int64) CalendarWindow {
	p := CalendarWindow{Limit: limit, Unit: CalendarMonth}
	if now := time.Now().UnixMicro(); p.one().(model.CalendarWindow).End(now)-now < 2*hour {
		p.Zone = "Asia/Tokyo"
	}
	return p
}

// eachSlowPolicyAndTable runs a test for every algorithm, on a table of tablesFor, side by side, with a complete Config.
func eachSlowPolicyAndTable(t *testing.T, limit int64, test func(t *testing.T, config Config)) {
	t.Helper()
	eachPolicyAndTable(t, slowPolicies(limit), test)
}

// eachSlowPolicyAllAndTable is the same with all of them at once, too, of which the last has the smallest limit.
func eachSlowPolicyAllAndTable(t *testing.T, limit int64, test func(t *testing.T, config Config)) {
	t.Helper()
	policies, larger := slowPolicies(limit), slowPolicies(2*limit)
	policies["all"] = All(
		larger["fixed window"],
		larger["token bucket"],
		larger["sliding window"],
		policies["sliding log"],
	)
	eachPolicyAndTable(t, policies, test)
}

func eachPolicyAndTable(t *testing.T, policies map[string]Policy, test func(t *testing.T, config Config)) {
	t.Helper()
	for name, policy := range policies {
		for _, durable := range tablesFor(t, name) {
			config := Config{Name: "test", Policy: policy, Durable: durable}
			t.Run(fmt.Sprintf("%s in %s", name, pgtest.Table(durable)), func(t *testing.T) {
				t.Parallel()
				test(t, config)
			})
		}
	}
}

// randomPolicy is one of modeltest.RandomPolicy.
func randomPolicy(r *rand.Rand) single { return policyOf(modeltest.RandomPolicy(r).Numbers()) }

// tablesFor says on which tables a test tries a policy, or another variant: on both with many rounds, else on one. The
// SQL for both is made from one text, and over all tests each policy is on each table.
func tablesFor(t *testing.T, variant string) (durable []bool) {
	t.Helper()
	if rounds(t) > 1 {
		return []bool{false, true}
	}
	return []bool{crc32.ChecksumIEEE([]byte(t.Name()+variant))%2 == 0}
}

// newLimiter returns a limiter with a client of its own, which has the defaults unless one config is given for it.
func newLimiter(t testing.TB, db DBTX, config Config, client ...ClientConfig) *Limiter {
	t.Helper()
	return newClient(t, db, append(client, ClientConfig{})[0]).limiter(t, config)
}

// newClient returns a client for several limiters.
func newClient(t testing.TB, db DBTX, config ClientConfig) *Client {
	t.Helper()
	client, err := NewClient(db, config)
	require.NoError(t, err)
	client.engine.Database.ShadowWait = 200
	return client
}

// limiter returns a limiter of the client.
func (c *Client) limiter(t testing.TB, config Config) *Limiter {
	t.Helper()
	limiter, err := c.Limiter(config)
	require.NoError(t, err)
	return limiter
}

// asResult is what a refund or a grant has returned, as the model says it: as a decision.
func asResult(b Balance, err error) (Result, error) {
	return Result{
		Allowed: err == nil, Limit: b.Limit, Remaining: b.Remaining, ResetAfter: b.ResetAfter, DecidedAt: b.DecidedAt,
	}, err
}

// frozen is a Test.Now that stands still.
func frozen(at time.Time) TestConfig { return TestConfig{Now: func() time.Time { return at }} }

// taken is how much of a slow policy's limit a key has taken.
func taken(t *testing.T, db pgtest.Executor, config Config, key string) int64 {
	t.Helper()
	return takenOf(config, storedRows(t, db, config.Durable), key)
}

func takenOf(config Config, stored map[modeltest.RowID]modeltest.Row, key string) int64 {
	row := stored[modeltest.RowID{Name: config.Name, Key: key}]
	// A row that was only made, for a request that was refused in the end, is of no algorithm.
	if bucket, isBucket := config.Policy.(TokenBucket); isBucket && row.Algorithm != 0 {
		return bucket.Capacity - row.Credit/row.Scale
	}
	return row.Count
}

// hold begins a transaction that has locked the row of a key, as a caller's WithTx(tx).Allow does until the transaction
// ends. The row must exist.
func hold(t *testing.T, db *pgtest.DB, config Config, key string) pgx.Tx {
	t.Helper()
	return holdOn(t, pgtest.Connect(t, db.Of(key)), config, key)
}

// holdOn is hold on a connection that is there already.
func holdOn(t *testing.T, conn *pgx.Conn, config Config, key string) pgx.Tx {
	t.Helper()
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	tag, err := tx.Exec(
		t.Context(),
		"SELECT FROM "+pgtest.Table(config.Durable)+" WHERE prefix = $1 AND key = $2 FOR UPDATE",
		config.Name,
		key,
	)
	require.NoError(t, err)
	require.EqualValues(t, 1, tag.RowsAffected())
	return tx
}

// inQueue is how many calls wait for the next statement.
func (c *Client) inQueue() int {
	c.engine.Queues.First().Mu.Lock()
	defer c.engine.Queues.First().Mu.Unlock()
	return c.engine.Queues.First().Waiting
}

// waitUntilHeld returns when the lane of a limiter waits for a row.
func waitUntilHeld(t *testing.T, pool *pgxpool.Pool, l *Limiter) {
	t.Helper()
	testkit.WaitUntil(t, func() bool {
		held := l.client.engine.Batcher.Held
		held.Mu.Lock()
		defer held.Mu.Unlock()
		for _, row := range held.Rows {
			if row.Sure {
				return true
			}
		}
		return false
	})
	pgtest.WaitUntilBlocked(t, pool, 1)
}

// inLane is how many calls wait for the lane.
func (c *Client) inLane() int {
	c.engine.Queues.First().Lane.Mu.Lock()
	defer c.engine.Queues.First().Lane.Mu.Unlock()
	return len(c.engine.Queues.First().Lane.Requests)
}

// takingOf is the function that takes by a policy.
func takingOf(policy Policy) string {
	return algorithm.ByCode(policy.rules()[0].Numbers().Algorithm).Function
}

// stepOf is the function that has its rules.
func stepOf(policy Policy) string {
	return "_rate_limit_" + [...]string{"", "fixed", "sliding", "bucket", "log", "calendar"}[policy.rules()[0].Numbers().Algorithm]
}

// alwaysArrays has the functions decide a single key as they decide several.
func alwaysArrays(t *testing.T, db pgtest.Executor) {
	t.Helper()
	for _, policy := range slowPolicies(1) {
		if _, log := policy.(SlidingLog); !log {
			pgtest.RewriteTwins(t, db, takingOf(policy), "IF cardinality(keys) = 1 THEN", "IF false THEN")
		}
	}
}

// neverCheap has them decide by the rules of rate_limit_all only, those for one key by themselves.
func neverCheap(t *testing.T, db pgtest.Executor) {
	t.Helper()
	for _, policy := range slowPolicies(1) {
		pgtest.LeaveToRules(t, db, takingOf(policy))
	}
}

// alwaysAll has them leave everything to rate_limit_all.
func alwaysAll(t *testing.T, db pgtest.Executor) {
	t.Helper()
	for _, policy := range slowPolicies(1) {
		pgtest.LeaveToAll(t, db, takingOf(policy))
	}
}

// storedRows reads a whole table.
func storedRows(t *testing.T, db pgtest.Executor, durable bool) map[modeltest.RowID]modeltest.Row {
	t.Helper()
	return pgtest.StoredRows(t, db, durable)
}

// newRequest returns a request for a key.
func (l *Limiter) newRequest(key string, cost int64) *engine.Request {
	return l.client.engine.Request(&engine.Ask{Space: l.space, Policy: l.model, Key: key, Cost: cost})
}

// newShadow returns the shadow of a request.
func (l *Limiter) newShadow(row *policytable.Row, key string, cost int64) *engine.Shadow {
	beside := *l.space
	beside.Name += policytable.ShadowSuffix
	return engine.NewShadow(&engine.Ask{
		Space: l.space, Policy: l.model, Key: key, Cost: cost,
		Beside: &engine.Beside{Space: &beside, Policy: row.Value.Policy},
	})
}

// under is With for a policy of any kind.
func (l *Limiter) under(policy Policy) *Limiter {
	with := *l
	with.policy, with.model = policy, policyModel(policy)
	return &with
}
