package faults

import (
	"net"
	"net/url"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/stretchr/testify/require"
)

// wireProxy stands between a pool and Postgres, and understands their protocol. It forwards everything except what a
// fault holds back.
type wireProxy struct {
	target string
	url    string // connects through the proxy

	mu         sync.Mutex
	next       []*fault   // one fault for each of the next statements
	statements int        // statements executed since the last call of fail
	conns      []net.Conn // connections opened by clients
	trickle    bool       // forward one byte at a time
	refuses    bool       // close new connections at once
}

// fault is a failure of a statement.
type fault struct {
	// The proxy does not forward the first message for which request returns true, nor any later request.
	request func(pgproto3.FrontendMessage) bool
	// The proxy holds back the first message for which reply returns true, and all later replies. The fault happens
	// when the reply is complete, so the database has committed.
	reply func(pgproto3.BackendMessage) bool
	then  outcome
	until <-chan struct{} // a late reply is forwarded when this is closed
	// If preparing is set, the fault happens while a statement is prepared, and not when it is executed.
	preparing bool
}

type outcome int

const (
	cut     outcome = iota // the proxy closes both ends
	swallow                // the proxy drops the held message silently
	late                   // the proxy forwards the held message later
)

// newWireProxy starts a proxy in front of the server at databaseURL, without TLS. The proxy ends with the test.
func newWireProxy(t *testing.T, databaseURL string) *wireProxy {
	t.Helper()
	parsed, err := url.Parse(databaseURL)
	require.NoError(t, err)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &wireProxy{target: parsed.Host}
	parsed.Host = listener.Addr().String()
	p.url = parsed.String()

	var conns sync.WaitGroup
	conns.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			p.mu.Lock()
			p.conns = append(p.conns, client)
			refuses := p.refuses
			p.mu.Unlock()
			if refuses {
				client.Close()
				continue
			}
			conns.Go(func() { p.serve(client) })
		}
	})
	t.Cleanup(func() {
		listener.Close()
		p.cutAll()
		conns.Wait()
	})
	return p
}

// fail makes the next statements fail, one for each fault.
func (p *wireProxy) fail(faults ...*fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.next, p.statements = faults, 0
}

// sent returns the number of statements since the last call of fail.
func (p *wireProxy) sent() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.statements
}

// refuse closes all connections, and refuses new connections. With false it accepts new connections again.
func (p *wireProxy) refuse(refuses bool) {
	p.mu.Lock()
	p.refuses = refuses
	p.mu.Unlock()
	if refuses {
		p.cutAll()
	}
}

// cutAll closes all connections.
func (p *wireProxy) cutAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, conn := range p.conns {
		conn.Close()
	}
	p.conns = nil
}

// take returns the fault that begins with this message, or nil.
func (p *wireProxy) take(message pgproto3.FrontendMessage) *fault {
	p.mu.Lock()
	defer p.mu.Unlock()
	if executes(message) {
		p.statements++
	} else if !requestIs[*pgproto3.Parse](message) {
		return nil
	}
	if len(p.next) == 0 || p.next[0].preparing == executes(message) {
		return nil
	}
	f := p.next[0]
	p.next = p.next[1:]
	return f
}

// write forwards a message.
func (p *wireProxy) write(to net.Conn, message []byte) error {
	p.mu.Lock()
	trickle := p.trickle
	p.mu.Unlock()
	size := len(message)
	if trickle {
		size = 1
	}
	for ; len(message) > 0; message = message[size:] {
		if _, err := to.Write(message[:size]); err != nil {
			return err
		}
	}
	return nil
}

// executes tells whether a message is the first one of a statement that takes units.
func executes(message pgproto3.FrontendMessage) bool {
	return requestIs[*pgproto3.Bind](message) || requestIs[*pgproto3.Query](message)
}

func requestIs[M pgproto3.FrontendMessage](message pgproto3.FrontendMessage) bool {
	_, ok := message.(M)
	return ok
}

func replyIs[M pgproto3.BackendMessage](message pgproto3.BackendMessage) bool {
	_, ok := message.(M)
	return ok
}

func anyRequest(pgproto3.FrontendMessage) bool { return true }

func anyReply(pgproto3.BackendMessage) bool { return true }

// serve serves one connection until either end closes it.
func (p *wireProxy) serve(client net.Conn) {
	defer client.Close()
	server, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}
	defer server.Close()
	backend, frontend := pgproto3.NewBackend(client, client), pgproto3.NewFrontend(server, server)

	startup, err := backend.ReceiveStartupMessage()
	if err != nil {
		return
	}
	encoded, err := startup.Encode(nil)
	if err != nil || p.write(server, encoded) != nil {
		return
	}
	if _, ok := startup.(*pgproto3.CancelRequest); ok {
		return
	}

	faults := make(chan *fault, 1) // the current statement's faults, from the goroutine for requests to the one for replies
	var replies sync.WaitGroup
	replies.Go(func() {
		p.passReplies(frontend, client, faults)
		client.Close()
		server.Close()
	})
	p.passRequests(backend, server, faults)
	client.Close()
	server.Close()
	replies.Wait()
}

func (p *wireProxy) passRequests(backend *pgproto3.Backend, server net.Conn, faults chan<- *fault) {
	var f *fault
	stopped := false
	for {
		message, err := backend.Receive()
		if err != nil {
			return
		}
		if requestIs[*pgproto3.Terminate](message) {
			return
		}
		if begun := p.take(message); begun != nil {
			if f = begun; f.reply != nil {
				faults <- f
			}
		}
		if stopped = stopped || f != nil && f.request != nil && f.request(message); stopped {
			if f.then == cut {
				return
			}
			continue
		}
		encoded, err := message.Encode(nil)
		if err != nil || p.write(server, encoded) != nil {
			return
		}
	}
}

func (p *wireProxy) passReplies(frontend *pgproto3.Frontend, client net.Conn, faults <-chan *fault) {
	var f *fault
	var held []byte
	holds := false
	for {
		message, err := frontend.Receive()
		if err != nil {
			return
		}
		select {
		case f = <-faults:
		default:
		}
		encoded, err := message.Encode(nil)
		if err != nil {
			return
		}
		if holds = holds || f != nil && f.reply(message); !holds {
			if p.write(client, encoded) != nil {
				return
			}
			continue
		}
		held = append(held, encoded...)
		if !replyIs[*pgproto3.ReadyForQuery](message) {
			continue
		}
		switch f.then {
		case cut:
			return
		case late:
			<-f.until
			if p.write(client, held) != nil {
				return
			}
		}
		f, held, holds = nil, nil, false
	}
}
