// Package ratelimit keeps rate limits in the Postgres that an application already has.
//
//	limiter, err := ratelimit.New(pool, ratelimit.Config{
//		Name:   "login",
//		Policy: ratelimit.SlidingWindow{Limit: 10, Window: time.Minute},
//	})
//	result, err := limiter.Allow(ctx, "user:123")
//
// Postgres decides each request in one round trip. A function locks the key's row, reads the database's clock, and
// updates the row only if it allows the request. So a denial takes nothing, and limits are exact for any number of
// processes, whatever their clocks show.
//
// Most applications need five things:
//
//   - Create the tables and functions with package migrations. Delete expired rows with package cleanup.
//   - Make a [Client] for the pool, and a [Limiter] for each limit. [New] makes both.
//   - Choose a [Policy], such as a [SlidingWindow] or a [TokenBucket].
//   - Call [Limiter.Allow] to take, [Limiter.Peek] to look, or [Limiter.Wait] to block until there is room. Package
//     httplimit calls Allow for a [net/http.Handler].
//   - Set [Config].OnFailure, the answer while Postgres is unreachable.
//
// More:
//
//   - Several limits at once: [AllowAll]. Within a transaction: [Limiter.WithTx].
//   - Giving back: [Limiter.Refund], [Limiter.Grant] and [Limiter.Reset].
//   - Costs that are known only afterwards: [Limiter.Charge] and [Limiter.Hold].
//   - Waiting: [Limiter.Wait]. A place in the future: [Limiter.Reserve].
//   - At most n at a time: [Concurrency], with [Limiter.Acquire], [Limiter.TryAcquire] and [Slot].
//   - Tiers: [Limiter.With]. Changes without a deploy: [Policies]. Busy keys: [Lease].
//   - Metrics: [Observer], [ErrorKind], package livepage. Tests: [TestConfig], package ratelimittest.
package ratelimit

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/policytable"
	"github.com/pgratelimit/ratelimit/internal/waitline"
)

// Limiter decides whether a request is allowed. It is safe for concurrent use, and needs no Close. An idle Limiter has
// no goroutine, timer or connection.
//
// When a caller's context ends, the call returns, but its statement goes on within [ClientConfig].Timeout, and the
// request may still count. Canceling the statement would close its connection.
type Limiter struct {
	client    *Client
	space     *engine.Space
	view      *policytable.View // the view of rate_limit_policy; nil if policies is nil
	beside    *engine.Space     // for rows of mode shadow; nil if policies is nil
	waiting   *waitline.Lines[Result]
	onFailure FailureMode
	policies  *Policies
	ban       *Ban
	policy    Policy
	model     *model.Policy // the rules of policy
}

// Config says what a [Limiter] limits. Name and Policy are required.
type Config struct {
	// Name separates the keys of this limiter from the keys of other limiters. Limiters with the same Name share their
	// keys, in any number of processes. A Name has 1 to 128 bytes of UTF-8 without NUL.
	Name   string
	Policy Policy // how much a key may take
	// Durable keeps the rows in rate_limit_durable, which survives a crash of the server. Set it for quotas and
	// billing. Defaults to false: rows are in rate_limit_ephemeral, which is unlogged, so a crash resets all keys.
	Durable bool
	// SynchronousCommit makes calls of a durable limiter wait until the WAL is flushed, so that a crash loses nothing.
	// Defaults to false: a crash may lose takes of the last 0.6 s (three times wal_writer_delay). Slots of a
	// [Concurrency] always wait.
	SynchronousCommit bool
	NoDenialCache     bool // makes every call ask the database; see [ClientConfig].DenialMaxAge
	// Policies makes the limiter obey its rows of rate_limit_policy. Policy applies to keys without a row.
	Policies *Policies
	Ban      *Ban   // bans keys that are denied again and again; needs Policies
	Lease    *Lease // decides most calls for busy keys in this process; start with &Lease{}
	// OnFailure says what Allow, AllowN, Peek, Wait and WaitN answer when Postgres is unreachable or too slow. All
	// other methods return the error. Defaults to ReturnError.
	OnFailure FailureMode
}

// New returns a limiter with a new [Client]. To configure the client, or to share it, call [NewClient] and
// [Client.Limiter] instead. Errors: a [*ConfigError].
func New(db DBTX, config Config) (*Limiter, error) {
	client, err := NewClient(db, ClientConfig{})
	if err != nil {
		return nil, err
	}
	return client.Limiter(config)
}

// Limiter returns a limiter that uses c. Errors: a [*ConfigError].
func (c *Client) Limiter(config Config) (*Limiter, error) {
	if err := config.validate(); err != nil {
		return nil, err
	}
	if config.SynchronousCommit && !c.engine.Pooled() {
		return nil, &ConfigError{
			Field: "Config.SynchronousCommit",
			Reason: "has no effect on a single connection or transaction, which commits as its session says; " +
				"run SET synchronous_commit = on there, or SET LOCAL in a transaction, or pass a *pgxpool.Pool",
		}
	}
	lease := config.Lease.withDefaults()
	if err := lease.validate(config.Policy, c.engine.Pooled()); err != nil {
		return nil, err
	}
	l := &Limiter{
		client: c, waiting: &waitline.Lines[Result]{}, onFailure: config.OnFailure, policies: config.Policies,
		ban: config.Ban.withDefaults(), policy: config.Policy, model: policyModel(config.Policy),
	}
	l.space = &engine.Space{
		Engine: c.engine, Name: config.Name, Durable: config.Durable, Flush: config.SynchronousCommit,
		Remember: !config.NoDenialCache, ReturnsErrors: config.OnFailure.answer <= returnError,
		Lease: (*engine.LeaseTerms)(lease),
	}
	if config.Policies != nil {
		table := config.Policies.table
		l.view = table.View(config.Name, (*policytable.BanTerms)(l.ban))
		l.space.Given = func(key string) { table.Given(config.Name, key) }
		table.AddDenials(c.engine.Cache())
		beside := *l.space
		beside.Name, beside.Lease = config.Name+policytable.ShadowSuffix, nil
		l.beside = &beside
	}
	return l, nil
}

func (c Config) validate() error {
	switch {
	case c.Name == "":
		return &ConfigError{
			Field: "Config.Name", Reason: "is required: it keeps this limiter's keys apart from those of others",
		}
	case !utf8.ValidString(c.Name) || strings.ContainsRune(c.Name, 0):
		return &ConfigError{Field: "Config.Name", Reason: "must be valid UTF-8 without NUL"}
	case strings.HasSuffix(c.Name, policytable.ShadowSuffix):
		return &ConfigError{
			Field:  "Config.Name",
			Reason: "ends with " + policytable.ShadowSuffix + ", as the names of rows of shadows do",
		}
	case c.SynchronousCommit && !c.Durable:
		return &ConfigError{
			Field: "Config.SynchronousCommit", Reason: "needs Durable: there is nothing to flush for an unlogged table",
		}
	case c.OnFailure.answer == fallbackLocal && !(c.OnFailure.share > 0 && c.OnFailure.share <= 1): // false for NaN
		return &ConfigError{Field: "Config.OnFailure", Reason: fmt.Sprintf(
			"is FallbackLocal(%v), and its share must be above 0 and at most 1", c.OnFailure.share)}
	}
	if err := c.Ban.validate(c.Policies); err != nil {
		return err
	}
	if err := validatePolicy(c.Policy); err != nil {
		return err
	}
	return validateName(c.Name, c.Policy)
}

// validateName checks the length of the name, including the suffix, such as /2, that All adds for its last policy.
func validateName(name string, policy Policy) error {
	longest := len(name)
	if several, ok := policy.(all); ok {
		longest = len(algorithm.RowName(name, several.n-1))
	}
	if longest > maxNameLen {
		return &ConfigError{Field: "Config.Name", Reason: fmt.Sprintf(
			"has %d bytes with what the policy adds, and may have at most %d", longest, maxNameLen)}
	}
	return nil
}

// With returns a limiter with another policy for the same keys, such as the policy of a paid tier. All other settings
// are those of l. With does not ask the database. What a key has taken stays taken: see [Policy]. A denial is
// remembered for one policy only, so a raised limit helps at once.
//
// Errors: a [*ConfigError] for a policy that cannot work, or is of another kind, such as a [TokenBucket] for a
// [SlidingWindow]. An [All] may have more or fewer policies than before. If it gains or loses a [Concurrency], other
// methods are for it: see [Concurrency].
func (l *Limiter) With(policy Policy) (*Limiter, error) {
	if err := validatePolicy(policy); err != nil {
		return nil, err
	}
	if err := validateName(l.space.Name, policy); err != nil {
		return nil, err
	}
	with := *l
	with.policy, with.model = policy, policyModel(policy)
	if kind, before, differ := with.model.KindsDiffer(l.model); differ {
		return nil, &ConfigError{Field: "Config.Policy", Reason: fmt.Sprintf("is a %s, and the keys' rows are of "+
			"a %s, which would start anew; make a limiter of another name", kind, before)}
	}
	return &with, nil
}

// Config returns the configuration of l, with the Policy that With has set.
func (l *Limiter) Config() Config {
	return Config{
		Name: l.space.Name, Policy: l.policy, Durable: l.space.Durable, SynchronousCommit: l.space.Flush,
		NoDenialCache: !l.space.Remember, OnFailure: l.onFailure, Policies: l.policies,
		Ban: l.ban.withDefaults(), Lease: (*Lease)(l.space.Lease).withDefaults(),
	}
}

func (l *Limiter) question(policy *model.Policy, key string, cost int64) engine.Ask {
	return engine.Ask{Space: l.space, Policy: policy, Key: key, Cost: cost}
}
