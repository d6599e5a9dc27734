package grpclimit_test

import (
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/grpclimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// These are the methods of the tests' service, in the form that protoc generates. A method's answer depends on the text
// of the request.
const (
	logIn = "/shop.Account/LogIn" // unary
	watch = "/shop.Account/Watch" // a stream that answers each message with the same text
)

// right is the text that succeeds. For every other text, the handler returns Unauthenticated.
const right = "right"

type account struct{}

func (account) answer(text string) error {
	if text != right {
		return status.Error(codes.Unauthenticated, "wrong")
	}
	return nil
}

var description = grpc.ServiceDesc{
	ServiceName: "shop.Account",
	HandlerType: (*any)(nil),
	Methods: []grpc.MethodDesc{{
		MethodName: "LogIn",
		Handler: func(
			service any, ctx context.Context, decode func(any) error, interceptor grpc.UnaryServerInterceptor,
		) (any, error) {
			request := &wrapperspb.StringValue{}
			if err := decode(request); err != nil {
				return nil, err
			}
			handler := func(ctx context.Context, request any) (any, error) {
				in := request.(*wrapperspb.StringValue)
				if err := service.(account).answer(in.GetValue()); err != nil {
					return nil, err
				}
				return in, nil
			}
			return interceptor(ctx, request, &grpc.UnaryServerInfo{Server: service, FullMethod: logIn}, handler)
		},
	}},
	Streams: []grpc.StreamDesc{{
		StreamName: "Watch", ServerStreams: true, ClientStreams: true,
		Handler: func(service any, stream grpc.ServerStream) error {
			for {
				message := &wrapperspb.StringValue{}
				if err := stream.RecvMsg(message); err != nil {
					return nil // the client has sent its last message
				}
				if err := service.(account).answer(message.GetValue()); err != nil {
					return err
				}
				if err := stream.SendMsg(message); err != nil {
					return err
				}
			}
		},
	}},
}

// connect starts the service on server, and returns a client's connection to it.
func connect(t *testing.T, server *grpc.Server) *grpc.ClientConn {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	return connectOver(t, server, listener, listener.Addr().String())
}

func connectOver(t *testing.T, server *grpc.Server, listener net.Listener, target string) *grpc.ClientConn {
	t.Helper()
	server.RegisterService(&description, account{})
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	conn, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, conn.Close())
		server.Stop()
		require.NoError(t, <-served)
	})
	return conn
}

// limited returns a connection to a server behind a limiter.
func limited(t *testing.T, limiter httplimit.Limiter, config grpclimit.Config) *grpc.ClientConn {
	t.Helper()
	return connect(t, limitedServer(t, limiter, config))
}

func limitedServer(t *testing.T, limiter httplimit.Limiter, config grpclimit.Config) *grpc.Server {
	t.Helper()
	limit, err := grpclimit.New(limiter, config)
	require.NoError(t, err)
	return grpc.NewServer(grpc.ChainUnaryInterceptor(limit.Unary), grpc.ChainStreamInterceptor(limit.Stream))
}

// call calls LogIn.
func call(ctx context.Context, conn *grpc.ClientConn, text string) error {
	return conn.Invoke(ctx, logIn, wrapperspb.String(text), &wrapperspb.StringValue{})
}

// codesOf calls LogIn with each text, and returns the codes.
func codesOf(t *testing.T, conn *grpc.ClientConn, texts ...string) (got []codes.Code) {
	t.Helper()
	for _, text := range texts {
		got = append(got, status.Code(call(t.Context(), conn, text)))
	}
	return got
}

// retryDelay returns the time in the RetryInfo of an error, or 0 without a RetryInfo.
func retryDelay(t *testing.T, err error) time.Duration {
	t.Helper()
	answer, ok := status.FromError(err)
	require.True(t, ok)
	require.LessOrEqual(t, len(answer.Details()), 1)
	for _, detail := range answer.Details() {
		info, ok := detail.(*errdetails.RetryInfo)
		require.True(t, ok, "%T", detail)
		require.Positive(t, info.GetRetryDelay().AsDuration())
		return info.GetRetryDelay().AsDuration()
	}
	return 0
}

// patient is a limiter whose refunds never time out.
type patient struct{ *ratelimit.Limiter }

func (p patient) Refund(ctx context.Context, result ratelimit.Result) (ratelimit.Balance, error) {
	return p.Limiter.Refund(context.WithoutCancel(ctx), result)
}

// fakeLimiter returns a prepared result, and records its calls.
type fakeLimiter struct {
	name   string // defaults to login
	result ratelimit.Result
	err    error

	mu       sync.Mutex
	keys     []string
	costs    []int64
	refunded int
}

func (f *fakeLimiter) Config() ratelimit.Config {
	name := f.name
	if name == "" {
		name = "login"
	}
	return ratelimit.Config{
		Name: name, Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Minute}, OnFailure: ratelimit.ReturnError(),
	}
}

func (f *fakeLimiter) AllowN(_ context.Context, key string, n int64) (ratelimit.Result, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.keys, f.costs = append(f.keys, key), append(f.costs, n)
	return f.result, f.err
}

// Hold is not used by the tests with a fakeLimiter.
func (f *fakeLimiter) Hold(context.Context, string, int64, time.Duration) (ratelimit.HoldResult, error) {
	return ratelimit.HoldResult{}, f.err
}

// TryAcquire is not used by the tests with a fakeLimiter.
func (f *fakeLimiter) TryAcquire(context.Context, string, ratelimit.SlotOptions) (ratelimit.SlotResult, error) {
	return ratelimit.SlotResult{}, f.err
}

func (f *fakeLimiter) Refund(context.Context, ratelimit.Result) (ratelimit.Balance, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.refunded++
	return ratelimit.Balance{}, nil
}

func allowing() *fakeLimiter { return &fakeLimiter{result: ratelimit.Result{Allowed: true, Limit: 10}} }
