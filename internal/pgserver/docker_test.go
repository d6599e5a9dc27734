//go:build unix

package pgserver

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgfind"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// fakeDocker stands in for the docker command. It logs its arguments, one command per line, and its container is a
// process that forwards the published port to a real server. The state of the container is a file.
const fakeDocker = `#!/bin/sh
here=$(dirname "$0")
echo "$@" >>"$here/log"

forward() {
	if [ -e "$here/broken" ]; then
		echo exited >"$here/state"
		return
	fi
	HELPER=forwarder FORWARDER "$(cat "$here/port")" TARGET >/dev/null 2>&1 </dev/null &
	echo $! >"$here/pid"
	echo running >"$here/state"
}

case "$1 $2" in
"version --format") echo 28.0.0 ;;
"image inspect") exit 1 ;;
"pull --quiet") ;;
"run --detach")
	while [ "$1" != --publish ]; do shift; done
	echo "${2%:5432}" >"$here/port"
	if [ -e "$here/taken" ]; then
		rm "$here/taken"
		echo created >"$here/state"
		echo "docker: Error response from daemon: Bind for $2 failed: port is already allocated" >&2
		exit 125
	fi
	forward
	echo 0123456789ab ;;
"container inspect") cat "$here/state" ;;
"kill --signal")
	kill -KILL "$(cat "$here/pid")"
	echo exited >"$here/state" ;;
logs\ *) echo "FATAL: on purpose" >&2 ;;
wait\ *)
	while [ "$(cat "$here/state")" = running ]; do sleep 0.02; done
	echo 0 ;;
start\ *) forward ;;
pause\ *)
	kill -STOP "$(cat "$here/pid")"
	echo paused >"$here/state" ;;
unpause\ *)
	kill -CONT "$(cat "$here/pid")"
	echo running >"$here/state" ;;
"rm -f")
	[ -e "$here/pid" ] && kill -KILL "$(cat "$here/pid")"
	rm -f "$here/state" "$here/pid" ;;
"ps -aq") [ ! -e "$here/state" ] || echo 0123456789ab ;;
*)
	echo "unknown command: $*" >&2
	exit 1 ;;
esac
`

// installFakeDocker returns the path of the command; its files are next to it.
func installFakeDocker(t *testing.T, target string) string {
	t.Helper()
	path := filepath.Join(testkit.OpenDir(t), "docker")
	script := strings.NewReplacer("HELPER", helperVariable, "FORWARDER", testBinary(t), "TARGET", target).
		Replace(fakeDocker)
	testkit.WriteProgram(t, path, []byte(script))
	return path
}

// dockerHost has the docker command and nothing else.
func dockerHost(docker string) host {
	return host{port: freePort, tempDir: os.TempDir(), Host: pgfind.Host{LookPath: func(name string) (string, error) {
		if name == "docker" {
			return docker, nil
		}
		return "", exec.ErrNotFound
	}}}
}

// commands returns what the fake has logged, with the random parts and the port replaced.
func commands(t *testing.T, docker string) []string {
	t.Helper()
	log, err := os.ReadFile(filepath.Join(filepath.Dir(docker), "log"))
	require.NoError(t, err)
	text := regexp.MustCompile(`pgserver-\w+`).ReplaceAllString(string(log), "NAME")
	text = regexp.MustCompile(`PASSWORD=\w{26}`).ReplaceAllString(text, "PASSWORD=SECRET")
	text = regexp.MustCompile(`127\.0\.0\.1:\d+:5432`).ReplaceAllString(text, "127.0.0.1:PORT:5432")
	var commands []string
	for line := range strings.Lines(text) {
		// How often we look at the container is no matter.
		if line = strings.TrimSpace(line); line != "wait NAME" &&
			line != "container inspect --format {{.State.Status}} NAME" {
			commands = append(commands, line)
		}
	}
	return commands
}

func TestDocker(t *testing.T) {
	t.Parallel()

	target := startServer(t, Config{})
	docker := installFakeDocker(t, address(portOf(t, target.URL())))
	folder := filepath.Dir(docker)
	require.NoError(t, os.WriteFile(filepath.Join(folder, "taken"), nil, 0o600))

	const run = "run --detach --name NAME --label com.github.pgratelimit.pgserver=true --publish 127.0.0.1:PORT:5432" +
		" --env POSTGRES_PASSWORD=SECRET --env POSTGRES_INITDB_ARGS=--encoding=UTF8 --locale=C --no-sync some/image:1" +
		" -c fsync=off -c full_page_writes=off -c max_connections=9 -c max_wal_size=256MB -c shared_buffers=128MB -c synchronous_commit=off"
	want := []string{
		"version --format {{.Server.Version}}",
		"image inspect some/image:1",
		"pull --quiet some/image:1",
		run,
		"rm -f -v NAME", // its port was taken
		run,
	}
	server, err := start(t.Context(),
		Config{Image: "some/image:1", Settings: map[string]string{"max_connections": "9"}}, dockerHost(docker))
	require.NoError(t, err)
	defer func() { require.NoError(t, server.Close()) }()
	require.Equal(t, want, commands(t, docker))

	require.True(t, server.Owned())
	require.Regexp(
		t,
		`^PostgreSQL \d+\S* from the Docker image some/image:1, started on 127\.0\.0\.1:\d+$`,
		server.Describe(),
	)
	require.Equal(t, "1", query(t, server.URL(), "SELECT 1"))
	require.ErrorIs(t, server.Restart(t.Context()), ErrRunning)

	for _, step := range []struct {
		do   func() error
		want []string
	}{
		{server.Freeze, []string{"pause NAME"}},
		{server.Freeze, nil},
		{server.Thaw, []string{"unpause NAME"}},
		{server.Thaw, nil},
		{server.Kill, []string{"kill --signal KILL NAME"}},
		{server.Kill, nil},
		{func() error { return server.Restart(t.Context()) }, []string{"start NAME"}},
		{func() error { return server.Stop(t.Context(), Smart) }, []string{"kill --signal TERM NAME"}},
		{func() error { return server.Stop(t.Context(), Smart) }, nil},
		{func() error { return server.Restart(t.Context()) }, []string{"start NAME"}},
		{server.Freeze, []string{"pause NAME"}},
		{func() error { return server.Stop(t.Context(), Immediate) }, []string{"unpause NAME", "kill --signal QUIT NAME"}},
		{func() error { return server.Restart(t.Context()) }, []string{"start NAME"}},
		{server.Close, []string{"rm -f -v NAME", "ps -aq --filter name=NAME"}},
		{server.Close, nil},
	} {
		require.NoError(t, step.do())
		want = append(want, step.want...)
		require.Equal(t, want, commands(t, docker))
	}
	require.ErrorIs(t, server.Restart(t.Context()), ErrClosed)
	require.Equal(t, want, commands(t, docker))

	owner := startOwner(t, "wait", fakeDockerVariable+"="+docker)
	owner.report(t)
	require.FileExists(t, filepath.Join(folder, "state"))
	require.NoError(t, syscall.Kill(-owner.cmd.Process.Pid, syscall.SIGKILL))
	require.Error(t, owner.cmd.Wait())
	require.Eventually(t, func() bool {
		log := commands(t, docker)
		return slices.Equal(log[len(log)-2:], []string{"rm -f -v NAME", "ps -aq --filter name=NAME"})
	}, patience, poll, "nobody has removed the container of a killed owner")
	require.NoFileExists(t, filepath.Join(folder, "state"))
}

func TestDockerContainerThatEnds(t *testing.T) {
	t.Parallel()

	docker := installFakeDocker(t, "nowhere")
	require.NoError(t, os.WriteFile(filepath.Join(filepath.Dir(docker), "broken"), nil, 0o600))
	_, err := start(t.Context(), Config{}, dockerHost(docker))
	require.ErrorContains(t, err, "it has ended")
	require.ErrorContains(t, err, "FATAL: on purpose")
	require.NoFileExists(t, filepath.Join(filepath.Dir(docker), "state"))
}
