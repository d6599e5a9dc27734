package ratelimit_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestDocumentsShowCompiledCode compares each Go block of README.md and docs/ with the examples, so what they show
// compiles. A block must be a run of lines of one example. Indentation may differ.
func TestDocumentsShowCompiledCode(t *testing.T) {
	t.Parallel()
	var compiled string
	for _, file := range []string{
		"example_test.go", "cleanup/example_test.go", "httplimit/example_test.go", "examples/hello/main.go", "examples/servers/main.go",
		"examples/jobs/main.go",
		"grpclimit/example_test.go", "livepage/example_test.go", "integration_test/frameworks/recipes_test.go",
		"integration_test/metrics/application_test.go", "ratelimittest/handler_test.go",
	} {
		code, err := os.ReadFile(file)
		require.NoError(t, err)
		compiled += withoutIndentation(string(code))
	}
	documents, err := filepath.Glob("docs/*.md")
	require.NoError(t, err)
	var blocks int
	for _, file := range append(documents, "README.md") {
		document, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, block := range strings.Split(string(document), "```go\n")[1:] {
			code, _, closed := strings.Cut(block, "```")
			require.True(t, closed, file)
			require.Contains(t, compiled, withoutIndentation(code), file)
			blocks++
		}
	}
	require.Greater(t, blocks, 10)
	require.NotContains(t, compiled, withoutIndentation("func notThere() {}"))
}

// Every link in the documents leads to an existing file and heading.
func TestLinksLeadSomewhere(t *testing.T) {
	t.Parallel()
	documents, err := filepath.Glob("docs/*.md")
	require.NoError(t, err)
	links := 0
	for _, file := range append(documents, "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md") {
		document, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, link := range regexp.MustCompile(`\]\(([^)]+)\)`).FindAllStringSubmatch(string(document), -1) {
			if strings.Contains(link[1], "://") {
				continue
			}
			target, heading, _ := strings.Cut(link[1], "#")
			path := file
			if target != "" {
				path = filepath.Join(filepath.Dir(file), target)
			}
			_, err := os.Stat(path)
			require.NoError(t, err, "%s: %s", file, link[1])
			if heading != "" {
				text, err := os.ReadFile(path)
				require.NoError(t, err)
				require.Contains(t, headings(string(text)), heading, "%s: %s", file, link[1])
			}
			links++
		}
	}
	require.Greater(t, links, 30)
}

// headings returns the anchors of a document's headings.
func headings(document string) (anchors []string) {
	for _, heading := range regexp.MustCompile(`(?m)^#+ (.+)$`).FindAllStringSubmatch(document, -1) {
		anchor := regexp.MustCompile(`[^a-z0-9 _-]`).ReplaceAllString(strings.ToLower(heading[1]), "")
		anchors = append(anchors, strings.ReplaceAll(anchor, " ", "-"))
	}
	return anchors
}

func withoutIndentation(code string) string {
	var lines []string
	for line := range strings.Lines(code) {
		lines = append(lines, strings.TrimSpace(line))
	}
	return strings.Join(lines, "\n")
}
