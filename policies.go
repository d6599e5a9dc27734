package ratelimit

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/pgratelimit/ratelimit/internal/memory"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/policytable"
	"github.com/pgratelimit/ratelimit/internal/turn"
)

// Policies are what this process knows of the table rate_limit_policy, with which people change limits without a
// deploy. Make one for each database, run it, and give it to the limiters that are to obey the table: see the example.
//
// A row is for one key, for all keys with a prefix, or for everybody. The row of the key is in force, else that of the
// longest prefix, else that for everybody, else the policy in the code; of several, the one that began last. A row's
// mode is enforce (its policy decides), off (everything is allowed and nothing counted) or deny (a ban). A row that
// this release cannot read, or of another kind than the limiter's policy, is passed over and logged.
//
// A row of the mode shadow is tried out: Allow, AllowN and Peek decide it beside the policy in force, with a count of
// its own, and Result.Shadow has its decision. It changes nothing.
//
// A change takes effect in all processes within a second, as Run listens on a connection of its own. Meanwhile a key is
// admitted what the larger of the two limits admits, at most. While the database is away, what is known stays in force.
// Until the first rows are read, calls wait for them within [ClientConfig].Timeout, and then fail as in an outage.
type Policies struct{ table *policytable.Table }

// PoliciesConfig says how [Policies] are read. The zero value is useful.
type PoliciesConfig struct {
	Schema string // where the migrations were applied; defaults to "": search_path finds it
	// MaxRows is how many rows this process holds at most, of 0.3 kB each. Bans by limiters are left out first, and the
	// log says so. Defaults to 200,000.
	MaxRows int
	Logger  *slog.Logger // for what cannot be read, without keys; defaults to slog.Default()
}

// PoliciesStatus says what a process knows of the table.
type PoliciesStatus struct {
	Rows       int           // held
	Unreadable int           // not obeyed, because this release cannot read them; `pgratelimit doctor` names them
	NoRoom     int           // not obeyed, because of MaxRows
	Age        time.Duration // since the database was asked for the last answer; 0 before the first one
	Listening  bool          // a change wakes this process up; else it asks twice a second
	Err        error         // why the database could not be asked last, or nil
}

const defaultMaxRows = 200_000

// NewPolicies asks nothing and starts nothing: see [Policies.Run]. db is a *pgxpool.Pool, or a sqldb.Pool, of which Run
// asks twice a second instead of listening. Errors: a [*ConfigError].
func NewPolicies(db DBTX, config PoliciesConfig) (*Policies, error) {
	_, inMemory := db.(*memory.DB)
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
	table := policytable.NewTable(db, policytable.TableConfig{
		Schema: config.Schema, MaxRows: config.MaxRows, Logger: config.Logger, Read: readPolicy,
	})
	return &Policies{table}, nil
}

// readPolicy reads the policy of a row.
func readPolicy(limiter, text string, shadow bool) (*model.Policy, error) {
	policy, err := ParsePolicy(text)
	if err != nil {
		return nil, err
	}
	if shadow {
		limiter += policytable.ShadowSuffix
	}
	return policyModel(policy), validateName(limiter, policy)
}

// Run keeps the policies up to date until the context ends. It needs the rights that deploy/grants.sql gives to
// applications. What fails is logged and tried again. A second Run waits for the end of the first.
func (p *Policies) Run(ctx context.Context) { p.table.Run(ctx) }

// Status says what this process knows.
func (p *Policies) Status() PoliciesStatus {
	status := PoliciesStatus(p.table.Status())
	status.Err = publicError(status.Err)
	return status
}
