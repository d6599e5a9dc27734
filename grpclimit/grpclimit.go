// Package grpclimit puts a limit of package ratelimit in front of a gRPC server. The package is a separate module, so
// that programs without it do not depend on gRPC.
//
// [New] turns a limiter into interceptors, one for unary calls and one for streams. A stream counts as one call when it
// opens, and its messages do not count. A limiter with [ratelimit.Concurrency] limits how many calls and open streams
// of a key run at once.
//
// [Config].Key finds the key that a call takes from. The keys are those of package httplimit, because a gRPC call is an
// HTTP request: its path is the full method, and its header is the metadata. [httplimit.ByIP] uses the address of the
// peer, or of the client behind trusted proxies. [httplimit.ByHeader] uses a value of the metadata. [ByFunc] uses any
// function. [httplimit.Join] and [httplimit.HMAC] make keys of other keys.
//
// An allowed call reaches the handler. All other calls get one of these codes:
//
//   - ResourceExhausted: the call is denied. RetryInfo says when the same call is allowed if nobody else takes
//     anything. See also [Config].FullCode.
//   - Unavailable: the limiter could not decide, because Postgres is unreachable or a transaction has locked the key's
//     row. RetryInfo has the retry time if it is known. The limiter's OnFailure may allow calls while Postgres is
//     unreachable: see [ratelimit.Config].
//   - InvalidArgument: the call has no usable key, or a cost that can never be taken.
//   - Canceled or DeadlineExceeded: the call's context ended before the decision.
package grpclimit

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/url"
	"reflect"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
)

// Config says how calls are limited. Key is required.
type Config struct {
	// Key finds the key that a call takes from. It is httplimit.ByIP, httplimit.ByHeader, ByFunc, or several of them in
	// httplimit.Join. A call without a key is rejected with InvalidArgument. Peers on a Unix socket have no address:
	// for a proxy on a Unix socket, see httplimit.TrustUnixSocket.
	Key httplimit.Key

	// Tier returns the limiter of a call, or nil for the limiter that New was given: see [httplimit.Config].
	//
	// Defaults to the limiter that New was given, for all calls.
	Tier func(ctx context.Context, fullMethod string) httplimit.Limiter

	// Cost returns what a call takes. A call with cost 0, such as a health check, passes without asking the limiter. A
	// call with a cost below 0, or above the whole limit, is rejected with InvalidArgument.
	//
	// Defaults to 1 for each call.
	Cost func(ctx context.Context, fullMethod string) int64

	// Charge tells whether a call that ends with the given code is charged. It is ChargeFailures, or any other
	// function. Each call takes its cost before the handler runs. If Charge returns false, and the cost still counts,
	// it is given back after the handler has returned: see [ratelimit.Limiter.Refund].
	//
	// In doubt the call is charged: if the handler panics, or if the call's context has ended when the handler returns.
	// Charge sees the code of the handler and of the interceptors after this one. So put interceptors that change codes
	// after this one in the chain.
	//
	// While Postgres is unreachable, costs cannot be given back and stay counted. A cost that FallbackLocal took stays
	// counted too.
	//
	// Defaults to charging every call.
	Charge func(codes.Code) bool

	// HoldFor is for costs that are known only afterwards: see [httplimit.Config].HoldFor. A handler calls
	// [httplimit.Settle] and [httplimit.Extend] with its context. If it does not, the whole Cost counts, or nothing if
	// Charge returns false.
	//
	// Defaults to 0: the cost is taken, not held.
	HoldFor time.Duration

	// SlotTTL is how long the slot of a call lasts after its last renewal, if the limiter's policy has slots: see
	// [httplimit.Config].SlotTTL. A stream has its slot until its handler returns. The context of a call ends if its
	// slot is lost, and [httplimit.SlotOf] returns the slot.
	//
	// Defaults to 30 seconds.
	SlotTTL time.Duration

	// FullCode is the code of a call that finds no free slot: ResourceExhausted, or Unavailable if the limit protects
	// the server rather than sharing it among clients.
	//
	// Defaults to ResourceExhausted.
	FullCode codes.Code

	// Logger gets the lines of [httplimit.Config].Logger. These lines begin with the word httplimit.
	//
	// Defaults to slog.Default(). A logger with slog.DiscardHandler drops all lines.
	Logger *slog.Logger
}

// ChargeFailures is a Config.Charge that charges a call unless its code is OK. It is for passwords and other secrets
// that clients could guess.
func ChargeFailures(code codes.Code) bool { return code != codes.OK }

// ByFunc uses the key that the function find returns. A key is at most 512 bytes of UTF-8 without NUL. Inside
// httplimit.HMAC, a key may be any bytes. For a call without a key, find must return an error. If it returned a
// constant instead, all such calls would share one limit.
func ByFunc(find func(ctx context.Context, fullMethod string) (string, error)) httplimit.Key {
	if find == nil {
		return httplimit.ByFunc(nil) // New refuses this
	}
	return httplimit.ByFunc(func(r *http.Request) (string, error) { return find(r.Context(), r.URL.Path) })
}

// Interceptors apply a limit. Pass them to [grpc.ChainUnaryInterceptor] and [grpc.ChainStreamInterceptor]. They are
// safe for concurrent use.
type Interceptors struct {
	limit func(http.Handler) http.Handler
}

var (
	_ grpc.UnaryServerInterceptor  = (*Interceptors)(nil).Unary
	_ grpc.StreamServerInterceptor = (*Interceptors)(nil).Stream
)

// New returns interceptors for a limiter. It returns a [*ratelimit.ConfigError] for a configuration that cannot work.
// New refuses a limiter without OnFailure, because the application must choose what happens while Postgres is
// unreachable.
func New(limiter httplimit.Limiter, config Config) (*Interceptors, error) {
	if l, ok := limiter.(*ratelimit.Limiter); limiter == nil || ok && l == nil {
		return nil, errors.New("grpclimit: the limiter is nil")
	}
	limits := limiter.Config()
	if limits.OnFailure == (ratelimit.FailureMode{}) {
		return nil, &ratelimit.ConfigError{Field: "Config.OnFailure", Reason: "is required for grpclimit: " +
			"nothing says what happens to calls while Postgres is away. " +
			"Choose FailOpen, FailClosed, FallbackLocal, or ReturnError, which rejects with Unavailable"}
	}
	web := httplimit.Config{
		Key:        config.Key,
		PolicyName: strings.Map(printable, limits.Name), // for the log
		Reject:     reject,
		HoldFor:    config.HoldFor,
		SlotTTL:    config.SlotTTL,
		Logger:     config.Logger,
	}
	switch config.FullCode {
	case codes.OK, codes.ResourceExhausted:
	case codes.Unavailable:
		web.FullStatus = http.StatusServiceUnavailable
	default:
		return nil, &ratelimit.ConfigError{Field: "grpclimit.Config.FullCode", Reason: "must be ResourceExhausted or " +
			"Unavailable, and is " + config.FullCode.String()}
	}
	if config.Tier != nil {
		web.Tier = func(r *http.Request) httplimit.Limiter { return config.Tier(r.Context(), r.URL.Path) }
	}
	if config.Cost != nil {
		web.Cost = func(r *http.Request) int64 { return config.Cost(r.Context(), r.URL.Path) }
	}
	if config.Charge != nil {
		web.Charge = func(status int) bool { return config.Charge(codes.Code(status - statusOK)) }
	}
	limit, err := httplimit.New(limiter, web)
	if refused, ok := errors.AsType[*ratelimit.ConfigError](err); ok {
		field := strings.Replace(refused.Field, "httplimit.", "grpclimit.", 1)
		return nil, &ratelimit.ConfigError{Field: field, Reason: refused.Reason}
	}
	if err != nil {
		return nil, err
	}
	return &Interceptors{limit}, nil
}

// printable replaces a character that httplimit refuses in the name of a policy.
func printable(c rune) rune {
	if c < ' ' || c > '~' || c == '"' || c == '\\' {
		return '?'
	}
	return c
}

// Unary is a [grpc.UnaryServerInterceptor].
func (i *Interceptors) Unary(
	ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler,
) (response any, err error) {
	err = i.pass(ctx, info.FullMethod, func(ctx context.Context) error {
		response, err = handler(ctx, request)
		return err
	})
	return response, err
}

// Stream is a [grpc.StreamServerInterceptor].
func (i *Interceptors) Stream(
	server any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler,
) error {
	return i.pass(stream.Context(), info.FullMethod, func(ctx context.Context) error {
		return handler(server, &streamIn{stream, ctx})
	})
}

// streamIn is a stream with the context of a call, which may have a hold or a slot.
type streamIn struct {
	grpc.ServerStream

	ctx context.Context //nolint:containedctx // a grpc.ServerStream has its context
}

func (s *streamIn) Context() context.Context { return s.ctx }

// pass hands a call to httplimit as an HTTP request, and returns the error that the client gets.
func (i *Interceptors) pass(ctx context.Context, fullMethod string, handle func(context.Context) error) error {
	// This error stays only if the client has left, because httplimit then writes no answer.
	c := &call{handle: handle, outcome: status.FromContextError(context.Canceled).Err()}
	if stream := grpc.ServerTransportStreamFromContext(ctx); stream != nil && reflect.ValueOf(stream).Comparable() {
		c.stream = stream
	}
	i.limit(c).ServeHTTP(c, request(ctx, fullMethod))
	return c.outcome
}

func request(ctx context.Context, fullMethod string) *http.Request {
	values, _ := metadata.FromIncomingContext(ctx)
	header := make(http.Header, len(values))
	for name, value := range values {
		header[http.CanonicalHeaderKey(name)] = value
	}
	r := &http.Request{
		Method: http.MethodPost, URL: &url.URL{Path: fullMethod}, Header: header, Body: http.NoBody,
		RemoteAddr: "unknown", // an empty RemoteAddr would count as a Unix socket
	}
	switch p, ok := peer.FromContext(ctx); {
	case !ok || p.Addr == nil:
	case p.Addr.Network() == "unix":
		r.RemoteAddr = "@"
	default:
		r.RemoteAddr = cmp.Or(p.Addr.String(), r.RemoteAddr)
	}
	return r.WithContext(ctx)
}

// call is a gRPC call in the form that httplimit needs: it is the handler and the ResponseWriter.
type call struct {
	stream  any                         // identifies the call; nil if it is unknown
	handle  func(context.Context) error // the rest of the chain
	outcome error                       // the error that the client gets, or nil
	header  http.Header
}

// statusOK is the HTTP status for the code OK. The status for another code is statusOK plus the code. httplimit ignores
// a status below 200.
const statusOK = 200

// ServeHTTP handles an allowed call. It writes the code as an HTTP status, for Config.Charge.
func (c *call) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.outcome = c.handle(r.Context())
	w.WriteHeader(statusOK + int(codeOf(c.outcome)))
}

// codeOf returns the code that a gRPC server sends for a handler's error.
func codeOf(err error) codes.Code {
	if own, ok := status.FromError(err); ok {
		return own.Code()
	}
	return status.FromContextError(err).Code()
}

// reject sets the error of a call that does not reach the handler.
func reject(w http.ResponseWriter, r *http.Request, rejection httplimit.Rejection) {
	c := w.(*call)
	if err := r.Context().Err(); err != nil && rejection.Err != nil {
		c.outcome = status.FromContextError(err).Err()
		return
	}
	var answer *status.Status
	switch rejection.Status {
	case http.StatusTooManyRequests:
		answer = status.New(codes.ResourceExhausted, "too many calls")
	case http.StatusServiceUnavailable:
		answer = status.New(codes.Unavailable, "the service cannot take this call for now")
	default:
		answer = status.New(codes.InvalidArgument,
			"the call does not say whom it is from, or asks for what is never allowed")
	}
	if after := rejection.Result.RetryAfter; after > 0 {
		info := &errdetails.RetryInfo{RetryDelay: durationpb.New(after)}
		if detailed, err := answer.WithDetails(info); err == nil {
			answer = detailed
		}
	}
	c.outcome = answer.Err()
}

// CallOfGRPC returns a value that identifies the call to httplimit, because each interceptor makes a new HTTP request.
func (c *call) CallOfGRPC() any { return c.stream }

// Header, Write and WriteHeader write an HTTP response that nobody reads.

func (c *call) Header() http.Header {
	if c.header == nil {
		c.header = http.Header{}
	}
	return c.header
}

func (c *call) Write(data []byte) (int, error) { return len(data), nil }

func (c *call) WriteHeader(int) {}
