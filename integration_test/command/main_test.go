// Package command tests the deployed forms of the command: its image, its cron job, and its use through a pooler.
package command

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const (
	repository = "../.."

	// patience is the longest wait for an event that is certain to come. cron wakes up every minute.
	patience = 3 * time.Minute
)

// building is locked during a build. The first build takes minutes to fill Go's cache, and later builds use the cache.
var building sync.Mutex

// buildCommand builds the command with the line in deploy/Dockerfile, and returns its path.
func buildCommand(t *testing.T) string {
	t.Helper()
	building.Lock()
	defer building.Unlock()
	dockerfile, err := os.ReadFile(filepath.Join(repository, "deploy/Dockerfile"))
	require.NoError(t, err)
	line := regexp.MustCompile(`(?m)^RUN (.* go build .* -o /pgratelimit .*)$`).FindSubmatch(dockerfile)
	require.NotNil(t, line)

	dir := testkit.OpenDir(t)
	binary := filepath.Join(dir, "pgratelimit")
	cmd := exec.CommandContext(
		t.Context(),
		"sh",
		"-c",
		strings.Replace(string(line[1]), "/pgratelimit ", "'"+binary+"' ", 1),
	)
	cmd.Dir = repository
	output, err := cmd.CombinedOutput()
	require.NoError(t, err, string(output))
	return binary
}
