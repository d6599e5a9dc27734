// Package policytable keeps what a process knows of the table rate_limit_policy: it watches the table, makes bans,
// reports shadows, and tells other processes which denials to forget.
package policytable

import (
	"context"
	_ "embed"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/rulebook"
	"github.com/pgratelimit/ratelimit/internal/turn"
)

var (
	//go:embed call/policies.sql
	policiesStatement string
	//go:embed call/ban.sql
	banStatement string
	//go:embed call/report.sql
	reportStatement string
)

const notifyStatement = "SELECT pg_catalog.pg_notify('rate_limit'::pg_catalog.text, $1::pg_catalog.text)"

// Statements returns the statements of this package, without a schema.
func Statements() []string {
	return []string{policiesStatement, banStatement, reportStatement, notifyStatement}
}

// Table is this process's copy of rate_limit_policy. It is safe for concurrent use.
type Table struct {
	db      pg.DB
	config  TableConfig
	Book    rulebook.Book[Ruling]
	Ready   chan struct{}                 // closed once the rows have been read
	turn    *turn.Turn                    // lets only one Run work at a time
	banning chan struct{}                 // has a value if bans is not empty
	Telling chan struct{}                 // has a value if given is not empty
	failed  atomic.Pointer[error]         // why the last attempt to read the rows failed, or nil
	Clock   atomic.Pointer[DatabaseClock] // nil until the rows have been read
	told    sync.Map                      // by a row's ID, the policy of another kind that passOver has logged
	swept   int64                         // when Run last dropped rows that had ended, by the database's clock
	// The pause between two full reads is PerRow times the number of rows. Patience is how long a query or a
	// notification may take. They are variables because tests change them.
	PerRow, Patience time.Duration

	Mu sync.Mutex
	// caches are the clients' remembered denials. given has the refunds, grants and resets of this process that other
	// processes do not know yet.
	caches  []Denials
	given   map[string]bool
	bans    map[*Strikes]bool           // Run looks for keys to ban in these
	Shadows map[RowVersion]*ShadowCount // the counts that were not reported yet
	Running bool
	status  TableStatus
	// asked is the time of the last query that was answered, and CompleteAt the time of the last query for all rows.
	// Version is the version in the last answer, and versionAt its time. If Version is nil, the next query asks for all
	// rows.
	asked, CompleteAt time.Time
	Version           *int64
	versionAt         int64 // by the database's clock, in microseconds since 1970
	// unreadable has the errors of rows that this release cannot read, by their IDs.
	unreadable map[int64]string
}

// TableConfig configures a Table.
type TableConfig struct {
	Schema  string
	MaxRows int // the most rows that the process keeps
	Logger  *slog.Logger
	// Read parses a policy for a limiter. The argument shadow says whether the policy is for a shadow row.
	Read func(limiter, text string, shadow bool) (*model.Policy, error)
}

// TableStatus is the state of a process's copy of the table.
type TableStatus struct {
	Rows, Unreadable, NoRoom int
	Age                      time.Duration // time since the last answered query; 0 if there was none
	Listening                bool
	Err                      error // why the last query failed
}

// Denials are the denials that a client remembers. Their values must be comparable.
type Denials interface {
	// ForgetIf forgets the denials of the keys for which is() returns true. It returns whether the client is still in
	// use.
	ForgetIf(is func(limiter, key string) bool) (inUse bool)
}

// DatabaseClock is a reading of the database's clock.
type DatabaseClock struct {
	Micros int64 // microseconds since 1970
	At     time.Time
}

// Row is a row of the table.
type Row = rulebook.Rule[Ruling]

// Ruling is the content of a row.
type Ruling struct {
	Mode Mode
	// The row is in force from the time From until just before Until, in microseconds since 1970. From is AlwaysBegun
	// if the row had begun when it was read. Until may be NoEnd.
	From, Until int64
	Changed     int64         // when the row was last changed, by the database's clock
	Learnt      int64         // when this process first read this content, by the database's clock
	Policy      *model.Policy // nil for off and deny; rows with the same text share a policy
}

// Mode is a row's mode.
type Mode string

// These are the modes that a row can have.
const (
	ModeEnforce Mode = "enforce"
	modeShadow  Mode = "shadow"
	ModeOff     Mode = "off"
	modeDeny    Mode = "deny"
)

// ShadowSuffix ends the names of limiters' counters for shadow policies.
const ShadowSuffix = "/shadow"

// NewTable returns a table that is not yet running. It sends no query, and starts no goroutine.
func NewTable(db pg.DB, config TableConfig) *Table {
	return &Table{
		db: db, config: config, Ready: make(chan struct{}), turn: turn.New(),
		banning: make(chan struct{}, 1), Telling: make(chan struct{}, 1), PerRow: againPerRow, Patience: patience,
	}
}

// Status returns the table's state in this process.
func (t *Table) Status() TableStatus {
	t.Mu.Lock()
	defer t.Mu.Unlock()
	status := t.status
	status.Rows = t.Book.Len()
	if !t.asked.IsZero() {
		status.Age = time.Since(t.asked)
	}
	return status
}

// errNotRun is the error for callers that waited in vain for the first rows.
var errNotRun = errors.New("the policies have not been read yet; has Policies.Run been started?")

// Await waits until the rows have been read once.
func (t *Table) Await(ctx context.Context, timeout time.Duration) error {
	select {
	case <-t.Ready:
		return nil
	default:
	}
	if failed := t.failed.Load(); failed != nil {
		return *failed
	}
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-t.Ready:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		if failed := t.failed.Load(); failed != nil {
			return *failed
		}
		return pg.NewError(errNotRun, pg.ErrTimeout)
	}
}

// now returns the database's clock as this process computes it, in microseconds since 1970. It must not be called
// before IsReady.
func (t *Table) now() int64 {
	c := t.Clock.Load()
	return c.Micros + time.Since(c.At).Microseconds()
}

// saysTheSame returns whether two versions of a row have the same content.
func saysTheSame(a, b *Row) bool {
	return a.Name == b.Name && a.Target == b.Target && a.Text == b.Text && a.From == b.From && a.Weak == b.Weak &&
		a.Value.Mode == b.Value.Mode && a.Value.Until == b.Value.Until && a.Value.Changed == b.Value.Changed &&
		a.Value.Policy.Is(b.Value.Policy)
}

// counts returns whether a row has begun and has not ended.
func (t *Table) counts(r *Row) bool {
	if r.Value.From == AlwaysBegun && r.Value.Until == NoEnd {
		return true
	}
	now := t.now()
	return r.Value.From <= now && now < r.Value.Until
}
