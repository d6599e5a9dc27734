package service

import (
	"net"
	"net/url"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// network stands between services and Postgres.
type network struct {
	url string // of the database, through the network

	mu    sync.Mutex
	state state
	conns map[net.Conn]bool
	lost  int // connections that were made in vain
}

type state int

const (
	works  state = iota
	loses        // what is sent does not arrive, also later on the same connection, and nobody is told
	breaks       // all connections are closed, and new ones too
)

// newNetwork starts a network in front of the server at databaseURL. It ends with the test.
func newNetwork(t *testing.T, databaseURL string) *network {
	t.Helper()
	parsed, err := url.Parse(databaseURL)
	require.NoError(t, err)
	target := parsed.Host
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	parsed.Host = listener.Addr().String()
	n := &network{url: parsed.String(), conns: map[net.Conn]bool{}}
	var work sync.WaitGroup
	work.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			n.mu.Lock()
			n.conns[client] = true
			losing := n.state == loses
			if losing {
				n.lost++
			}
			n.mu.Unlock()
			if losing { // nobody answers, until the client gives up
				continue
			}
			server, err := net.Dial("tcp", target)
			if err != nil { // it is being restarted
				client.Close()
				continue
			}
			n.mu.Lock()
			n.conns[server] = true
			n.mu.Unlock()
			work.Go(func() { n.copy(server, client) })
			work.Go(func() { n.copy(client, server) })
		}
	})
	t.Cleanup(func() {
		listener.Close()
		n.set(breaks)
		work.Wait()
	})
	return n
}

// copy forwards what one side sends, and closes both at the end.
func (n *network) copy(to, from net.Conn) {
	buffer := make([]byte, 32<<10)
	lost := false
	for {
		some, err := from.Read(buffer)
		n.mu.Lock()
		lost = lost || n.state == loses
		if n.state == breaks {
			err = net.ErrClosed
		}
		n.mu.Unlock()
		if err == nil && !lost {
			_, err = to.Write(buffer[:some])
		}
		if err != nil {
			to.Close()
			from.Close()
			n.mu.Lock()
			delete(n.conns, to)
			delete(n.conns, from)
			n.mu.Unlock()
			return
		}
	}
}

func (n *network) set(s state) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.state = s
	if s == breaks {
		for conn := range n.conns {
			conn.Close()
		}
	}
}

// inVain returns how many connections were made while the network was losing all that is sent.
func (n *network) inVain() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.lost
}
