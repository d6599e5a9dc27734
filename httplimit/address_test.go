package httplimit

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// from returns a peer's request, which has the given lines of a header.
func from(peer, header string, lines ...string) *http.Request {
	r := &http.Request{RemoteAddr: peer, Header: http.Header{}}
	if len(lines) > 0 {
		r.Header[header] = lines
	}
	return r
}

func trusted() IPOption {
	return TrustedProxies(netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8"))
}

func TestAddressOfThePeer(t *testing.T) {
	t.Parallel()

	for peer, want := range map[string]string{
		"192.0.2.1:1234":                   "192.0.2.1",
		"192.0.2.1":                        "192.0.2.1",
		"[::ffff:192.0.2.1]:1234":          "192.0.2.1",
		"[2001:db8:1:2:3:4:5:6]:1234":      "2001:db8:1:2::/64",
		"[2001:db8:1:2:ffff::1%eth0]:1234": "2001:db8:1:2::/64",
		"2001:db8:1:2:3:4:5:6":             "2001:db8:1:2::/64",
		"[2001:db8::1.2.3.4]:1":            "2001:db8::/64", // not 1.2.3.4
		"[::1]:1":                          "::/64",
		"[fe80::1%eth0]:1":                 "fe80::/64",
		"[::ffff:192.0.2.1%eth0]:1":        "192.0.2.1",
	} {
		requireKey(t, want, ByIP(), from(peer, ""))
		// The client's header is ignored.
		requireKey(t, want, ByIP(), from(peer, "X-Forwarded-For", "203.0.113.9"))
		requireKey(t, want, ByIP(trusted()), from(peer, "X-Forwarded-For", "203.0.113.9"))
		requireKey(t, want, ByIP(trusted(), AddressHeader("Forwarded")), from(peer, "Forwarded", "for=203.0.113.9"))
	}
	for bits, want := range map[int]string{
		48: "2001:db8:1::/48", 56: "2001:db8:1:200::/56", 128: "2001:db8:1:2ff:3:4:5:6/128",
	} {
		requireKey(t, want, ByIP(IPv6Prefix(bits)), from("[2001:db8:1:2ff:3:4:5:6]:1", ""))
	}
	for _, peer := range []string{
		"", "@", "unix", "192.0.2.1:", "192.0.2.1:x", "192.0.2.1:99999", "192.0.2.256:1", "192.0.2.01:1", "[192.0.2.1]:1", "[192.0.2.1]",
		"[::1", "::1]", "[]", "[]:1", ":1", "localhost:80", "1.2.3.4.5:1", "0x7f.1:1", "192.0.2.1 :1", "[::ffff:192.0.2.1", "\x00",
	} {
		_, err := ByIP().Of(from(peer, ""))
		require.Error(t, err, "%q", peer)
	}
}

// For an IPv6 address that contains an IPv4 address, the key is the IPv4 address.
func TestIPv4AddressInsideOfIPv6(t *testing.T) {
	t.Parallel()

	for address, want := range map[string]string{
		"64:ff9b::203.0.113.9":               "203.0.113.9",
		"64:ff9b::cb00:7109":                 "203.0.113.9",
		"64:ff9b::1:cb00:7109":               "64:ff9b::/64", // outside of 64:ff9b::/96
		"64:ff9b:1::203.0.113.9":             "64:ff9b:1::cb00:7109/128",
		"64:ff9b:1:cb00:71:900::":            "64:ff9b:1:cb00:71:900::/128",
		"64:ff9b:2::203.0.113.9":             "64:ff9b:2::/64",
		"2002:cb00:7109::1":                  "203.0.113.9",
		"2002:cb00:7109:ffff::1":             "203.0.113.9",
		"2001:0:102:304:8000:63bf:34ff:8ef6": "203.0.113.9",
		"2001:1:102:304:8000:63bf:34ff:8ef6": "2001:1:102:304::/64",
		"::203.0.113.9":                      "::/64", // nobody has such an address
		"::ffff:0:203.0.113.9":               "::/64", // nobody has such an address either
		"2001:db8::5efe:cb00:7109":           "2001:db8::/64",
	} {
		for _, key := range []Key{ByIP(), ByIP(IPv6Prefix(48)), ByIP(IPv6Prefix(128))} {
			got, err := key.Of(from("["+address+"]:1", ""))
			require.NoError(t, err)
			if !strings.HasSuffix(want, "/64") {
				require.Equal(t, want, got, address)
			}
		}
		requireKey(t, want, ByIP(), from("["+address+"]:1", ""))
		requireKey(t, want, ByIP(trusted()), from("10.0.0.1:1", "X-Forwarded-For", "1.1.1.1, "+address))
	}
	// Trust depends on the IPv6 address, and not on the IPv4 address in it.
	for _, peer := range []string{"[64:ff9b::10.0.0.1]:1", "[2002:a00:1::1]:1"} {
		requireKey(t, "10.0.0.1", ByIP(trusted()), from(peer, "X-Forwarded-For", "203.0.113.9"))
	}
	requireKey(t, "203.0.113.9", ByIP(TrustedProxies(netip.MustParsePrefix("64:ff9b::10.0.0.0/104"))),
		from("[64:ff9b::10.0.0.1]:1", "X-Forwarded-For", "203.0.113.9"))
}

// Peers on a Unix socket have no address. If the application trusts the socket, the header counts. If it does not trust
// the socket, the log says what to do.
func TestUnixSocket(t *testing.T) {
	t.Parallel()

	serveUnix := func(t *testing.T, config Config) (*fakeLimiter, func(lines http.Header) int) {
		t.Helper()
		limiter := allowing()
		config.Headers = None
		path := filepath.Join(t.TempDir(), "socket")
		listener, err := net.Listen("unix", path)
		require.NoError(t, err)
		server := httptest.NewUnstartedServer(limited(t, limiter, config, nil))
		require.NoError(t, server.Listener.Close())
		server.Listener = listener
		server.Start()
		t.Cleanup(server.Close)
		client := http.Client{Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "unix", path)
			},
		}}
		return limiter, func(lines http.Header) int {
			r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://socket", nil)
			require.NoError(t, err)
			r.Header = lines
			response, err := client.Do(r)
			require.NoError(t, err)
			require.NoError(t, response.Body.Close())
			return response.StatusCode
		}
	}
	forged := http.Header{"X-Forwarded-For": {"1.1.1.1, 203.0.113.9, 10.0.0.1"}}

	var log testkit.Journal
	limiter, ask := serveUnix(t, Config{Key: ByIP(trusted()), Logger: log.Logger()})
	for range 10 {
		require.Equal(t, http.StatusBadRequest, ask(forged))
	}
	require.Empty(t, limiter.asked)
	lines := log.Lines()
	require.Len(t, lines, 1)
	require.Contains(t, lines[0], "pass httplimit.TrustUnixSocket() to ByIP")
	require.NotContains(t, lines[0], "203.0.113.9")

	limiter, ask = serveUnix(t, Config{Key: ByIP(trusted(), TrustUnixSocket()), Logger: log.Logger()})
	require.Equal(t, http.StatusOK, ask(forged))
	require.Equal(t, []asked{{"203.0.113.9", 1}}, limiter.asked)
	require.Empty(t, log.Lines())
	for range 10 {
		require.Equal(t, http.StatusBadRequest, ask(http.Header{"X-Real-Ip": {"203.0.113.9"}}))
	}
	lines = log.Lines()
	require.Len(t, lines, 2)
	require.Contains(t, lines[0], "write=httplimit.AddressHeader(`X-Real-Ip`)")
	require.Contains(t, lines[1], "the proxy at the Unix socket sends no header X-Forwarded-For")

	for _, peer := range []string{"", "@", "@proxy", "/run/proxy.sock"} {
		requireKey(t, "203.0.113.9", ByIP(TrustUnixSocket()), from(peer, "X-Forwarded-For", "1.1.1.1, 203.0.113.9"))
		_, err := ByIP(TrustUnixSocket()).Of(from(peer, ""))
		require.Error(t, err)
		// The server says that this peer came over TCP.
		r := from(peer, "X-Forwarded-For", "203.0.113.9")
		r = r.WithContext(context.WithValue(t.Context(), http.LocalAddrContextKey, net.Addr(&net.TCPAddr{})))
		_, err = ByIP(TrustUnixSocket()).Of(r)
		require.Error(t, err)
	}
	// A peer with an address did not come over a Unix socket. A peer with an unreadable address has no key.
	requireKey(t, "192.0.2.1", ByIP(TrustUnixSocket()), from("192.0.2.1:1", "X-Forwarded-For", "203.0.113.9"))
	for _, peer := range []string{"unix", "localhost:80", "unknown", "\x00"} {
		_, err := ByIP(TrustUnixSocket()).Of(from(peer, "X-Forwarded-For", "203.0.113.9"))
		require.Error(t, err)
	}
}

// Over all lines of the header, the client is the last address that is not a trusted proxy's.
func TestAddressBehindTrustedProxies(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		want  string // empty: an error
		lines []string
	}{
		{"10.0.0.1", nil},
		{"203.0.113.9", []string{"203.0.113.9"}},
		{"203.0.113.9", []string{" \t203.0.113.9:4711 "}},
		{"203.0.113.9", []string{"198.51.100.1, 203.0.113.9"}},
		{"203.0.113.9", []string{"198.51.100.1, 203.0.113.9, 10.2.3.4,fd00::1"}},
		{"203.0.113.9", []string{"198.51.100.1", "203.0.113.9", "10.2.3.4,[fd00::1]:80"}},
		{"203.0.113.9", []string{"::ffff:203.0.113.9, ::ffff:10.0.0.1"}},
		{"2001:db8::/64", []string{"2001:db8::1"}},
		{"2001:db8::/64", []string{"[2001:db8::1]"}},
		{"2001:db8::/64", []string{"[2001:db8::1]:80"}},
		{"2001:db8::/64", []string{"2001:db8::1%eth0"}},
		{"10.0.0.9", []string{"10.0.0.9, 10.0.0.8"}}, // the first address, if all are trusted
		// Anything before the client's address may be forged.
		{"203.0.113.9", []string{"unknown, 203.0.113.9"}},
		{"203.0.113.9", []string{"\x00\xff, 203.0.113.9"}},
		{"203.0.113.9", []string{", ,,, 203.0.113.9"}},
		{"203.0.113.9", []string{strings.Repeat("10.0.0.1,", 100_000) + "203.0.113.9"}},
		{"203.0.113.9", []string{strings.Repeat("x", 1<<20) + ",203.0.113.9"}},
		{"203.0.113.9", append(make([]string, 10_000), "203.0.113.9")},
		{"203.0.113.9", []string{"203.0.113.9" + strings.Repeat(",10.0.0.1", maxHops-1)}},

		{"", []string{"203.0.113.9" + strings.Repeat(",10.0.0.1", maxHops)}},
		{"", []string{""}},
		// Empty members do not count.
		{"203.0.113.9", []string{"203.0.113.9,"}},
		{"203.0.113.9", []string{"203.0.113.9 , "}},
		{"203.0.113.9", []string{"198.51.100.1, 203.0.113.9,,\t, 10.0.0.1,"}},
		{"203.0.113.9", []string{"203.0.113.9" + strings.Repeat(",", 100_000)}},
		{"203.0.113.9", []string{"203.0.113.9,", ",10.0.0.1,"}},
		{"10.0.0.9", []string{",10.0.0.9"}},
		// A line without any member comes from a proxy that knew no address.
		{"", []string{","}},
		{"", []string{" ,\t, "}},
		{"", []string{"203.0.113.9", ""}},
		{"", []string{"203.0.113.9", ", ,"}},
		{"", []string{"unknown"}},
		{"", []string{"203.0.113.9, unknown, 10.0.0.1"}},
		{"", []string{"203.0.113.9 10.0.0.1"}},
		{"", []string{"203.0.113.9;10.0.0.1"}},
		{"", []string{`"203.0.113.9"`}},
		{"", []string{"[203.0.113.9]"}},
		{"", []string{"2001:db8::1]:80"}},
	} {
		for _, header := range []string{"X-Forwarded-For", "X-Real-Ip"} {
			r := from("10.0.0.1:1234", header, test.lines...)
			// Other headers come from the client, and are ignored.
			r.Header["True-Client-Ip"], r.Header["Forwarded"] = []string{"1.1.1.1"}, []string{"for=1.1.1.1"}
			key := ByIP(trusted(), AddressHeader(header))
			if test.want != "" {
				requireKey(t, test.want, key, r)
				continue
			}
			_, err := key.Of(r)
			require.Error(t, err, "%q", test.lines)
		}
	}
}

func TestForwarded(t *testing.T) {
	t.Parallel()

	key := ByIP(trusted(), AddressHeader("forwarded"))
	for _, test := range []struct {
		want  string // empty: an error
		lines []string
	}{
		{"10.0.0.1", nil},
		{"203.0.113.9", []string{"for=203.0.113.9"}},
		{"203.0.113.9", []string{`For="203.0.113.9:47011"`}},
		{"203.0.113.9", []string{"proto=http;FOR=203.0.113.9;by=10.0.0.43"}},
		{"203.0.113.9", []string{`proto=http; for="203\.0.113.9" ;host="a,b;for=1.1.1.1\"" `}},
		{"203.0.113.9", []string{"for=198.51.100.1, for=203.0.113.9 ,for=10.0.0.2"}},
		{"203.0.113.9", []string{"for=198.51.100.1", "for=203.0.113.9", `for="[fd00::1]:80"`}},
		{"2001:db8::/64", []string{`for="[2001:db8::1]"`}},
		{"2001:db8::/64", []string{`for="[2001:db8::1]:80"`}},
		{"2001:db8::/64", []string{`for=[2001:db8::1]:80`}},
		// Lines before the line with the client's address may be forged.
		{"203.0.113.9", []string{`for="`, "for=203.0.113.9"}},
		// In the same line, an open quote may hide what a proxy has appended.
		{"", []string{`for=1.1.1.1;host=", for=203.0.113.9`}},
		{"", []string{`for=1.1.1.1;host=", for="203.0.113.9"`}},
		{"", []string{`for="\`}},
		{"", []string{""}},
		{"", []string{"for"}},
		{"", []string{"for="}},
		{"", []string{`for=""`}},
		{"", []string{"=203.0.113.9"}},
		{"", []string{"for =203.0.113.9"}},
		{"", []string{"203.0.113.9"}},
		// Empty elements and pairs do not count.
		{"203.0.113.9", []string{"for=203.0.113.9,"}},
		{"203.0.113.9", []string{"for=203.0.113.9;"}},
		{"203.0.113.9", []string{"for=203.0.113.9 ; "}},
		{"203.0.113.9", []string{",\t,for=203.0.113.9, ,, for=10.0.0.1 ,"}},
		{"203.0.113.9", []string{";for=203.0.113.9;;proto=http;,;;,for=10.0.0.1;"}},
		{"203.0.113.9", []string{"for=203.0.113.9" + strings.Repeat(",;", 10_000)}},
		{"203.0.113.9", []string{"for=203.0.113.9,", `;for="[fd00::1]";`}},
		// A port may be hidden, or above 65535.
		{"203.0.113.9", []string{`for="203.0.113.9:_x"`}},
		{"203.0.113.9", []string{`for="203.0.113.9:_SEV.KI-SEK_1"`}},
		{"203.0.113.9", []string{`for=203.0.113.9:_x`}},
		{"203.0.113.9", []string{`for="203.0.113.9:99999"`}},
		{"2001:db8::/64", []string{`for="[2001:db8::1]:_x", for="10.0.0.1:_y"`}},
		{"203.0.113.9", []string{`for="[::ffff:203.0.113.9]:_x"`}},
		{"203.0.113.9", []string{`for="\2\0\3.0.113.9"; host=""`}},
		{"", []string{`for="203.0.113.9:_"`}},
		{"", []string{`for="203.0.113.9:_x y"`}},
		{"", []string{`for="203.0.113.9:x"`}},
		{"", []string{`for="203.0.113.9:"`}},
		{"", []string{`for="203.0.113.9:100000"`}},
		{"", []string{`for="203.0.113.9:80:_x"`}},
		{"", []string{`for="2001:db8::1:_x"`}},
		{"", []string{`for="[203.0.113.9]:_x"`}},
		{"", []string{`for="unknown:_x"`}},
		{"", []string{`for=":_x"`}},
		// A proxy may hide another proxy's address, but not the client's.
		{"203.0.113.9", []string{"proto=http, for=unknown, for=_hidden, for=203.0.113.9"}},
		{"", []string{"for=203.0.113.9, proto=http, for=10.0.0.1"}},
		{"", []string{"for=203.0.113.9, for=_hidden, for=10.0.0.1"}},
		{"", []string{","}},
		{"", []string{" ; , ;"}},
		{"", []string{"for=203.0.113.9", ""}},
		{"", []string{"for=203.0.113.9", "proto=http"}},
		{"", []string{`for="";for=203.0.113.9`}},
		{"", []string{"for=203.0.113.9 10.0.0.1"}},
		{"", []string{`for=203.0.113.9"x"`}},
		{"", []string{"proto=http"}},
		{"", []string{"for=203.0.113.9, proto=http"}},
		{"", []string{"for=203.0.113.9;for=1.1.1.1"}},
		{"", []string{"for=unknown"}},
		{"", []string{`for="_hidden"`}},
		{"", []string{"for=_SEVKISEK"}},
		{"", []string{strings.Repeat("for=1.1.1.1,", maxHops) + "for=203.0.113.9"}},
	} {
		r := from("10.0.0.1:1234", "Forwarded", test.lines...)
		r.Header["X-Forwarded-For"] = []string{"1.1.1.1"}
		if test.want != "" {
			requireKey(t, test.want, key, r)
			continue
		}
		_, err := key.Of(r)
		require.Error(t, err, "%q", test.lines)
	}
}

// requireAddressOrError requires that key is an address or a network, or that err does not contain the input.
func requireAddressOrError(t *testing.T, key string, err error, input string) {
	t.Helper()
	if err != nil {
		require.Empty(t, key)
		if len(input) > 20 {
			require.NotContains(t, err.Error(), input)
		}
		return
	}
	if strings.Contains(key, "/") {
		network, err := netip.ParsePrefix(key)
		require.NoError(t, err)
		require.Equal(t, network.Masked(), network)
		if localNAT64.Contains(network.Addr()) {
			require.Equal(t, 128, network.Bits())
		} else {
			require.Equal(t, 64, network.Bits())
		}
		require.False(t, network.Addr().Is4In6())
		return
	}
	address, err := netip.ParseAddr(key)
	require.NoError(t, err)
	require.True(t, address.Is4())
}

// FuzzRemoteAddr tests that any RemoteAddr yields an address or an error, and that headers of an untrusted peer are
// ignored.
func FuzzRemoteAddr(f *testing.F) {
	for _, peer := range []string{"192.0.2.1:80", "[2001:db8::1]:80", "::ffff:1.2.3.4", "@", "[fe80::1%eth0]:1", "[64:ff9b::1.2.3.4]:1", "[64:ff9b:1::1]:1", "[2002:102:304::]:1"} {
		f.Add(peer, "203.0.113.9")
	}
	f.Fuzz(func(t *testing.T, peer, header string) {
		key, err := ByIP().Of(from(peer, ""))
		requireAddressOrError(t, key, err, peer)
		forged, forgedErr := ByIP().Of(from(peer, "X-Forwarded-For", header))
		require.Equal(t, key, forged)
		require.Equal(t, err, forgedErr)
		// A peer with an address is not a Unix socket.
		if !isUnixSocket(from(peer, "")) {
			unix, _ := ByIP(TrustUnixSocket()).Of(from(peer, "X-Forwarded-For", header))
			require.Equal(t, key, unix)
		}
	})
}

// FuzzXForwardedFor tests that the key is the address that a trusted proxy appends, whatever the client sends.
func FuzzXForwardedFor(f *testing.F) {
	for _, header := range []string{
		"", "unknown", "10.0.0.1, 10.0.0.2", `"`, "1.1.1.1,", "[::1", "203.0.113.9:1", ",,,", "1.1.1.1, ,\t,", "1.1.1.1:_x",
	} {
		f.Add(header, "X-Forwarded-For")
	}
	f.Fuzz(func(t *testing.T, header, name string) {
		if !isToken(name) || http.CanonicalHeaderKey(name) == "Forwarded" {
			name = "X-Forwarded-For"
		}
		key, canonical := ByIP(trusted(), AddressHeader(name)), http.CanonicalHeaderKey(name)
		requireKey(t, "203.0.113.9", key, from("10.0.0.1:1", canonical, header+", 203.0.113.9"))
		requireKey(t, "203.0.113.9", key, from("10.0.0.1:1", canonical, header, "203.0.113.9"))
		requireKey(t, "203.0.113.9", key, from("10.0.0.1:1", canonical, header, "203.0.113.9", "10.0.0.2"))
		requireKey(t, "203.0.113.9", key, from("10.0.0.1:1", canonical, header+", ,203.0.113.9,", ",10.0.0.2,,"))
		for _, unsaid := range []string{"", " , ,"} {
			_, err := key.Of(from("10.0.0.1:1", canonical, header, unsaid))
			require.Error(t, err)
		}

		alone, err := key.Of(from("10.0.0.1:1", canonical, header))
		requireAddressOrError(t, alone, err, header)
	})
}

// FuzzForwarded tests that the key is the address that a trusted proxy appends, or that a malformed line is refused.
func FuzzForwarded(f *testing.F) {
	for _, header := range []string{
		"", "for=1.1.1.1", `for="[2001:db8::1]:80";proto=http`, `for=1.1.1.1;host="`, `for="\`, "for=unknown", "for=10.0.0.1,for=10.0.0.2", `a=",`,
		"for=1.1.1.1,", "for=1.1.1.1;", ",;,", `for="1.1.1.1:_x"`, `a=";`,
	} {
		f.Add(header)
	}
	f.Fuzz(func(t *testing.T, header string) {
		key := ByIP(trusted(), AddressHeader("Forwarded"))
		for _, appended := range []string{
			"for=203.0.113.9", `for="203.0.113.9:80"`, `for=203.0.113.9;host="example.com";proto=https`, `host="example.com";for="203.0.113.9"`,
			"for=203.0.113.9,", ";for=203.0.113.9; , ;", `for="203.0.113.9:_x"`,
		} {
			client, err := key.Of(from("10.0.0.1:1", "Forwarded", header+", "+appended))
			if err == nil {
				require.Equal(t, "203.0.113.9", client)
			}
			requireKey(t, "203.0.113.9", key, from("10.0.0.1:1", "Forwarded", header, appended))
		}
		for _, unsaid := range []string{"proto=https", "for=_hidden", `for=unknown;host="example.com"`, ";proto=https,"} {
			_, err := key.Of(from("10.0.0.1:1", "Forwarded", header+", "+unsaid))
			require.Error(t, err)
			_, err = key.Of(from("10.0.0.1:1", "Forwarded", header, unsaid))
			require.Error(t, err)
		}
		alone, err := key.Of(from("10.0.0.1:1", "Forwarded", header))
		requireAddressOrError(t, alone, err, header)
	})
}
