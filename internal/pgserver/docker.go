//go:build unix

package pgserver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"
)

// container runs a server in Docker. The docker command stays in the foreground, ends with the server, and prints the
// server's log.
type container struct{ docker, image string }

// findDocker returns a way to run the image if the Docker engine answers. findDocker downloads the image if necessary.
func findDocker(ctx context.Context, image string) (way, error) {
	path, err := exec.LookPath("docker")
	if err != nil {
		return nil, errors.New("no docker command in PATH")
	}
	w := container{path, image}
	short, cancel := context.WithTimeout(ctx, 10*time.Second) // a remote engine may never answer
	defer cancel()
	if err := w.do(short, "version", "--format", "{{.Server.Version}}"); err != nil {
		return nil, fmt.Errorf("the Docker engine does not answer: %w", err)
	}
	if w.do(ctx, "image", "inspect", image) != nil {
		if err := w.do(ctx, "pull", "--quiet", image); err != nil {
			return nil, err
		}
	}
	return w, nil
}

func (w container) origin() string { return "the Docker image " + w.image }

func (w container) prepare(context.Context, *process) error { return nil }

// server returns a command without --rm, because a container that removes itself could not be started again.
func (w container) server(p *process) *exec.Cmd {
	name := filepath.Base(p.dir)
	if p.settled {
		return exec.Command(w.docker, "start", "--attach", name)
	}
	_ = w.do(context.Background(), "rm", "-f", "-v", name) // an earlier attempt may have left a container
	args := []string{
		"run", "--name", name,
		"--publish", fmt.Sprintf("127.0.0.1:%d:5432", p.port),
		"--env", "POSTGRES_PASSWORD=" + p.password,
		"--env", "POSTGRES_INITDB_ARGS=--encoding=UTF8 --locale=C --no-sync",
		w.image,
	}
	for name, value := range p.config.settings() {
		args = append(args, "-c", name+"="+value)
	}
	return exec.Command(w.docker, args...)
}

// signal signals the container's first process, which is the postmaster. SIGKILL ends the other processes too.
func (w container) signal(p *process, signal syscall.Signal) error {
	args := []string{"kill", "--signal", strconv.Itoa(int(signal))}
	switch signal {
	case syscall.SIGSTOP:
		args = []string{"pause"}
	case syscall.SIGCONT:
		_ = w.do(context.Background(), "unpause", filepath.Base(p.dir)) // the container may not be paused
		return nil
	}
	return w.do(context.Background(), append(args, filepath.Base(p.dir))...)
}

// do runs a short docker command. The error contains the command's output.
func (w container) do(ctx context.Context, args ...string) error {
	return run(exec.CommandContext(ctx, w.docker, args...), "docker "+args[0])
}

// run runs a command and waits for its end. The error contains the command's output.
func run(cmd *exec.Cmd, name string) error {
	cmd.WaitDelay = time.Second // children of a canceled command may keep its output open
	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, bytes.TrimSpace(output))
	}
	return nil
}
