// Package cleanup deletes the rows of keys that never come back.
//
//	sweeper, err := cleanup.New(pool, cleanup.Config{})
//	…
//	go sweeper.Run(ctx) // in every process, if you like: one of them sweeps
//
// An expired row means the same as no row, so a limiter needs no sweeping to be right, and sweeping changes no decision. It
// keeps the tables small. Without Go, the function rate_limit_sweep does the same from pg_cron; its comment says how.
package cleanup

import (
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
)

const (
	// batchPages is how many pages a batch reads at most: 0.8 MB, which takes a millisecond if they are in memory. Meanwhile the expired
	// rows that it has found stay locked: at ten times as many, the slowest of a hundred calls beside a sweeper that does not pause
	// took 2.4 times as long as without one; at this, 1.7 times.
	batchPages = 100

	// maxPause keeps a pass the sweeper's own: 10 s after a batch, rate_limit_sweep lets another one go on with it.
	maxPause = 5 * time.Second

	// patience is how long a batch may take, which takes milliseconds unless the database does not answer.
	patience = 30 * time.Second
)

// Config says how a [Sweeper] works. The zero value is useful.
type Config struct {
	// Schema is the schema that the migrations were applied in.
	//
	// Defaults to "": found through the connection's search_path.
	Schema string

	// BatchSize is how many rows are deleted in one transaction at most. It takes about a millisecond for each thousand.
	//
	// Defaults to 1,000.
	BatchSize int

	// Share is the share of its time in which a pass keeps the database busy, above 0 and at most 1: after a batch of 1 ms, it
	// pauses for 4 ms with a share of 0.2. A pause is at most 5 seconds long.
	//
	// Defaults to 0.2.
	Share float64

	// MaxDuration ends a pass, pauses included: no batch but the first begins after it. The next pass goes on where this one
	// stopped. A batch takes milliseconds; if the database does not answer, it is given up after 30 seconds.
	//
	// Defaults to 10 minutes.
	MaxDuration time.Duration

	// Interval is the time from one pass of Run to the next, give or take a tenth. Sweepers of several processes share it: while
	// one has reached the end within this time, the others skip theirs.
	//
	// Defaults to 5 minutes.
	Interval time.Duration

	// Names are the names of all limiters that still exist. Rows of any other name are deleted, WHETHER THEY HAVE EXPIRED OR NOT:
	// a limiter that is missing here, in whichever application, forgets what its keys have taken at every pass.
	//
	// Defaults to nil: rows are deleted when they have expired, whatever their name. That is enough to be rid of a limiter
	// that is no longer used; with Names its rows go at once.
	Names []string

	// Logger gets one line for each pass that deleted something, and for each that failed and that Run tries again.
	//
	// Defaults to nil: nothing is logged.
	Logger *slog.Logger

	// Progress is called after each batch with how many pages of the tables lie behind it, and how many there are. A pass that
	// goes on where the one before has stopped does not begin at 0.
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
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	c.Names = slices.Clone(c.Names)
	return c
}

func (c Config) validate() error {
	refuse := func(field, reason string, args ...any) error {
		return &ratelimit.ConfigError{Field: field, Reason: fmt.Sprintf(reason, args...)}
	}
	switch {
	case !utf8.ValidString(c.Schema) || strings.ContainsRune(c.Schema, 0):
		return refuse("Schema", "must be valid UTF-8 without NUL")
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

// Result is what a pass has done. That of a pass that failed tells what it had done until then.
type Result struct {
	// Scanned is how many pages of 8 kB the pass has read.
	Scanned int64
	// Deleted is how many rows it has deleted.
	Deleted int64
	// Batches is how many transactions that took.
	Batches int
	// Complete tells whether the pass has reached the end of both tables. If not, the next one goes on where it stopped.
	Complete bool
	// Skipped tells that another sweeper is at work, which this one left to it; or, in Run, that another one has reached the
	// end within Config.Interval.
	Skipped bool
	// Took is how long the pass took, pauses included.
	Took time.Duration
}

// Sweeper deletes the rows that expired a minute ago or more, from both tables, by the database's clock. It reads the tables
// in the order in which they lie on disk, in batches, each a short transaction of its own; passes over rows that somebody has
// locked; and works for a set share of the time only. One sweeper works in a schema at a time, and where it stops, the next one goes
// on, in whichever process.
//
// It is safe for concurrent use, needs no Close, and takes one of the pool's connections during a batch, and none between batches.
type Sweeper struct {
	db      ratelimit.DBTX
	config  Config
	id      string // to know its own pass again
	sweepQL string
	working sync.Mutex // held during a pass
}

//go:embed sweep.sql
var sweepStatement string

// New returns a sweeper of the database behind db, a *pgxpool.Pool or a connection. It asks nothing of the database and starts
// nothing. It returns a *[ratelimit.ConfigError] for a configuration that cannot work.
func New(db ratelimit.DBTX, config Config) (*Sweeper, error) {
	if pool, ok := db.(*pgxpool.Pool); db == nil || ok && pool == nil {
		return nil, &ratelimit.ConfigError{Field: "db", Reason: "is nil, and must be a *pgxpool.Pool or a connection"}
	}
	if _, ok := db.(pgx.Tx); ok {
		return nil, &ratelimit.ConfigError{Field: "db", Reason: "is a transaction, which would lock all that is swept until it ends; use a *pgxpool.Pool or a connection"}
	}
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	statement := sweepStatement
	if config.Schema != "" {
		statement = strings.Replace(statement, "rate_limit_sweep", pgx.Identifier{config.Schema}.Sanitize()+".rate_limit_sweep", 1)
	}
	return &Sweeper{db: db, config: config, id: rand.Text(), sweepQL: statement}, nil
}

// Run does a pass now, and one every [Config].Interval, until the context ends, and then returns nil. It returns early with
// an error that waiting does not mend: [ratelimit.ErrNotMigrated], [ratelimit.ErrNotPermitted] or
// [ratelimit.ErrPreparedStatements]. After any other it waits for the next pass.
func (s *Sweeper) Run(ctx context.Context) error {
	least := s.config.Interval - s.config.Interval/10
	for ctx.Err() == nil {
		result, err := s.pass(ctx, &least)
		switch {
		case err == nil, ctx.Err() != nil:
		case errors.Is(err, ratelimit.ErrNotMigrated), errors.Is(err, ratelimit.ErrNotPermitted), errors.Is(err, ratelimit.ErrPreparedStatements):
			return err
		default:
			s.config.Logger.LogAttrs(ctx, slog.LevelWarn, "ratelimit: a sweep failed; it is tried again",
				slog.Any("error", err), slog.Duration("took", result.Took))
		}
		// Never less than least, or a sweeper would skip a pass because of its own last one.
		wait(ctx, least+mathrand.N(s.config.Interval/5))
	}
	return nil
}

// RunOnce does one pass.
//
// The end of the context ends the pass, and the statement under way with it, which closes that connection; the error is the
// context's then. Any other is a [*ratelimit.StoreError]. What was deleted stays deleted, and the next pass goes on from there.
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
			s.config.Logger.LogAttrs(ctx, slog.LevelInfo, "ratelimit: swept",
				slog.Int64("deleted", result.Deleted), slog.Int64("scanned_pages", result.Scanned), slog.Int("batches", result.Batches),
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

// batch sweeps one batch, and adds what it has done to a result.
func (s *Sweeper) batch(ctx context.Context, atMostEvery *time.Duration, result *Result) error {
	if err := ctx.Err(); err != nil {
		return ended(err)
	}
	var now *time.Time
	if s.config.Test.Now != nil {
		t := s.config.Test.Now()
		now = &t
	}
	var scanned, deleted, page, pages int64
	batchCtx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err := s.db.QueryRow(batchCtx, s.sweepQL, s.config.BatchSize, batchPages, s.config.Names, s.id, atMostEvery, now).
		Scan(&result.Skipped, &result.Complete, &scanned, &deleted, &page, &pages)
	switch {
	case ctx.Err() != nil && err != nil:
		return ended(ctx.Err())
	case err != nil:
		return ratelimit.NewStoreError(err)
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

// wait waits, or until the context ends.
func wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// ended is what the caller gets whose context has ended.
func ended(err error) error { return fmt.Errorf("ratelimit: the sweep was ended: %w", err) }
