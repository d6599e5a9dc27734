package web

import (
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The curl lines of docs/other-languages.md work, at the address where this test listens.
func TestCurlOfTheDocument(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("curl"); err != nil {
		t.Skip("curl: install it")
	}
	text, err := os.ReadFile("../../../docs/other-languages.md")
	require.NoError(t, err)
	_, script, found := strings.Cut(string(text), "```sh\n")
	require.True(t, found)
	script, rest, found := strings.Cut(script, "```")
	require.True(t, found)
	require.NotContains(t, rest, "```sh")

	b := setup(t, Options{})
	server := httptest.NewServer(b.handler)
	t.Cleanup(server.Close)
	require.Contains(t, script, "http://127.0.0.1:8080")
	script = strings.ReplaceAll(script, "http://127.0.0.1:8080", server.URL)
	out, err := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c",
		strings.ReplaceAll(script, "curl ", "curl --fail ")).CombinedOutput()
	require.NoError(t, err, string(out))
	require.Equal(t, 3, strings.Count(string(out), `"allowed":true`), string(out))
	require.Contains(t, string(out), `"remaining":1`)
}
