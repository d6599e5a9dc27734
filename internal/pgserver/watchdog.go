//go:build unix

package pgserver

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"sync"
)

// watchdog is a shell script that outlives this process for as long as it takes to clean up.
//
// It reads from a pipe whose other end only this process holds. The operating system closes that end when the
// process ends, however it ends. Then the script goes to work. It runs in a session of its own, so the Ctrl-C
// that ends this process does not end the script. Close cleans up through the watchdog too. So only one piece of
// code removes a server, and nothing races with it.
type watchdog struct {
	pipe *os.File
	done chan struct{} // closed when the script has ended and been reaped
	err  error         // how it ended; valid once done is closed

	mu     sync.Mutex
	closed bool
}

// startWatchdog runs a script with arguments $1 and on. Its standard input is the pipe.
func startWatchdog(script string, args ...string) (*watchdog, error) {
	reader, writer, err := os.Pipe() // close-on-exec: neither the server nor any other child inherits the writer
	if err != nil {
		return nil, fmt.Errorf("pgserver: start the watchdog: %w", err)
	}
	defer reader.Close()

	cmd := exec.Command("/bin/sh", append([]string{"-c", script, "pgserver-watchdog"}, args...)...)
	cmd.Stdin = reader
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), "PATH="+os.Getenv("PATH")+":/usr/bin:/bin:/usr/sbin:/sbin")
	cmd.SysProcAttr = detached(nil)
	if err := cmd.Start(); err != nil {
		writer.Close()
		return nil, fmt.Errorf("pgserver: start the watchdog: %w", err)
	}

	w := &watchdog{pipe: writer, done: make(chan struct{})}
	go func() {
		w.err = cmd.Wait()
		close(w.done)
		// A caller may keep the URL and drop the Server. If the pipe were then collected, it would be closed.
		runtime.KeepAlive(w.pipe)
	}()
	return w, nil
}

// do runs a step that the script must know of, and tells the script what the step returns. After close it does
// not run the step.
func (w *watchdog) do(step func() (line string, err error)) error {
	w.mu.Lock()
	defer w.mu.Unlock()

	if w.closed {
		return ErrClosed
	}
	line, err := step()
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintln(w.pipe, line); err != nil {
		return fmt.Errorf("pgserver: the watchdog of the server is gone: %w", err)
	}
	return nil
}

// close makes the script clean up, and returns when it has done so.
func (w *watchdog) close() error {
	w.mu.Lock()
	w.closed = true
	err := w.pipe.Close()
	w.mu.Unlock()

	<-w.done
	if err == nil {
		err = w.err
	}
	return err
}
