package httplimit

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
)

// defaultHeader is the header in which most proxies send the client's address.
const defaultHeader = "X-Forwarded-For"

// maxHops is the largest number of proxies that a request may have passed.
const maxHops = 100

// addresses finds the address of a request's client.
type addresses struct {
	trusted  []netip.Prefix
	header   string // in canonical form
	ipv6Bits int
	unix     bool // peers on Unix sockets are trusted
	err      error
}

// IPOption is an option of ByIP.
type IPOption func(*addresses)

// ByIP uses the client's address as the key. The address is RemoteAddr, unless RemoteAddr is a trusted proxy. For an
// IPv6 address the key is its /64 network, because a client owns the whole network. For an IPv6 address of NAT64
// (64:ff9b::/96), 6to4 (2002::/16) or Teredo (2001::/32), the key is the IPv4 address in it. In local NAT64
// (64:ff9b:1::/48) the position of the IPv4 address is unknown, so the key is the whole address. A request with an
// unreadable address has no key. If requests seem to come through a proxy that is not trusted, [Config].Logger gets one
// line.
func ByIP(options ...IPOption) Key {
	a := &addresses{header: defaultHeader, ipv6Bits: 64}
	for _, option := range options {
		option(a)
	}
	if a.err != nil {
		return Key{err: a.err}
	}
	return Key{find: a.key}
}

// TrustedProxies names the networks of the proxies in front of this server. If the peer is in such a network, the
// client is the last address in X-Forwarded-For that is not a trusted proxy. Text before that address may be forged,
// and is ignored. All lines of the header count, in order. If all addresses are trusted proxies, the client is the
// first address. Without the header, the client is the peer. Each proxy must append the address of its peer to the
// header, or replace the header with this address.
func TrustedProxies(prefixes ...netip.Prefix) IPOption {
	return func(a *addresses) {
		for _, prefix := range prefixes {
			switch {
			case !prefix.IsValid():
				a.err = errors.New("is ByIP with TrustedProxies of a prefix that is not valid")
			case prefix.Bits() == 0:
				a.err = fmt.Errorf("is ByIP with TrustedProxies(%v), which trusts everybody, "+
					"so that all clients could choose their address", prefix)
			case prefix.Addr().Is4In6():
				a.err = fmt.Errorf("is ByIP with TrustedProxies(%v); write it as IPv4", prefix)
			}
		}
		a.trusted = append(a.trusted, prefixes...)
	}
}

// TrustUnixSocket trusts peers on Unix sockets, as TrustedProxies trusts networks. Make sure that only your proxy can
// open the socket. Peers on Unix sockets have no address, so a request without the header has no key. A request with an
// empty RemoteAddr counts as a request over a Unix socket, unless http.LocalAddrContextKey has another network.
func TrustUnixSocket() IPOption { return func(a *addresses) { a.unix = true } }

// AddressHeader names the header that trusted proxies set, if it is not X-Forwarded-For. Forwarded is read as RFC 7239
// defines it. Any other header, such as X-Real-IP, is read as a list of addresses. All other headers are ignored. The
// proxies must not forward a client's version of this header.
func AddressHeader(name string) IPOption {
	return func(a *addresses) {
		if !isToken(name) {
			a.err = fmt.Errorf("is ByIP with AddressHeader(%q), which is no name of a header", name)
		}
		a.header = http.CanonicalHeaderKey(name)
	}
}

// IPv6Prefix sets how many bits of an IPv6 address are part of the key, from 48 to 128. Defaults to 64.
func IPv6Prefix(bits int) IPOption {
	return func(a *addresses) {
		if bits < 48 || bits > 128 {
			a.err = fmt.Errorf("is ByIP with IPv6Prefix(%d), which must be from 48 to 128", bits)
		}
		a.ipv6Bits = bits
	}
}

func (a *addresses) key(r *http.Request, hint *proxyHint) (string, error) {
	client, err := a.client(r, hint)
	if err != nil {
		return "", err
	}
	if client = embedded(client); client.Is4() {
		return client.String(), nil
	}
	bits := a.ipv6Bits
	if localNAT64.Contains(client) {
		bits = client.BitLen()
	}
	network, err := client.Prefix(bits)
	if err != nil {
		return "", &KeyError{Reason: "its address has no network"}
	}
	return network.String(), nil
}

//nolint:gochecknoglobals // these are constants
var (
	nat64      = netip.MustParsePrefix("64:ff9b::/96")   // RFC 6052
	localNAT64 = netip.MustParsePrefix("64:ff9b:1::/48") // RFC 8215
	sixToFour  = netip.MustParsePrefix("2002::/16")      // RFC 3056
	teredo     = netip.MustParsePrefix("2001::/32")      // RFC 4380
)

// embedded returns the IPv4 address in an address of NAT64, 6to4 or Teredo. It returns all other addresses unchanged. A
// client cannot use the IPv4 address of another client, because responses go to the IPv4 address. Networks of /64 would
// be bad keys here: in NAT64 and Teredo, many clients share one network, and in 6to4, one client has 65,536 networks.
// Trust in proxies depends on the unchanged address.
func embedded(address netip.Addr) netip.Addr {
	b := address.As16()
	switch {
	case nat64.Contains(address):
		return netip.AddrFrom4([4]byte(b[12:]))
	case sixToFour.Contains(address):
		return netip.AddrFrom4([4]byte(b[2:6]))
	case teredo.Contains(address):
		return netip.AddrFrom4([4]byte{^b[12], ^b[13], ^b[14], ^b[15]})
	}
	return address
}

func (a *addresses) client(r *http.Request, hint *proxyHint) (netip.Addr, error) {
	client, ok := parseAddress(r.RemoteAddr)
	lines := r.Header[a.header]
	switch {
	case !ok && isUnixSocket(r):
		if !a.unix {
			return netip.Addr{}, &KeyError{Reason: "the peer has no address, as over a Unix socket: " +
				"if nobody but your proxy can open the socket, pass httplimit.TrustUnixSocket() to ByIP"}
		}
	case !ok:
		return netip.Addr{}, &KeyError{Reason: "the address of the peer cannot be read"}
	case !a.trusts(client):
		hint.onUntrusted(a, r, client)
		return client, nil
	}
	if len(lines) == 0 {
		hint.onTrusted(a, r)
		if !ok {
			return netip.Addr{}, &KeyError{Reason: "the proxy at the Unix socket sends no header " + a.header +
				"; if it sends another, pass httplimit.AddressHeader to ByIP"}
		}
	}
	hops := 0
	for i, line := range slices.Backward(lines) {
		texts, ok := a.read(line)
		if !ok {
			return netip.Addr{}, a.unreadable()
		}
		for j, text := range texts {
			if client, ok = parseAddress(text); !ok || hops == maxHops {
				return netip.Addr{}, a.unreadable()
			}
			if !a.trusts(client) {
				if hint.wantsClients() {
					hint.onClient(r, client, a.before(lines[:i], texts[j+1:]))
				}
				return client, nil
			}
			hops++
		}
	}
	return client, nil
}

// before returns the address before the client's address in the header, for proxyHint. The returned address may be
// forged.
func (a *addresses) before(lines, texts []string) netip.Addr {
	if len(texts) == 0 && len(lines) > 0 {
		texts, _ = a.read(lines[len(lines)-1])
	}
	if len(texts) == 0 {
		return netip.Addr{}
	}
	address, _ := parseAddress(texts[0])
	return address
}

// isUnixSocket tells whether a request without a readable address came over a Unix socket. For a Unix socket,
// RemoteAddr is "@", empty, or the path of the peer's socket.
func isUnixSocket(r *http.Request) bool {
	local, known := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	if known && !strings.HasPrefix(local.Network(), "unix") {
		return false
	}
	return r.RemoteAddr == "" || r.RemoteAddr[0] == '@' || r.RemoteAddr[0] == '/'
}

func (a *addresses) unreadable() error {
	return &KeyError{Reason: "the addresses in header " + a.header + ", which a trusted proxy has sent, cannot be read"}
}

func (a *addresses) trusts(address netip.Addr) bool {
	return slices.ContainsFunc(a.trusted, func(prefix netip.Prefix) bool { return prefix.Contains(address) })
}

// read returns at most maxHops + 1 addresses in a line of the header, the last address first. It skips empty members,
// as RFC 9110 section 5.6.1 says. A client gains nothing by empty members, because they come before the proxy's
// address. read refuses a line without any member: its proxy knew no address, and the line before it may be forged.
func (a *addresses) read(line string) ([]string, bool) {
	if a.header == "Forwarded" {
		return readForwarded(line)
	}
	var texts []string
	for len(texts) <= maxHops {
		i := strings.LastIndexByte(line, ',')
		if text := strings.Trim(line[i+1:], " \t"); text != "" {
			texts = append(texts, text)
		}
		if i < 0 {
			break
		}
		line = line[:i]
	}
	return texts, len(texts) > 0
}

// readForwarded returns the value of "for" in each element of a Forwarded line (RFC 7239 section 4), the last element
// first. It skips empty elements and pairs. For an element with other pairs but no "for", it returns an empty text,
// which is not an address: the proxy that added the element hides the client, and earlier elements may be forged. If
// there is a syntax error, the whole line is refused: a client's open quote could hide what the proxy appends.
func readForwarded(line string) ([]string, bool) {
	var texts []string
	var address string
	for pairs, told := 0, false; ; {
		if line = strings.TrimLeft(line, " \t"); line != "" && line[0] != ',' && line[0] != ';' {
			name, rest, found := strings.Cut(line, "=")
			if !found || !isToken(name) {
				return nil, false
			}
			value, rest, ok := readValue(rest)
			if !ok {
				return nil, false
			}
			if strings.EqualFold(name, "for") {
				if told {
					return nil, false
				}
				address, told = withoutPort(value), true
			}
			pairs++
			line = strings.TrimLeft(rest, " \t")
		}
		if pairs > 0 && (line == "" || line[0] == ',') {
			if len(texts) == maxHops {
				return nil, false
			}
			texts, address, pairs, told = append(texts, address), "", 0, false
		}
		switch {
		case line == "":
			slices.Reverse(texts)
			return texts, len(texts) > 0
		case line[0] != ',' && line[0] != ';':
			return nil, false
		}
		line = line[1:]
	}
}

// withoutPort removes the port from an address of RFC 7239 section 6. A port is up to five digits, or "_" and a word.
func withoutPort(node string) string {
	i := strings.LastIndexByte(node, ':')
	host, port := node[:max(i, 0)], node[i+1:]
	hidden, isHidden := strings.CutPrefix(port, "_")
	switch {
	case !strings.HasSuffix(host, "]") && strings.Count(node, ":") != 1: // no port, or an IPv6 address without brackets
	case isHidden && isToken(hidden), len(port) > 0 && len(port) <= 5 && strings.Trim(port, "0123456789") == "":
		return host
	}
	return node
}

// readValue reads a quoted string, or everything up to the next separator: many proxies do not quote IPv6 addresses.
func readValue(line string) (value, rest string, ok bool) {
	if !strings.HasPrefix(line, `"`) {
		end := strings.IndexAny(line, ",; \t\"")
		if end < 0 {
			end = len(line)
		}
		return line[:end], line[end:], end > 0
	}
	var text []byte
	for i := 1; i < len(line); i++ {
		switch line[i] {
		case '"':
			return string(text), line[i+1:], true
		case '\\':
			if i++; i == len(line) {
				return "", "", false
			}
		}
		text = append(text, line[i])
	}
	return "", "", false
}

// parseAddress reads an IPv4 or IPv6 address, with or without a port: 192.0.2.1, 192.0.2.1:80, 2001:db8::1,
// [2001:db8::1], [2001:db8::1]:80.
func parseAddress(text string) (netip.Addr, bool) {
	text = strings.Trim(text, " \t")
	var address netip.Addr
	var err error
	switch {
	case strings.HasPrefix(text, "[") && strings.HasSuffix(text, "]"):
		address, err = netip.ParseAddr(text[1 : len(text)-1])
		if address.Is4() {
			return netip.Addr{}, false
		}
	case strings.HasPrefix(text, "[") || strings.Count(text, ":") == 1:
		var withPort netip.AddrPort
		withPort, err = netip.ParseAddrPort(text)
		address = withPort.Addr()
	default:
		address, err = netip.ParseAddr(text)
	}
	return address.Unmap().WithZone(""), err == nil
}
