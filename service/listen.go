package service

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"time"
)

// isLocal returns whether only this machine can reach an address: a Unix socket, or a loopback address.
func isLocal(address string) bool {
	if strings.HasPrefix(address, "unix:") {
		return true
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.IsLoopback() || host == "localhost"
}

// listen listens on an address of the form host:port or unix:/path. Only this user and its group can use a socket.
func listen(address string) (net.Listener, error) {
	path, isSocket := strings.CutPrefix(address, "unix:")
	if !isSocket {
		return net.Listen("tcp", address)
	}
	l, err := net.Listen("unix", path)
	if errors.Is(err, syscall.EADDRINUSE) && isAbandoned(path) {
		if err := os.Remove(path); err != nil {
			return nil, err
		}
		l, err = net.Listen("unix", path)
	}
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o660); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// isAbandoned returns whether a path is a socket that nobody listens on, as after a crash.
func isAbandoned(path string) bool {
	info, err := os.Lstat(path)
	if err != nil || info.Mode()&os.ModeSocket == 0 {
		return false
	}
	conn, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		conn.Close()
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}

// checkExposure returns an error for an address that other machines can reach, if nothing protects it.
func (o *Options) checkExposure() error {
	if o.TLS != nil || o.Token != "" || o.Insecure {
		return nil
	}
	for _, a := range []struct{ flag, address string }{{"--grpc", o.GRPC}, {"--http", o.HTTP}, {"--door", o.Door}} {
		if a.address != "" && !isLocal(a.address) {
			return fmt.Errorf("%s %s may be reached from other machines, and everybody there could use up all limits: "+
				"give --tls-cert and --tls-key, or --token-file, or listen on 127.0.0.1; "+
				"if the network itself is closed, give --insecure", a.flag, a.address)
		}
	}
	return nil
}
