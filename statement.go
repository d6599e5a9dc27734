package ratelimit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pg"
)

// execute has the database decide all requests in one statement, and sets the decisions of their parts. Requests
// for the same key are decided in their order. After an error nothing was taken, unless it is ErrOutcomeUnknown.
// db is the database's own, or a transaction.
func (d *database) execute(ctx context.Context, db DBTX, requests []*request, tx transaction) error {
	if d.memory != nil {
		return d.decideInMemory(db, requests)
	}
	over, err := false, error(nil)
	if tx.own() && !tx.skipHeld && d.pooled() {
		if shadows := shadowsOf(requests); shadows != nil {
			over, err = d.executeBoth(ctx, db, requests, shadows, tx)
		}
	}
	if !over {
		c := d.call(requests, tx)
		c.undecide()
		sharded := d.sharded.Load()
		err = c.query(ctx, db, tx.own() && !sharded)
		if sharded && pg.Canceled(err) && !pg.FromProxy(err) { // the proxy has not waited for the shard's answer
			err = pg.NewError(pg.Cause(err), ErrTimeout, ErrOutcomeUnknown)
		}
	}
	if requests[0].looks() && pg.LockTimeout(err) { // a request that looks waits for no row
		return pg.LockedTable(err)
	}
	return d.explain(ctx, db, requests, err)
}

// call is a statement that decides, and whose decisions its answer has.
type call struct {
	sql    string
	args   []any
	into   []*part
	takes  bool    // the function is one whose name begins with rate_limit_take_
	counts []int64 // then, of how many requests each part is; nil if that is 1 each
	from   *rowSet // then, the rows that the parts take from; nil if each takes from a row of its own
}

// call returns the statement for requests.
func (d *database) call(requests []*request, tx transaction) call {
	if tx.skipHeld || !ofOneFunction(requests) {
		return d.callAll(requests, tx)
	}
	return d.callOne(requests, tx)
}

// ofOneFunction tells whether the function of an algorithm can decide the requests. It can if they take from keys of
// one limiter, under one policy, and lease nothing of a bucket. For several keys of a log it would do nothing by
// itself.
func ofOneFunction(requests []*request) bool {
	first := &requests[0].parts[0]
	for _, r := range requests {
		p := &r.parts[0]
		if len(r.parts) != 1 || p.cost < 1 || p.space != first.space || p.rules != first.rules || r.leased(p) != 0 {
			return false
		}
	}
	return len(requests) == 1 || first.rules.Numbers().Algorithm != algorithm.SlidingLog
}

// callOne calls a function of an algorithm.
func (d *database) callOne(requests []*request, tx transaction) call {
	n := len(requests)
	keys, into := make([]string, n), make([]*part, n)
	are1 := true
	for i, r := range requests {
		p := &r.parts[0]
		keys[i], into[i] = p.key, p
		are1 = are1 && p.cost == 1 && r.count == 1
	}
	var costs, counts []int64 // nil if all are 1, which is the shortest way
	if !are1 {
		numbers := make([]int64, 2*n)
		costs, counts = numbers[:n], numbers[n:]
		for i, r := range requests {
			costs[i], counts[i] = into[i].cost, r.count
		}
	}
	space, of := into[0].space, into[0].rules.Numbers()
	args := []any{
		space.name, keys, costs, counts, space.durable, tx.lockTimeout,
		d.synchronousCommit(tx, space.durable, space.flush), microsOf(d.now()),
	}
	return call{
		sql: d.statement(of.Algorithm), args: append(args, argumentsOf(of)...), into: into, counts: counts, takes: true,
	}
}

// microsOf are the microseconds since 1970 of a time that may be nil.
func microsOf(t *time.Time) *int64 {
	if t == nil {
		return nil
	}
	return new(t.UnixMicro())
}

// callAll calls rate_limit_all, or rate_limit_take_all.
func (d *database) callAll(requests []*request, tx transaction) call {
	n := 0
	for _, r := range requests {
		n += len(r.parts)
	}
	owners, counts := make([]int32, n), make([]int64, n)
	into := make([]*part, 0, n)
	for i, r := range requests {
		for j := range r.parts {
			owners[len(into)], counts[len(into)] = int32(i), r.count
			into = append(into, &r.parts[j])
		}
	}
	if len(requests) == 1 { // not needed, but it saves the function the sorting
		slices.SortFunc(into, compareLockOrder)
	}
	if n >= d.manyParts && !tx.skipHeld && d.attempts.worthwhile() {
		if from := rowSetOf(requests, into, counts); from != nil {
			return d.takeAll(from, into, owners, counts, tx)
		}
	}
	rows := argumentsOfRows(into)
	durables, costs := make([]bool, n), make([]int64, n)
	var leased []int64 // nil if nothing is leased of a bucket
	var refunds refundArguments
	durable := false
	for i, p := range into {
		durables[i], costs[i] = p.space.durable, p.cost
		if units := requests[owners[i]].leased(p); units != 0 {
			if leased == nil {
				leased = make([]int64, n)
			}
			leased[i] = units
		}
		refunds.set(i, n, p.refund)
		durable = durable || p.space.durable
	}
	return call{sql: d.statement(ofAll), into: into, args: []any{
		owners, rows.names, rows.keys, durables, rows.algorithms, rows.limits, rows.spans, rows.refills, costs, counts,
		tx.lockTimeout, d.synchronousCommit(tx, durable, rows.flush), d.now(),
		refunds.since, refunds.in, refunds.at, refunds.spent, tx.skipHeld, rows.zones, leased,
	}}
}

// rowArguments are the rows of parts, and their policies.
type rowArguments struct {
	names, keys            []string
	algorithms             []int16
	limits, spans, refills []int64
	zones                  []string // nil if no part has one
	flush                  bool     // SynchronousCommit is set for one of them
}

func argumentsOfRows(parts []*part) rowArguments {
	n := len(parts)
	numbers := make([]int64, 3*n)
	rows := rowArguments{
		names: make([]string, n), keys: make([]string, n), algorithms: make([]int16, n),
		limits: numbers[:n], spans: numbers[n : 2*n], refills: numbers[2*n:],
	}
	for i, p := range parts {
		of := p.rules.Numbers()
		rows.names[i], rows.keys[i], rows.algorithms[i] = p.name, p.key, of.Algorithm
		rows.limits[i], rows.spans[i], rows.refills[i] = of.Limit, model.Micros(of.Span), of.Refill
		if of.Zone != "" {
			if rows.zones == nil {
				rows.zones = make([]string, n)
			}
			rows.zones[i] = of.Zone
		}
		rows.flush = rows.flush || p.space.flush
	}
	return rows
}

// compareLockOrder is the order in which rate_limit_all locks rows.
func compareLockOrder(a, b *part) int {
	table := func(p *part) int {
		if p.space.durable {
			return 1
		}
		return 0
	}
	return cmp.Or(
		table(a)-table(b), len(b.key)-len(a.key), strings.Compare(a.key, b.key), strings.Compare(a.name, b.name))
}

// synchronousCommit is the setting for a transaction of ours that writes durable rows. nil leaves the session's.
func (d *database) synchronousCommit(tx transaction, durable, flush bool) *bool {
	if !tx.own() || !d.pooled() || !durable {
		return nil
	}
	return &flush
}

// refundArguments tell the database which takes are given back. They are NULL for all other parts, and nil if
// there are no refunds.
type refundArguments struct{ since, in, at, spent []*int64 }

// set says that the i-th of n parts gives back k, if k is not nil.
func (r *refundArguments) set(i, n int, k *model.Take) {
	if k == nil {
		return
	}
	if r.in == nil {
		*r = refundArguments{make([]*int64, n), make([]*int64, n), make([]*int64, n), make([]*int64, n)}
	}
	r.since[i], r.in[i], r.at[i], r.spent[i] = &k.Since, &k.In, &k.At, &k.Spent
}

// undecide says of all parts that the statement has not come to them. That stays so for those that its answer leaves
// out.
func (c *call) undecide() {
	for _, p := range c.into {
		p.decision.Granted = passedOver
	}
}

// query runs the statement. It sets the decision of each part for which a row comes back.
//
// The statement returns times in microseconds, because the text of a timestamptz depends on DateStyle. For that it
// multiplies date_part, a double precision number of seconds. This is exact until 2106 (TestTimesAreReadExactly),
// and cheaper than extract, which is numeric.
func (c *call) query(ctx context.Context, db DBTX, own bool) error {
	targets, each := c.answer()
	return query(ctx, db, own, c.sql, c.args, targets, each)
}

// read reads the rows of the statement.
func (c *call) read(rows pgx.Rows) error {
	targets, each := c.answer()
	_, err := pgx.ForEachRow(rows, targets[:min(len(targets), len(rows.FieldDescriptions()))], each)
	return err
}

// answer returns what a row is scanned into, and what sets decisions then.
func (c *call) answer() (targets []any, each func() error) {
	if !c.takes {
		return decisionsInto(c.into)
	}
	var numbers pgtype.FlatArray[pgtype.Int8]
	return []any{&numbers}, func() error {
		if c.from != nil {
			return c.from.takenInto(c.into, c.counts, numbers)
		}
		return takenInto(c.into, c.counts, numbers)
	}
}

// decisionsInto returns what a row is scanned into, and what sets its part's decision then.
func decisionsInto(into []*part) (targets []any, each func() error) {
	var ord, decidedAt int64
	var retryAfter *int64
	var one model.Decision
	var log []int64
	targets = []any{
		&ord, &one.Granted, &one.Remaining, &retryAfter, &one.ResetAfter, &decidedAt,
		&one.State.Count, &one.State.PrevCount, &one.State.WindowStart,
		&one.State.Credit, &one.State.Scale, &one.State.ExpiresAt,
		&one.Taken.Spent, &one.Taken.Since, &one.Taken.At, &log,
	}
	return targets, func() error {
		one.RetryAfter = model.Never
		if retryAfter != nil {
			one.RetryAfter = *retryAfter
		}
		one.DecidedAt = time.UnixMicro(decidedAt)
		one.State.Log = model.NewEntries(log)
		one.State.Since, one.Taken.In = one.Taken.Since, one.State.WindowStart
		into[ord-1].decision = one
		return nil
	}
}

// deleteRows deletes rows of a key.
func (d *database) deleteRows(
	ctx context.Context, db DBTX, space *keyspace, names []string, key string, tx transaction,
) error {
	if d.memory != nil {
		return d.resetInMemory(db, space, names, key)
	}
	args := []any{names, key, space.durable, tx.lockTimeout, d.synchronousCommit(tx, space.durable, space.flush)}
	err := query(ctx, db, tx.own(), pg.Qualify(resetStatement, d.schema), args, []any{nil}, func() error { return nil })
	if pg.LockTimeout(err) && !isAway(err) {
		return keyHeld()
	}
	one := &request{parts: []part{{space: space}}}
	return d.explain(ctx, db, []*request{one}, err)
}

// maxTries is how often a statement runs that others undo. Somebody who holds a row again and again undoes it each time
// at REPEATABLE READ and SERIALIZABLE.
const maxTries = 5

// query runs a statement, scans each row into targets, and translates the error. It retries once if nothing was sent,
// and on the next connection if the server had ended an idle one. In a transaction of our own it also retries on 40001
// and 40P01, a few times, and once after a migration or a cancellation.
func query(ctx context.Context, db DBTX, own bool, sql string, args, targets []any, each func() error) error {
	for n := 1; ; n++ {
		first := n == 1
		err := queryOnce(ctx, db, sql, args, targets, each)
		again := first && pg.NeverSent(err) || pg.EndedIdle(err) ||
			own && (n < maxTries && pg.Undone(err) || first && (pg.Remade(err) || pg.Canceled(err)))
		if err == nil || !again || ctx.Err() != nil {
			return err
		}
	}
}

func queryOnce(ctx context.Context, db DBTX, sql string, args, targets []any, each func() error) error {
	switch db.(type) {
	case *pgxpool.Pool, pg.Pool:
		return pg.Use(ctx, db, func(conn *pgx.Conn) error { return queryOn(ctx, conn, sql, args, targets, each) })
	}
	return queryOn(ctx, db, sql, args, targets, each)
}

// queryOn is queryOnce on a connection or transaction.
func queryOn(ctx context.Context, db DBTX, sql string, args, targets []any, each func() error) error {
	if err := pg.Garbled(db, sql); err != nil {
		return err
	}
	rows, err := db.Query(ctx, sql, args...)
	if err != nil {
		if err := pg.Unsent(db, err); err != nil {
			return err
		}
		return statementError(err)
	}
	// The last column, the log, is there only where there may be logs. It costs a batch a hundredth.
	targets = targets[:min(len(targets), len(rows.FieldDescriptions()))]
	// This closes rows and returns their error, even one that comes after the last row. In the extended protocol
	// that is the error of the commit.
	if _, err := pgx.ForEachRow(rows, targets, each); err != nil {
		return statementError(err)
	}
	return nil
}

// schemaVersion is the number of the last migration. This package calls what that version has.
const schemaVersion = 3

// explain adds to an error what takes another query to find out. If what was called is missing, it is the version
// to which the database has been migrated. If the encoding refuses a text, it is whether that is the limiter's
// name.
func (d *database) explain(ctx context.Context, db DBTX, requests []*request, err error) error {
	if _, ok := db.(*pgxpool.Pool); ok {
		err = d.blame(err)
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errRefused):
		first := requests[0].parts[0].space
		if !isASCII(first.name) && d.refusesName(ctx, db, requests, first) {
			return errNameRefused
		}
		return err
	}
	if zone := unknownZone(requests, err); zone != "" {
		return errZone(zone, "which the database's server does not know; "+
			"SELECT name FROM pg_timezone_names lists what it knows")
	}
	return d.explainVersion(ctx, db, err)
}

// unknownZone returns the time zone that an error of Postgres is about, or nothing. Such an error has the name of the
// zone in its text, in whatever language that is.
func unknownZone(requests []*request, err error) (zone string) {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok || pgErr.Code != "22023" || strings.HasPrefix(pgErr.Message, "rate_limit: ") {
		return ""
	}
	for _, r := range requests {
		for i := range r.parts {
			name := r.parts[i].rules.Numbers().Zone
			if len(name) > len(zone) && strings.Contains(pgErr.Message, name) {
				zone = name
			}
		}
	}
	return zone
}

// closeTimeout is how long pgxpool takes to close a connection that does not answer. Until then it counts as acquired.
const closeTimeout = 15 * time.Second

// blame finds out whether it was the application that had all connections of the pool, or statements that hang in
// Postgres, as those before have shown. In the second case it is an ordinary ErrTimeout.
func (d *database) blame(err error) error {
	hungAt := d.hungAt.Load()
	switch {
	case errors.Is(err, ErrPoolExhausted):
		if hungAt != nil && time.Since(*hungAt) < closeTimeout {
			return pg.Translate(pg.Cause(err), false)
		}
	case isAway(err):
		now := time.Now()
		d.hungAt.Store(&now)
	case hungAt != nil:
		d.hungAt.Store(nil)
	}
	return err
}

// refusesName tells whether the encoding refuses the name of the only limiter, so that no key is to blame. It
// cannot tell in a transaction, which the error has ended.
func (d *database) refusesName(ctx context.Context, db DBTX, requests []*request, space *keyspace) bool {
	if !ofOneLimiter(requests) {
		return false
	}
	err := query(ctx, db, false, "SELECT $1::pg_catalog.text", []any{space.name}, []any{nil},
		func() error { return nil })
	return errors.Is(err, errRefused)
}

func ofOneLimiter(requests []*request) bool {
	for _, r := range requests {
		for i := range r.parts {
			if r.parts[i].space != requests[0].parts[0].space {
				return false
			}
		}
	}
	return true
}

func (d *database) explainVersion(ctx context.Context, db DBTX, err error) error {
	if !errors.Is(err, ErrNotMigrated) || pg.Remade(err) || pg.FromProxy(err) { // a proxy knows only its own version
		return err
	}
	var version int64
	statement := pg.Qualify("SELECT rate_limit_version()", d.schema)
	if query(ctx, db, false, statement, nil, []any{&version}, func() error { return nil }) != nil {
		return err // there is no such function, or the error has ended the transaction
	}
	kind, says := ErrNotMigrated, "which has what is missing: search_path may name another schema first"
	if version < schemaVersion {
		says = "and what is missing came later"
	} else if version > schemaVersion {
		kind = ErrNewerSchema
		says = "which has it no longer"
	}
	return pg.NewError(fmt.Errorf("the database is at version %d of the migrations, %s; "+
		"this release was made for version %d: %w", version, says, schemaVersion, pg.Cause(err)), kind)
}

// statementError translates an error of a statement. If the encoding of the database or the connection refuses a
// key, it is a KeyError instead, because the database's message shows bytes of the key.
func statementError(err error) error {
	if argument, ok := pg.Unencodable(err); ok && argument == "name" {
		return errNameRefused
	} else if ok {
		return errRefused
	}
	return pg.Translate(err, true)
}

func isASCII(text string) bool {
	return strings.IndexFunc(text, func(r rune) bool { return r > 127 }) < 0
}
