package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/pgratelimit/ratelimit/internal/memdb"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/policytable"
	"github.com/pgratelimit/ratelimit/internal/turn"
)

// Policies is this process's copy of the table rate_limit_policy, whose rows change limits without a deploy. Make one
// copy for each database, call its Run, and set it as [Config].Policies of limiters: see the example.
//
// A row is for one key, for all keys with a prefix, or for everybody. The limiter obeys the key's row. If there is
// none, it obeys the row of the longest prefix, then the row for everybody, then [Config].Policy. Of several rows for
// the same keys, the row that began last decides. A row's mode is enforce (its policy decides), off (everything is
// allowed and nothing counted) or deny (a ban). A row is ignored and logged if this release cannot read it, or if its
// policy is of another kind than the limiter's, or if only one of them has a [Concurrency].
//
// A row of mode shadow tries a policy without enforcing it. Allow, AllowN and Peek apply such a policy beside the
// policy in force, with a separate count, and [Result].Shadow has its decision. Slots cannot be tried: a Concurrency is
// refused as a shadow, and a limiter with a Concurrency ignores shadows, and logs that.
//
// A change takes effect in all processes within a second, because Run listens on a separate connection. Until then, a
// key gets at most what the larger of both limits admits. While the database is unreachable, the known rows stay in
// force. Before the first rows are read, calls wait for the rows until their [ClientConfig].Timeout ends, and then fail
// as in an outage.
type Policies struct{ table *policytable.Table }

// PoliciesConfig says how [Policies] are read. The zero value is useful.
type PoliciesConfig struct {
	Schema string // the schema that has the tables; defaults to "": search_path finds it
	// MaxRows is the most rows that this process keeps. Each row takes 0.3 kB. Further rows are ignored and logged:
	// first bans by limiters, then other rows. Defaults to 200,000.
	MaxRows int
	Logger  *slog.Logger // gets a line for what cannot be read, without keys; defaults to slog.Default()
}

// PoliciesStatus describes this process's copy of rate_limit_policy.
type PoliciesStatus struct {
	Rows       int           // the number of rows that are kept
	Unreadable int           // rows ignored because this release cannot read them; `pgratelimit doctor` names them
	NoRoom     int           // rows ignored because of MaxRows
	Age        time.Duration // the time since the last query that succeeded; 0 before the first
	Listening  bool          // true if Postgres tells this process of changes; false if the process asks twice a second
	Err        error         // why the last query failed, or nil
}

const defaultMaxRows = 200_000

// NewPolicies returns an empty copy of the table in db, for [Policies.Run] to fill. db is a *pgxpool.Pool, a
// sqldb.Pool or a [*Service]. Without a *pgxpool.Pool, Run asks twice a second instead of listening. Errors: a
// [*ConfigError].
func NewPolicies(db DBTX, config PoliciesConfig) (*Policies, error) {
	_, inMemory := db.(*memdb.DB)
	switch {
	case pg.IsNil(db):
		return nil, &ConfigError{Field: "db", Reason: "is nil, and must be a *pgxpool.Pool"}
	case inMemory:
		return nil, &ConfigError{Field: "db", Reason: "is in memory, where there is no table of policies"}
	case pg.WrapsConn(db) != "":
		return nil, &ConfigError{Field: "db", Reason: pg.WrapsConn(db)}
	case turn.Of(db) != nil:
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
	if _, ok := db.(*Service); ok && config.Schema != "" {
		return nil, &ConfigError{
			Field: "PoliciesConfig.Schema", Reason: "must be empty for a Service, which has its own",
		}
	}
	table := policytable.NewTable(behind(db), policytable.TableConfig{
		Schema: config.Schema, MaxRows: config.MaxRows, Logger: config.Logger, Read: readPolicy,
	})
	return &Policies{table}, nil
}

var errShadowOfSlots = errors.New("a policy with a Concurrency cannot be a shadow, because nobody would release the " +
	"slots that it gives")

// readPolicy parses the policy of a limiter's row. The argument shadow is true if the row's mode is shadow.
func readPolicy(limiter, text string, shadow bool) (*model.Policy, error) {
	policy, err := ParsePolicy(text)
	if err != nil {
		return nil, err
	}
	read := policyModel(policy)
	if shadow {
		if read.HasSlots {
			return nil, errShadowOfSlots
		}
		limiter += policytable.ShadowSuffix
	}
	return read, validateName(limiter, policy)
}

// Run keeps the policies up to date until ctx ends. It needs the rights that deploy/grants.sql gives to applications.
// It logs failures and tries again. A second Run waits for the end of the first.
func (p *Policies) Run(ctx context.Context) { p.table.Run(ctx) }

// Status describes this process's copy of the table.
func (p *Policies) Status() PoliciesStatus {
	status := PoliciesStatus(p.table.Status())
	status.Err = publicError(status.Err)
	return status
}

// Everybody returns the policy of the row that applies to all keys of a limiter, or false if no such row of mode
// enforce is in force, or if the rows were not read yet. It is for programs that learn the names of their limiters from
// the table.
func (p *Policies) Everybody(limiter string) (policy Policy, ok bool) {
	if m := p.table.Everybody(limiter); m != nil {
		return policyFrom(m), true
	}
	return nil, false
}
