package pgserver

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strings"

	"github.com/pgratelimit/ratelimit/internal/pgfind"
)

// host is what Start finds on this machine. Tests replace it.
type host struct {
	pgfind.Host
	tempDir string
	port    func() (int, error)
}

func newHost() host { return host{Host: pgfind.NewHost(), tempDir: tempDir(), port: freePort} }

// memoryDir is a folder in memory, on Linux. To make a database there takes a tenth of the time that it takes on
// a disk.
const memoryDir = "/dev/shm"

// tempDir returns where servers keep their files: in TMPDIR if that is set, else in memory if there is plenty,
// else where temporary files go.
func tempDir() string {
	const plenty = 4 << 30 // bytes; the tests need a tenth of it
	if os.Getenv("TMPDIR") == "" && freeBytes(memoryDir) >= plenty {
		return memoryDir
	}
	return os.TempDir()
}

// freePort returns a port of 127.0.0.1 that nobody listens on right now. It is below the ports that Linux (32768
// and up) and macOS (49152 and up) give to outgoing connections. One of those could take the port while our
// server is stopped.
func freePort() (int, error) {
	const first, last, attempts = 20000, 32767, 100

	var err error
	for range attempts {
		port := first + rand.IntN(last-first+1)
		var listener net.Listener
		if listener, err = net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			return port, listener.Close()
		}
	}
	return 0, fmt.Errorf("pgserver: find a free port on 127.0.0.1: %w", err)
}

// portTaken reports whether a message of Postgres or Docker says that somebody else listens on the port.
func portTaken(message string) bool {
	for _, sign := range []string{
		"could not create any TCP/IP sockets",
		"could not bind",
		"port is already allocated",
		"address already in use",
	} {
		if strings.Contains(message, sign) {
			return true
		}
	}
	return false
}
