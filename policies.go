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
type Policies struct{ table *policytable.Table }

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

// Run keeps the policies up to date until the context ends. It needs rights that deploy/grants.sql gives to
// applications: EXECUTE on rate_limit_policies, on rate_limit_report for shadows, and on rate_limit_ban for bans.
// Whatever fails is tried again, and logged when it begins and when it is over. What is known stays in force after the
// end. A second Run waits for the end of the first.
func (p *Policies) Run(ctx context.Context) { p.table.Run(ctx) }

// Status says what this process knows.
func (p *Policies) Status() PoliciesStatus {
	status := PoliciesStatus(p.table.Status())
	status.Err = publicError(status.Err)
	return status
}
