package service

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	rls "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	pb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/door"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// answer is what a door says about a key.
type answer struct {
	allowed bool
	counted bool // the database has decided, and not OnFailure
}

// caller asks on one door.
type caller struct {
	name string
	ask  func(ctx context.Context, key string) (answer, error)
}

// how says how callers ask. The zero value is good for a Unix socket.
type how struct {
	limit     int64 // of all keys; for the Go door, whose clients know their policies
	tls       *tls.Config
	token     string
	onFailure ratelimit.FailureMode // for the Go door
	allows    bool                  // whether OnFailure allows
	direct    ratelimit.DBTX        // for the Go door
}

// callers returns a caller for each door of some instances. It asks the first instance that it can connect to.
func callers(t *testing.T, h how, of ...*instance) []caller {
	t.Helper()
	return []caller{
		{"gRPC", overGRPC(t, h, of)},
		{"HTTP", overHTTP(t, h, of)},
		{"Go door", throughDoor(t, h, of[0])},
	}
}

// dialer returns a function that connects to the first address that is there.
func dialer(of []*instance, address func(*instance) string) func(ctx context.Context) (net.Conn, error) {
	return func(ctx context.Context) (conn net.Conn, err error) {
		for _, s := range of {
			network, addr := door.Network(address(s))
			if conn, err = (&net.Dialer{}).DialContext(ctx, network, addr); err == nil {
				return conn, nil
			}
		}
		return nil, err
	}
}

func overGRPC(t *testing.T, h how, of []*instance) func(context.Context, string) (answer, error) {
	t.Helper()
	creds := insecure.NewCredentials()
	if h.tls != nil {
		creds = credentials.NewTLS(h.tls)
	}
	dial := dialer(of, func(s *instance) string { return s.grpc })
	conn, err := grpc.NewClient("passthrough:///localhost", grpc.WithTransportCredentials(creds),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return dial(ctx) }),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1, MaxDelay: 20 * time.Millisecond},
			MinConnectTimeout: testkit.Amply,
		}))
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	client := pb.NewRateLimitServiceClient(conn)
	return func(ctx context.Context, key string) (answer, error) {
		if h.token != "" {
			ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+h.token)
		}
		got, err := client.ShouldRateLimit(ctx, &pb.RateLimitRequest{Domain: "shop", Descriptors: []*rls.RateLimitDescriptor{
			{Entries: []*rls.RateLimitDescriptor_Entry{{Key: "user", Value: key}}},
		}})
		if err != nil {
			return answer{}, err
		}
		allowed := got.GetOverallCode() == pb.RateLimitResponse_OK
		// An OnFailure that allows says that nothing remains. So does the database after the last unit.
		return answer{allowed, !h.allows || !allowed || got.GetStatuses()[0].GetLimitRemaining() > 0}, nil
	}
}

// row is the key for HTTP and the Go door that counts what Envoy's key counts.
func row(key string) string { return "user=" + key + " year" }

func overHTTP(t *testing.T, h how, of []*instance) func(context.Context, string) (answer, error) {
	t.Helper()
	dial := dialer(of, func(s *instance) string { return s.http })
	transport := &http.Transport{
		DialContext:     func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
		TLSClientConfig: h.tls, MaxIdleConnsPerHost: 100,
	}
	t.Cleanup(transport.CloseIdleConnections)
	url := "http://127.0.0.1/v1/ask"
	if h.tls != nil {
		url = "https://127.0.0.1/v1/ask"
	}
	return func(ctx context.Context, key string) (answer, error) {
		body, err := json.Marshal(map[string]string{"limiter": "envoy:shop", "key": row(key)})
		if err != nil {
			return answer{}, err
		}
		request, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
		if err != nil {
			return answer{}, err
		}
		request.Header.Set("Content-Type", "application/json")
		request.Header.Set("Authorization", "Bearer "+h.token)
		response, err := transport.RoundTrip(request)
		if err != nil {
			return answer{}, err
		}
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		if err != nil {
			return answer{}, err
		}
		if response.StatusCode != http.StatusOK && response.StatusCode != http.StatusTooManyRequests {
			return answer{}, fmt.Errorf("status %d: %s", response.StatusCode, text)
		}
		var got struct{ Source string }
		err = json.Unmarshal(text, &got)
		return answer{response.StatusCode == http.StatusOK, got.Source == "database" || got.Source == "cached denial"}, err
	}
}

func throughDoor(t *testing.T, h how, s *instance) func(context.Context, string) (answer, error) {
	t.Helper()
	of, err := ratelimit.NewService(s.door, ratelimit.ServiceConfig{TLS: h.tls, Token: h.token, Direct: h.direct})
	require.NoError(t, err)
	t.Cleanup(of.Close)
	l, err := ratelimit.New(of, ratelimit.Config{
		Name: "envoy:shop", Policy: ratelimit.FixedWindow{Limit: h.limit, Window: 365 * 24 * time.Hour, Align: true},
		Durable: true, OnFailure: h.onFailure,
	})
	require.NoError(t, err)
	return func(ctx context.Context, key string) (answer, error) {
		got, err := l.Allow(ctx, row(key))
		return answer{got.Allowed, got.Source <= ratelimit.SourceCachedDenial}, err
	}
}
