package main

import (
	"bytes"
	"log/slog"
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// commandVariable makes the test binary behave as the command.
const commandVariable = "PGRATELIMIT_TEST_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(commandVariable) != "" {
		main()
	}
	slog.SetDefault(slog.New(slog.DiscardHandler))
	pgtest.Main(m)
}

// command is the command as a process of its own.
func command(t *testing.T, databaseURL string, args ...string) *exec.Cmd {
	t.Helper()
	path, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), path, args...)
	cmd.Env = append(os.Environ(), commandVariable+"=yes", "DATABASE_URL="+databaseURL)
	return cmd
}

func TestHelp(t *testing.T) {
	t.Parallel()

	for _, args := range [][]string{{"--help"}, {"-h"}, {"help"}, {"demo", "--help"}, {"demo", "--serve", "-h"}} {
		var stdout, stderr bytes.Buffer
		require.Equal(t, 0, run(t.Context(), args, &stdout, &stderr), args)
		require.Equal(t, usage, stdout.String(), args)
		require.Empty(t, stderr.String(), args)
	}
}

func TestCommandLinesThatMakeNoSense(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		args []string
		want string
	}{
		{nil, "a command is missing"},
		{[]string{"dome"}, `no command "dome"`},
		{[]string{"--serve", "demo"}, "-serve"},
		{[]string{"demo", "--verbose"}, "-verbose"},
		{[]string{"demo", "--serve=perhaps"}, "perhaps"},
		{[]string{"demo", "now"}, `no argument, and got "now"`},
	} {
		var stdout, stderr bytes.Buffer
		require.Equal(t, 2, run(t.Context(), test.args, &stdout, &stderr), test.args)
		require.Empty(t, stdout.String(), test.args)
		require.Contains(t, stderr.String(), test.want)
		require.Contains(t, stderr.String(), usage)
	}
}
