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

// Table is what this process knows of rate_limit_policy. Several goroutines may use it at once.
type Table struct {
	db      pg.DB
	config  TableConfig
	Book    rulebook.Book[Ruling]
	Ready   chan struct{}                 // closed once the rows have been read for the first time
	turn    *turn.Turn                    // of Run
	banning chan struct{}                 // has a value if something is in bans
	Telling chan struct{}                 // has a value if something is in given
	failed  atomic.Pointer[error]         // why the last try to read them failed; nil if it did not
	Clock   atomic.Pointer[DatabaseClock] // nil before ready
	told    sync.Map                      // by the id of the row, the policy that was logged to be of another kind
	swept   int64                         // when Run last dropped rows that had ended, by the database's clock
	PerRow  time.Duration                 // how often all rows are read again, for each of them

	Mu sync.Mutex
	// caches are what clients remember of denials, and given is what has been given back, granted or reset in this
	// process, of which other processes have not been told yet.
	caches  []Denials
	given   map[string]bool
	bans    map[*Strikes]bool      // which may have keys that Run is to ban
	Shadows map[int64]*ShadowCount // by the id of the row, what has not been reported yet
	Running bool
	status  TableStatus
	// asked is when the last answer was asked for. version, made at versionAt, is what that has told; nil asks for all
	// rows. completeAt is when all were last asked for.
	asked, CompleteAt time.Time
	Version           *int64
	versionAt         int64 // by the database's clock, in microseconds since 1970
	// unreadable are the ids of rows that this release cannot read.
	unreadable map[int64]bool
}

// TableConfig says how a Table is read.
type TableConfig struct {
	Schema  string
	MaxRows int // how many are held at most
	Logger  *slog.Logger
	// Read reads the text of a policy for a limiter. Shadow tells that it is decided beside another one.
	Read func(limiter, text string, shadow bool) (*model.Policy, error)
}

// TableStatus says what a process knows of the table.
type TableStatus struct {
	Rows, Unreadable, NoRoom int
	Age                      time.Duration // since the last answer was asked for; 0 if there was none
	Listening                bool
	Err                      error // why the database could not be asked last
}

// Denials are those that a client remembers. They are comparable.
type Denials interface {
	// ForgetIf forgets those of some keys. It tells whether the client is still in use.
	ForgetIf(is func(limiter, key string) bool) (inUse bool)
}

// DatabaseClock is a reading of the database's clock.
type DatabaseClock struct {
	Micros int64 // since 1970
	At     time.Time
}

// Row is a row of the table.
type Row = rulebook.Rule[Ruling]

// Ruling is what a row says.
type Ruling struct {
	Mode Mode
	// It counts from from on, and at Until no longer, in microseconds since 1970. from is alwaysBegun if it had begun
	// when it was read, and Until may be NoEnd.
	From, Until int64
	Learnt      int64         // when this process first heard of what it says, by the database's clock
	Policy      *model.Policy // nil for off and deny; rows with the same text share it
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

// ShadowSuffix ends the name of the rows that count for policies of the mode shadow.
const ShadowSuffix = "/shadow"

// NewTable returns what is still to be run. It asks nothing, and starts nothing.
func NewTable(db pg.DB, config TableConfig) *Table {
	return &Table{
		db: db, config: config, Ready: make(chan struct{}), turn: turn.New(),
		banning: make(chan struct{}, 1), Telling: make(chan struct{}, 1), PerRow: againPerRow,
	}
}

// Status says what this process knows.
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

// errNotRun tells those who wait for the first rows what may be missing.
var errNotRun = errors.New("the policies have not been read yet; has Policies.Run been started?")

// Await waits until the rows have been read for the first time.
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

// now is the database's clock as this process knows it, in microseconds since 1970. It is not known before ready, and
// is only asked for where there is a row.
func (t *Table) now() int64 {
	c := t.Clock.Load()
	return c.Micros + time.Since(c.At).Microseconds()
}

// saysTheSame tells whether nothing has changed about a row.
func saysTheSame(a, b *Row) bool {
	return a.Name == b.Name && a.Target == b.Target && a.Text == b.Text && a.From == b.From && a.Weak == b.Weak &&
		a.Value.Mode == b.Value.Mode && a.Value.Until == b.Value.Until && a.Value.Policy.Is(b.Value.Policy)
}

// counts tells whether a rule has begun, and has not ended.
func (t *Table) counts(r *Row) bool {
	if r.Value.From == AlwaysBegun && r.Value.Until == NoEnd {
		return true
	}
	now := t.now()
	return r.Value.From <= now && now < r.Value.Until
}
