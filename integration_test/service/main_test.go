// Package service tests pgratelimit serve as a whole: real processes, which are asked on all doors at once while they
// are killed, frozen, cut off from Postgres, reloaded, drained and attacked.
package service

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// program is the path of the command.
var program string

func TestMain(m *testing.M) { os.Exit(buildAndRun(m)) }

func buildAndRun(m *testing.M) int {
	dir, err := os.MkdirTemp("", "ratelimit-serve-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = os.RemoveAll(dir) }()
	program = filepath.Join(dir, "pgratelimit")
	build := exec.Command("go", "build", "-o", program, "./cmd/pgratelimit")
	build.Dir, build.Stderr = "../..", os.Stderr // its go.work has the module of the command
	if err := build.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "build the command:", err)
		return 1
	}
	return pgtest.Run(m)
}
