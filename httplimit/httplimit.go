// Package httplimit puts a limit of package ratelimit in front of an [http.Handler].
//
// [New] turns a limiter into a middleware: a function from handler to handler, for net/http and everything that takes
// such functions. [Config].Key says who is charged for a request, such as [ByIP]. Clients cannot forge a key: addresses
// in headers are believed only behind proxies that you named, and then only the last address that is not a proxy's.
//
// A denied request gets status 429 and a true Retry-After: the time at which the same request is allowed if nobody else
// takes anything, in whole seconds, rounded up. During a ban it is the ban's end. If the ban has no end, or ends more
// than ten years from now, Retry-After is a day, because somebody will probably lift the ban sooner. You have to choose
// what happens while Postgres is away, see [New].
//
// The middleware adds half a microsecond and 3 allocations to the limiter's own call, with [ByIP] and [IETFDraft11].
// Behind a proxy, or with keys in [HMAC], it adds one microsecond and 4 allocations. A denial adds 6 allocations.
// Giving back the cost of a request, see [Config].Charge, takes another call of the limiter before the response ends.
//
// [Transport] is for the other side: it keeps a client within a limit that its processes share.
//
// The module github.com/pgratelimit/ratelimit/grpclimit does the same for gRPC, with the keys of this package.
package httplimit

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pg"
)

// statusClientClosedRequest is the status that other servers log for a client that has left. Nobody reads it, but
// without it the server would log 200, which looks like a success.
const statusClientClosedRequest = 499

// Limiter is what New needs of a [ratelimit.Limiter].
type Limiter interface {
	// Config is the limiter's configuration. New reads it once: Name is the default of Config.PolicyName, Policy is
	// shown in header fields, and OnFailure says what happens while Postgres is away.
	Config() ratelimit.Config
	AllowN(ctx context.Context, key string, n int64) (ratelimit.Result, error)
	// Refund gives back what AllowN took. Only a Config.Charge needs it.
	Refund(ctx context.Context, result ratelimit.Result) (ratelimit.Balance, error)
}

var _ Limiter = (*ratelimit.Limiter)(nil)

// Config says how requests are limited. Key is required.
type Config struct {
	// Key says who is charged for a request: ByIP, ByHeader, ByContext, ByFunc, or several of them in Join. A request
	// without a key is rejected with status 400.
	Key Key

	// Tier returns the limiter of a request, if it is not New's. Make it with New's limiter's With, so that usage is
	// kept when a customer changes tiers, and so is OnFailure, which every tier needs. nil means New's limiter. The
	// header fields show the tier's policy.
	//
	// Defaults to New's limiter for all requests.
	Tier func(*http.Request) Limiter

	// Skip tells whether a request is exempt from the limit.
	//
	// Defaults to none.
	Skip func(*http.Request) bool

	// Cost is what a request takes. A request with cost 0 passes without asking the limiter. A cost below 0, or above
	// the whole limit, is rejected with status 400.
	//
	// Defaults to 1 for each.
	Cost func(*http.Request) int64

	// Charge decides, by the status of the response, whether the request is charged: ChargeFailures, ChargeSuccesses,
	// ChargeAllButServerErrors, or any function. The cost is taken first and given back when the handler is done, as
	// far as it still counts: see [ratelimit.Limiter.Refund]. So within a window no more requests start than the limit
	// allows. Slow requests of earlier windows may still run beside them.
	//
	// In doubt the cost stays taken. To get it back, a handler has to write a status or a part of the body to the
	// ResponseWriter that it was given, for example w.WriteHeader(http.StatusNoContent), and return. A request is
	// charged if
	//
	//   - its handler writes nothing, panics, takes the connection over, calls Unwrap, or writes several statuses
	//     of which one is charged;
	//   - an error handler in front of this middleware writes its status, as in some frameworks, or something writes
	//     past it;
	//   - the client left before there was a status;
	//   - the deadline of its context has passed when the handler returns.
	//
	// If the ResponseWriter in front has the methods Written or Status, as frameworks' writers have, they count too.
	// Nothing else in front may change a status that it was given, because this middleware would not see that.
	//
	// The header fields are sent before the cost comes back. If Charge says at the first status that the cost comes
	// back, Remaining already includes it. Reset still shows the time after the take.
	//
	// If Postgres is away, the cost cannot be given back and stays counted. So does a cost that a FallbackLocal took.
	//
	// Defaults to charging every request.
	Charge func(status int) bool

	// Headers chooses the header fields that tell clients about their limit.
	//
	// Defaults to None: only Retry-After, with a rejection.
	Headers Headers

	// AddFields adds the application's own header fields to responses of requests that are let through. It is called
	// after the fields of Headers are set and before the status is written. If Charge will probably give the cost back,
	// the result's Remaining already includes it. The result's Source tells whether the database decided. For rejected
	// requests, see Reject.
	//
	// Defaults to adding none.
	AddFields func(http.Header, ratelimit.Result)

	// PolicyName is the limit's name in header fields and problems, for clients: printable ASCII without quotes
	// and backslashes.
	//
	// Defaults to the limiter's name.
	PolicyName string

	// Reject answers a request that does not reach the handler: ProblemJSON, PlainText, or any function. A function may
	// choose another status. Retry-After and the fields of Headers are already set.
	//
	// Defaults to ProblemJSON.
	Reject func(http.ResponseWriter, *http.Request, Rejection)

	// OnError answers a request for which the limiter returned an error. New requires either OnError or the limiter's
	// own Config.OnFailure, because one of them has to say what happens while Postgres is away.
	//
	// Defaults to Reject, with status 503.
	OnError func(http.ResponseWriter, *http.Request, error)

	// Logger gets a line when one of these begins, and not one for each request: requests without a usable key, costs
	// that can never be taken, errors, lost refunds, proxies that ByIP does not trust, requests that are charged twice
	// for the same key. What keeps the database from deciding is logged by the limiter's client, see
	// [ratelimit.ClientConfig].Logger.
	//
	// Defaults to slog.Default(). slog.DiscardHandler turns it off.
	Logger *slog.Logger
}

func (c Config) withDefaults(limiter ratelimit.Config) Config {
	if c.PolicyName == "" {
		c.PolicyName = limiter.Name
	}
	if c.Reject == nil {
		c.Reject = ProblemJSON
	}
	return c
}

func (c Config) validate(limiter ratelimit.Config) error {
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
// A denied request is answered with status 429 and a Retry-After in whole seconds. Trying again earlier is useless. If
// Postgres is away and the limiter fails closed or returns an error, the answer is 503. Everything else reaches the
// handler. The handler gets the ResponseWriter itself, unless there is a [Config].Charge.
func New(limiter Limiter, config Config) (func(http.Handler) http.Handler, error) {
	if l, ok := limiter.(*ratelimit.Limiter); limiter == nil || ok && l == nil {
		return nil, errors.New("httplimit: the limiter is nil")
	}
	limits := limiter.Config()
	config = config.withDefaults(limits)
	if err := config.validate(limits); err != nil {
		return nil, err
	}
	m := &middleware{limit: limit{limiter, shapesOf(limits.Policy)}, config: config}
	m.proxies.log = func(r *http.Request, message, write string) {
		m.log(r.Context(), slog.LevelWarn, message, slog.String("write", write))
	}
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { m.serve(w, r, next) })
	}, nil
}

// limit is a limiter and what header fields show of its policy.
type limit struct {
	limiter Limiter
	shapes  []shape
}

type middleware struct {
	limit  limit
	config Config

	// What has been logged.
	keyless, badCost atomic.Bool // logged once and never again, since any client can cause it
	errors, refunds  health
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
	return limit{tier, shapesOf(tier.Config().Policy)}
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
	result, err := limit.limiter.AllowN(r.Context(), key, cost)
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
		m.reject(w, r, Rejection{Status: http.StatusTooManyRequests, RetryAfter: told.RetryAfter, Result: result})
	case m.config.Charge != nil &&
		(result.Source == ratelimit.SourceDatabase || result.Source == ratelimit.SourceLease):
		m.serveAndSettle(w, r, next, charge{limit: limit, cost: cost, result: result})
	default:
		m.setHeaders(w.Header(), limit, result, result.Remaining)
		next.ServeHTTP(w, r)
	}
}

// setHeaders sets the fields of Config.Headers, unless nothing is known about the key. It adds those of
// Config.AddFields if the request is allowed.
func (m *middleware) setHeaders(header http.Header, limit limit, result ratelimit.Result, remaining int64) {
	if result.Source != ratelimit.SourceFailedOpen {
		m.config.Headers.set(header, m.config.PolicyName, limit.shapes, result, remaining)
	}
	if result.Allowed && m.config.AddFields != nil {
		result.Remaining = remaining
		m.config.AddFields(header, result)
	}
}

// rejectKey answers a request without a key, or with one that cannot be stored.
func (m *middleware) rejectKey(w http.ResponseWriter, r *http.Request, err error) {
	if !m.keyless.Swap(true) {
		reason := err
		if own, ok := errors.AsType[*KeyError](err); ok {
			reason = own
		} else if !errors.Is(err, ratelimit.ErrInvalidKey) { // from a function given to ByFunc; may show personal data
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
	// The request's own deadline says nothing about the limiter. The limiter's client logs trouble with the database.
	if r.Context().Err() == nil && !pg.IsTrouble(err) && m.errors.changed(err) {
		m.warn(r.Context(), "httplimit: the limiter fails; further errors are not logged until it decides again", err)
	}
	if m.config.OnError != nil {
		m.config.OnError(w, r, err)
		return
	}
	m.reject(w, r, Rejection{Status: http.StatusServiceUnavailable, Err: err})
}

// reject answers a request, with a Retry-After of at least a second unless its status is 400.
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

// calm is the shortest failure whose recovery is logged. So short failures do not fill the log.
const calm = 10 * time.Second

// health tells whether something works, so that only changes are logged.
type health struct{ failing atomic.Int64 } // since when, in nanoseconds since 1970; 0 if it works

// changed records an attempt, and tells whether failing has begun or ended.
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
