package httplimit

import (
	"net/http"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// A proxy whose header ByIP does not read is logged once. The line has the option that is missing, but no address.
func TestProxyThatIsNotTrustedIsToldOfOnce(t *testing.T) {
	t.Parallel()

	const private, write = "a peer in a private network sends ", "write=httplimit.TrustedProxies(netip.MustParsePrefix(`"
	for name, c := range map[string]struct {
		key    Key
		peer   string
		header string
		says   string // "" if nothing is logged
		write  string
	}{
		"10":         {ByIP(), "10.1.2.3:1", "X-Forwarded-For", private + "X-Forwarded-For", write + "10.0.0.0/8`))"},
		"172":        {ByIP(), "172.31.2.3:1", "X-Forwarded-For", private, write + "172.16.0.0/12`))"},
		"192":        {ByIP(), "192.168.2.3:1", "X-Forwarded-For", private, write + "192.168.0.0/16`))"},
		"loopback":   {ByIP(), "127.0.0.3:1", "X-Forwarded-For", private, write + "127.0.0.0/8`))"},
		"IPv6":       {ByIP(), "[fd12:3::4]:1", "X-Forwarded-For", private, write + "fc00::/7`))"},
		"IPv6 loop":  {ByIP(), "[::1]:1", "X-Forwarded-For", private, write + "::1/128`))"},
		"mapped":     {ByIP(), "[::ffff:10.1.2.3]:1", "X-Forwarded-For", private, write + "10.0.0.0/8`))"},
		"Forwarded":  {ByIP(), "10.1.2.3:1", "Forwarded", private + "Forwarded", "10.0.0.0/8`)), httplimit.AddressHeader(`Forwarded`)"},
		"X-Real-Ip":  {ByIP(), "10.1.2.3:1", "X-Real-Ip", private + "X-Real-Ip", "httplimit.AddressHeader(`X-Real-Ip`)"},
		"own header": {ByIP(AddressHeader("X-Own")), "10.1.2.3:1", "X-Own", private + "X-Own", "httplimit.AddressHeader(`X-Own`)"},
		"other proxies are trusted": {
			ByIP(trusted()), "192.168.2.3:1", "X-Forwarded-For", private, write + "192.168.0.0/16`))",
		},
		"in HMAC, Join and First": {
			HMAC(make([]byte, 16), Join(text("a"), First(ByHeader("X"), ByIP()))), "10.1.2.3:1", "X-Forwarded-For", private, write,
		},
		"trusted, with another header": {
			ByIP(trusted()), "10.1.2.3:1", "X-Real-Ip", "a trusted proxy sends X-Real-Ip, but not X-Forwarded-For",
			"write=httplimit.AddressHeader(`X-Real-Ip`)",
		},
		"trusted":              {ByIP(trusted()), "10.1.2.3:1", "X-Forwarded-For", "", ""},
		"trusted, no header":   {ByIP(trusted()), "10.1.2.3:1", "User-Agent", "", ""},
		"no header":            {ByIP(), "10.1.2.3:1", "User-Agent", "", ""},
		"public":               {ByIP(), "192.0.2.1:1", "X-Forwarded-For", "", ""},
		"public IPv6":          {ByIP(), "[2001:db8::1]:1", "X-Forwarded-For", "", ""},
		"outside of 172.16/12": {ByIP(), "172.32.2.3:1", "X-Forwarded-For", "", ""},
		"another key":          {ByHeader("X-Forwarded-For"), "10.1.2.3:1", "X-Forwarded-For", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var log testkit.Journal
			handler := limited(t, allowing(), Config{Key: c.key, Logger: log.Logger()}, nil)
			for range 100 {
				r := from(c.peer, c.header, "203.0.113.9")
				require.Equal(t, http.StatusOK, serve(t, handler, r).status)
			}
			lines := log.Lines()
			if c.says == "" {
				require.Empty(t, lines)
				return
			}
			require.Len(t, lines, 1)
			require.Contains(t, lines[0], "level=WARN")
			require.Contains(t, lines[0], "policy=login")
			require.Contains(t, lines[0], c.says)
			require.Contains(t, lines[0], c.write)
			for _, address := range []string{"203.0.113.9", "1.2.3", ".2.3", "fd12"} {
				require.NotContains(t, lines[0], address)
			}

			// Each middleware logs the proxy.
			again := limited(t, allowing(), Config{Key: c.key, Logger: log.Logger()}, nil)
			serve(t, again, from(c.peer, c.header, "203.0.113.9"))
			require.Len(t, log.Lines(), 1)
		})
	}
}

// A balancer that appends its public address to the client's address is logged once, without an address. Other peers
// with X-Forwarded-For are not logged.
func TestBalancerThatAppendsItsOwnAddress(t *testing.T) {
	t.Parallel()

	for name, c := range map[string]struct {
		lines [][]string // X-Forwarded-For of each request
		tells bool
	}{
		"four clients": {[][]string{
			{"198.51.100.1, 203.0.113.9"}, {"198.51.100.1, 203.0.113.9"}, {"198.51.100.2, 203.0.113.9"},
			{"198.51.100.3,203.0.113.9"}, {"198.51.100.4, 203.0.113.9"},
		}, true},
		"IPv6, and a proxy behind it": {[][]string{
			{"2a00:1::1, 2a00:9::9, 10.0.0.2"}, {"2a00:1::2, 2a00:9::9, 10.0.0.2"}, {"2a00:1::3, 2a00:9::9, 10.0.0.2"},
		}, true},
		"lines of their own": {[][]string{
			{"198.51.100.1", "203.0.113.9"}, {"198.51.100.2", "203.0.113.9"}, {"198.51.100.3", "203.0.113.9"},
		}, true},
		"two clients": {[][]string{
			{"198.51.100.1, 203.0.113.9"}, {"198.51.100.2, 203.0.113.9"}, {"198.51.100.1, 203.0.113.9"},
		}, false},
		"others are seen, too": {[][]string{
			{"198.51.100.1, 203.0.113.9"}, {"198.51.100.2"}, {"198.51.100.2, 203.0.113.9"}, {"198.51.100.3, 203.0.113.9"},
		}, false},
		"a company behind its own proxy": {[][]string{
			{"10.9.0.1, 203.0.113.9"}, {"192.168.0.2, 203.0.113.9"}, {"172.16.0.3, 203.0.113.9"}, {"fd00::4, 203.0.113.9"},
		}, false},
		"nothing before it":  {[][]string{{"203.0.113.9"}, {",203.0.113.9"}, {"", "203.0.113.9"}, {"203.0.113.9"}}, false},
		"what is no address": {[][]string{{"a, 203.0.113.9"}, {"b, 203.0.113.9"}, {"c", "203.0.113.9"}}, false},
		"itself":             {[][]string{{"203.0.113.9, 203.0.113.9"}, {"203.0.113.9", "203.0.113.9"}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var log testkit.Journal
			handler := limited(t, allowing(), Config{Key: ByIP(trusted()), Logger: log.Logger()}, nil)
			for range 3 {
				for _, lines := range c.lines {
					require.Equal(t, http.StatusOK, serve(t, handler, from("10.1.2.3:1", "X-Forwarded-For", lines...)).status)
				}
			}
			lines := log.Lines()
			if !c.tells {
				require.Empty(t, lines)
				return
			}
			require.Len(t, lines, 1)
			require.Contains(t, lines[0], "if it is your balancer's own, all clients share one limit")
			require.Contains(t, lines[0], "write=httplimit.TrustedProxies(netip.MustParsePrefix(`ADDRESS/32`))")
			for _, address := range []string{"198.51", "203.0", "2a00", "10.1"} {
				require.NotContains(t, lines[0], address)
			}
		})
	}
}

// With the option that the logged line names, ByIP finds the client's address.
func TestWhatTheHintSaysMendsIt(t *testing.T) {
	t.Parallel()

	var log testkit.Journal
	limiter := allowing()
	key := ByIP(TrustedProxies(netip.MustParsePrefix("10.0.0.0/8")), AddressHeader("X-Real-Ip"))
	handler := limited(t, limiter, Config{Key: key, Logger: log.Logger()}, nil)
	serve(t, handler, from("10.1.2.3:1", "X-Real-Ip", "203.0.113.9"))
	require.Equal(t, []asked{{"203.0.113.9", 1}}, limiter.asked)
	require.Empty(t, log.Lines())
}

//nolint:paralleltest // AllocsPerRun counts the allocations of all tests
func TestHintCostsNoAllocation(t *testing.T) {
	for name, hint := range map[string]*proxyHint{"none": nil, "not given": {}, "given": {}} {
		if name == "given" {
			hint.given.Store(true)
		}
		key, r := ByIP(), from("10.1.2.3:1", "X-Forwarded-For", "203.0.113.9")
		if name == "not given" { // a server without a proxy
			r = from("192.0.2.1:1", "X-Forwarded-For", "203.0.113.9")
		}
		require.LessOrEqual(t, testing.AllocsPerRun(100, func() { _, _ = key.of(r, hint) }), 1.0, name) // for the key
	}
}
