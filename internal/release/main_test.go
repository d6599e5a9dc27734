package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// integration_test/release makes a whole release. These tests show what is refused.

func TestWhatCannotBeReleased(t *testing.T) {
	t.Chdir(t.TempDir()) // the program works in the current folder
	git := func(args ...string) {
		t.Helper()
		args = append([]string{"-c", "user.name=test", "-c", "user.email=test@localhost"}, args...)
		text, err := exec.CommandContext(t.Context(), "git", args...).CombinedOutput()
		require.NoError(t, err, string(text))
	}
	commit := func(changelog string) {
		t.Helper()
		require.NoError(t, os.WriteFile("CHANGELOG.md", []byte(changelog), 0o600))
		git("add", ".")
		git("commit", "--quiet", "-m", "changelog")
	}
	git("init", "--quiet")

	commit("# Changelog\n\n## 0.1.0 (unreleased)\n")
	require.ErrorContains(t, check("v0.1.0"), "CHANGELOG.md has no line")
	commit("# Changelog\n\n## 0.1.0 (2026-12-24)\n")
	require.NoError(t, check("v0.1.0"))
	require.ErrorContains(t, check("v0.1.1"), "CHANGELOG.md has no line")
	for _, version := range []string{"", "0.1.0", "v0.1", "v2.0.0", "v0.1.0+x", "v0.1.0 "} {
		require.ErrorContains(t, check(version), "is no version", version)
	}

	require.NoError(t, os.WriteFile("new.go", nil, 0o600))
	require.ErrorContains(t, check("v0.1.0"), "new.go")
	require.NoError(t, os.Remove("new.go"))
	git("tag", "v0.1.0")
	require.ErrorContains(t, check("v0.1.0"), "can never change")
}

func TestEdits(t *testing.T) {
	t.Parallel()

	flags, err := edits(`{
		"Require": [{"Path": "github.com/pgratelimit/ratelimit", "Version": "v0.0.0"}, {"Path": "example.com/other"},
			{"Path": "github.com/pgratelimit/ratelimit/service"}, {"Path": "github.com/pgratelimit/ratelimiter"}],
		"Replace": [{"Old": {"Path": "github.com/pgratelimit/ratelimit"}, "New": {"Path": "../"}}]
	}`, "v0.1.0")
	require.NoError(t, err)
	require.Equal(t, []string{
		"-require=github.com/pgratelimit/ratelimit@v0.1.0", "-require=github.com/pgratelimit/ratelimit/service@v0.1.0",
		"-dropreplace=github.com/pgratelimit/ratelimit",
	}, flags)

	_, err = edits(`{"Replace": [{"Old": {"Path": "example.com/other"}}]}`, "v0.1.0")
	require.ErrorContains(t, err, "example.com/other")
}

func TestEveryModuleIsPublished(t *testing.T) {
	t.Parallel()

	var found []string
	for _, pattern := range []string{"go.mod", "*/go.mod", "*/*/go.mod", "*/*/*/go.mod"} {
		files, err := filepath.Glob("../../" + pattern)
		require.NoError(t, err)
		for _, file := range files {
			folder, err := filepath.Rel("../..", filepath.Dir(file))
			require.NoError(t, err)
			found = append(found, folder)
		}
	}
	require.ElementsMatch(t, append(modules(), "integration_test"), found)
	require.Equal(t, "v0.1.0", tag(".", "v0.1.0"))
	require.Equal(t, "cmd/pgratelimit/v0.1.0", tag("cmd/pgratelimit", "v0.1.0"))
}
