// Package ratelimit keeps rate limits in the Postgres that an application already has.
//
//	limiter, err := ratelimit.New(pool, ratelimit.Config{
//		Name:   "login",
//		Policy: ratelimit.SlidingWindow{Limit: 10, Window: time.Minute},
//	})
//	result, err := limiter.Allow(ctx, "user:123")
//
// Postgres decides, in one round trip. A function locks the key's row, reads the database's clock, and updates the row
// only if it allows the request. So limits are exact under any concurrency and over any number of processes, whatever
// their clocks say, and a denial takes nothing.
//
// Most applications need five things:
//
//   - Migrate the database by package migrations, and sweep it by package cleanup.
//   - Make one [Client] for the pool, and a [Limiter] for each limit; or both by [New].
//   - Choose a [Policy], such as a [SlidingWindow] or a [TokenBucket].
//   - Ask: [Limiter.Allow] takes, [Limiter.Peek] looks, and [Limiter.Wait] blocks until there is room. Package
//     httplimit does it for an [net/http.Handler].
//   - Say what to answer while Postgres is away: [Config].OnFailure.
//
// More:
//
//   - Several limits at once: [AllowAll]. Within a transaction: [Limiter.WithTx].
//   - Giving: [Limiter.Refund], [Limiter.Grant] and [Limiter.Reset].
//   - Tiers: [Limiter.With]. Limits without a deploy: [Policies]. Busy keys: [Lease].
//   - Metrics: [Observer], [ErrorKind]. Tests: [TestConfig], package ratelimittest.
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

// Limiter decides whether keys may go on. It is safe for concurrent use, and needs no Close. At rest it holds no
// goroutine, timer or connection.
//
// A context ends only the caller's wait. The statement goes on within [ClientConfig].Timeout, and the request may still
// count. Ending the statement would close its connection.
type Limiter struct {
	client    *Client
	space     *engine.Space
	view      *policytable.View // of the table of policies; nil without one
	beside    *engine.Space     // of the policies of the mode shadow
	waiting   *waitline.Lines[Result]
	onFailure FailureMode
	policies  *Policies
	ban       *Ban
	policy    Policy
	model     *model.Policy // of the policy
}

// Config says what a [Limiter] limits. Name and Policy are required.
type Config struct {
	// Name keeps the keys of this limiter apart from those of others. Limiters of one name share their keys, in any
	// number of processes. 1 to 128 bytes of UTF-8 without NUL.
	Name   string
	Policy Policy // how much a key may take
	// Durable keeps the rows in rate_limit_durable, which survives a crash of the server: for quotas and billing.
	// Defaults to false: a crash empties the unlogged rate_limit_ephemeral, and every key is as good as new.
	Durable bool
	// SynchronousCommit makes a durable limiter's calls wait until the WAL is flushed, so that a crash forgets
	// nothing. Defaults to false: a crash may forget the last 0.6 s (three times wal_writer_delay).
	SynchronousCommit bool
	NoDenialCache     bool // makes every call ask the database; see [ClientConfig].DenialMaxAge
	// Policies makes the limiter obey the rows of rate_limit_policy that name it. Policy is for keys without a row.
	Policies *Policies
	Ban      *Ban   // denies everything to keys that are denied again and again; needs Policies
	Lease    *Lease // takes ahead of busy keys, and decides most calls for them in this process; try &Lease{}
	// OnFailure is what Allow, AllowN, Peek, Wait and WaitN answer when Postgres is away or too slow. All other methods
	// return the error. Defaults to ReturnError.
	OnFailure FailureMode
}

// New returns a limiter with a [Client] of its own. To configure the client, or to share it, call [NewClient] and
// [Client.Limiter]. Errors: a [*ConfigError].
func New(db DBTX, config Config) (*Limiter, error) {
	client, err := NewClient(db, ClientConfig{})
	if err != nil {
		return nil, err
	}
	return client.Limiter(config)
}

// Limiter returns a limiter that asks through c. Errors: a [*ConfigError].
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
	case c.OnFailure.answer == fallbackLocal && !(c.OnFailure.share > 0 && c.OnFailure.share <= 1): // which NaN is not
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

// validateName checks the length of the name, with what All adds to it.
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

// With returns a limiter of another policy for the same keys: for tiers, such as free and paid, or for numbers from a
// table of customers. It shares all else with l, and asks nothing. What a key has taken stays taken: see [Policy]. A
// denial is remembered for its policy only, so a raised limit helps at once.
//
// Errors: a [*ConfigError] for a policy that cannot work, or that is of another kind, such as a [TokenBucket] for a
// [SlidingWindow]. For [All], each policy must be of the kind that was at its place. There may be more of them or
// fewer.
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

// Config returns the configuration, with the Policy that With was given.
func (l *Limiter) Config() Config {
	return Config{
		Name: l.space.Name, Policy: l.policy, Durable: l.space.Durable, SynchronousCommit: l.space.Flush,
		NoDenialCache: !l.space.Remember, OnFailure: l.onFailure, Policies: l.policies,
		Ban: l.ban.withDefaults(), Lease: (*Lease)(l.space.Lease).withDefaults(),
	}
}

// question returns a question about a key.
func (l *Limiter) question(policy *model.Policy, key string, cost int64) engine.Ask {
	return engine.Ask{Space: l.space, Policy: policy, Key: key, Cost: cost}
}
