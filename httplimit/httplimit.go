// Package httplimit puts a limit of package ratelimit in front of an [http.Handler].
//
// [New] makes a middleware of a limiter: a function from handler to handler, for net/http and everything that takes such functions.
// [Config].Key says whom a request is charged to, such as [ByIP]. What is forged counts for nothing: addresses in headers are
// believed only behind proxies that were named, and then only the last one that is not theirs.
//
// A request that is denied gets status 429 and a Retry-After that is true: it says the time at which the same request is allowed if
// nobody else takes anything, in whole seconds, rounded up. What happens while Postgres is away has to be chosen, see [New].
//
// On top of the limiter's own call this takes half a microsecond and 3 allocations with [ByIP] and [IETFDraft11], one microsecond
// and 4 behind a proxy, the same for keys in [HMAC], and 6 allocations for a denial. To give back the cost of a request, see
// [Config].Charge, takes another call of the limiter, before the response ends.
//
// It knows nothing of gRPC, where a denial is ResourceExhausted with a RetryInfo, and a failure of the store Unavailable.
package httplimit

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// statusClientClosedRequest is what other servers log for a client that has left. It is not there to read it, but the 200 of a
// handler that writes nothing would look like a success.
const statusClientClosedRequest = 499

// Limiter is what New needs of a [ratelimit.Limiter].
type Limiter interface {
	// Name is the default of Config.PolicyName, and Policy is shown in header fields.
	Name() string
	Policy() ratelimit.Policy
	// OnFailure tells what was chosen for the time when Postgres is away.
	OnFailure() ratelimit.FailureMode
	AllowN(ctx context.Context, key string, n int64) (ratelimit.Result, error)
	// Refund gives back what AllowN has taken, by its result. It is called if there is a Config.Charge.
	Refund(ctx context.Context, result ratelimit.Result) (ratelimit.Result, error)
}

var _ Limiter = (*ratelimit.Limiter)(nil)

// Config says how requests are limited. Key is required.
type Config struct {
	// Key says whom a request is charged to: ByIP, ByHeader, ByContext, ByFunc, or several of them in Join. A request without a
	// key is rejected, with status 400.
	Key Key

	// Skip tells which requests are not limited at all.
	//
	// Defaults to none.
	Skip func(*http.Request) bool

	// Cost is what a request takes. One that costs nothing passes without a question, and one that costs more than the whole
	// limit, or less than nothing, is rejected, with status 400.
	//
	// Defaults to 1 for each.
	Cost func(*http.Request) int64

	// Charge tells by the status of the response whether the request is charged: ChargeFailures, ChargeSuccesses,
	// ChargeAllButServerErrors, or any function. The cost is taken first, so within a window no more requests are let in than the
	// limit allows, whatever becomes of them; slow ones of earlier windows may still run beside them. It is given back when the
	// handler is done, as far as it still counts: see [ratelimit.Limiter.Refund].
	//
	// In doubt it stays taken, whatever Charge would say. For its cost to come back, a handler has to write a status, or something of
	// the response, to the ResponseWriter that it was given, before it returns: w.WriteHeader(http.StatusNoContent), say. One that writes
	// nothing, or panics before it does, is charged; so is one whose status is written by an error handler in front of this middleware,
	// or past it, as some frameworks do. It stays taken as well if the client has left before there was a status. What cannot be given
	// back, because Postgres is away, stays counted, and so does what a FallbackLocal has taken.
	//
	// Defaults to charging every request.
	Charge func(status int) bool

	// Headers is which header fields tell the client about its limit.
	//
	// Defaults to None: only Retry-After, with a rejection.
	Headers Headers

	// PolicyName is how clients see the limit, in header fields and problems: printable ASCII without quotes and backslashes.
	//
	// Defaults to the limiter's name.
	PolicyName string

	// Reject answers a request that does not reach the handler: ProblemJSON, PlainText, or any function, which may choose another
	// status. Retry-After and the fields of Headers are set before.
	//
	// Defaults to ProblemJSON.
	Reject func(http.ResponseWriter, *http.Request, Rejection)

	// OnError answers a request that the limiter has returned an error for. It is one way to choose what happens while Postgres is
	// away; the limiter's own Config.OnFailure is the other, and New refuses a limiter with neither.
	//
	// Defaults to Reject, with status 503.
	OnError func(http.ResponseWriter, *http.Request, error)

	// Logger is told of requests without a usable key, of errors and of refunds that get lost: once when they begin, and not for
	// each request.
	//
	// Defaults to nil: nothing is logged.
	Logger *slog.Logger
}

func (c Config) withDefaults(limiter Limiter) Config {
	if c.PolicyName == "" {
		c.PolicyName = limiter.Name()
	}
	if c.Reject == nil {
		c.Reject = ProblemJSON
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

func (c Config) validate(limiter Limiter) error {
	if err := c.Key.usable(); err != nil {
		return &ConfigError{Field: "Key", Reason: err.Error()}
	}
	unprintable := func(c rune) bool { return c < ' ' || c > '~' || c == '"' || c == '\\' }
	switch {
	case c.PolicyName == "" || strings.ContainsFunc(c.PolicyName, unprintable):
		return &ConfigError{Field: "PolicyName", Reason: "(by default the limiter's name) must be printable ASCII without quotes and backslashes, and is " +
			strconv.Quote(c.PolicyName)}
	case c.Headers < None || c.Headers > GitHub:
		return &ConfigError{Field: "Headers", Reason: "must be None, IETFDraft11, XRateLimit or GitHub"}
	case c.OnError == nil && limiter.OnFailure() == ratelimit.FailureMode{}:
		return &ConfigError{Field: "OnError", Reason: "is required for this limiter: nothing says what happens to requests while Postgres is away. " +
			"Set it, or OnFailure in the limiter's ratelimit.Config: FailOpen, FailClosed, FallbackLocal, or ReturnError, which rejects with status 503"}
	}
	return nil
}

// ConfigError says which field of a [Config] New has refused, and why.
type ConfigError struct {
	Field  string
	Reason string // completes the sentence that Field begins
}

func (e *ConfigError) Error() string { return "httplimit: Config." + e.Field + " " + e.Reason }

// New returns a middleware that lets through to a handler what the limiter allows. It returns a *ConfigError for a configuration
// that cannot work.
//
// A request that is denied is answered with status 429, and Retry-After, in whole seconds: no sooner does it make sense to try
// again. One that nobody could decide about, because Postgres is away and the limiter fails closed or returns an error, is answered
// with 503. Everything else reaches the handler, with the ResponseWriter as it is unless there is a [Config].Charge.
func New(limiter Limiter, config Config) (func(http.Handler) http.Handler, error) {
	if l, ok := limiter.(*ratelimit.Limiter); limiter == nil || ok && l == nil {
		return nil, errors.New("httplimit: the limiter is nil")
	}
	config = config.withDefaults(limiter)
	if err := config.validate(limiter); err != nil {
		return nil, err
	}
	m := &middleware{limiter: limiter, policy: limiter.Policy(), config: config}
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { m.serve(w, r, next) })
	}, nil
}

type middleware struct {
	limiter Limiter
	policy  ratelimit.Policy
	config  Config

	// What has been logged.
	keyless, badCost atomic.Bool // it happens at all, since anybody can make it happen
	errors, refunds  health
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
	key, err := m.config.Key.Of(r)
	if err != nil {
		m.rejectKey(w, r, err)
		return
	}
	result, err := m.limiter.AllowN(r.Context(), key, cost)
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
		m.setHeaders(w.Header(), result, result.Remaining)
		m.reject(w, r, Rejection{Status: http.StatusTooManyRequests, RetryAfter: result.RetryAfter, Result: result})
	case m.config.Charge != nil && result.Source == ratelimit.SourceDatabase:
		m.serveAndSettle(w, r, next, charge{cost: cost, result: result})
	default:
		m.setHeaders(w.Header(), result, result.Remaining)
		next.ServeHTTP(w, r)
	}
}

// setHeaders sets the fields of Config.Headers, unless nothing is known about the key.
func (m *middleware) setHeaders(header http.Header, result ratelimit.Result, remaining int64) {
	if result.Source != ratelimit.SourceFailedOpen {
		m.config.Headers.set(header, m.config.PolicyName, m.policy, result, remaining)
	}
}

// rejectKey answers a request without a key, or with one that cannot be stored.
func (m *middleware) rejectKey(w http.ResponseWriter, r *http.Request, err error) {
	if !m.keyless.Swap(true) {
		reason := err
		if own, ok := errors.AsType[*KeyError](err); ok {
			reason = own
		} else if !errors.Is(err, ratelimit.ErrInvalidKey) { // of a function given to ByFunc: who knows what is in it
			reason = &KeyError{Reason: "Config.Key returned an error"}
		}
		m.warn(r.Context(), "httplimit: a request has no usable key, and is rejected; further ones are not logged", reason)
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
			m.warn(r.Context(), "httplimit: a request has a cost that can never be taken, and is rejected; further ones are not logged", err)
		}
		m.reject(w, r, Rejection{Status: http.StatusBadRequest, Err: err})
		return
	}
	// A deadline of the request's own says nothing about the limiter.
	if r.Context().Err() == nil && m.errors.changed(err) {
		m.warn(r.Context(), "httplimit: the limiter fails; further errors are not logged until it decides again", err)
	}
	if m.config.OnError != nil {
		m.config.OnError(w, r, err)
		return
	}
	m.reject(w, r, Rejection{Status: http.StatusServiceUnavailable, Err: err})
}

// reject answers a request. A rejection that is over sometime gets a Retry-After of at least a second.
func (m *middleware) reject(w http.ResponseWriter, r *http.Request, rejection Rejection) {
	rejection.Policy = m.config.PolicyName
	if rejection.Status != http.StatusBadRequest {
		seconds := max(1, wholeSeconds(rejection.RetryAfter))
		rejection.RetryAfter = time.Duration(seconds) * time.Second
		w.Header().Set("Retry-After", strconv.FormatInt(seconds, 10))
	}
	m.config.Reject(w, r, rejection)
}

// warn logs an error in which there is no key.
func (m *middleware) warn(ctx context.Context, message string, err error) {
	m.config.Logger.LogAttrs(ctx, slog.LevelWarn, message, slog.String("policy", m.config.PolicyName), slog.Any("error", err))
}

func (m *middleware) info(ctx context.Context, message string) {
	m.config.Logger.LogAttrs(ctx, slog.LevelInfo, message, slog.String("policy", m.config.PolicyName))
}

// calm is how long something has to fail at least before it is said to work again: what fails now and then is logged now and then.
const calm = 10 * time.Second

// health is whether something works, so that only changes are logged.
type health struct{ failing atomic.Int64 } // since when, in nanoseconds since 1970; 0: it works

// changed tells whether the last attempt went otherwise than those before.
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
