package ratelimit_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Every test named in docs/guarantees.md exists.
func TestGuaranteesNameTestsThatExist(t *testing.T) {
	t.Parallel()

	exist := map[string]bool{}
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`)
	require.NoError(t, filepath.WalkDir(".", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		source, err := os.ReadFile(path)
		for _, match := range declared.FindAllSubmatch(source, -1) {
			exist[string(match[1])] = true
		}
		return err
	}))

	text, err := os.ReadFile("docs/guarantees.md")
	require.NoError(t, err)
	named := regexp.MustCompile("`((?:Test|Fuzz)\\w+)`").FindAllStringSubmatch(string(text), -1)
	require.Greater(t, len(named), 50)
	for _, name := range named {
		require.True(t, exist[name[1]], "there is no %s", name[1])
	}
}
