package bench

import (
	"bytes"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// farAway is the round trip to a server in another data centre nearby, or in the same data centre over a busy network.
const farAway = time.Millisecond

// startDelayProxy returns an address that leads to the server at target with a longer round trip. Each answer is late
// by the argument delay, and requests pass immediately. A client cannot tell this from half the delay in each
// direction. On Linux, Go rounds timers up to milliseconds when the process is idle, so two half delays would take one
// and a half times as long as one whole delay.
//
// The proxy keeps the order of the data, and its buffer never fills. So the proxy limits no throughput.
func startDelayProxy(tb testing.TB, target string, delay time.Duration) (address string) {
	tb.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(tb, err)
	var conns sync.WaitGroup
	tb.Cleanup(func() {
		listener.Close()
		conns.Wait()
	})
	conns.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			conns.Go(func() { forward(client, target, delay) })
		}
	})
	return listener.Addr().String()
}

// forward serves one connection until either end closes it.
func forward(client net.Conn, target string, delay time.Duration) {
	defer client.Close()
	server, err := net.Dial("tcp", target)
	if err != nil {
		return
	}
	defer server.Close()
	go func() {
		_, _ = io.Copy(server, client)
		server.Close() // ends the loops below
	}()

	type parcel struct {
		due  time.Time
		data []byte
	}
	underWay := make(chan parcel, 1<<12)
	go func() {
		defer close(underWay)
		buffer := make([]byte, 1<<16)
		for {
			n, err := server.Read(buffer)
			if n > 0 {
				underWay <- parcel{time.Now().Add(delay), bytes.Clone(buffer[:n])}
			}
			if err != nil {
				return
			}
		}
	}()
	for p := range underWay {
		<-time.After(time.Until(p.due))
		if _, err := client.Write(p.data); err != nil {
			server.Close() // both loops continue until underWay is closed
		}
	}
}

func TestDelayProxy(t *testing.T) {
	t.Parallel()
	const delay = 20 * time.Millisecond
	echo, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer echo.Close()
	go func() {
		for {
			conn, err := echo.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				_, _ = io.Copy(conn, conn)
			}()
		}
	}()

	conn, err := net.Dial("tcp", startDelayProxy(t, echo.Addr().String(), delay))
	require.NoError(t, err)
	defer conn.Close()
	begun := time.Now()
	sent := make([]byte, 1<<20)
	for i := range sent {
		sent[i] = byte(i % 251)
	}
	go func() {
		for begin := 0; begin < len(sent); begin += 1 << 10 {
			if _, err := conn.Write(sent[begin : begin+1<<10]); err != nil {
				return
			}
		}
	}()

	first := make([]byte, 1)
	_, err = io.ReadFull(conn, first)
	require.NoError(t, err)
	require.GreaterOrEqual(t, time.Since(begun), delay)
	rest := make([]byte, len(sent)-1)
	_, err = io.ReadFull(conn, rest)
	require.NoError(t, err)
	require.Equal(t, sent, append(first, rest...), "the order is kept")
	// All thousand parcels had the delay, but they were in flight together.
	require.Less(t, time.Since(begun), 100*delay)
}
