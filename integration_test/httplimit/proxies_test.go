package httplimit

import (
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// The proxies and the application are at 127.0.0.1, and the clients at other addresses of this machine.
var proxies = httplimit.TrustedProxies(netip.MustParsePrefix("127.0.0.1/32"))

// startNginx starts an nginx in front of an address.
func startNginx(t *testing.T, to string) string {
	t.Helper()
	nginx := program(t, "nginx")
	dir := testkit.OpenDir(t)
	address := testkit.FreeAddress(t)
	config := fmt.Sprintf(`
		daemon off;
		master_process off;
		pid %[1]s/pid;
		error_log stderr;
		events {}
		http {
			access_log off;
			client_body_temp_path %[1]s/body;
			proxy_temp_path %[1]s/proxy;
			fastcgi_temp_path %[1]s/fastcgi;
			uwsgi_temp_path %[1]s/uwsgi;
			scgi_temp_path %[1]s/scgi;
			large_client_header_buffers 4 64k;
			server {
				listen %[2]s;
				location / {
					proxy_pass http://%[3]s;
					proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
					proxy_set_header X-Real-IP $remote_addr;
				}
			}
		}`, dir, address, to)
	file := filepath.Join(dir, "nginx.conf")
	require.NoError(t, os.WriteFile(file, []byte(config), 0o600))
	testkit.Start(t, testkit.Accepts(address), nginx, "-p", dir, "-e", "stderr", "-c", file)
	return address
}

// startHAProxy starts a HAProxy in front of an address.
func startHAProxy(t *testing.T, to string) string {
	t.Helper()
	haproxy := program(t, "haproxy")
	address := testkit.FreeAddress(t)
	file := filepath.Join(t.TempDir(), "haproxy.cfg")
	require.NoError(t, os.WriteFile(file, fmt.Appendf(nil, `
global
	tune.bufsize 65536
defaults
	mode http
	timeout connect 60s
	timeout client 60s
	timeout server 60s
frontend clients
	bind %s
	option forwardfor
	http-request add-header Forwarded for=%%[src];proto=http
	default_backend application
backend application
	server application %s
`, address, to), 0o600))
	testkit.Start(t, testkit.Accepts(address), haproxy, "-f", file, "-db")
	return address
}

// forgeries returns headers by which a client pretends to be another client.
func forgeries() []http.Header {
	header := func(lines ...string) http.Header {
		forged := http.Header{}
		for _, name := range []string{"X-Forwarded-For", "X-Real-Ip", "Forwarded", "True-Client-Ip", "Cf-Connecting-Ip"} {
			for _, line := range lines {
				if name == "Forwarded" && !strings.Contains(line, "=") {
					line = "for=" + strings.ReplaceAll(line, ", ", ", for=")
				}
				forged.Add(name, line)
			}
		}
		return forged
	}
	return []http.Header{
		nil,
		header("1.2.3.4"),
		header("127.0.0.3"), // another client's address
		header("127.0.0.1"), // a proxy's address
		header("127.0.0.3, 127.0.0.1"),
		header("1.2.3.4", "127.0.0.1", "2001:db8::1"),
		header("unknown"),
		header("::ffff:127.0.0.1"),
		header(strings.Repeat("127.0.0.1, ", 400) + "127.0.0.1"),
		{"X-Forwarded-For": {""}, "X-Real-Ip": {""}},
		{"X-Forwarded-For": {`", ,;"`}, "X-Real-Ip": {`"`}},
		{"Forwarded": {`for=1.2.3.4;host="`}},
		{"Forwarded": {`for="`}},
		{"Connection": {"X-Forwarded-For, X-Real-IP, Forwarded"}},
	}
}

// Clients send any headers through real proxies, past the proxies, or through two proxies. Each client has the limit of
// its address, and cannot use up another client's limit.
func TestProxies(t *testing.T) {
	t.Parallel()

	type entrance = func(t *testing.T, to string) string
	through := func(t *testing.T, to string) string { return startHAProxy(t, startNginx(t, to)) }
	past := func(_ *testing.T, to string) string { return to }
	for name, test := range map[string]struct {
		entrance entrance
		header   string
	}{
		"nginx":                     {startNginx, "X-Forwarded-For"},
		"nginx with X-Real-IP":      {startNginx, "X-Real-IP"},
		"HAProxy":                   {startHAProxy, "X-Forwarded-For"},
		"HAProxy with Forwarded":    {startHAProxy, "Forwarded"},
		"HAProxy in front of nginx": {through, "X-Forwarded-For"},
		"past the proxies":          {past, "X-Forwarded-For"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			const limit = 40
			limiter := newLimiter(
				t,
				ratelimit.Config{Policy: ratelimit.FixedWindow{Limit: limit, Window: 365 * 24 * time.Hour}},
			)
			key := httplimit.ByIP(proxies, httplimit.AddressHeader(test.header))
			address := test.entrance(t, serve(t, limiter, httplimit.Config{Key: key}, nil))
			attacker, other := newClient(t, "127.0.0.2"), newClient(t, "127.0.0.3")
			admitted, denied := 0, 0
			for i := range 4 * limit {
				forged := forgeries()[i%len(forgeries())]
				switch status, _ := attacker.get(t, address, forged); status {
				case http.StatusOK:
					admitted++
				case http.StatusTooManyRequests:
					denied++
				default:
					require.Contains(t, []int{http.StatusBadRequest, http.StatusRequestHeaderFieldsTooLarge}, status)
				}
			}
			require.Equal(t, limit, admitted)
			require.Positive(t, denied)

			for _, client := range []string{"127.0.0.1", "1.2.3.4", "127.0.0.3"} {
				result, err := limiter.Peek(t.Context(), client)
				require.NoError(t, err)
				require.EqualValues(t, limit, result.Remaining, client)
			}
			status, _ := other.get(t, address, nil)
			require.Equal(t, http.StatusOK, status)
			result, err := limiter.Peek(t.Context(), "127.0.0.3")
			require.NoError(t, err)
			require.EqualValues(t, limit-1, result.Remaining)
		})
	}
}

// This is a negative control: on a server that trusts every header, an attacker gets in any number of times.
func TestTrustingClientsIsCaught(t *testing.T) {
	t.Parallel()

	limiter := newLimiter(t, ratelimit.Config{Policy: ratelimit.FixedWindow{Limit: 1, Window: 365 * 24 * time.Hour}})
	address := startNginx(t, serve(t, limiter, httplimit.Config{Key: httplimit.ByIP(
		httplimit.TrustedProxies(netip.MustParsePrefix("127.0.0.0/8")),
	)}, nil))
	attacker := newClient(t, "127.0.0.2")
	for i := range 10 {
		status, _ := attacker.get(t, address, http.Header{"X-Forwarded-For": {fmt.Sprintf("1.2.3.%d", i)}})
		require.Equal(t, http.StatusOK, status)
	}
}
