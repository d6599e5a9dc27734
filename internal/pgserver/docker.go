//go:build unix

package pgserver

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"time"
)

// dockerTimeout bounds the Docker commands that have no caller's context, or must not be interrupted by it.
const dockerTimeout = time.Minute

// containerWatchdog removes the container named $2 with the docker command $1.
//
// Its input is "pending" before "docker run" and "settled" after it. If this process ends in between, a container
// may come up after the script has looked for it. So the script looks for it again for a while.
const containerWatchdog = `
trap '' HUP INT TERM
state=settled
while read -r line; do state=$line; done

n=0
while :; do
	"$1" rm -f -v "$2"
	left=$("$1" ps -aq --filter "name=$2") && [ -z "$left" ] && [ "$state" = settled ] && exit 0
	n=$((n + 1))
	[ $n -ge 10 ] && exit 1
	sleep 1
done
`

// container is a server in a Docker container, driven by the docker command line.
type container struct {
	docker   string
	image    string
	name     string
	password string
	settings []setting
	port     int
	freePort func() (int, error)
	watchdog *watchdog

	starting sync.Mutex // held by start
	created  bool       // the container exists and its port is settled; guarded by starting
}

var _ engine = (*container)(nil)

// newContainer gets the image. start makes the container itself.
func newContainer(ctx context.Context, config Config, host host, docker string) (engine, error) {
	port, err := host.port()
	if err != nil {
		return nil, err
	}
	if _, err := runDocker(ctx, docker, "image", "inspect", config.Image); err != nil {
		if _, err := runDocker(ctx, docker, "pull", "--quiet", config.Image); err != nil {
			return nil, fmt.Errorf("pgserver: get the image %s: %w", config.Image, err)
		}
	}

	// The name is known before the container exists, so that it can be removed whatever happens.
	name := "pgserver-" + strings.ToLower(rand.Text())
	watchdog, err := startWatchdog(containerWatchdog, docker, name)
	if err != nil {
		return nil, err
	}
	return &container{
		docker:   docker,
		image:    config.Image,
		name:     name,
		password: rand.Text(),
		settings: config.settings(nil),
		port:     port,
		freePort: host.port,
		watchdog: watchdog,
	}, nil
}

func (c *container) start(ctx context.Context) (version string, err error) {
	c.starting.Lock()
	defer c.starting.Unlock()
	ctx, cancel := withStartTimeout(ctx)
	defer cancel()

	for {
		err := c.launch(ctx)
		if err == nil {
			break
		}
		if !portTaken(err.Error()) {
			return "", err
		}
		select {
		case <-ctx.Done():
			return "", err
		case <-time.After(50 * time.Millisecond):
		}
	}

	version, err = awaitReady(ctx, c.url(), "", func(ctx context.Context) error {
		if _, err := c.command(ctx, "wait", c.name); err != nil {
			return err
		}
		return errors.New("it has ended")
	})
	if err != nil {
		return "", errors.Join(fmt.Errorf("%w\n%s", err, c.logs()), c.kill())
	}
	return version, nil
}

// launch runs a new container the first time, and starts that container again later.
func (c *container) launch(ctx context.Context) error {
	if c.created {
		if err := c.watchdog.do(func() (string, error) { return "settled", nil }); err != nil {
			return err
		}
		running, err := c.running(ctx)
		if err != nil {
			return err
		}
		if running {
			return ErrRunning
		}
		_, err = c.command(ctx, "start", c.name)
		return err
	}

	// If the command were interrupted, nobody would know whether there is a container.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), dockerTimeout)
	defer cancel()

	if err := c.watchdog.do(func() (string, error) { return "pending", nil }); err != nil {
		return err
	}
	_, runErr := c.command(ctx, c.runArgs()...)
	if runErr != nil {
		// If the port was taken, there is a container nevertheless. If there is none, the error of this command
		// is no news.
		_, _ = c.command(ctx, "rm", "-f", "-v", c.name)
	}
	if err := c.watchdog.do(func() (string, error) { return "settled", nil }); err != nil {
		return err
	}
	if runErr == nil {
		c.created = true
		return nil
	}

	port, err := c.freePort()
	if err != nil {
		return errors.Join(runErr, err)
	}
	c.port = port
	return runErr
}

// runArgs leaves out --rm, because a container that removes itself could not be started again after Stop or Kill.
func (c *container) runArgs() []string {
	args := []string{
		"run", "--detach",
		"--name", c.name,
		"--label", "com.github.pgratelimit.pgserver=true",
		"--publish", fmt.Sprintf("127.0.0.1:%d:5432", c.port),
		"--env", "POSTGRES_PASSWORD=" + c.password,
		"--env", "POSTGRES_INITDB_ARGS=--encoding=UTF8 --locale=C --no-sync",
		c.image,
	}
	for _, setting := range c.settings {
		args = append(args, "-c", setting.name+"="+setting.value)
	}
	return args
}

// stop signals the postmaster, which is the first process of the container.
func (c *container) stop(ctx context.Context, mode Mode) error {
	if running, err := c.running(ctx); err != nil || !running {
		return err
	}

	signal := "INT"
	switch mode {
	case Fast:
	case Smart:
		signal = "TERM"
	case Immediate:
		signal = "QUIT"
	}
	if err := c.thaw(); err != nil {
		return err
	}
	if _, err := c.command(ctx, "kill", "--signal", signal, c.name); err != nil {
		return err
	}
	_, err := c.command(ctx, "wait", c.name)
	return err
}

// kill needs no list of processes. When the first process of a container dies, the kernel kills all others.
func (c *container) kill() error {
	ctx, cancel := context.WithTimeout(context.Background(), dockerTimeout)
	defer cancel()

	if running, err := c.running(ctx); err != nil || !running {
		return err
	}
	if _, err := c.command(ctx, "kill", "--signal", "KILL", c.name); err != nil {
		return err
	}
	_, err := c.command(ctx, "wait", c.name)
	return err
}

func (c *container) freeze() error { return c.pause("pause", "running") }
func (c *container) thaw() error   { return c.pause("unpause", "paused") }

// pause runs the command if the container is in the state from.
func (c *container) pause(command, from string) error {
	ctx, cancel := context.WithTimeout(context.Background(), dockerTimeout)
	defer cancel()

	state, err := c.state(ctx)
	if err != nil || state != from {
		return err
	}
	_, err = c.command(ctx, command, c.name)
	return err
}

func (c *container) close() error {
	if err := c.watchdog.close(); err != nil {
		return fmt.Errorf("pgserver: remove the container %s: %w", c.name, err)
	}
	return nil
}

func (c *container) running(ctx context.Context) (bool, error) {
	state, err := c.state(ctx)
	return state == "running" || state == "paused", err
}

// state returns one word, such as created, running, paused or exited.
func (c *container) state(ctx context.Context) (string, error) {
	return c.command(ctx, "container", "inspect", "--format", "{{.State.Status}}", c.name)
}

// logs returns the end of what the server has logged.
func (c *container) logs() string {
	ctx, cancel := context.WithTimeout(context.Background(), dockerTimeout)
	defer cancel()

	var logs bytes.Buffer
	cmd := dockerCommand(ctx, c.docker, "logs", "--tail", "20", c.name)
	cmd.Stdout, cmd.Stderr = &logs, &logs // the server logs to the latter
	if err := cmd.Run(); err != nil {
		return err.Error()
	}
	return strings.TrimSpace(logs.String())
}

func (c *container) command(ctx context.Context, args ...string) (string, error) {
	output, err := runDocker(ctx, c.docker, args...)
	if err != nil {
		return "", fmt.Errorf("pgserver: %w", err)
	}
	return output, nil
}

// runDocker returns what the command prints. Its error holds what the command complains of, but not the
// arguments, because one of them is a password.
func runDocker(ctx context.Context, docker string, args ...string) (string, error) {
	cmd := dockerCommand(ctx, docker, args...)
	var complaint bytes.Buffer
	cmd.Stderr = &complaint
	output, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("docker %s: %w: %s", args[0], err, bytes.TrimSpace(complaint.Bytes()))
	}
	return string(bytes.TrimSpace(output)), nil
}

func dockerCommand(ctx context.Context, docker string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, docker, args...)
	cmd.SysProcAttr = detached(nil) // so that Ctrl-C reaches this process alone
	cmd.WaitDelay = time.Second     // children of a killed command may hold its output open
	return cmd
}

func (c *container) url() string {
	return fmt.Sprintf("postgres://postgres:%s@127.0.0.1:%d/postgres?sslmode=disable", c.password, c.port)
}

func (c *container) origin() string {
	return "from the Docker image " + c.image + ", started on 127.0.0.1:" + strconv.Itoa(c.port)
}

func (c *container) dataDir() string      { return "" }
func (c *container) pid() int             { return 0 }
func (c *container) pids() ([]int, error) { return nil, nil }
