package ratelimit

import (
	"context"
	_ "embed"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// DBTX is what a [Limiter] needs of a database. With a *pgxpool.Pool, the usual choice, a limiter coalesces concurrent calls;
// with one connection or transaction (*pgxpool.Conn, *pgx.Conn, pgx.Tx) calls take turns on it, those of other limiters on the same
// connection included. It asks in the caller's session, one call at a time: denials are not remembered, calls do not leave together
// (MaxInFlight, MaxBatch, DenialMaxAge and Observer.Batch mean nothing), and transactions commit as the session says.
type DBTX interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

var (
	_ DBTX = (*pgxpool.Pool)(nil)
	_ DBTX = (*pgxpool.Conn)(nil)
	_ DBTX = (*pgx.Conn)(nil)
	_ DBTX = (pgx.Tx)(nil)
)

const (
	maxNameLen = 128 // bytes
	maxKeyLen  = 512 // bytes; with the name, only the log of a SlidingLog can need TOAST, nor an index entry more than a page can hold
)

// Config says what a [Limiter] limits. Name and Policy are required.
type Config struct {
	// Name keeps limiters apart that share a database: the same key of two names is two keys. 1 to 128 bytes of UTF-8
	// without NUL. Limiters of one name, in any number of processes, share their keys.
	Name string

	// Policy is how much a key may take.
	Policy Policy

	// Durable keeps the limiter's rows in rate_limit_durable, which survives a crash of the server, for quotas and billing.
	//
	// Defaults to false: rate_limit_ephemeral, an unlogged table, which a crash empties (every key is as good as new then),
	// for protection against abuse.
	Durable bool

	// SynchronousCommit makes a durable limiter's calls wait until the WAL is flushed, so that nothing that was allowed is
	// forgotten in a crash. It does not concern the methods that take a transaction, which commits as its owner says; and New refuses
	// it with a single connection or transaction, for the same reason.
	//
	// Defaults to false: a crash may forget what was allowed in the last three wal_writer_delays, 0.6 s as Postgres ships.
	SynchronousCommit bool

	// Schema is the schema that the migrations were applied in.
	//
	// Defaults to "": found through the connection's search_path.
	Schema string

	// Timeout is the budget of a call, from when it is made until the database has decided, at least 1 ms. A wait for
	// a row that somebody's transaction holds is given up earlier, by the server too, after a quarter of it ([ErrKeyHeld]), and holds up
	// calls for other keys by some milliseconds at most, unless the limiter was made with a single connection or transaction: those
	// keep their own settings.
	//
	// Defaults to 1 second.
	Timeout time.Duration

	// MaxInFlight is how many statements the limiter has under way at most, and so how many of the pool's connections it uses
	// for them; for keys whose row somebody holds, one more. Everybody who asks meanwhile waits for the next statement, which
	// decides all of them. A second one leaves only where it pays: if 24 callers wait, if the database is a millisecond away or
	// more, or if the first one takes longer than 10 ms. From 1; defaults to 2.
	MaxInFlight int

	// MaxBatch is how many calls leave together in one statement at most.
	//
	// Defaults to 500.
	MaxBatch int

	// DenialMaxAge is how long a denial is remembered in this process. Until then, or until its RetryAfter if that comes
	// first, requests of that cost or more are denied without asking the database. A key that this limiter, or one that its With has
	// returned, takes from, resets, gives back to or grants credit is forgotten at once, also within a transaction or by AllowAll. If
	// somebody else does it, that takes effect here within this time: a reset may not be seen, and a RetryAfter may be too short. Two
	// limiters that New has returned are somebody else to each other, also if their Name is the same. So is what may still count
	// after an [ErrOutcomeUnknown].
	//
	// Defaults to 1 second.
	DenialMaxAge time.Duration

	// NoDenialCache turns that off: every call asks the database.
	//
	// Defaults to false.
	NoDenialCache bool

	// OnFailure is what the limiter answers when Postgres is away or too slow to decide: an error, or [FailOpen], [FailClosed]
	// or [FallbackLocal]; [Result].Source then says so. It answers for Allow, AllowN, Peek, Wait and WaitN. All other methods return the
	// error.
	//
	// Defaults to none of them, which returns the error as [ReturnError] does.
	OnFailure FailureMode

	// Logger is told when decisions begin to be made by OnFailure, and when they are made by Postgres again: one line each.
	//
	// Defaults to nil: nothing is logged.
	Logger *slog.Logger

	// Observer is told about every decision and every statement, for metrics.
	//
	// Defaults to nil: nothing is observed, and that costs nothing.
	Observer *Observer

	// Test is for tests of the application.
	Test TestConfig
}

// TestConfig replaces parts of a limiter for tests.
type TestConfig struct {
	// Now replaces the database's clock. It is called once for each statement, possibly by several goroutines at once.
	Now func() time.Time
}

func (c Config) withDefaults() Config {
	if c.Timeout == 0 {
		c.Timeout = time.Second
	}
	if c.MaxInFlight == 0 {
		c.MaxInFlight = 2
	}
	if c.MaxBatch == 0 {
		c.MaxBatch = 500
	}
	if c.DenialMaxAge == 0 {
		c.DenialMaxAge = time.Second
	}
	return c
}

func (c Config) validate() error {
	switch {
	case c.Name == "":
		return &ConfigError{Field: "Name", Reason: "is required: it keeps this limiter's keys apart from those of others"}
	case !utf8.ValidString(c.Name) || strings.ContainsRune(c.Name, 0):
		return &ConfigError{Field: "Name", Reason: "must be valid UTF-8 without NUL"}
	case c.SynchronousCommit && !c.Durable:
		return &ConfigError{Field: "SynchronousCommit", Reason: "needs Durable: there is nothing to flush for an unlogged table"}
	case !utf8.ValidString(c.Schema) || strings.ContainsRune(c.Schema, 0):
		return &ConfigError{Field: "Schema", Reason: "must be valid UTF-8 without NUL"}
	case c.Timeout < time.Millisecond:
		return &ConfigError{Field: "Timeout", Reason: fmt.Sprintf("is %v, and must be at least 1ms", c.Timeout)}
	case c.MaxInFlight < 1:
		return &ConfigError{Field: "MaxInFlight", Reason: fmt.Sprintf("is %d, and must be at least 1", c.MaxInFlight)}
	case c.MaxBatch < 1:
		return &ConfigError{Field: "MaxBatch", Reason: fmt.Sprintf("is %d, and must be at least 1", c.MaxBatch)}
	case c.OnFailure.answer == fallbackLocal && !(c.OnFailure.share > 0 && c.OnFailure.share <= 1): // nor NaN
		return &ConfigError{Field: "OnFailure", Reason: fmt.Sprintf("is FallbackLocal(%v), and its share must be above 0 and at most 1", c.OnFailure.share)}
	case c.DenialMaxAge < 0:
		return &ConfigError{Field: "DenialMaxAge", Reason: fmt.Sprintf("is %v, and must not be negative; NoDenialCache turns the cache off", c.DenialMaxAge)}
	}
	if err := validatePolicy(c.Policy); err != nil {
		return err
	}
	return validateName(c.Name, c.Policy)
}

// validateName checks the length, which All adds to.
func validateName(name string, policy Policy) error {
	longest := len(name)
	if several, ok := policy.(all); ok {
		longest = len(partName(name, several.n-1))
	}
	if longest > maxNameLen {
		return &ConfigError{Field: "Name", Reason: fmt.Sprintf("has %d bytes with what the policy adds, and may have at most %d", longest, maxNameLen)}
	}
	return nil
}

func validatePolicy(policy Policy) error {
	switch policy.(type) {
	case nil, *FixedWindow, *SlidingWindow, *TokenBucket, *SlidingLog:
		return &ConfigError{Field: "Policy", Reason: "is required: a FixedWindow, SlidingWindow, TokenBucket or SlidingLog (not a pointer to one)"}
	}
	return policy.validate()
}

// Result is a decision. The zero Result denies. That of a take remembers what it took, for [Limiter.Refund].
type Result struct {
	// Allowed tells whether the request was allowed, and its cost taken. Of a Peek: whether a cost of 1 would be.
	Allowed bool
	// Source tells how it was decided: by the database, unless Postgres is away ([Config].OnFailure) or the denial was remembered.
	Source Source
	// Limit is the policy's limit; of a bucket, its capacity.
	Limit int64
	// Remaining is the largest cost that would be allowed at the time of the decision and after it: 7 after taking 3 of 10.
	// With credit from [Limiter.Grant] it may be above Limit, and then no single request may take all of it.
	Remaining int64
	// RetryAfter is 0 if the request was allowed; else the time, from the decision, after which the same request is
	// allowed if nobody else takes anything: exactly then, and not a microsecond earlier. With 10 a minute in a sliding
	// window, all taken at 0 s, it is 61 s at 5 s.
	RetryAfter time.Duration
	// ResetAfter is the time, from the decision, after which the key is as good as new if nobody takes anything;
	// 0 if it already is. In that example it is 115 s at 5 s: what was taken counts for two windows.
	ResetAfter time.Duration
	// DecidedAt is the database's clock at the decision, from which RetryAfter and ResetAfter count; this process's, if Source
	// says that the database is away.
	DecidedAt time.Time

	receipt *receipt // what was taken, for Refund; nil if nothing was, or the database has not decided it
}

// Limiter decides whether keys may go on. It is safe for concurrent use by any number of goroutines, needs no Close, and at
// rest holds nothing but the denials of the last second, and what was taken by [FallbackLocal]: no goroutine, no timer, no connection.
//
// Allow asks for one request, AllowN for one of a cost, and Peek looks without taking. Each is one statement of its own
// transaction, decided by the database's clock. AllowTx and AllowNTx take part in a transaction of the caller's instead. Wait
// comes back when the request is allowed, and With asks under another policy.
//
// # Contexts
//
// A context ends only the caller's wait. The statement itself goes on within [Config].Timeout, and what was asked may
// still count: a cancelled context would close the connection, and thousands of impatient clients would then cost the
// application thousands of connections.
type Limiter struct {
	*core
	policy   Policy
	numbers  []any
	decideQL string
}

// core is what a limiter shares with those that its With has returned: everything but the policy.
type core struct {
	config   Config // its Policy is that of the first limiter
	resetQL  string
	settings settings // of statements on db; in a caller's transaction, none

	denials  *denials  // nil: none are remembered
	breaker  *breaker  // nil: errors are returned
	fallback *fallback // nil unless OnFailure is FallbackLocal

	db     DBTX
	single *sync.Mutex // held during a call, if db is one connection, and shared with all limiters on it; else nil
	shared bool        // whether db can be used by several goroutines at once

	begin  time.Time
	heldAt atomic.Int64 // when a held row, or a refused key, last cost others time; in nanoseconds since begin

	mu       sync.Mutex
	queue    []*call
	inFlight int
	fastest  time.Duration       // see took
	held     map[heldKey]heldRow // keys that were found locked a moment ago; nil if none was
	lane     []*call             // for keys that are held
	serving  bool                // whether the lane is being served
	calls    sync.Pool           // of *call; not those whose caller left before the decision: whoever decides still writes to them

	linesMu sync.Mutex
	lines   map[string][]*line // where callers wait for a key, one for each policy
}

//go:embed sql/call/reset.sql
var resetStatement string

// New returns a limiter that keeps its rows in the database behind db. It asks nothing of the database, starts nothing,
// and needs no Close. It returns a *ConfigError for a configuration that cannot work.
func New(db DBTX, config Config) (*Limiter, error) {
	if db == nil || db == (*pgxpool.Pool)(nil) || db == (*pgxpool.Conn)(nil) || db == (*pgx.Conn)(nil) {
		return nil, &ConfigError{Field: "db", Reason: "is nil, and must be a *pgxpool.Pool, a connection or a transaction"}
	}
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	l := &Limiter{
		core: &core{
			begin: time.Now(), config: config, resetQL: qualify(resetStatement, config.Schema), db: db,
			breaker: newBreaker(config), fallback: newFallback(config),
		},
		policy:   config.Policy,
		numbers:  config.Policy.numbers(),
		decideQL: qualify(config.Policy.statement(), config.Schema),
	}
	switch db := db.(type) {
	case *pgx.Conn:
		l.single = turns(db)
	case *pgxpool.Conn:
		l.single = turns(db.Conn())
	case pgx.Tx:
		l.single = turns(db.Conn())
	default:
		l.shared = true
		if !config.NoDenialCache {
			l.denials = newDenials(config.DenialMaxAge, config.Test.Now)
		}
		// Below the client's budget, so that a wait that the client has given up ends on the server too.
		l.settings.lockTimeout = millis(config.Timeout / 4)
		if config.Durable {
			l.settings.synchronousCommit = &config.SynchronousCommit
		}
	}
	if config.SynchronousCommit && !l.shared {
		return nil, &ConfigError{Field: "SynchronousCommit", Reason: "has no effect on a single connection or transaction, which commits as " +
			"its session says; run SET synchronous_commit = on there, or SET LOCAL in a transaction, or pass a *pgxpool.Pool"}
	}
	return l, nil
}

// connections guards the maps of CustomData while limiters are made, which need not be done by one goroutine.
//
//nolint:gochecknoglobals // the maps are pgx's, so nobody but all limiters together can guard them
var connections sync.Mutex

// turns is the mutex of a connection, on which the calls of all its limiters take turns.
func turns(conn *pgx.Conn) *sync.Mutex {
	if conn == nil || conn.PgConn() == nil { // a transaction of the application's own making
		return &sync.Mutex{}
	}
	const name = "github.com/pgratelimit/ratelimit: turns"
	connections.Lock()
	defer connections.Unlock()
	data := conn.PgConn().CustomData()
	mutex, ok := data[name].(*sync.Mutex)
	if !ok {
		mutex = &sync.Mutex{}
		data[name] = mutex
	}
	return mutex
}

// With returns a limiter of other numbers, or of another algorithm, for the same keys: for tiers, such as free and paid, or
// for numbers that stand in a table of customers. It asks nothing and starts nothing, so it may be called for each request.
// Everything but the policy is shared with l, the connections in use and the denials in memory included. Calls under different
// policies leave in different statements, so a few tiers coalesce nearly as well as one, and numbers of every customer's own hardly.
//
// What a key has taken stays taken when it is asked for under another policy: see [Policy] for what is made of it. A denial
// is remembered for the policy that it was made under, so a raised limit helps at the next call.
//
// Errors: a [*ConfigError] for a policy that cannot work.
func (l *Limiter) With(policy Policy) (*Limiter, error) {
	if err := validatePolicy(policy); err != nil {
		return nil, err
	}
	if err := validateName(l.config.Name, policy); err != nil {
		return nil, err
	}
	with := &Limiter{core: l.core, policy: policy, numbers: policy.numbers(), decideQL: l.decideQL}
	if statement := policy.statement(); statement != l.policy.statement() {
		with.decideQL = qualify(statement, l.config.Schema)
	}
	return with, nil
}

// Name is the limiter's [Config].Name.
func (l *Limiter) Name() string { return l.config.Name }

// Policy is the limiter's policy.
func (l *Limiter) Policy() Policy { return l.policy }

// qualify names the schema in a statement whose function names all begin with rate_limit_.
func qualify(statement, schema string) string {
	if schema == "" {
		return statement
	}
	return strings.ReplaceAll(statement, "rate_limit_", pgx.Identifier{schema}.Sanitize()+".rate_limit_")
}

// Allow takes 1 from key's limit if that fits, and tells whether it did.
//
// Errors: a [*KeyError]; the context's error, if that ends first (the request may still count); else a [*StoreError].
func (l *Limiter) Allow(ctx context.Context, key string) (Result, error) {
	return l.allow(ctx, key, 1)
}

// AllowN takes n from key's limit if that fits, or nothing. With n = 0 it is Peek. Errors: as Allow, and a [*CostError]
// for n below 0 or above the policy's limit.
func (l *Limiter) AllowN(ctx context.Context, key string, n int64) (Result, error) {
	return l.allow(ctx, key, n)
}

// AllowTx is Allow within the caller's transaction: what it takes is kept if tx commits, and given back if tx rolls back.
//
// From a request that is allowed until tx ends, everybody else who asks for this key waits for tx (and is told
// [ErrKeyHeld] after a quarter of their Timeout). So ask late in the transaction, and never for a key that many share;
// where the work need not decide over the quota, Allow before the transaction, and [Limiter.Refund] of its result if it comes to nothing, is the
// better choice: nobody waits, but a process that dies in between has taken for nothing.
//
// A denial leaves tx as it was, and so does an error found before the database was asked; an error of the database aborts
// tx, as any does. The context is looked at only before the statement is sent, because interrupting it would break tx; a
// call that has not been answered within [Config].Timeout, because somebody else's transaction holds the row, say, closes
// tx's connection. At the isolation levels REPEATABLE READ and SERIALIZABLE the database may refuse with SQLSTATE 40001,
// which says to try the whole transaction again.
func (l *Limiter) AllowTx(ctx context.Context, tx pgx.Tx, key string) (Result, error) {
	return l.allowTx(ctx, tx, key, 1)
}

// AllowNTx is AllowN within the caller's transaction; see AllowTx.
func (l *Limiter) AllowNTx(ctx context.Context, tx pgx.Tx, key string, n int64) (Result, error) {
	return l.allowTx(ctx, tx, key, n)
}

// Peek tells what Allow would, and takes nothing: Allowed says whether a cost of 1 would fit. It locks no row and waits for
// none, so it does not see what transactions under way are about to take. Errors: as Allow.
func (l *Limiter) Peek(ctx context.Context, key string) (Result, error) {
	return l.allow(ctx, key, 0)
}

// Reset makes key as good as new. Under [All] it does so for one policy after the other: what somebody takes in the meantime as the
// first for a long time may stay counted by some of them and not by others. Errors: as Allow.
func (l *Limiter) Reset(ctx context.Context, key string) error {
	if err := validateKey(key); err != nil {
		return err
	}
	if !l.shared {
		l.single.Lock()
		defer l.single.Unlock()
		defer l.wakeUp(key)
		return l.reset(ctx, l.db, key, l.settings)
	}
	if err := ctx.Err(); err != nil {
		return waitError(err)
	}
	done := make(chan error, 1)
	go func() {
		err := l.reset(ctx, l.db, key, l.settings)
		l.wakeUp(key)
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return waitError(ctx.Err())
	}
}

// ResetTx is Reset within the caller's transaction; see AllowTx.
func (l *Limiter) ResetTx(ctx context.Context, tx pgx.Tx, key string) error {
	if err := validateKey(key); err != nil {
		return err
	}
	return l.reset(ctx, tx, key, settings{})
}

func (l *Limiter) reset(ctx context.Context, db DBTX, key string, settings settings) error {
	if err := ctx.Err(); err != nil {
		return waitError(err)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.config.Timeout)
	defer cancel()
	var names []string
	for _, p := range l.appendParts(nil, key, 0) {
		names = append(names, p.name)
	}
	if settings.own() {
		settings.lockTimeout = millis(l.patience() / time.Duration(len(names))) // for each of its rows
	}
	args := []any{names, key, l.config.Durable, settings.lockTimeout, settings.synchronousCommit}
	err := query(ctx, db, settings.own(), l.resetQL, args, []any{nil}, func() error { return nil })
	l.denials.changed(key, nil) // also after an error: it may have been reset
	if lockTimeout(err) && !isAway(err) {
		return keyHeld()
	}
	return l.explain(ctx, db, err)
}

func (l *Limiter) allow(ctx context.Context, key string, n int64) (result Result, err error) {
	if l.config.Observer != nil {
		defer l.ended(time.Now(), n, &result, &err)
	}
	if err := l.validate(key, n); err != nil {
		return Result{}, err
	}
	if err := ctx.Err(); err != nil {
		return Result{}, waitError(err)
	}
	if l.denials != nil && n > 0 {
		if result, ok := l.denials.deny(l.policy, key, n); ok {
			return result, nil
		}
	}
	if l.breaker == nil {
		return l.askDatabase(ctx, key, n, nil, false)
	}
	if pass, probe := l.breaker.pass(); pass {
		if result, err := l.askDatabase(ctx, key, n, nil, probe); !isAway(err) {
			return result, err
		}
	}
	return l.substitute(key, n), nil
}

// askDatabase has a request decided whose numbers are valid; a cost below 0 is a refund, or, without what it is of, a grant.
func (l *Limiter) askDatabase(ctx context.Context, key string, n int64, refund []take, probe bool) (Result, error) {
	if l.shared {
		return l.enqueue(ctx, key, n, refund, nil, probe)
	}
	var result Result
	err := l.takeTurn(probe, func() (err error) {
		result, err = l.allowOne(ctx, l.db, key, n, refund, l.settings)
		return err
	})
	return result, err
}

// takeTurn asks the database on its one connection, unless the breaker has opened during the wait for it.
func (l *Limiter) takeTurn(probe bool, ask func() error) error {
	l.single.Lock()
	defer l.single.Unlock()
	if !probe && l.breaker.open() {
		return errNotTried
	}
	err := ask()
	l.breaker.report(err, probe)
	return err
}

func (l *Limiter) allowTx(ctx context.Context, tx pgx.Tx, key string, n int64) (result Result, err error) {
	if l.config.Observer != nil {
		defer l.ended(time.Now(), n, &result, &err)
	}
	if err := l.validate(key, n); err != nil {
		return Result{}, err
	}
	return l.allowOne(ctx, tx, key, n, nil, settings{})
}

// allowOne decides one request on one connection, and does not return before the connection is free again.
func (l *Limiter) allowOne(ctx context.Context, db DBTX, key string, n int64, refund []take, settings settings) (Result, error) {
	elements := []element{{key: key, cost: n, count: 1, refund: refund}}
	if err := l.decideWithin(ctx, db, elements, settings); err != nil {
		return Result{}, err
	}
	return l.result(&elements[0], 1), nil
}

// decideWithin is decide within Timeout, on one connection.
func (l *Limiter) decideWithin(ctx context.Context, db DBTX, elements []element, settings settings) error {
	if err := ctx.Err(); err != nil {
		return waitError(err)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.config.Timeout)
	defer cancel()
	err := l.decide(ctx, db, elements, settings)
	l.changed(elements, err, nil)
	return err
}

func (l *Limiter) validate(key string, n int64) error {
	if err := validateKey(key); err != nil {
		return err
	}
	if limit := l.policy.limit(); n < 0 || n > limit {
		return &CostError{Cost: n, Limit: limit}
	}
	return nil
}

func validateKey(key string) error {
	switch {
	case key == "":
		return &KeyError{Reason: "is empty, and needs at least 1 byte"}
	case len(key) > maxKeyLen:
		return &KeyError{Reason: fmt.Sprintf("has %d bytes, and may have at most %d; hash long keys", len(key), maxKeyLen)}
	case strings.IndexByte(key, 0) >= 0:
		return &KeyError{Reason: "contains a NUL byte, which Postgres cannot store"}
	case !utf8.ValidString(key):
		return &KeyError{Reason: "is not valid UTF-8; encode binary keys, for example in base64"}
	}
	return nil
}

// waitError is what a caller gets whose context has ended.
func waitError(err error) error { return fmt.Errorf("ratelimit: gave up waiting: %w", err) }
