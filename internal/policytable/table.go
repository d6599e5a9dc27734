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

// Table is this process's copy of rate_limit_policy. It is safe for concurrent use.
type Table struct {
	db      pg.DB
	config  TableConfig
	Book    rulebook.Book[Ruling]
	Ready   chan struct{}                 // closed once the rows have been read
	turn    *turn.Turn                    // of Run
	banning chan struct{}                 // has a value if bans is not empty
	Telling chan struct{}                 // has a value if given is not empty
	failed  atomic.Pointer[error]         // why the last attempt to read the rows failed, or nil
	Clock   atomic.Pointer[DatabaseClock] // nil before ready
	told    sync.Map                      // by the row's id, the policy that was logged as one of another kind
	swept   int64                         // when Run last dropped ended rows, by the database's clock
	PerRow  time.Duration                 // the pause between two full reads, for each row

	Mu sync.Mutex
	// caches are the clients' remembered denials. given are the refunds, grants and resets of this process that other
	// processes have not been told of yet.
	caches  []Denials
	given   map[string]bool
	bans    map[*Strikes]bool      // these may have keys for Run to ban
	Shadows map[int64]*ShadowCount // by the row's id, the counts that are not reported yet
	Running bool
	status  TableStatus
	// asked is the time of the last question that was answered. version, from versionAt, is that answer's version; nil
	// asks for all rows. completeAt is when all rows were last requested.
	asked, CompleteAt time.Time
	Version           *int64
	versionAt         int64 // by the database's clock, in microseconds since 1970
	// unreadable has the ids of rows that this release cannot read.
	unreadable map[int64]bool
}

// TableConfig configures a Table.
type TableConfig struct {
	Schema  string
	MaxRows int // the most rows that are kept
	Logger  *slog.Logger
	// Read parses a policy for a limiter. Shadow tells that the policy is for a shadow row.
	Read func(limiter, text string, shadow bool) (*model.Policy, error)
}

// TableStatus is the state of a process's copy of the table.
type TableStatus struct {
	Rows, Unreadable, NoRoom int
	Age                      time.Duration // since the last answered question; 0 if there was none
	Listening                bool
	Err                      error // why the last question failed
}

// Denials are the denials that a client remembers. They are comparable.
type Denials interface {
	// ForgetIf forgets the denials of some keys. It tells whether the client is still in use.
	ForgetIf(is func(limiter, key string) bool) (inUse bool)
}

// DatabaseClock is a reading of the database's clock.
type DatabaseClock struct {
	Micros int64 // since 1970
	At     time.Time
}

// Row is a row of the table.
type Row = rulebook.Rule[Ruling]

// Ruling is the content of a row.
type Ruling struct {
	Mode Mode
	// The row counts from From until just before Until, in microseconds since 1970. From is AlwaysBegun if the row had
	// begun when it was read. Until may be NoEnd.
	From, Until int64
	Learnt      int64         // when this process first read this content, by the database's clock
	Policy      *model.Policy // nil for off and deny; rows with the same text share one
}

// Mode is a row's mode.
type Mode string

// The modes.
const (
	ModeEnforce Mode = "enforce"
	modeShadow  Mode = "shadow"
	ModeOff     Mode = "off"
	modeDeny    Mode = "deny"
)

// ShadowSuffix is the end of the counter names for shadow policies.
const ShadowSuffix = "/shadow"

// NewTable returns a table that still has to be run. It sends no query, and starts no goroutine.
func NewTable(db pg.DB, config TableConfig) *Table {
	return &Table{
		db: db, config: config, Ready: make(chan struct{}), turn: turn.New(),
		banning: make(chan struct{}, 1), Telling: make(chan struct{}, 1), PerRow: againPerRow,
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

// errNotRun tells callers that wait for the first rows that Run may be missing.
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

// now is the database's clock as this process computes it, in microseconds since 1970. It is unknown before ready, and
// is only used where there is a row.
func (t *Table) now() int64 {
	c := t.Clock.Load()
	return c.Micros + time.Since(c.At).Microseconds()
}

// saysTheSame tells whether a row is unchanged.
func saysTheSame(a, b *Row) bool {
	return a.Name == b.Name && a.Target == b.Target && a.Text == b.Text && a.From == b.From && a.Weak == b.Weak &&
		a.Value.Mode == b.Value.Mode && a.Value.Until == b.Value.Until && a.Value.Policy.Is(b.Value.Policy)
}

// counts tells whether a rule has begun and has not ended.
func (t *Table) counts(r *Row) bool {
	if r.Value.From == AlwaysBegun && r.Value.Until == NoEnd {
		return true
	}
	now := t.now()
	return r.Value.From <= now && now < r.Value.Until
}
