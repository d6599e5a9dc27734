package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"
	"weak"

	"github.com/pgratelimit/ratelimit/internal/memory"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/rulebook"
	"github.com/pgratelimit/ratelimit/internal/turn"
)

// Policies are what this process knows of the table rate_limit_policy, with which people change limits without a
// deploy. Make one for each database, have it run, and give it to the limiters that are to obey the table:
//
//	policies, err := ratelimit.NewPolicies(pool, ratelimit.PoliciesConfig{})
//	…
//	go policies.Run(ctx)
//	limiter, err := client.Limiter(ratelimit.Config{Name: "api", Policy: policy, Policies: policies})
//
// A row is for an exact key, for all keys with a prefix, or for everybody. The exact key comes first, then the longest
// prefix, then everybody, then the policy in the code; of several rows for the same, the one that began last. A row's
// mode is enforce (its policy decides), off (everything is allowed and nothing counted) or deny (a ban). A row is
// passed over, and logged, if this release cannot read it, or if its policy is of another kind than the limiter's, as
// [Limiter.With] says.
//
// A row of the mode shadow is looked up in the same way among its like. Allow, AllowN and Peek decide it beside the
// policy in force, in the same round trip and of whatever kind it is. It counts for itself, under the limiter's name
// with /shadow behind it. [Result].Shadow and the observer tell what it would have decided, and `pgratelimit policy
// compare` how often it would have denied. It changes no decision. If its row is held, or anything else goes wrong, it
// is left out. It is not asked within transactions, in sets, by Wait, or where a row of the mode off or deny decides,
// and Refund gives nothing back to it.
//
// A decision reads the rows in memory, and asks the database nothing more for it. A change takes effect in all
// processes within a second: Run listens on a connection of its own, and asks once a second besides. Where it hears
// nothing, as behind PgBouncer in transaction mode, it asks twice a second, and logs that. Logical replication and
// restored dumps write rows that no trigger tells of. Run finds them by reading all rows again, every second and of
// more than 200 rows one second for each 200. While the database is away, what was known last goes on. Until the
// first rows have been read, calls wait for that within [ClientConfig].Timeout. If it fails, they fail as if the
// database were away, and [Config].OnFailure answers.
//
// While processes hear of a change, some decide by the old row and some by the new one. What a key has taken counts for
// both. So it is admitted what the larger of the two limits admits, at most. Of a [CalendarWindow] whose unit changes
// it is both.
//
// Policies are safe for concurrent use.
type Policies struct {
	db      DBTX
	config  PoliciesConfig
	book    rulebook.Book[ruling]
	ready   chan struct{}                 // closed once the rows have been read for the first time
	turn    *turn.Turn                    // of Run
	banning chan struct{}                 // has a value if something is in bans
	telling chan struct{}                 // has a value if something is in given
	failed  atomic.Pointer[error]         // why the last try to read them failed; nil if it did not
	clock   atomic.Pointer[databaseClock] // nil before ready
	told    sync.Map                      // by the id of the row, the policy that was logged to be of another kind
	swept   int64                         // when Run last dropped rows that had ended, by the database's clock
	perRow  time.Duration                 // how often all rows are read again, for each of them

	mu sync.Mutex
	// caches are what clients remember of denials, and given is what has been given back, granted or reset in this
	// process, of which other processes have not been told yet.
	caches  []weak.Pointer[denials]
	given   map[string]bool
	bans    map[*strikes]bool      // which may have keys that Run is to ban
	shadows map[int64]*shadowCount // by the id of the row, what has not been reported yet
	running bool
	status  PoliciesStatus
	// asked is when the last answer was asked for. version, made at versionAt, is what that has told; nil asks for all
	// rows. completeAt is when all were last asked for.
	asked, completeAt time.Time
	version           *int64
	versionAt         int64 // by the database's clock, in microseconds since 1970
	// unreadable are the ids of rows that this release cannot read.
	unreadable map[int64]bool
}

// PoliciesConfig says how [Policies] are read. The zero value is useful.
type PoliciesConfig struct {
	Schema string // where the migrations were applied; defaults to "": search_path finds it
	// MaxRows is how many rows this process holds at most. They need about 0.3 kB each. Rows beyond it are left out,
	// and logged: the bans that limiters have made before what people have written. Defaults to 200,000.
	MaxRows int
	// Logger gets a line when rows cannot be read or used, and one when the database can be asked again, but never a
	// key. Defaults to slog.Default().
	Logger *slog.Logger
}

// PoliciesStatus says what a process knows of the table.
type PoliciesStatus struct {
	Rows int // how many are held
	// Unreadable is how many rows this release cannot read, and NoRoom is how many are beyond MaxRows. They are not
	// obeyed. `pgratelimit doctor` names the former.
	Unreadable, NoRoom int
	// Age is how old the knowledge may be: the time since the database was asked for the last answer. It is 0 if there
	// has been none.
	Age       time.Duration
	Listening bool  // a change wakes this process up; else it asks twice a second
	Err       error // why the database could not be asked last; nil if it could
}

// databaseClock is a reading of the database's clock.
type databaseClock struct {
	micros int64 // since 1970
	at     time.Time
}

// ruling is what a row says.
type ruling struct {
	mode ruleMode
	// It counts from from on, and at until no longer, in microseconds since 1970. from is alwaysBegun if it had begun
	// when it was read.
	from, until int64
	learnt      int64 // when this process first heard of what it says, by the database's clock

	sharedPolicy
}

// sharedPolicy is a policy, which many rows may have.
type sharedPolicy struct {
	policy  Policy                   // nil for off and deny
	limiter *atomic.Pointer[Limiter] // the last limiter that was made of it
}

type rule = rulebook.Rule[ruling]

// ruleMode is a row's mode.
type ruleMode string

const (
	modeEnforce ruleMode = "enforce"
	modeShadow  ruleMode = "shadow"
	modeOff     ruleMode = "off"
	modeDeny    ruleMode = "deny"
)

const defaultMaxRows = 200_000

// NewPolicies returns what is still to be run. It asks nothing, and starts nothing. db is a *pgxpool.Pool or
// sqldb.Pool; of the latter, Run does not listen. Errors: a [*ConfigError].
func NewPolicies(db DBTX, config PoliciesConfig) (*Policies, error) {
	_, inMemory := db.(*memory.DB)
	switch {
	case pg.IsNil(db):
		return nil, &ConfigError{Field: "db", Reason: "is nil, and must be a *pgxpool.Pool"}
	case inMemory:
		return nil, &ConfigError{Field: "db", Reason: "is in memory, where there is no table of policies"}
	case newDatabase(db, "", nil).turn != nil:
		return nil, &ConfigError{
			Field: "db", Reason: "is a single connection or transaction, and must be a *pgxpool.Pool",
		}
	case !utf8.ValidString(config.Schema) || strings.ContainsAny(config.Schema, "\x00\n\r"):
		return nil, &ConfigError{
			Field: "PoliciesConfig.Schema", Reason: "must be valid UTF-8 without NUL and line breaks",
		}
	case config.MaxRows < 0:
		return nil, &ConfigError{
			Field: "PoliciesConfig.MaxRows", Reason: fmt.Sprintf("is %d, and must be at least 1", config.MaxRows),
		}
	}
	if config.MaxRows == 0 {
		config.MaxRows = defaultMaxRows
	}
	return &Policies{
		db: db, config: config, ready: make(chan struct{}), turn: turn.New(),
		banning: make(chan struct{}, 1), telling: make(chan struct{}, 1), perRow: againPerRow,
	}, nil
}

// Status says what this process knows.
func (p *Policies) Status() PoliciesStatus {
	p.mu.Lock()
	defer p.mu.Unlock()
	status := p.status
	status.Rows = p.book.Len()
	if !p.asked.IsZero() {
		status.Age = time.Since(p.asked)
	}
	return status
}

// errNotRun tells those who wait for the first rows what may be missing.
var errNotRun = errors.New("the policies have not been read yet; has Policies.Run been started?")

// await waits until the rows have been read for the first time.
func (p *Policies) await(ctx context.Context, timeout time.Duration) error {
	select {
	case <-p.ready:
		return nil
	default:
	}
	if failed := p.failed.Load(); failed != nil {
		return *failed
	}
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-p.ready:
		return nil
	case <-ctx.Done():
		return gaveUp(ctx.Err())
	case <-timer.C:
		if failed := p.failed.Load(); failed != nil {
			return *failed
		}
		return pg.NewError(errNotRun, ErrTimeout)
	}
}

// now is the database's clock as this process knows it, in microseconds since 1970. It is not known before ready, and
// is only asked for where there is a row.
func (p *Policies) now() int64 {
	c := p.clock.Load()
	return c.micros + time.Since(c.at).Microseconds()
}

// saysTheSame tells whether nothing has changed about a row.
func saysTheSame(a, b *rule) bool {
	return a.Name == b.Name && a.Target == b.Target && a.Text == b.Text && a.From == b.From && a.Weak == b.Weak &&
		a.Value.mode == b.Value.mode && a.Value.until == b.Value.until && a.Value.policy == b.Value.policy
}

// counts tells whether a rule has begun, and has not ended.
func (p *Policies) counts(r *rule) bool {
	if r.Value.from == alwaysBegun && r.Value.until == noEnd {
		return true
	}
	now := p.now()
	return r.Value.from <= now && now < r.Value.until
}
