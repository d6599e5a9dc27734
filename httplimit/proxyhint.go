package httplimit

import (
	"fmt"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
)

// proxyHint logs, once, that requests seem to come through a proxy whose header ByIP does not read, so that all clients
// behind the proxy share one limit. The line contains no address, only the private network of the proxy.
type proxyHint struct {
	given atomic.Bool
	log   func(r *http.Request, message, write string)

	// These fields tell whether all requests through trusted proxies seem to come from one address.
	several atomic.Bool // requests came from different addresses, which ends the check
	mu      sync.Mutex
	client  netip.Addr                        // the address of the first client
	before  [minClientsOfABalancer]netip.Addr // different addresses that stood before the client's in the header
}

// minClientsOfABalancer is how many different addresses the header must have before the address that all requests seem
// to come from. On an unused server, one person with forged headers can reach this number. On a busy server, other
// clients have other addresses, so nothing is logged.
const minClientsOfABalancer = 3

// onUntrusted checks a request whose peer is not a trusted proxy. It ignores peers outside private networks, because on
// the internet anybody may send headers of proxies.
func (h *proxyHint) onUntrusted(a *addresses, r *http.Request, peer netip.Addr) {
	if h == nil || h.given.Load() {
		return
	}
	network := reservedNetwork(peer)
	if network == "" {
		return
	}
	header := forwardingHeader(a, r)
	if header == "" || h.given.Swap(true) {
		return
	}
	write := fmt.Sprintf("httplimit.TrustedProxies(netip.MustParsePrefix(`%s`))", network)
	if header != defaultHeader {
		write += fmt.Sprintf(", httplimit.AddressHeader(`%s`)", header)
	}
	h.log(r, "httplimit: a peer in a private network sends "+header+", but ByIP does not trust it; "+
		"if it is your proxy, all clients behind it share one limit: "+
		"pass this to ByIP, with the narrowest prefix that your proxies are in", write)
}

// onTrusted checks a trusted proxy's request that lacks the header that ByIP reads.
func (h *proxyHint) onTrusted(a *addresses, r *http.Request) {
	if h == nil || h.given.Load() {
		return
	}
	header := forwardingHeader(a, r)
	if header == "" || h.given.Swap(true) {
		return
	}
	h.log(r, "httplimit: a trusted proxy sends "+header+", but not "+a.header+", which ByIP reads; "+
		"all clients behind it share one limit: if the proxy itself sets the header, pass this to ByIP",
		fmt.Sprintf("httplimit.AddressHeader(`%s`)", header))
}

// wantsClients tells whether onClient needs more requests.
func (h *proxyHint) wantsClients() bool { return h != nil && !h.several.Load() && !h.given.Load() }

// onClient checks a request whose header from a trusted proxy names the client. Some load balancers append their public
// address to the client's address. Then all requests seem to come from the balancer, and the clients' addresses stand
// before its address. onClient ignores private addresses there, because they come from a company's own proxy.
func (h *proxyHint) onClient(r *http.Request, client, before netip.Addr) {
	h.mu.Lock()
	if !h.client.IsValid() {
		h.client = client
	}
	if h.client != client {
		h.several.Store(true)
	}
	all := false
	for i := range h.before {
		if h.several.Load() || !before.IsGlobalUnicast() || before.IsPrivate() || before == client ||
			h.before[i] == before {
			break
		}
		if !h.before[i].IsValid() {
			h.before[i], all = before, i == len(h.before)-1
			break
		}
	}
	h.mu.Unlock()
	if all && !h.given.Swap(true) {
		h.log(r, "httplimit: all requests through trusted proxies seem to be from one address, with several others "+
			"before it in the header; if it is your balancer's own, all clients share one limit: "+
			"pass this to ByIP, too, with that address",
			"httplimit.TrustedProxies(netip.MustParsePrefix(`ADDRESS/32`))")
	}
}

// forwardingHeader returns the name of a header of the request that may contain the client's address, or "".
func forwardingHeader(a *addresses, r *http.Request) string {
	for _, name := range [...]string{
		a.header, defaultHeader, "Forwarded", "X-Real-Ip", "True-Client-Ip", "Cf-Connecting-Ip",
	} {
		if len(r.Header[name]) > 0 {
			return name
		}
	}
	return ""
}

// reservedNetwork returns the loopback or private network that an address is in, or "".
func reservedNetwork(address netip.Addr) string {
	switch {
	case address.IsLoopback() && address.Is4():
		return "127.0.0.0/8"
	case address.IsLoopback():
		return "::1/128"
	case !address.IsPrivate():
		return ""
	case address.Is6():
		return "fc00::/7"
	}
	switch address.As4()[0] {
	case 10:
		return "10.0.0.0/8"
	case 172:
		return "172.16.0.0/12"
	default:
		return "192.168.0.0/16"
	}
}
