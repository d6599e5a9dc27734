// Package cleanup deletes expired rows of the limiters' tables.
//
//	sweeper, err := cleanup.New(pool, cleanup.Config{})
//	…
//	go sweeper.Run(ctx) // may run in every process: only one of them sweeps at a time
//
// An expired row means the same as no row, so sweeping changes no decision. Sweeping keeps the tables small. From
// pg_cron, call the function rate_limit_sweep instead; its comment says how.
package cleanup

import (
	"cmp"
	"context"
	"crypto/rand"
	_ "embed"
	"errors"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/turn"
)

const (
	// batchPages is the most pages that a batch reads: 0.8 MB. Reading them takes a millisecond if they are in memory.
	// A batch locks the expired rows that it finds. A sweeper without pauses multiplied the p99 of calls by 1.7. With
	// ten times as many pages in a batch, it multiplied the p99 by 2.4.
	batchPages = 100

	// maxPause is below 10 s, because after 10 s without a batch, rate_limit_sweep lets another sweeper continue the
	// pass.
	maxPause = 5 * time.Second

	// patience is the longest time that a batch waits for the database. A batch takes milliseconds.
	patience = 30 * time.Second
)

// Config says how a [Sweeper] works. The zero value is useful.
type Config struct {
	// Schema is the schema that has the tables.
	//
	// Defaults to "": the search_path of the connection finds the tables.
	Schema string

	// BatchSize is the most rows that one transaction deletes, from 1 to 1,000,000. Deleting 1,000 rows takes about a
	// millisecond.
	//
	// Defaults to 1,000.
	BatchSize int

	// Share is the share of time in which a pass works, above 0 and at most 1. With a Share of 0.2, a pass pauses for 4
	// ms after a batch of 1 ms. A pause lasts at most 5 seconds.
	//
	// Defaults to 0.2.
	Share float64

	// MaxDuration bounds a pass, including its pauses. After MaxDuration no further batch begins, but every pass does
	// at least one batch. The next pass continues where this pass stopped. If the database does not answer, a batch
	// ends after 30 seconds.
	//
	// Defaults to 10 minutes.
	MaxDuration time.Duration

	// Interval is the time from one pass of Run to the next, plus or minus a tenth. It is at least 1 second. If a
	// sweeper of any process has completed a pass within Interval, all other sweepers skip their passes.
	//
	// Defaults to 5 minutes.
	Interval time.Duration

	// Names lists the limiters of all applications that use the tables. Rows of any other name are deleted, WHETHER
	// THEY HAVE EXPIRED OR NOT. So if a limiter is missing, every pass deletes the usage of its keys. For a limiter of
	// several policies (ratelimit.All) its name is enough: rows named api/2 to api/8 belong to api.
	//
	// Defaults to nil: all expired rows are deleted, whatever their name. The rows of a limiter that no longer exists
	// are then deleted after they have expired. With Names, these rows are deleted at once.
	Names []string

	// Logger gets a line for each pass that deleted rows. Run also logs when passes begin to fail (with the cause),
	// when they work again, and when Run returns an error.
	//
	// Defaults to slog.Default(). A logger with slog.DiscardHandler drops all lines.
	Logger *slog.Logger

	// Progress is called after each batch with the number of pages done and the total number. A pass that continues an
	// earlier one does not begin at 0.
	//
	// Defaults to nil.
	Progress func(done, total int64)

	// Test replaces the database's clock.
	Test ratelimit.TestConfig
}

func (c Config) withDefaults() Config {
	if c.BatchSize == 0 {
		c.BatchSize = 1000
	}
	if c.Share == 0 {
		c.Share = 0.2
	}
	if c.MaxDuration == 0 {
		c.MaxDuration = 10 * time.Minute
	}
	if c.Interval == 0 {
		c.Interval = 5 * time.Minute
	}
	c.Names = slices.Clone(c.Names)
	return c
}

func (c Config) validate() error {
	refuse := func(field, reason string, args ...any) error {
		return &ratelimit.ConfigError{Field: "cleanup.Config." + field, Reason: fmt.Sprintf(reason, args...)}
	}
	switch {
	case !utf8.ValidString(c.Schema) || strings.ContainsAny(c.Schema, "\x00\n\r"):
		return refuse("Schema", "must be valid UTF-8 without NUL and line breaks")
	case c.BatchSize < 1 || c.BatchSize > 1_000_000:
		return refuse("BatchSize", "is %d, and must be from 1 to 1,000,000", c.BatchSize)
	case !(c.Share > 0 && c.Share <= 1):
		return refuse("Share", "is %v, and must be above 0 and at most 1", c.Share)
	case c.MaxDuration < 0:
		return refuse("MaxDuration", "is %v, and must not be negative", c.MaxDuration)
	case c.Interval < time.Second:
		return refuse("Interval", "is %v, and must be at least 1s", c.Interval)
	case c.Names != nil && len(c.Names) == 0:
		return refuse("Names", "is empty but not nil, which would delete every row")
	}
	for _, name := range c.Names {
		if name == "" || !utf8.ValidString(name) || strings.ContainsRune(name, 0) {
			return refuse("Names", "must hold names of limiters: not empty, and valid UTF-8 without NUL")
		}
	}
	return nil
}

// Result says what a pass did. If the pass failed, Result says what it did before the error.
type Result struct {
	// Scanned is how many pages of 8 kB the pass read.
	Scanned int64
	// Deleted is how many rows the pass deleted.
	Deleted int64
	// Batches is how many transactions the pass used.
	Batches int
	// Complete tells whether the pass reached the end of both tables. If not, the next pass continues where this pass
	// stopped.
	Complete bool
	// Skipped is true if the pass left the work to another sweeper that is working. In Run it is also true if a sweeper
	// has completed a pass within Config.Interval.
	Skipped bool
	// Took is how long the pass took, pauses included.
	Took time.Duration
}

// Sweeper deletes the rows of both tables that expired at least a minute ago, by the database's clock. It reads the
// tables in batches, in their order on disk, and each batch is a short transaction. It skips locked rows, and works
// only for Config.Share of the time. Only one sweeper works in a schema at a time. When that sweeper stops, the next
// sweeper of any process continues its work.
//
// A Sweeper is safe for concurrent use, and needs no Close. It uses one connection of the pool during a batch, and none
// between batches. On a single connection, its batches take turns with the calls of limiters.
type Sweeper struct {
	db      ratelimit.DBTX
	config  Config
	names   []string // row names of all limiters that still exist; nil if unknown
	id      string   // identifies the pass of this sweeper in the database
	sweepQL string
	working sync.Mutex // held during a pass
	turn    *turn.Turn // taken for each batch; if db is one connection, all its limiters and sweepers share it
}

//go:embed sweep.sql
var sweepStatement string

// New returns a sweeper for db, a *pgxpool.Pool or a connection. It sends nothing to the database and starts nothing.
// It returns a *[ratelimit.ConfigError] for a configuration that cannot work.
func New(db ratelimit.DBTX, config Config) (*Sweeper, error) {
	if pg.IsNil(db) {
		return nil, &ratelimit.ConfigError{Field: "db", Reason: "is nil, and must be a *pgxpool.Pool or a connection"}
	}
	if reason := pg.WrapsConn(db); reason != "" {
		return nil, &ratelimit.ConfigError{Field: "db", Reason: reason}
	}
	if _, ok := db.(pgx.Tx); ok {
		return nil, &ratelimit.ConfigError{Field: "db", Reason: "is a transaction, " +
			"which would lock all that is swept until it ends; use a *pgxpool.Pool or a connection"}
	}
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	sweepQL := pg.Qualify(sweepStatement, config.Schema)
	var names []string // nil for all names
	for _, name := range config.Names {
		names = append(names, algorithm.RowNames(name)...)
	}
	s := &Sweeper{db: db, config: config, names: names, id: rand.Text(), sweepQL: sweepQL, turn: turn.Of(db)}
	if s.turn == nil { // a pool: calls need not take turns
		s.turn = turn.New()
	}
	return s, nil
}

// Run does a pass at once, and then one every [Config].Interval. When the context ends, it returns nil. It returns
// early only with an error that somebody has to fix: [ratelimit.ErrNotMigrated], [ratelimit.ErrNotPermitted] or
// [ratelimit.ErrPreparedStatements]. After any other error it waits for the next pass.
func (s *Sweeper) Run(ctx context.Context) error {
	least := s.config.Interval - s.config.Interval/10
	failing := "" // the ErrorKind
	for ctx.Err() == nil {
		_, err := s.pass(ctx, &least)
		switch {
		case ctx.Err() != nil:
		case err == nil:
			if failing != "" {
				s.log(ctx, slog.LevelInfo, "ratelimit: sweeps work again")
				failing = ""
			}
		case errors.Is(err, ratelimit.ErrNotMigrated), errors.Is(err, ratelimit.ErrNotPermitted),
			errors.Is(err, ratelimit.ErrPreparedStatements):
			s.log(ctx, slog.LevelError, "ratelimit: the sweeper has ended; mend the cause, and call Run again",
				slog.Any("error", err))
			return err
		default:
			if kind := ratelimit.ErrorKind(err); kind != failing {
				s.log(ctx, slog.LevelWarn, "ratelimit: sweeps fail, and are tried again; "+
					"further ones are not logged until one works", slog.Any("error", err))
				failing = kind
			}
		}
		// If the wait were shorter than least, the sweeper would skip a pass because of its own previous pass.
		wait(ctx, least+mathrand.N(s.config.Interval/5))
	}
	return nil
}

// RunOnce does one pass.
//
// When the context ends, the pass and its statement end too, and the statement's connection is closed. RunOnce then
// returns the context's error. Any other error is a [*ratelimit.StoreError]. Deleted rows stay deleted, and the next
// pass continues where this pass stopped.
func (s *Sweeper) RunOnce(ctx context.Context) (Result, error) {
	return s.pass(ctx, nil)
}

func (s *Sweeper) pass(ctx context.Context, atMostEvery *time.Duration) (result Result, err error) {
	if !s.working.TryLock() {
		return Result{Skipped: true}, nil
	}
	defer s.working.Unlock()
	began := time.Now()
	defer func() {
		result.Took = time.Since(began)
		if result.Deleted > 0 {
			s.log(ctx, slog.LevelInfo, "ratelimit: swept",
				slog.Int64("deleted", result.Deleted), slog.Int64("scanned_pages", result.Scanned),
				slog.Int("batches", result.Batches),
				slog.Bool("complete", result.Complete), slog.Duration("took", result.Took))
		}
	}()
	for {
		batchBegan := time.Now()
		if err := s.batch(ctx, atMostEvery, &result); err != nil {
			return result, err
		}
		if result.Complete || result.Skipped {
			return result, nil
		}
		pause := min(time.Duration(float64(time.Since(batchBegan))*(1/s.config.Share-1)), maxPause)
		if time.Since(began)+pause >= s.config.MaxDuration {
			return result, nil
		}
		wait(ctx, pause)
	}
}

func (s *Sweeper) log(ctx context.Context, level slog.Level, message string, attributes ...slog.Attr) {
	cmp.Or(s.config.Logger, slog.Default()).LogAttrs(ctx, level, message, attributes...)
}

// batch sweeps one batch and adds it to result.
func (s *Sweeper) batch(ctx context.Context, atMostEvery *time.Duration, result *Result) error {
	var now *time.Time
	if s.config.Test.Now != nil {
		t := s.config.Test.Now()
		now = &t
	}
	var scanned, deleted, page, pages int64
	err := s.query(ctx, []any{s.config.BatchSize, batchPages, s.names, s.id, atMostEvery, now},
		&result.Skipped, &result.Complete, &scanned, &deleted, &page, &pages)
	switch {
	case ctx.Err() != nil && err != nil:
		return ended(ctx.Err())
	case err != nil:
		return &ratelimit.StoreError{Err: pg.Translate(err, true)}
	case result.Skipped:
		return nil
	}
	result.Scanned += scanned
	result.Deleted += deleted
	result.Batches++
	if s.config.Progress != nil {
		s.config.Progress(page, pages)
	}
	return nil
}

// query runs the statement when it is this sweeper's turn.
func (s *Sweeper) query(ctx context.Context, args []any, targets ...any) error {
	if err := s.turn.Take(ctx); err != nil { // if ctx has ended, the statement would close the connection
		return err
	}
	defer s.turn.Pass()
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	ask := func(db ratelimit.DBTX) error {
		if err := pg.Garbled(db, s.sweepQL); err != nil {
			return err
		}
		rows, err := db.Query(ctx, s.sweepQL, args...)
		if err != nil {
			return err
		}
		_, err = pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (struct{}, error) {
			return struct{}{}, row.Scan(targets...)
		})
		return err
	}
	switch s.db.(type) {
	case *pgxpool.Pool, pg.Pool:
		return pg.Use(ctx, s.db, func(conn *pgx.Conn) error { return ask(conn) })
	}
	return ask(s.db)
}

// wait waits for d, or until the context ends.
func wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// ended returns the error for a context that has ended with err.
func ended(err error) error { return fmt.Errorf("ratelimit: the sweep was ended: %w", err) }
