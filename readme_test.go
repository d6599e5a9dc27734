package ratelimit_test

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestReadmeShowsCompiledCode compares each Go block of README.md with the examples, so that what README shows compiles: a block is
// lines of one of them, whatever their indentation.
func TestReadmeShowsCompiledCode(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	var compiled string
	for _, file := range []string{"example_test.go", "cleanup/example_test.go", "httplimit/example_test.go", "examples/hello/main.go"} {
		code, err := os.ReadFile(file)
		require.NoError(t, err)
		compiled += withoutIndentation(string(code))
	}

	blocks := strings.Split(string(readme), "```go\n")[1:]
	require.NotEmpty(t, blocks)
	for _, block := range blocks {
		code, _, closed := strings.Cut(block, "```")
		require.True(t, closed)
		require.Contains(t, compiled, withoutIndentation(code))
	}
	require.NotContains(t, compiled, withoutIndentation("func notThere() {}"))
}

func withoutIndentation(code string) string {
	var lines []string
	for line := range strings.Lines(code) {
		lines = append(lines, strings.TrimSpace(line))
	}
	return strings.Join(lines, "\n")
}
