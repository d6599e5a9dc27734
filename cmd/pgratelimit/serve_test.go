package main

import (
	"io"
	"net/http"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// The lines that the demo of serve prints work as they are printed.
func TestServeDemo(t *testing.T) {
	t.Parallel()
	pgtest.OwnServer(t)

	cmd := command(t, "", "serve", "--demo", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0",
		"--timeout", testkit.Amply.String())
	tempDir := testkit.OpenDir(t) // the server's user must be able to enter the folder
	cmd.Env = append(cmd.Env, "TMPDIR="+tempDir)
	process := start(t, cmd)
	process.readTo("The same without grpcurl")
	process.readTo("    [{")
	out := process.out.String()
	response, err := http.Get(find(t, `(?m)^  (http://\S+/)$`, out))
	require.NoError(t, err)
	defer response.Body.Close()
	page, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, response.StatusCode)
	require.Contains(t, string(page), "No decision since then")
	lines := regexp.MustCompile(`(?m)^  (curl|grpcurl) (.+\n)+`).FindAllString(out, -1)
	require.Len(t, lines, 3)
	for i, want := range []string{`"allowed":true`, `"overallCode": "OK"`, `"overallCode":`} {
		if program := strings.Fields(lines[i])[0]; testkit.Program(program) == "" {
			t.Log("not installed: " + program) // TestReflection of module service does what grpcurl does
			continue
		}
		answer, err := exec.CommandContext(t.Context(), "sh", "-c", lines[i]).CombinedOutput()
		require.NoError(t, err, string(answer))
		require.Contains(t, string(answer), want)
	}
	require.NoError(t, process.interrupt())
	requireServerGone(t, out, tempDir)
}
