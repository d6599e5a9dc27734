package service_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	rls "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	pb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	reflection "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/service"
)

// running is a service that a test has started.
type running struct {
	grpc, http, door string // addresses
	dir              string
	pool             *pgxpool.Pool
	log              *syncBuffer
	hangup           chan os.Signal
	end              context.CancelFunc
	ended            chan error
}

// syncBuffer is a bytes.Buffer for concurrent use.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

const loopback = "127.0.0.1:0"

// start starts a service with these files, and ends it after the test.
func start(t *testing.T, files map[string]string, change func(*service.Options)) *running {
	t.Helper()
	s := &running{dir: t.TempDir(), log: &syncBuffer{}, hangup: make(chan os.Signal, 1), ended: make(chan error, 1)}
	for name, content := range files {
		s.write(t, name, content)
	}
	s.pool = pgtest.New(t).Pool
	started := make(chan struct{})
	o := service.Options{
		DB: s.pool, Dir: s.dir, GRPC: loopback, HTTP: loopback, Door: loopback,
		Timeout: time.Minute, Drain: time.Minute, Logger: slog.New(slog.NewTextHandler(s.log, nil)), Hangup: s.hangup,
		Started: func(grpc, http, door net.Addr) {
			s.grpc, s.http, s.door = grpc.String(), "http://"+http.String(), door.String()
			close(started)
		},
	}
	if change != nil {
		change(&o)
	}
	var ctx context.Context
	ctx, s.end = context.WithCancel(context.Background())
	go func() { s.ended <- service.Run(ctx, o) }()
	select {
	case <-started:
	case err := <-s.ended:
		require.NoError(t, err, "the service has ended")
	}
	t.Cleanup(func() {
		s.end()
		require.NoError(t, <-s.ended)
	})
	return s
}

func (s *running) write(t *testing.T, name, content string) {
	t.Helper()
	// As an editor or Kubernetes does: a reader sees the old file or the new one.
	temporary := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(temporary, []byte(content), 0o600))
	require.NoError(t, os.Rename(temporary, filepath.Join(s.dir, name)))
}

// get returns the answer to a GET.
func (s *running) get(t *testing.T, path string) (code int, body string) {
	t.Helper()
	response, err := http.Get(s.http + path) //nolint:noctx // the test has a timeout
	require.NoError(t, err)
	defer response.Body.Close()
	content, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return response.StatusCode, string(content)
}

// ask asks a limiter over HTTP, and returns the status.
func (s *running) ask(t *testing.T, limiter string) int {
	t.Helper()
	response, err := http.Post(s.http+"/v1/ask", "application/json", //nolint:noctx // the test has a timeout
		strings.NewReader(`{"limiter": "`+limiter+`", "key": "user:123"}`))
	require.NoError(t, err)
	defer response.Body.Close()
	return response.StatusCode
}

// dial returns a connection for gRPC.
func (s *running) dial(t *testing.T, how credentials.TransportCredentials) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(s.grpc, grpc.WithTransportCredentials(how))
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn
}

// ask asks as Envoy does.
func ask(ctx context.Context, conn *grpc.ClientConn, domain, key, value string) (pb.RateLimitResponse_Code, error) {
	answer, err := pb.NewRateLimitServiceClient(conn).ShouldRateLimit(ctx, &pb.RateLimitRequest{
		Domain: domain,
		Descriptors: []*rls.RateLimitDescriptor{{
			Entries: []*rls.RateLimitDescriptor_Entry{{Key: key, Value: value}},
		}},
	})
	return answer.GetOverallCode(), err
}

// eventually waits until a condition holds. The files of a service are read every two seconds.
func eventually(t *testing.T, holds func() bool) {
	t.Helper()
	require.Eventually(t, holds, time.Minute, 10*time.Millisecond)
}

// shop returns rules that allow n requests a year for each address.
func shop(n int) string {
	return fmt.Sprintf("domain: shop\ndescriptors:\n- key: address\n  rate_limit: {unit: year, requests_per_unit: %d}\n", n)
}

const login = "limiters:\n- name: login\n  policy: fixed 2/1d\n"

func TestServe(t *testing.T) {
	t.Parallel()
	s := start(t, map[string]string{"shop.yaml": shop(2), "limiters.yaml": login, ".hidden.yaml": "{", "notes.txt": "{"}, nil)
	conn := s.dial(t, insecure.NewCredentials())
	for i := range 3 {
		code, err := ask(t.Context(), conn, "shop", "address", "192.0.2.1")
		require.NoError(t, err)
		require.Equal(t, i == 2, code == pb.RateLimitResponse_OVER_LIMIT)
	}
	health, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{})
	require.NoError(t, err)
	require.Equal(t, healthpb.HealthCheckResponse_SERVING, health.GetStatus())

	for _, want := range []int{http.StatusOK, http.StatusOK, http.StatusTooManyRequests} {
		require.Equal(t, want, s.ask(t, "login"))
	}
	require.Equal(t, http.StatusNotFound, s.ask(t, "row"))
	_, err = s.pool.Exec(t.Context(),
		"INSERT INTO rate_limit_policy (name, mode, policy, comment) VALUES ('row', 'enforce', 'fixed 1/1d', 'a test')")
	require.NoError(t, err)
	eventually(t, func() bool { return s.ask(t, "row") == http.StatusOK })
	require.Equal(t, http.StatusTooManyRequests, s.ask(t, "row"))

	door, err := ratelimit.NewService(s.door, ratelimit.ServiceConfig{})
	require.NoError(t, err)
	defer door.Close()
	l, err := ratelimit.New(door, ratelimit.Config{
		Name: "login", Policy: ratelimit.FixedWindow{Limit: 2, Window: 24 * time.Hour},
	})
	require.NoError(t, err)
	result, err := l.Allow(t.Context(), "user:123")
	require.NoError(t, err)
	require.False(t, result.Allowed, "both count together")

	code, _ := s.get(t, "/healthz")
	require.Equal(t, http.StatusOK, code)
	eventually(t, func() bool {
		code, _ := s.get(t, "/readyz")
		return code == http.StatusOK
	})
	code, metrics := s.get(t, "/metrics")
	require.Equal(t, http.StatusOK, code)
	require.Contains(t, metrics, "ratelimit_decision_duration_seconds_count{")
	require.Contains(t, metrics, "ratelimit_service_configuration_broken 0")
	require.NotContains(t, metrics, "192.0.2.1")
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "it renames tables of the database")
	s := start(t, map[string]string{
		"shop.yaml": shop(2), "limiters.yaml": login + "- name: other\n  policy: fixed 2/1d\n",
	}, nil)
	conn := s.dial(t, insecure.NewCredentials())
	for _, domain := range []string{"shop", "shop", "shop", ""} {
		_, _ = ask(t.Context(), conn, domain, "address", "192.0.2.1")
	}
	for _, limiter := range []string{"login", "login", "login", "unknown"} {
		s.ask(t, limiter)
	}
	_, metrics := s.get(t, "/metrics")
	for _, line := range []string{
		`request_duration_seconds_count{answer="allowed",door="grpc"} 2`,
		`request_duration_seconds_count{answer="denied",door="grpc"} 1`,
		`request_duration_seconds_count{answer="refused",door="grpc"} 1`,
		`request_duration_seconds_count{answer="allowed",door="http"} 2`,
		`request_duration_seconds_count{answer="denied",door="http"} 1`,
		`request_duration_seconds_count{answer="refused",door="http"} 1`,
		`connections{door="go"} 0`, `connections{door="grpc"} 1`,
		fmt.Sprintf(`pool_size %d`, s.pool.Config().MaxConns), `pool_in_use `,
	} {
		require.Contains(t, metrics, "\nratelimit_service_"+line)
	}
	require.Contains(t, metrics, `ratelimit_table_size_bytes{table="ephemeral"} `)
	require.NoError(t, conn.Close())
	eventually(t, func() bool {
		_, metrics := s.get(t, "/metrics")
		return strings.Contains(metrics, `connections{door="grpc"} 0`)
	})

	// What does not work is not measured, and logged once.
	for _, table := range []string{"ephemeral", "sweeper"} {
		_, err := s.pool.Exec(t.Context(), "ALTER TABLE rate_limit_"+table+" RENAME TO gone_"+table)
		require.NoError(t, err)
	}
	require.Equal(t, http.StatusServiceUnavailable, s.ask(t, "other"))
	_, err := ask(t.Context(), s.dial(t, insecure.NewCredentials()), "shop", "address", "192.0.2.2")
	require.Equal(t, codes.Unavailable, status.Code(err))
	for range 2 {
		_, metrics = s.get(t, "/metrics")
	}
	require.Contains(t, metrics, `request_duration_seconds_count{answer="failed",door="http"} 1`)
	require.Contains(t, metrics, `request_duration_seconds_count{answer="failed",door="grpc"} 1`)
	require.NotContains(t, metrics, "ratelimit_table_size_bytes")
	require.Equal(t, 1, strings.Count(s.log.String(), "lacks the tables"))
}

// The service uses a schema that search_path does not name.
func TestSchema(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "it migrates another schema")
	db := pgtest.Empty(t)
	require.NoError(t, migrations.Up(t.Context(), db.InSchema(t, "limits of all")))
	s := start(t, map[string]string{
		"shop.yaml": shop(1), "limiters.yaml": login + "- name: jobs\n  policy: concurrent 1\n",
	}, func(o *service.Options) { o.DB, o.Schema = db.Pool, "limits of all" })
	_, err := db.Pool.Exec(t.Context(), `INSERT INTO "limits of all".rate_limit_policy (name, mode, policy, comment)
		VALUES ('row', 'enforce', 'fixed 1/1d', 'a test')`)
	require.NoError(t, err)
	eventually(t, func() bool { return s.ask(t, "row") == http.StatusOK })
	code, err := ask(t.Context(), s.dial(t, insecure.NewCredentials()), "shop", "address", "192.0.2.1")
	require.NoError(t, err)
	require.Equal(t, pb.RateLimitResponse_OK, code)
	for _, path := range []string{"/v1/ask", "/v1/look", "/v1/hold", "/v1/acquire"} {
		limiter, more := "login", ""
		switch path {
		case "/v1/hold":
			more = `, "cost": 1, "ttl": 60`
		case "/v1/acquire":
			limiter = "jobs"
		}
		response, err := http.Post(s.http+path, "application/json", //nolint:noctx // the test has a timeout
			strings.NewReader(`{"limiter": "`+limiter+`", "key": "user:123"`+more+`}`))
		require.NoError(t, err)
		response.Body.Close()
		require.Equal(t, http.StatusOK, response.StatusCode, path)
	}
	door, err := ratelimit.NewService(s.door, ratelimit.ServiceConfig{})
	require.NoError(t, err)
	defer door.Close()
	l, err := ratelimit.New(door, ratelimit.Config{
		Name: "login", Policy: ratelimit.FixedWindow{Limit: 2, Window: 24 * time.Hour},
	})
	require.NoError(t, err)
	result, err := l.Peek(t.Context(), "user:123")
	require.NoError(t, err)
	require.Zero(t, result.Remaining)
}

// grpcurl and similar programs need no proto file: the service describes itself, as they ask for it.
func TestReflection(t *testing.T) {
	t.Parallel()
	s := start(t, map[string]string{"shop.yaml": shop(1)}, nil)
	conn := s.dial(t, insecure.NewCredentials())
	stream, err := reflection.NewServerReflectionClient(conn).ServerReflectionInfo(t.Context())
	require.NoError(t, err)
	require.NoError(t, stream.Send(&reflection.ServerReflectionRequest{
		MessageRequest: &reflection.ServerReflectionRequest_FileContainingSymbol{
			FileContainingSymbol: "envoy.service.ratelimit.v3.RateLimitService",
		},
	}))
	answer, err := stream.Recv()
	require.NoError(t, err)
	var described descriptorpb.FileDescriptorSet
	for _, file := range answer.GetFileDescriptorResponse().GetFileDescriptorProto() {
		var one descriptorpb.FileDescriptorProto
		require.NoError(t, proto.Unmarshal(file, &one))
		described.File = append(described.File, &one)
	}
	files, err := protodesc.NewFiles(&described)
	require.NoError(t, err)
	found, err := files.FindDescriptorByName("envoy.service.ratelimit.v3.RateLimitService.ShouldRateLimit")
	require.NoError(t, err)
	method, ok := found.(protoreflect.MethodDescriptor)
	require.True(t, ok)

	request, reply := dynamicpb.NewMessage(method.Input()), dynamicpb.NewMessage(method.Output())
	require.NoError(t, protojson.Unmarshal([]byte(
		`{"domain": "shop", "descriptors": [{"entries": [{"key": "address", "value": "192.0.2.1"}]}]}`), request))
	require.NoError(t, conn.Invoke(t.Context(), "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit", request, reply))
	require.Contains(t, protojson.Format(reply), `"OK"`)
}

func TestReload(t *testing.T) {
	t.Parallel()
	s := start(t, map[string]string{"shop.yaml": shop(1)}, nil)
	conn := s.dial(t, insecure.NewCredentials())
	over := func(key string) bool {
		code, err := ask(t.Context(), conn, "shop", "address", key)
		require.NoError(t, err)
		return code == pb.RateLimitResponse_OVER_LIMIT
	}
	require.False(t, over("a"))
	require.True(t, over("a"))

	// A mistake leaves the old rules in force, and the log says where it is, once.
	s.write(t, "shop.yaml", shop(5)+"  surprise: 1\n")
	eventually(t, func() bool { return strings.Contains(s.log.String(), "shop.yaml:") })
	require.True(t, over("a"))
	require.Contains(t, s.log.String(), "the old one stays in force")
	require.Contains(t, s.log.String(), "surprise")
	_, metrics := s.get(t, "/metrics")
	require.Contains(t, metrics, "ratelimit_service_configuration_broken 1")

	s.write(t, "shop.yaml", shop(5))
	eventually(t, func() bool { return !over("a") })
	_, metrics = s.get(t, "/metrics")
	require.Contains(t, metrics, "ratelimit_service_configuration_broken 0")
	require.Equal(t, 1, strings.Count(s.log.String(), "has a mistake"))

	before := strings.Count(s.log.String(), "is in force")
	s.hangup <- os.Interrupt
	eventually(t, func() bool { return strings.Count(s.log.String(), "is in force") > before })
}

// A path that is asked with a wrong method says which are right.
func TestMethods(t *testing.T) {
	t.Parallel()
	s := start(t, nil, nil)
	for _, test := range []struct{ method, path, allow string }{
		{"GET", "/json", "POST"},
		{"GET", "/v1/ask", "POST"},
		{"POST", "/metrics", "GET, HEAD"},
		{"DELETE", "/healthz", "GET, HEAD"},
		{"PUT", "/readyz", "GET, HEAD"},
		{"POST", "/", "GET, HEAD"},
	} {
		request, err := http.NewRequestWithContext(t.Context(), test.method, s.http+test.path, nil)
		require.NoError(t, err)
		response, err := http.DefaultClient.Do(request)
		require.NoError(t, err)
		response.Body.Close()
		require.Equal(t, http.StatusMethodNotAllowed, response.StatusCode, test.path)
		require.Equal(t, test.allow, response.Header.Get("Allow"), test.path)
	}
	code, _ := s.get(t, "/nowhere")
	require.Equal(t, http.StatusNotFound, code)
}

func TestWhatIsWrongAtTheStart(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		change func(*service.Options)
		reason string
	}{
		"other machines": {func(o *service.Options) { o.GRPC = "0.0.0.0:0" }, "--grpc 0.0.0.0:0 may be reached from other machines"},
		"all addresses":  {func(o *service.Options) { o.HTTP = ":0" }, "--http :0 may be reached from other machines"},
		"a name":         {func(o *service.Options) { o.Door = "example.com:0" }, "--door example.com:0 may be reached"},
		"no folder":      {func(o *service.Options) { o.Dir = "/nowhere" }, "/nowhere"},
		"no port":        {func(o *service.Options) { o.HTTP = "localhost:x"; o.Insecure = true }, "--http: "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := service.Options{
				DB: pgtest.New(t).Pool, Dir: t.TempDir(), GRPC: loopback, HTTP: loopback,
				Logger: slog.New(slog.DiscardHandler), Drain: time.Minute,
			}
			test.change(&o)
			require.ErrorContains(t, service.Run(t.Context(), o), test.reason)
		})
	}
}

// The error for an address that is in use says by which flag it can be changed.
func TestAddressInUse(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "s")
	for network, address := range map[string]string{"tcp": loopback, "unix": path} {
		busy, err := net.Listen(network, address)
		require.NoError(t, err)
		t.Cleanup(func() { busy.Close() })
		used := busy.Addr().String()
		if network == "unix" {
			used = "unix:" + path
		}
		for example, o := range map[string]service.Options{
			"--grpc 127.0.0.1:9081": {GRPC: used},
			"--http 127.0.0.1:9080": {GRPC: loopback, HTTP: used},
			"--door 127.0.0.1:9082": {Door: used},
		} {
			o.DB, o.Logger, o.Drain = pgtest.New(t).Pool, slog.New(slog.DiscardHandler), time.Minute
			err := service.Run(t.Context(), o)
			require.ErrorIs(t, err, syscall.EADDRINUSE)
			require.ErrorContains(t, err, "; give another address, such as "+example)
		}
	}
}

func TestToken(t *testing.T) {
	t.Parallel()
	const token = "0123456789abcdef0123456789abcdef"
	s := start(t, map[string]string{"shop.yaml": shop(1), "limiters.yaml": login}, func(o *service.Options) {
		o.Token = token
		o.GRPC, o.HTTP, o.Door = "0.0.0.0:0", "0.0.0.0:0", "0.0.0.0:0"
	})
	s.http = strings.Replace(s.http, "[::]", "127.0.0.1", 1)
	s.grpc = strings.Replace(s.grpc, "[::]", "127.0.0.1", 1)
	conn := s.dial(t, insecure.NewCredentials())
	for _, sent := range []string{"", "Bearer", "Bearer " + token + "0", "Bearer " + token[1:], "Basic " + token} {
		ctx := metadata.AppendToOutgoingContext(t.Context(), "authorization", sent)
		_, err := ask(ctx, conn, "shop", "address", "a")
		require.Equal(t, codes.Unauthenticated, status.Code(err), "%q", sent)
		for path, form := range map[string]string{
			"GET /metrics": "text/plain; charset=utf-8", "POST /json": "application/problem+json",
			"POST /v1/ask": "application/problem+json",
		} {
			method, path, _ := strings.Cut(path, " ")
			request, err := http.NewRequestWithContext(t.Context(), method, s.http+path, nil)
			require.NoError(t, err)
			request.Header.Set("Authorization", sent)
			response, err := http.DefaultClient.Do(request)
			require.NoError(t, err)
			text, err := io.ReadAll(response.Body)
			require.NoError(t, err)
			response.Body.Close()
			require.Equal(t, http.StatusUnauthorized, response.StatusCode)
			require.Equal(t, form, response.Header.Get("Content-Type"))
			require.Equal(t, "Bearer", response.Header.Get("WWW-Authenticate"))
			require.Contains(t, string(text), "header Authorization: Bearer TOKEN")
		}
	}
	for _, path := range []string{"/v1/ask", "/json", "/nowhere", "/openapi.yaml"} {
		code, _ := s.get(t, path)
		require.NotEqual(t, http.StatusOK, code)
	}
	code, _ := s.get(t, "/healthz")
	require.Equal(t, http.StatusOK, code)
	_, err := ask(metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer "+token), conn, "shop", "address", "a")
	require.NoError(t, err)
	_, err = healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{})
	require.NoError(t, err)
	require.NotContains(t, s.log.String(), token)
}

// authority returns TLS configurations for a server that wants client certificates, and for a client that has one.
func authority(t *testing.T) (server, client *tls.Config) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		IsCA: true, BasicConstraintsValid: true,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	certificate, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	pool := x509.NewCertPool()
	pool.AddCert(certificate)
	pair := []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}
	return &tls.Config{Certificates: pair, ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert, MinVersion: tls.VersionTLS12},
		&tls.Config{Certificates: pair, RootCAs: pool, MinVersion: tls.VersionTLS12}
}

func TestTLS(t *testing.T) {
	t.Parallel()
	server, client := authority(t)
	s := start(t, map[string]string{"shop.yaml": shop(2), "limiters.yaml": login}, func(o *service.Options) { o.TLS = server })
	_, err := ask(t.Context(), s.dial(t, credentials.NewTLS(client)), "shop", "address", "a")
	require.NoError(t, err)

	stranger := &tls.Config{RootCAs: client.RootCAs, MinVersion: tls.VersionTLS12}
	for _, how := range []credentials.TransportCredentials{credentials.NewTLS(stranger), insecure.NewCredentials()} {
		_, err = ask(t.Context(), s.dial(t, how), "shop", "address", "a")
		require.Equal(t, codes.Unavailable, status.Code(err))
	}
	transport := &http.Transport{TLSClientConfig: client}
	defer transport.CloseIdleConnections()
	response, err := (&http.Client{Transport: transport}).Get(strings.Replace(s.http, "http:", "https:", 1) + "/healthz") //nolint:noctx // as in get
	require.NoError(t, err)
	response.Body.Close()
	require.Equal(t, http.StatusOK, response.StatusCode)
	plain, _ := s.get(t, "/healthz")
	require.Equal(t, http.StatusBadRequest, plain)

	of, err := ratelimit.NewService(s.door, ratelimit.ServiceConfig{TLS: client})
	require.NoError(t, err)
	defer of.Close()
	l, err := ratelimit.New(of, ratelimit.Config{Name: "door", Policy: ratelimit.FixedWindow{Limit: 1, Window: time.Hour}})
	require.NoError(t, err)
	result, err := l.Allow(t.Context(), "a")
	require.NoError(t, err)
	require.True(t, result.Allowed)
}

// A service that ends answers all requests under way, and no call fails before it has refused connections.
func TestDrain(t *testing.T) {
	t.Parallel()
	s := start(t, map[string]string{"shop.yaml": shop(1 << 30)}, nil)
	conn := s.dial(t, insecure.NewCredentials())
	var callers sync.WaitGroup
	var answered, asked [16]int
	for i := range answered {
		callers.Go(func() {
			for {
				_, err := ask(t.Context(), conn, "shop", "address", fmt.Sprint(i))
				if status.Code(err) == codes.Unavailable { // refused: Envoy would ask another instance
					return
				}
				asked[i]++
				if err == nil {
					answered[i]++
				}
			}
		})
	}
	eventually(t, func() bool {
		_, metrics := s.get(t, "/metrics")
		return strings.Contains(metrics, "ratelimit_statement_duration_seconds_count{")
	})
	s.end()
	callers.Wait()
	require.Equal(t, asked, answered)
}
