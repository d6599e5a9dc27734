package ratelimit_test

import (
	"os"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// Every test file named in docs/guarantees.md exists and has tests.
func TestGuaranteesNameFilesThatHaveTests(t *testing.T) {
	t.Parallel()

	text, err := os.ReadFile("docs/guarantees.md")
	require.NoError(t, err)
	named := regexp.MustCompile("`([\\w/]+_test\\.go)`").FindAllStringSubmatch(string(text), -1)
	require.Greater(t, len(named), 50)
	for _, name := range named {
		source, err := os.ReadFile(name[1])
		require.NoError(t, err)
		require.Regexp(t, `(?m)^func (Test|Fuzz)\w+\(`, string(source), "%s has no tests", name[1])
	}
}

// CONTRIBUTING.md says what each package below internal/ is for.
func TestContributingNamesEveryPackage(t *testing.T) {
	t.Parallel()

	text, err := os.ReadFile("CONTRIBUTING.md")
	require.NoError(t, err)
	packages, err := os.ReadDir("internal")
	require.NoError(t, err)
	for _, folder := range packages {
		require.Regexp(t, "(?m)^\\|.*`"+folder.Name()+"`.*\\|.*\\|$", string(text), folder.Name())
	}
}
