package engine_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// elsewhere runs functions in goroutines outside of the test's synctest bubble. During a slow write, pgx starts a
// goroutine that reads. That goroutine may not wake up a goroutine in a bubble.
type elsewhere struct {
	t     *testing.T // its context is not part of the bubble
	calls chan func()
	ended chan struct{}
}

func newElsewhere(t *testing.T) elsewhere {
	t.Helper()
	e := elsewhere{t: t, calls: make(chan func()), ended: make(chan struct{})}
	go func() {
		for call := range e.calls {
			go func() {
				defer func() { e.ended <- struct{}{} }() // even if the test fails in call
				call()
			}()
		}
	}()
	t.Cleanup(func() { close(e.calls) })
	return e
}

// run runs a function elsewhere, and returns when the function has ended.
func (e elsewhere) run(call func()) {
	e.calls <- call
	<-e.ended
}

// gate is a database that executes and answers a statement only when the test says so.
type gate struct {
	ratelimit.DBTX
	conn      *pgx.Conn
	elsewhere elsewhere
	waiting   []*underWay
}

// txElsewhere is a transaction that executes its statements outside of the bubble.
type txElsewhere struct {
	pgx.Tx
	elsewhere elsewhere
}

func (tx txElsewhere) Query(_ context.Context, sql string, args ...any) (pgx.Rows, error) {
	s := &underWay{sql: sql, args: args}
	tx.elsewhere.run(func() { s.query(tx.Tx, tx.Conn().TypeMap()) })
	return s.rows, s.err
}

// underWay is a statement that has no answer yet. The test uses it only while all other goroutines are blocked.
type underWay struct {
	sql      string
	args     []any
	answer   chan struct{}
	executed bool
	event    int // the number of the event in which the statement was executed
	rows     pgx.Rows
	err      error
}

func (g *gate) Query(_ context.Context, sql string, args ...any) (pgx.Rows, error) {
	s := &underWay{sql: sql, args: args, answer: make(chan struct{})}
	g.waiting = append(g.waiting, s)
	<-s.answer
	return s.rows, s.err
}

// execute executes a statement, and commits its transaction.
func (g *gate) execute(s *underWay) {
	s.executed = true
	g.elsewhere.run(func() { s.query(g.conn, g.conn.TypeMap()) })
}

// query executes the statement, and reads all rows of its answer.
func (s *underWay) query(db ratelimit.DBTX, types *pgtype.Map) {
	rows, err := db.Query(context.Background(), s.sql, s.args...)
	if err != nil {
		s.err = err
		return
	}
	answer := &heldRows{fields: slices.Clone(rows.FieldDescriptions()), types: types}
	for rows.Next() {
		var values [][]byte
		for _, value := range rows.RawValues() {
			values = append(values, slices.Clone(value))
		}
		answer.values = append(answer.values, values)
	}
	s.rows, s.err = answer, rows.Err()
}

// heldRows are rows of an answer that the caller has not received yet.
type heldRows struct {
	pgx.Rows
	fields []pgconn.FieldDescription
	types  *pgtype.Map
	values [][][]byte
	next   int
}

func (r *heldRows) Next() bool { r.next++; return r.next <= len(r.values) }

func (*heldRows) Err() error { return nil }

func (*heldRows) Close() {}

func (*heldRows) CommandTag() pgconn.CommandTag { return pgconn.CommandTag{} }

func (r *heldRows) FieldDescriptions() []pgconn.FieldDescription { return r.fields }

func (r *heldRows) Scan(targets ...any) error {
	for i, target := range targets {
		if target == nil {
			continue
		}
		if err := r.types.Scan(r.fields[i].DataTypeOID, r.fields[i].Format, r.values[r.next-1][i], target); err != nil {
			return err
		}
	}
	return nil
}

// A remembered denial is an answer that the database could have given at the same time. This holds for all methods, for
// any order of executing and answering statements, and for commits and rollbacks. The denial includes all changes of
// the key that were answered. Of the unanswered changes, the denial includes those up to some time, and no later ones.
// While a transaction has changed a key and is still open, no denial of the key is used, because the database would
// wait.
func TestThoroughDenialsNeverChangeADecisionInAnyOrder(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")
	for _, policy := range []ratelimit.Policy{
		ratelimit.FixedWindow{Limit: 5, Window: 3 * time.Second},
		ratelimit.SlidingWindow{Limit: 5, Window: 3 * time.Second},
		ratelimit.TokenBucket{Capacity: 5, Refill: 3, Every: 2 * time.Second},
		ratelimit.SlidingLog{Limit: 5, Window: 3 * time.Second},
		ratelimit.CalendarWindow{Limit: 5, Unit: ratelimit.CalendarMinute},
	} {
		t.Run(fmt.Sprintf("%T", policy), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			conn, txConn, elsewhere := pgtest.Connect(t, db), pgtest.Connect(t, db), newElsewhere(t)
			synctest.Test(t, func(t *testing.T) { // to wait until all goroutines are blocked
				o := newOrders(t, policy, conn, txConn, elsewhere)
				defer o.abandon()
				rare := func() bool { // whether some events have happened too rarely
					return slices.ContainsFunc([]string{
						"hit", "hit while others are under way", "commit", "rollback", "answered in another order",
					}, func(what string) bool { return o.seen[what] <= 3 })
				}
				for o.step = 0; o.step < 400*limitertest.Rounds(t) || rare(); o.step++ {
					require.Less(t, o.step, 20_000*limitertest.Rounds(t), "%v", o.seen)
					o.act()
				}
				o.drain()
			})
		})
	}
}

// orders is a random history of calls of one limiter.
type orders struct {
	t       *testing.T
	step    int
	seed    uint64
	random  *rand.Rand
	gate    *gate
	tx      *pgx.Conn
	policy  ratelimit.Policy
	l, lead *ratelimit.Limiter // lead is another limiter, so that l's requests are not first
	tiers   []ratelimit.Policy // further policies for calls of l

	history   []map[string]modeltest.Row // the rows of the database after each event
	told      map[string]int             // the last event that has changed a key and was answered
	held      map[string]bool            // the keys that the open transaction has locked
	inTx      bool
	abandoned bool
	seen      map[string]int

	mu    sync.Mutex
	taken map[string][]ratelimit.Result // for each key, the results that can be given back
}

func newOrders(t *testing.T, policy ratelimit.Policy, conn, tx *pgx.Conn, elsewhere elsewhere) *orders {
	t.Helper()
	o := &orders{
		t: t, policy: policy, gate: &gate{conn: conn, elsewhere: elsewhere}, tx: tx,
		told: map[string]int{}, held: map[string]bool{}, seen: map[string]int{}, taken: map[string][]ratelimit.Result{},
	}
	o.seed = rand.Uint64()
	o.random = rand.New(rand.NewPCG(o.seed, 0))
	config := ratelimit.Config{
		Name:   "l",
		Policy: policy,
	}
	clientConfig := ratelimit.ClientConfig{DenialMaxAge: 2 * time.Second, Test: ratelimit.TestConfig{Now: time.Now}}
	o.l = limitertest.New(t, o.gate, config, clientConfig)
	config.Name, config.Policy = "lead", ratelimit.FixedWindow{Limit: 1 << 20, Window: time.Hour}
	o.lead = limitertest.Of(t, limitertest.Client(o.l), config)
	o.tiers = []ratelimit.Policy{
		policy, policy, policy, policy, policy, policy,
		ratelimit.FixedWindow{Limit: 6, Window: 2 * time.Second}, ratelimit.SlidingWindow{Limit: 7, Window: 4 * time.Second},
		ratelimit.TokenBucket{
			Capacity: 5,
			Refill:   4,
			Every:    2 * time.Second,
		}, ratelimit.All(policy, ratelimit.FixedWindow{Limit: 6, Window: 2 * time.Second}),
	}
	o.event()
	return o
}

func (o *orders) event() {
	rows := map[string]modeltest.Row{}
	var stored map[modeltest.RowID]modeltest.Row
	o.gate.elsewhere.run(func() { stored = pgtest.StoredRows(o.gate.elsewhere.t, o.gate.conn, false) })
	for id, row := range stored {
		if id.Name == "l" {
			rows[id.Key] = row
		}
	}
	o.history = append(o.history, rows)
}

// tell records that a caller has received the answer of an event.
func (o *orders) tell(event int) {
	for _, key := range []string{"a", "b"} {
		if o.history[event][key] != o.history[event-1][key] {
			o.told[key] = max(o.told[key], event)
		}
	}
}

func (o *orders) key() string { return []string{"a", "b"}[o.random.IntN(2)] }

func (o *orders) tier() *ratelimit.Limiter {
	return limitertest.Under(o.l, o.tiers[o.random.IntN(len(o.tiers))])
}

func (o *orders) act() {
	switch n := o.random.IntN(100); {
	case n < 40:
		o.allow()
	case n < 46:
		o.give()
	case n < 50:
		o.allowAll()
	case n < 65:
		o.execute()
	case n < 85:
		o.answer()
	case n < 90 && !o.inTx:
		o.transact()
	case n < 95:
		// The clock moves only while nothing is under way. If the clock moved during a statement, a denial's numbers
		// would allow for the duration of the statement.
		if o.drain(); len(o.gate.waiting) == 0 {
			limitertest.Elapse(time.Duration(o.random.Int64N(1_500_000)) * time.Microsecond)
		}
	}
}

// start starts a call, and waits until the call has ended or is blocked at the gate.
func (o *orders) start(call func() (ratelimit.Result, error)) (result ratelimit.Result, ended bool) {
	go func() {
		var err error
		if result, err = call(); err != nil && !o.abandoned {
			o.t.Error("step", o.step, "of seed", o.seed, err)
		}
		ended = true
	}()
	synctest.Wait()
	return result, ended
}

func (o *orders) allow() {
	l, key := o.tier(), o.key()
	n := 1 + o.random.Int64N(limitertest.Model(l.Config().Policy).Limit)
	for range 1 + o.random.IntN(3)*o.random.IntN(3) { // these requests are merged into one
		got, ended := o.start(func() (ratelimit.Result, error) {
			result, err := l.AllowN(context.Background(), key, n)
			o.keep(key, result)
			return result, err
		})
		if ended {
			o.check(l, key, n, got)
		}
	}
}

// check compares a remembered denial with the answers that the database could give.
func (o *orders) check(l *ratelimit.Limiter, key string, n int64, got ratelimit.Result) {
	require.Equal(o.t, ratelimit.SourceCachedDenial, got.Source)
	require.False(o.t, o.held[key], "step %d of seed %d: a transaction holds the key", o.step, o.seed)
	o.seen["hit"]++
	if len(o.gate.waiting) > 0 {
		o.seen["hit while others are under way"]++
	}
	got.Source, got.DecidedAt = ratelimit.SourceDatabase, got.DecidedAt.UTC()
	var possible []ratelimit.Result
	for _, rows := range o.history[o.told[key]:] {
		row, clock, m := rows[key], time.Now(), limitertest.Model(l.Config().Policy).Rules[0]
		if row.Algorithm != m.Numbers().Algorithm {
			row.State = model.State{}
		}
		_, d := m.Decide(row.State, clock.UnixMicro(), n)
		d.DecidedAt = clock.UTC()
		o := (&engine.Part{Rules: m, Cost: n, Decision: d}).Outcome(1)
		possible = append(possible, limitertest.ResultOf(&o))
	}
	require.Contains(o.t, possible, got, "step %d of seed %d: %v, cost %d", o.step, o.seed, l.Config().Policy, n)
}

// keep stores the result of a take for a later refund.
func (o *orders) keep(key string, result ratelimit.Result) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if result.Allowed {
		o.taken[key] = append(o.taken[key], result)
	}
}

// some returns the result of a take of key. Without such a take, it returns a result that took nothing.
func (o *orders) some(key string) ratelimit.Result {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.taken[key]) == 0 {
		return ratelimit.Result{}
	}
	return o.taken[key][o.random.IntN(len(o.taken[key]))]
}

func (o *orders) refund(l *ratelimit.Limiter, key string) (ratelimit.Result, error) {
	result, err := limitertest.AsResult(l.Refund(context.Background(), o.some(key)))
	return result, unless(err, ratelimit.ErrNothingToRefund)
}

func (o *orders) refundTx(tx pgx.Tx, l *ratelimit.Limiter, key string) (ratelimit.Result, error) {
	result, err := limitertest.AsResult(l.WithTx(tx).Refund(context.Background(), o.some(key)))
	return result, unless(err, ratelimit.ErrNothingToRefund)
}

func unless(err, expected error) error {
	if errors.Is(err, expected) {
		return nil
	}
	return err
}

func (o *orders) give() {
	l, key := o.tier(), o.key()
	switch o.random.IntN(3) {
	case 0:
		o.start(func() (ratelimit.Result, error) { return o.refund(l, key) })
	case 1:
		o.start(func() (ratelimit.Result, error) { return limitertest.AsResult(l.Grant(context.Background(), key, 1)) })
	case 2:
		o.start(func() (ratelimit.Result, error) { return ratelimit.Result{}, l.Reset(context.Background(), key) })
	}
}

// requests returns random requests for one AllowAll.
func (o *orders) requests() (requests []ratelimit.Request, keys []string) {
	from := o.random.IntN(2)
	requests, keys = []ratelimit.Request{o.tier().Request("a", 1), o.tier().Request("b", 1)}[from:], []string{"a", "b"}[from:]
	if o.random.IntN(2) == 0 {
		requests, keys = append([]ratelimit.Request{o.lead.Request("all", 1)}, requests...), append(keys, "all")
	}
	return requests, keys
}

func (o *orders) allowAll() {
	requests, _ := o.requests()
	o.start(func() (ratelimit.Result, error) {
		_, err := ratelimit.AllowAll(context.Background(), requests...)
		return ratelimit.Result{}, err
	})
}

// execute executes one of the statements under way. It skips statements for rows that the open transaction has locked.
func (o *orders) execute() {
	if i := o.one(false); i >= 0 && !o.inTx {
		o.gate.execute(o.gate.waiting[i])
		o.event()
		o.gate.waiting[i].event = len(o.history) - 1
	}
}

// answer answers one of the executed statements.
func (o *orders) answer() {
	i := o.one(true)
	if i < 0 {
		return
	}
	s := o.gate.waiting[i]
	if slices.ContainsFunc(
		o.gate.waiting,
		func(other *underWay) bool { return other.executed && other.event < s.event },
	) {
		o.seen["answered in another order"]++
	}
	o.tell(s.event)
	o.gate.waiting = slices.Delete(o.gate.waiting, i, i+1)
	close(s.answer)
	synctest.Wait()
}

// one returns the index of a random statement under way with this value of executed, or -1.
func (o *orders) one(executed bool) int {
	var which []int
	for i, s := range o.gate.waiting {
		if s.executed == executed {
			which = append(which, i)
		}
	}
	if len(which) == 0 {
		return -1
	}
	return which[o.random.IntN(len(which))]
}

// drain executes and answers all statements under way.
func (o *orders) drain() {
	for !o.inTx && len(o.gate.waiting) > 0 {
		o.execute()
		o.answer()
	}
}

// abandon ends all statements under way, so that a failed test can end.
func (o *orders) abandon() {
	o.abandoned = true
	for len(o.gate.waiting) > 0 {
		s := o.gate.waiting[0]
		s.err = context.Canceled
		o.gate.waiting = o.gate.waiting[1:]
		close(s.answer)
		synctest.Wait()
	}
}

// transact takes and gives units in a transaction. Other calls run before the transaction ends.
func (o *orders) transact() {
	ctx := context.Background()
	tx := txElsewhere{elsewhere: o.gate.elsewhere}
	var err error
	tx.elsewhere.run(func() { tx.Tx, err = o.tx.Begin(ctx) })
	require.NoError(o.t, err)
	o.inTx = true
	for range 1 + o.random.IntN(2) {
		l, key := o.tier(), o.key()
		changed := true
		switch o.random.IntN(6) {
		case 0, 1:
			var result ratelimit.Result
			result, err = l.WithTx(tx).AllowN(ctx, key, 1+o.random.Int64N(3))
			changed = result.Allowed
		case 2:
			var results ratelimit.Results
			requests, keys := o.requests()
			results, err = limitertest.AllowAllTx(ctx, tx, requests...)
			changed = false
			for _, key := range keys {
				o.held[key] = o.held[key] || results.Allowed
			}
		case 3:
			var result ratelimit.Result
			result, err = o.refundTx(tx, l, key)
			changed = result.Allowed // a refund may have had nothing to give back
		case 4:
			_, err = l.WithTx(tx).Grant(ctx, key, 1)
		case 5:
			err = l.WithTx(tx).Reset(ctx, key)
		}
		require.NoError(o.t, err)
		o.held[key] = o.held[key] || changed
	}
	for range o.random.IntN(8) {
		o.act()
	}
	if o.random.IntN(2) == 0 {
		o.seen["rollback"]++
		tx.elsewhere.run(func() { err = tx.Rollback(ctx) })
		require.NoError(o.t, err)
	} else {
		o.seen["commit"]++
		tx.elsewhere.run(func() { err = tx.Commit(ctx) })
		require.NoError(o.t, err)
		o.event()
		o.tell(len(o.history) - 1)
	}
	o.inTx = false
	clear(o.held)
}
