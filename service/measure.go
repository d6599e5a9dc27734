package service

import (
	"context"
	"net"
	"net/http"
	"sync"
	"time"

	pb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	client "github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// These are the values of the label door. The processes at the Go door measure their requests themselves.
const (
	doorGRPC = "grpc"
	doorHTTP = "http"
	doorGo   = "go"
)

// These are the values of the label answer.
const (
	answerAllowed = "allowed" // or done
	answerDenied  = "denied"
	answerRefused = "refused" // the request is wrong
	answerFailed  = "failed"  // Postgres or the service is at fault
	answerLeft    = "left"    // the caller has left
)

// interceptor measures the requests over gRPC.
func (m *metrics) interceptor(
	ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler,
) (any, error) {
	begin := time.Now()
	response, err := handler(ctx, request)
	if info.FullMethod == pb.RateLimitService_ShouldRateLimit_FullMethodName {
		decided, _ := response.(*pb.RateLimitResponse)
		m.observe(doorGRPC, answerOf(decided, err), begin)
	}
	return response, err
}

func answerOf(response *pb.RateLimitResponse, err error) string {
	switch status.Code(err) {
	case codes.OK:
		if response.GetOverallCode() == pb.RateLimitResponse_OVER_LIMIT {
			return answerDenied
		}
		return answerAllowed
	case codes.Canceled, codes.DeadlineExceeded:
		return answerLeft
	case codes.Unknown, codes.InvalidArgument, codes.Unauthenticated:
		return answerRefused
	default:
		return answerFailed
	}
}

// measured measures the requests over HTTP that a handler answers.
func (m *metrics) measured(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		begin := time.Now()
		seen := &statusWriter{ResponseWriter: w, status: http.StatusOK}
		h.ServeHTTP(seen, r)
		answer := answerAllowed
		switch {
		case r.Context().Err() != nil:
			answer = answerLeft
		case seen.status >= http.StatusInternalServerError:
			answer = answerFailed
		case seen.status == http.StatusTooManyRequests:
			answer = answerDenied
		case seen.status >= http.StatusBadRequest:
			answer = answerRefused
		}
		m.observe(doorHTTP, answer, begin)
	})
}

// statusWriter remembers the status of a response.
type statusWriter struct {
	http.ResponseWriter

	status int
}

func (w *statusWriter) WriteHeader(code int) {
	w.status = code
	w.ResponseWriter.WriteHeader(code)
}

// Unwrap is for http.ResponseController.
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// counted counts the open connections of a listener.
type counted struct {
	net.Listener

	open client.Gauge
}

func (l counted) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.open.Inc()
	return &countedConn{Conn: conn, closed: sync.OnceFunc(l.open.Dec)}, nil
}

type countedConn struct {
	net.Conn

	closed func()
}

func (c *countedConn) Close() error {
	c.closed()
	return c.Conn.Close()
}
