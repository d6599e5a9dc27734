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
// their clocks say, and a denial takes nothing. Calls that arrive while others are under way share a statement.
//
// Most applications need five things:
//
//   - Migrate the database first, by package migrations, and delete expired rows by package cleanup.
//   - Make one [Client] for the pool, and a [Limiter] for each limit. [New] makes both if there is one limit.
//   - Choose a policy: [FixedWindow], [SlidingWindow], [TokenBucket], [SlidingLog], [CalendarWindow], or [All] of
//     several.
//   - Ask: [Limiter.Allow] takes, [Limiter.Peek] looks, and [Limiter.Wait] blocks until there is room. Package
//     httplimit does it for an [net/http.Handler].
//   - Say what to answer while Postgres is away: [Config].OnFailure.
//
// # More
//
//   - Several limits at once: [AllowAll], which takes from all limiters or none.
//   - Quota that commits with the caller's transaction: [Limiter.WithTx].
//   - Giving back what came to nothing: [Limiter.Refund]; in another process, with [Result.Receipt]. Credit for a key:
//     [Limiter.Grant]. A new start: [Limiter.Reset].
//   - Other numbers for the same keys: [Limiter.With]. Limits that change without a deploy: [Policies], [Ban] and
//     [Limiter.Explain].
//   - Very busy keys: [Lease].
//   - Errors: compare them by [errors.Is] with the variables below. [ErrorKind] names one in a word. A denial is no
//     error.
//   - Metrics: [Observer]. The log tells of outages by itself.
//   - Tests: [TestConfig] replaces the clocks, and package ratelimittest has a database in memory.
//
// The command cmd/pgratelimit shows all of this at work.
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
// goroutine, timer or connection, only remembered denials and what [FallbackLocal] has allowed.
//
//   - Allow takes 1, and AllowN takes n. Peek looks. Wait and WaitN block until there is room.
//   - Request is for [AllowAll], which takes from several limiters or none. A policy of [All] does so for one key.
//   - Refund and RefundN give back, Grant gives more, and Reset forgets.
//   - WithTx does all this within a transaction of the caller's.
//   - With asks for the same keys with other numbers.
//
// A context ends only the caller's wait. The statement goes on within [ClientConfig].Timeout, and the request may
// still count. Ending the statement would close its connection, and thousands of impatient clients would cost the
// application thousands of connections.
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
	// Name keeps limiters apart that share a database: the same key of two names is two keys. 1 to 128 bytes of
	// UTF-8 without NUL. Limiters of one name, in any number of processes, share their keys.
	Name   string
	Policy Policy // how much a key may take
	// Durable keeps the rows in rate_limit_durable, which survives a crash of the server, for quotas and billing.
	// Defaults to false: rate_limit_ephemeral, an unlogged table, for protection against abuse. A crash empties
	// it, and every key is as good as new.
	Durable bool
	// SynchronousCommit makes a durable limiter's calls wait until the WAL is flushed, so that a crash forgets
	// nothing. Defaults to false: it may forget the last three wal_writer_delays, 0.6 s as Postgres ships. The
	// caller's transactions commit as their owner says, so a client of a single connection or transaction refuses
	// it.
	SynchronousCommit bool
	NoDenialCache     bool // has every call ask the database; see [ClientConfig].DenialMaxAge
	// Policies makes the limiter obey the rows of rate_limit_policy that name it. Policy holds where there is none.
	// Defaults to nil: the limiter obeys Policy.
	Policies *Policies
	// Ban denies everything to keys that are denied again and again. It needs Policies. Defaults to nil, which bans
	// nobody.
	Ban *Ban
	// Lease has the process take ahead of busy keys, and decide most calls for them by itself. &Lease{} has defaults
	// that suit most limits. Defaults to nil: every call asks the database, except for remembered denials.
	Lease *Lease
	// OnFailure is what Allow, AllowN, Peek, Wait and WaitN answer when Postgres is away or too slow to decide.
	// All other methods return the error, which is the default here too. [Result].Source says so.
	OnFailure FailureMode
}

// New returns a limiter with a [Client] of its own, which has the defaults. To configure the client, or to share it
// between limiters, call [NewClient] and then [Client.Limiter]. Errors: a [*ConfigError].
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

// validateName checks the length of the name with what All adds to it.
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

// With returns a limiter of other numbers for the same keys: for tiers, such as free and paid, or for numbers that
// stand in a table of customers. It asks nothing and starts nothing, so it may be called for each request.
// Everything but the policy is shared with l. A policy that many ask under has statements of its own. Where many
// policies have a few calls each, one statement decides for all.
//
// What a key has taken stays taken when it is asked for under another policy: see [Policy] for what is made of it.
// A denial is remembered for the policy that it was made under, so a raised limit helps at the next call.
//
// Errors: a [*ConfigError] for a policy that cannot work, or that is of another kind, such as a [TokenBucket] for a
// [SlidingWindow]. Of [All], that goes for each of the policies, in their order; there may be more of them or fewer.
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

// Config returns the configuration. Its Policy is the one of this limiter, even if With made it.
func (l *Limiter) Config() Config {
	return Config{
		Name: l.space.Name, Policy: l.policy, Durable: l.space.Durable, SynchronousCommit: l.space.Flush,
		NoDenialCache: !l.space.Remember, OnFailure: l.onFailure, Policies: l.policies,
		Ban: l.ban.withDefaults(), Lease: (*Lease)(l.space.Lease).withDefaults(),
	}
}

// question is one about a key.
func (l *Limiter) question(policy *model.Policy, key string, cost int64) engine.Ask {
	return engine.Ask{Space: l.space, Policy: policy, Key: key, Cost: cost}
}
