package service

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// instance is a process that serves.
type instance struct {
	grpc, http, door string // addresses: host:port or unix:/path
	config           string // the folder with the configuration
	args, env        []string
	log              testkit.Journal // of all processes that the test started
	cmd              *exec.Cmd
	ended            chan error
}

// personal is part of all keys and tokens in these tests. It must be in no log.
const personal = "ada@example.com"

// start starts a process for the database at url, and ends it after the test. Its doors are Unix sockets, unless args
// says otherwise.
func start(t *testing.T, url string, files map[string]string, args ...string) *instance {
	t.Helper()
	dir := testkit.OpenDir(t)
	s := &instance{config: filepath.Join(dir, "config")}
	require.NoError(t, os.Mkdir(s.config, 0o700))
	for name, content := range files {
		s.write(t, name, content)
	}
	s.args = append([]string{
		"serve", "--database-url", url, "--config", s.config, "--grpc", "unix:" + dir + "/grpc",
		"--http", "unix:" + dir + "/http", "--door", "unix:" + dir + "/door",
	}, args...)
	s.run(t)
	t.Cleanup(func() {
		s.signal(t, syscall.SIGCONT)
		s.end(t)
		require.NotContains(t, s.log.String(), personal)
		if t.Failed() {
			t.Log(s.log.String())
		}
	})
	return s
}

var listens = regexp.MustCompile(`msg="pgratelimit serves".*`)

// run starts the process, and waits until it listens.
func (s *instance) run(t *testing.T) {
	t.Helper()
	s.cmd = exec.Command(program, s.args...)
	s.cmd.Stdout, s.cmd.Stderr = &s.log, &s.log
	s.cmd.Env = append(os.Environ(), s.env...)
	before := len(listens.FindAllString(s.log.String(), -1))
	require.NoError(t, s.cmd.Start())
	s.ended = make(chan error, 1)
	go func(cmd *exec.Cmd, ended chan error) { ended <- cmd.Wait() }(s.cmd, s.ended)
	var lines []string
	testkit.WaitUntil(t, func() bool {
		select {
		case err := <-s.ended:
			require.Fail(t, "the process has ended", "%v\n%s", err, s.log.String())
		default:
		}
		lines = listens.FindAllString(s.log.String(), -1)
		return len(lines) > before
	})
	for name, address := range map[string]*string{"grpc": &s.grpc, "http": &s.http, "door": &s.door} {
		*address = regexp.MustCompile(` ` + name + `=(\S+)`).FindStringSubmatch(lines[before])[1]
		if strings.HasPrefix(*address, "/") {
			*address = "unix:" + *address
		}
	}
}

func (s *instance) signal(t *testing.T, signal os.Signal) {
	t.Helper()
	if err := s.cmd.Process.Signal(signal); !errors.Is(err, os.ErrProcessDone) {
		require.NoError(t, err)
	}
}

// kill ends the process at once.
func (s *instance) kill(t *testing.T) {
	t.Helper()
	s.signal(t, os.Kill)
	require.Error(t, <-s.ended)
}

// end lets the process drain, and waits until it has ended.
func (s *instance) end(t *testing.T) {
	t.Helper()
	s.signal(t, syscall.SIGTERM)
	require.NoError(t, <-s.ended, s.log.String())
	s.ended <- nil // so that a test may end it twice
}

// write writes a file of the configuration as an editor does: a reader sees the old file or the new one.
func (s *instance) write(t *testing.T, name, content string) {
	t.Helper()
	temporary := filepath.Join(s.config, ".new")
	require.NoError(t, os.WriteFile(temporary, []byte(content), 0o600))
	require.NoError(t, os.Rename(temporary, filepath.Join(s.config, name)))
}

// rules returns files that limit each key to n in a year, for Envoy and for HTTP. The Go door uses the same row.
func rules(n int, onFailure string) map[string]string {
	return map[string]string{
		"shop.yaml": fmt.Sprintf(
			"domain: shop\ndescriptors:\n- key: user\n  rate_limit: {unit: year, requests_per_unit: %d}\n", n),
		"limiters.yaml": fmt.Sprintf(
			"limiters:\n- name: envoy:shop\n  policy: every %d/8760h\n  durable: true\n  on_failure: %s\n",
			n, cmp.Or(onFailure, "error")),
	}
}
