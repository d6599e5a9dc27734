package service

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	rls "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	pb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/door"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// A thousand connections on each door are idle, and a thousand on each say nothing or never end their first words. All
// others are served. The service ends those that say nothing, and keeps those that have asked something before.
func TestIdleConnections(t *testing.T) {
	t.Parallel()
	const crowd = 1000
	s := start(t, pgtest.New(t).URL, rules(crowd*10, ""), patient...)
	h := how{limit: crowd * 10}

	// These connections are welcome, and idle.
	for range crowd {
		ask := throughDoor(t, h, s)
		_, err := ask(t.Context(), personal)
		require.NoError(t, err)
	}
	request := "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
	web := open(t, crowd, s.http, request)
	for _, conn := range web {
		requireOK(t, conn)
	}
	const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
	open(t, crowd, s.grpc, preface+"\x00\x00\x00\x04\x00\x00\x00\x00\x00") // and empty settings

	// These are not.
	var silent []net.Conn
	silent = append(silent, open(t, crowd, s.http, "POST /v1/ask HTTP/1.1\r\nHost: x\r\nX-Slow: ")...)
	for _, address := range []string{s.grpc, s.http, s.door} {
		silent = append(silent, open(t, crowd, address, "")...)
	}
	silent = append(silent, open(t, crowd, s.door, "\x00\x00")...)
	silent = append(silent, open(t, crowd, s.grpc, preface[:7])...)

	serves := func() {
		t.Helper()
		for _, c := range callers(t, h, s) {
			got, err := c.ask(t.Context(), personal)
			require.NoError(t, err, c.name)
			require.True(t, got.allowed && got.counted, c.name)
		}
	}
	serves()
	for i, conn := range silent {
		_, err := io.Copy(io.Discard, conn)
		require.NotErrorIs(t, err, os.ErrDeadlineExceeded, i)
	}
	serves()
	for _, conn := range web {
		require.NoError(t, conn.SetDeadline(time.Now().Add(testkit.Amply)))
		_, err := io.WriteString(conn, request)
		require.NoError(t, err)
		requireOK(t, conn)
	}
}

// open opens n connections that say something and then nothing more.
func open(t *testing.T, n int, address, says string) (conns []net.Conn) {
	t.Helper()
	network, addr := door.Network(address)
	for range n {
		conn, err := net.Dial(network, addr)
		require.NoError(t, err)
		t.Cleanup(func() { conn.Close() })
		require.NoError(t, conn.SetDeadline(time.Now().Add(testkit.Amply)))
		_, err = io.WriteString(conn, says)
		require.NoError(t, err)
		conns = append(conns, conn)
	}
	return conns
}

func requireOK(t *testing.T, conn net.Conn) {
	t.Helper()
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	_, err = io.Copy(io.Discard, response.Body)
	require.NoError(t, err)
	response.Body.Close()
	require.Equal(t, http.StatusOK, response.StatusCode)
}

// Clients with a wrong token, without TLS, or with too much to say get a status that tells them so. The log has no more
// than a line each second for all of them, without keys and tokens, and nobody else is disturbed.
func TestHostileClients(t *testing.T) {
	t.Parallel()
	const right = "token-of-" + personal
	dir := t.TempDir()
	trusted := certificate(t, dir)
	token := filepath.Join(dir, "token")
	require.NoError(t, os.WriteFile(token, []byte(right), 0o600))
	s := start(t, pgtest.New(t).URL, rules(100_000, ""), append(patient, "--token-file", token,
		"--tls-cert", filepath.Join(dir, "cert.pem"), "--tls-key", filepath.Join(dir, "key.pem"),
		"--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--door", "127.0.0.1:0")...)
	good := how{limit: 100_000, token: right, tls: trusted}
	l := ask(t, personal, testkit.Amply, goroutines, callers(t, good, s))

	began := time.Now()
	refused := func(h how, says ...string) {
		t.Helper()
		for i, c := range callers(t, h, s) {
			for range 30 {
				_, err := c.ask(t.Context(), personal)
				require.ErrorContains(t, err, says[i], c.name)
				require.NotContains(t, err.Error(), personal)
			}
		}
	}
	refused(how{limit: 1, tls: trusted}, "code = Unauthenticated", "status 401", "refuses the token")
	refused(how{limit: 1, tls: trusted, token: right + "1"}, "code = Unauthenticated", "status 401", "refuses the token")
	refused(how{limit: 1, token: right}, "code = Unavailable", "status 400", "wants TLS")

	million := strings.Repeat(personal, 1<<20/len(personal)+1)
	conn, err := grpc.NewClient(s.grpc, grpc.WithTransportCredentials(credentials.NewTLS(trusted)))
	require.NoError(t, err)
	defer conn.Close()
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: trusted}}
	defer client.CloseIdleConnections()
	post := func(header, body string) int {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://"+s.http+"/v1/ask", strings.NewReader(body))
		require.NoError(t, err)
		request.Header = http.Header{"Authorization": {"Bearer " + right}, "Content-Type": {"application/json"}, "X-More": {header}}
		response, err := client.Do(request)
		require.NoError(t, err)
		response.Body.Close()
		return response.StatusCode
	}
	for range 10 {
		ctx := metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer "+right)
		_, err = pb.NewRateLimitServiceClient(conn).ShouldRateLimit(ctx, &pb.RateLimitRequest{
			Domain:      "shop",
			Descriptors: []*rls.RateLimitDescriptor{{Entries: []*rls.RateLimitDescriptor_Entry{{Key: "user", Value: million}}}},
		})
		require.Equal(t, codes.ResourceExhausted, status.Code(err))
		require.Equal(t, http.StatusRequestEntityTooLarge, post("", `{"limiter": "envoy:shop", "key": "`+million+`"}`))
		require.Equal(t, http.StatusRequestHeaderFieldsTooLarge, post(million, "{}"))
		_, err = throughDoor(t, good, s)(t.Context(), million)
		require.ErrorIs(t, err, ratelimit.ErrInvalidKey)
		raw, err := tls.Dial("tcp", s.door, trusted)
		require.NoError(t, err)
		_, _ = io.WriteString(raw, million) // the service may close the connection before it has read all
		_, err = io.Copy(io.Discard, raw)
		require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
		raw.Close()
	}
	l.each(t, 1, func(c *told) int64 { return c.allowed.Load() })
	l.stop()
	l.requireNoFailure(t)
	lines := strings.Count(s.log.String(), "\n")
	seconds := int(time.Since(began).Seconds())
	require.LessOrEqual(t, lines, 2+1+seconds, s.log.String()) // 2 say that it serves
}

// certificate writes a certificate for 127.0.0.1 and its key to a folder, and returns a configuration that trusts it.
func certificate(t *testing.T, dir string) *tls.Config {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		DNSNames: []string{"localhost"}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	private, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	for name, block := range map[string]*pem.Block{
		"cert.pem": {Type: "CERTIFICATE", Bytes: der}, "key.pem": {Type: "PRIVATE KEY", Bytes: private},
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(block), 0o600))
	}
	parsed, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	pool := x509.NewCertPool()
	pool.AddCert(parsed)
	return &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
}
