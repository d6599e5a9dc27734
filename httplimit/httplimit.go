// Package httplimit puts a limit of package ratelimit in front of an [http.Handler].
//
// [New] turns a limiter into a middleware for net/http: a function that takes a handler and returns a handler.
// [Config].Key returns the key that a request takes from, such as the client's address with [ByIP]. Clients cannot
// forge an address: ByIP ignores headers unless the peer is in [TrustedProxies], and then uses the last address that is
// not a proxy's.
//
// A denied request gets status 429 and an exact Retry-After: the time until the same request is allowed if nobody else
// takes anything, rounded up to whole seconds. For a banned key, Retry-After is the time until the ban ends. If a ban
// ends more than ten years from now, Retry-After is a day, because somebody will probably lift the ban. The application
// must choose what happens while Postgres is unreachable: see [New].
//
// A limiter with [ratelimit.Concurrency], alone or in a [ratelimit.All], limits how many requests of a key run at once.
// The middleware acquires a slot before the handler runs, and releases it when the handler has returned, also after a
// panic. Retry-After is then the time until enough slots end if nobody renews or releases one. So a request before that
// time may be allowed. See [Config].SlotTTL and [SlotOf].
//
// With [ByIP] and [IETFDraft11], the middleware adds half a microsecond and 3 allocations to the limiter's call. Behind
// a proxy, or with keys in [HMAC], it adds one microsecond and 4 allocations. A denial adds 6 allocations. A request
// whose cost is given back needs a second call of the limiter before its response ends: see [Config].Charge.
//
// [Transport] is for clients: it keeps the requests of several processes within one shared limit.
//
// The module github.com/pgratelimit/ratelimit/grpclimit does the same for gRPC, with the keys of this package.
package httplimit

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pg"
)

// statusClientClosedRequest is the status that nginx logs for a client that has left. The client does not read this
// status, but without it, logs would show 200, like a success.
const statusClientClosedRequest = 499

// Limiter has the methods of a [ratelimit.Limiter] that New needs.
type Limiter interface {
	// Config returns the limiter's configuration. New reads it once: Name is the default of Config.PolicyName, header
	// fields show Policy, and OnFailure says what happens while Postgres is unreachable.
	Config() ratelimit.Config
	AllowN(ctx context.Context, key string, n int64) (ratelimit.Result, error)
	// Refund gives back what AllowN took. Only a Config.Charge needs Refund.
	Refund(ctx context.Context, result ratelimit.Result) (ratelimit.Balance, error)
	// Hold holds n instead of taking it. Only a Config.HoldFor needs Hold.
	Hold(ctx context.Context, key string, n int64, ttl time.Duration) (ratelimit.HoldResult, error)
	// TryAcquire acquires a slot instead of taking n. Only a policy with slots needs TryAcquire.
	TryAcquire(ctx context.Context, key string, options ratelimit.SlotOptions) (ratelimit.SlotResult, error)
}

var _ Limiter = (*ratelimit.Limiter)(nil)

// Config says how requests are limited. Key is required.
type Config struct {
	// Key finds the key that a request takes from. It is ByIP, ByHeader, ByContext, ByFunc, or several of them in Join
	// or First. A request without a key is rejected with status 400.
	Key Key

	// Tier returns the limiter of a request, or nil for the limiter that New was given. Make the limiters of tiers by
	// calling With of the limiter that New was given: then a customer who changes tiers keeps the usage, and each tier
	// has OnFailure. The header fields show the tier's policy.
	//
	// Defaults to the limiter that New was given, for all requests.
	Tier func(*http.Request) Limiter

	// Skip tells whether a request is exempt from the limit.
	//
	// Defaults to limiting all requests.
	Skip func(*http.Request) bool

	// Cost returns what a request takes, or how many units its slot has. A request with cost 0 passes without asking
	// the limiter. A request with a cost below 0, or above the whole limit, is rejected with status 400.
	//
	// Defaults to 1 for each request.
	Cost func(*http.Request) int64

	// Charge tells whether a request with this response status is charged. It is ChargeFailures, ChargeSuccesses,
	// ChargeAllButServerErrors, or any other function. Each request takes its cost before the handler runs. If Charge
	// returns false, and the cost still counts, it is given back after the handler has returned: see
	// [ratelimit.Limiter.Refund]. So no more requests start in a window than the limit allows. Slow requests from
	// earlier windows may still run.
	//
	// In doubt a request is charged. To avoid a charge, a handler must write a status or a part of the body to the
	// ResponseWriter that it was given, for example w.WriteHeader(http.StatusNoContent), and return. A request is
	// always charged if
	//
	//   - its handler writes nothing, panics, hijacks the connection, calls Unwrap, or writes several statuses of which
	//     one is charged;
	//   - code outside this middleware writes the status, as error handlers of some frameworks do, or uses another
	//     ResponseWriter;
	//   - the client left before there was a status;
	//   - the deadline of the request's context has passed when the handler returns.
	//
	// If the server's ResponseWriter has a method Written or Status, as those of frameworks have, the middleware calls
	// it to check the status. Other code outside the middleware must not change a status, because the middleware would
	// not see the change.
	//
	// The header fields are sent before the cost is given back. If Charge returns false for the first status, Remaining
	// is already what remains with the cost given back. Reset still shows the time after the take.
	//
	// While Postgres is unreachable, costs cannot be given back and stay counted. A cost that FallbackLocal took stays
	// counted too. A limiter with slots charges every request: New refuses it with a Charge, and a Tier ignores Charge.
	//
	// Defaults to charging every request.
	Charge func(status int) bool

	// HoldFor is for costs that are known only afterwards, such as the tokens of an answer. If it is above 0, Cost is
	// an estimate: the middleware holds it while the handler runs, and the handler says by Settle what was really used.
	// See [ratelimit.Limiter.Hold]. HoldFor is how long the hold lasts: from 1 ms to 24 h, and longer than handlers
	// usually need. A handler that takes longer calls Extend. If the process crashes, the hold ends by itself.
	//
	// If the handler does not call Settle, the whole Cost counts, or nothing if Charge returns false. A Settle that has
	// failed is repeated after the handler has returned.
	//
	// If a request passes several middlewares with HoldFor, Settle and Extend are for the innermost one. For the
	// others, the whole Cost counts, or nothing if Charge returns false. To settle several limits with one number, let
	// a single middleware hold them: give it a limiter with [ratelimit.All].
	//
	// A limiter with slots holds nothing: New refuses it with a HoldFor, and a Tier ignores HoldFor.
	//
	// Defaults to 0: the cost is taken, not held.
	HoldFor time.Duration

	// SlotTTL is how long the slot of a request lasts after its last renewal. The slot is renewed while the handler
	// runs, so SlotTTL is how long a process that dies keeps it. If all slots have this SlotTTL, it is also the longest
	// Retry-After of a request that finds no free slot. From 1 second to 24 hours.
	//
	// Defaults to 30 seconds.
	SlotTTL time.Duration

	// FullStatus is the status of a request that finds no free slot: 429, or 503 if the limit protects the server
	// rather than sharing it among clients. A denial by another policy of an All, or by a row of mode deny, has status
	// 429.
	//
	// Defaults to 429.
	FullStatus int

	// Headers selects the header fields that tell clients about their limit.
	//
	// Defaults to None: only rejections have a field, Retry-After.
	Headers Headers

	// AddFields adds header fields of the application to the responses to allowed requests. It is called after the
	// fields of Headers are set, and before the status is written. If Charge has returned false, the cost will probably
	// be given back, and the result's Remaining includes it. The result's Source tells whether the database decided.
	// For rejected requests, see Reject.
	//
	// Defaults to adding no fields.
	AddFields func(http.Header, ratelimit.Result)

	// PolicyName is the name of the limit that header fields and ProblemJSON show to clients: printable ASCII without
	// quotes and backslashes.
	//
	// Defaults to the limiter's name.
	PolicyName string

	// Reject writes the response to a request that does not reach the handler: ProblemJSON, PlainText, or any function.
	// Retry-After and the fields of Headers are already set. Reject may choose another status.
	//
	// Defaults to ProblemJSON.
	Reject func(http.ResponseWriter, *http.Request, Rejection)

	// OnError writes the response to a request for which the limiter returned an error. New requires either OnError or
	// OnFailure of the limiter's ratelimit.Config: one of them must say what happens while Postgres is unreachable.
	//
	// Defaults to Reject, with status 503.
	OnError func(http.ResponseWriter, *http.Request, error)

	// Logger gets a line for the first of each of these: requests without a usable key, costs that can never be taken,
	// errors, lost refunds, proxies that ByIP does not trust, and requests that are charged twice for the same key. It
	// does not get a line for each request. The limiter's client logs problems of the database: see
	// [ratelimit.ClientConfig].Logger.
	//
	// Defaults to slog.Default(). A logger with slog.DiscardHandler drops all lines.
	Logger *slog.Logger
}

func (c Config) withDefaults(limiter ratelimit.Config) Config {
	if c.PolicyName == "" {
		c.PolicyName = limiter.Name
	}
	if c.Reject == nil {
		c.Reject = ProblemJSON
	}
	if c.FullStatus == 0 {
		c.FullStatus = http.StatusTooManyRequests
	}
	return c
}

func (c Config) validate(limiter ratelimit.Config, slots bool) error {
	refuse := func(field, reason string) error {
		return &ratelimit.ConfigError{Field: "httplimit.Config." + field, Reason: reason}
	}
	if err := c.Key.usable(); err != nil {
		return refuse("Key", err.Error())
	}
	unprintable := func(c rune) bool { return c < ' ' || c > '~' || c == '"' || c == '\\' }
	switch {
	case c.PolicyName == "" || strings.ContainsFunc(c.PolicyName, unprintable):
		return refuse("PolicyName", "(by default the limiter's name) must be printable ASCII "+
			"without quotes and backslashes, and is "+strconv.Quote(c.PolicyName))
	case c.Headers < None || c.Headers > IETFDraft6:
		return refuse("Headers", "must be None, IETFDraft11, IETFDraft6, XRateLimit or GitHub")
	case c.HoldFor != 0 && (c.HoldFor < model.MinHold || c.HoldFor > model.MaxHold):
		return refuse("HoldFor", "must be from 1 ms to 24 h, and is "+c.HoldFor.String())
	case c.SlotTTL != 0 && (c.SlotTTL < time.Second || c.SlotTTL > model.MaxHold):
		return refuse("SlotTTL", "must be from 1 s to 24 h, and is "+c.SlotTTL.String())
	case c.FullStatus != http.StatusTooManyRequests && c.FullStatus != http.StatusServiceUnavailable:
		return refuse("FullStatus", "must be 429 or 503, and is "+strconv.Itoa(c.FullStatus))
	case slots && c.Charge != nil:
		return refuse("Charge", "needs a policy without slots: what a slot has taken cannot be given back")
	case slots && c.HoldFor != 0:
		return refuse("HoldFor", "needs a policy without slots: a slot is held while the handler runs")
	case c.OnError == nil && limiter.OnFailure == ratelimit.FailureMode{}:
		return refuse("OnError", "is required for this limiter: "+
			"nothing says what happens to requests while Postgres is away. "+
			"Set OnFailure in the limiter's ratelimit.Config: FailOpen, FailClosed, FallbackLocal, "+
			"or ReturnError, which rejects with status 503. Or set OnError here")
	}
	return nil
}

// New returns a middleware that passes allowed requests to a handler. It returns a [*ratelimit.ConfigError] for a
// configuration that cannot work.
//
// A denied request gets status 429 and a Retry-After in whole seconds. Requests before that time would be denied too,
// unless a slot is released. If the database does not decide, and the limiter fails closed or returns an error, the
// status is 503. All other requests reach the handler. Without [Config].Charge, the handler gets the server's
// ResponseWriter unchanged.
func New(limiter Limiter, config Config) (func(http.Handler) http.Handler, error) {
	if l, ok := limiter.(*ratelimit.Limiter); limiter == nil || ok && l == nil {
		return nil, errors.New("httplimit: the limiter is nil")
	}
	limits := limiter.Config()
	config = config.withDefaults(limits)
	own := limitBy(limiter, limits.Policy)
	if err := config.validate(limits, own.slots); err != nil {
		return nil, err
	}
	m := &middleware{limit: own, config: config}
	m.proxies.log = func(r *http.Request, message, write string) {
		m.log(r.Context(), slog.LevelWarn, message, slog.String("write", write))
	}
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { m.serve(w, r, next) })
	}, nil
}

// limit is a limiter, with the numbers of its policy that header fields show.
type limit struct {
	limiter Limiter
	shapes  []shape
	slots   bool // whether a policy has slots
}

func limitBy(limiter Limiter, policy ratelimit.Policy) limit {
	shapes := shapesOf(policy)
	return limit{limiter, shapes, slices.ContainsFunc(shapes, func(s shape) bool { return s.slots })}
}

type middleware struct {
	limit  limit
	config Config

	// These fields record what has been logged.
	keyless, badCost atomic.Bool // logged only once, because any client can cause it
	errors, refunds  health
	releases         health
	proxies          proxyHint
	nested           nesting
}

// limitOf returns the limit of a request.
func (m *middleware) limitOf(r *http.Request) limit {
	if m.config.Tier == nil {
		return m.limit
	}
	tier := m.config.Tier(r)
	if l, ok := tier.(*ratelimit.Limiter); tier == nil || ok && l == nil {
		return m.limit
	}
	return limitBy(tier, tier.Config().Policy)
}

func (m *middleware) serve(w http.ResponseWriter, r *http.Request, next http.Handler) {
	if m.config.Skip != nil && m.config.Skip(r) {
		next.ServeHTTP(w, r)
		return
	}
	cost := int64(1)
	if m.config.Cost != nil {
		if cost = m.config.Cost(r); cost == 0 {
			next.ServeHTTP(w, r)
			return
		}
	}
	key, err := m.config.Key.of(r, &m.proxies)
	if err != nil {
		m.rejectKey(w, r, err)
		return
	}
	limit := m.limitOf(r)
	if visit, ok := m.nested.enter(m, w, r, limit.limiter, key); ok {
		defer visit.leave()
	}
	given, err := m.ask(r.Context(), limit, key, cost)
	result := given.result
	switch {
	case err != nil:
		m.rejectError(w, r, err)
		return
	case m.errors.changed(nil):
		m.info(r.Context(), "httplimit: the limiter decides again")
	}
	switch {
	case result.Source == ratelimit.SourceFailedClosed:
		m.reject(w, r, Rejection{Status: http.StatusServiceUnavailable, RetryAfter: result.RetryAfter, Result: result})
	case !result.Allowed:
		told := result
		if result.Source == ratelimit.SourcePolicy {
			told.RetryAfter, told.ResetAfter = foreseeable(result.RetryAfter), foreseeable(result.ResetAfter)
		}
		m.setHeaders(w.Header(), limit, told, told.Remaining)
		status := http.StatusTooManyRequests
		if limit.full(&result) {
			status = m.config.FullStatus
		}
		m.reject(w, r, Rejection{Status: status, RetryAfter: told.RetryAfter, Result: result})
	case m.config.Charge != nil && given.slot == nil &&
		(result.Source == ratelimit.SourceDatabase || result.Source == ratelimit.SourceLease):
		m.serveAndSettle(w, r, next, charge{limit: limit, cost: cost, result: result, hold: given.hold})
	default:
		m.setHeaders(w.Header(), limit, result, result.Remaining)
		switch {
		case given.hold != nil:
			defer m.end(r.Context(), given.hold, cost)
			r = given.hold.in(r)
		case given.slot != nil:
			defer m.release(r.Context(), given.slot)
			r = inSlot(r, given.slot)
		}
		next.ServeHTTP(w, r)
	}
}

// given is a decision, and what the request has while its handler runs.
type given struct {
	result ratelimit.Result
	hold   *held           // nil if the cost was not held
	slot   *ratelimit.Slot // nil if the policy has no slots
}

// ask takes the cost of a request, holds it, or acquires a slot.
func (m *middleware) ask(ctx context.Context, limit limit, key string, cost int64) (given, error) {
	switch {
	case limit.slots:
		answer, err := limit.limiter.TryAcquire(ctx, key, ratelimit.SlotOptions{N: cost, TTL: m.config.SlotTTL})
		return given{result: answer.Result, slot: answer.Slot}, err
	case m.config.HoldFor == 0:
		result, err := limit.limiter.AllowN(ctx, key, cost)
		return given{result: result}, err
	}
	answer, err := limit.limiter.Hold(ctx, key, cost, m.config.HoldFor)
	g := given{result: answer.Result}
	switch {
	case answer.Hold == nil:
	case err != nil: // the client has left, or the outcome is unknown
		afterwards(ctx, func(ctx context.Context) {
			_, _ = answer.Hold.Cancel(ctx) // otherwise it ends by itself
		})
	default:
		g.hold = &held{hold: answer.Hold}
	}
	return g, err
}

// setHeaders sets the fields of Config.Headers, unless the limiter failed open. If the request is allowed, it also
// calls Config.AddFields.
func (m *middleware) setHeaders(header http.Header, limit limit, result ratelimit.Result, remaining int64) {
	if result.Source != ratelimit.SourceFailedOpen {
		m.config.Headers.set(header, m.config.PolicyName, limit.shapes, result, remaining)
	}
	if result.Allowed && m.config.AddFields != nil {
		result.Remaining = remaining
		m.config.AddFields(header, result)
	}
}

// rejectKey answers a request without a key, or with a key that the database cannot store.
func (m *middleware) rejectKey(w http.ResponseWriter, r *http.Request, err error) {
	if !m.keyless.Swap(true) {
		reason := err
		if own, ok := errors.AsType[*KeyError](err); ok {
			reason = own
		} else if !errors.Is(err, ratelimit.ErrInvalidKey) { // an error of a ByFunc function may show personal data
			reason = &KeyError{Reason: "Config.Key returned an error"}
		}
		m.warn(r.Context(), "httplimit: a request has no usable key, and is rejected; further ones are not logged",
			reason)
	}
	m.reject(w, r, Rejection{Status: http.StatusBadRequest, Err: err})
}

func (m *middleware) rejectError(w http.ResponseWriter, r *http.Request, err error) {
	switch {
	case errors.Is(err, context.Canceled) && errors.Is(r.Context().Err(), context.Canceled):
		w.WriteHeader(statusClientClosedRequest)
		return
	case errors.Is(err, ratelimit.ErrInvalidKey):
		m.rejectKey(w, r, err)
		return
	case errors.Is(err, ratelimit.ErrCostExceedsLimit), errors.Is(err, ratelimit.ErrInvalidCost):
		if !m.badCost.Swap(true) {
			m.warn(r.Context(),
				"httplimit: a request has a cost that can never be taken, and is rejected; further ones are not logged",
				err)
		}
		m.reject(w, r, Rejection{Status: http.StatusBadRequest, Err: err})
		return
	}
	// Errors after the request's deadline are not logged, because the limiter may be healthy. Database errors are
	// logged by the limiter's client.
	if r.Context().Err() == nil && !pg.IsTrouble(err) && m.errors.changed(err) {
		m.warn(r.Context(), "httplimit: the limiter fails; further errors are not logged until it decides again", err)
	}
	if m.config.OnError != nil {
		m.config.OnError(w, r, err)
		return
	}
	m.reject(w, r, Rejection{Status: http.StatusServiceUnavailable, Err: err})
}

// reject calls Config.Reject. It sets a Retry-After of at least one second, unless the status is 400.
func (m *middleware) reject(w http.ResponseWriter, r *http.Request, rejection Rejection) {
	rejection.Policy = m.config.PolicyName
	if rejection.Status != http.StatusBadRequest {
		seconds := max(1, wholeSeconds(rejection.RetryAfter))
		rejection.RetryAfter = time.Duration(seconds) * time.Second
		w.Header().Set("Retry-After", strconv.FormatInt(seconds, 10))
	}
	m.config.Reject(w, r, rejection)
}

// warn logs an error that contains no key.
func (m *middleware) warn(ctx context.Context, message string, err error) {
	m.log(ctx, slog.LevelWarn, message, slog.Any("error", err))
}

func (m *middleware) info(ctx context.Context, message string) {
	m.log(ctx, slog.LevelInfo, message)
}

func (m *middleware) log(ctx context.Context, level slog.Level, message string, attributes ...slog.Attr) {
	cmp.Or(m.config.Logger, slog.Default()).LogAttrs(ctx, level, message,
		append([]slog.Attr{slog.String("policy", m.config.PolicyName)}, attributes...)...)
}

// calm is the shortest failure whose end is logged. Alternating successes and failures then do not fill the log.
const calm = 10 * time.Second

// health remembers whether an operation fails, so that only changes are logged.
type health struct{ failing atomic.Int64 } // since this time, in nanoseconds since 1970; 0 if the operation works

// changed records the error of an attempt, and tells whether a failure has begun or ended.
func (h *health) changed(err error) bool {
	since := h.failing.Load()
	switch {
	case err != nil:
		return since == 0 && h.failing.CompareAndSwap(0, time.Now().UnixNano())
	case since == 0:
		return false
	default:
		return time.Now().UnixNano()-since >= int64(calm) && h.failing.CompareAndSwap(since, 0)
	}
}
