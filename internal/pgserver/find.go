package pgserver

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// installFolders returns patterns of the folders in which packages put the programs of the server; few of them are in PATH.
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

// findBinaries returns the folder of postgres and initdb; "" if there is none. A folder that was asked for must have them.
func findBinaries(ctx context.Context, binDir string, host host) (string, error) {
	if binDir != "" {
		binDir, err := filepath.Abs(binDir)
		if err != nil {
			return "", fmt.Errorf("pgserver: folder of the Postgres binaries: %w", err)
		}
		if !hasBinaries(binDir) {
			return "", fmt.Errorf("pgserver: there are no programs postgres and initdb in %s", binDir)
		}
		return binDir, nil
	}

	var candidates []string
	if initdb, err := host.lookPath("initdb"); err == nil {
		candidates = append(candidates, filepath.Dir(initdb))
	}
	if pgConfig, err := host.lookPath("pg_config"); err == nil {
		if printed, err := exec.CommandContext(ctx, pgConfig, "--bindir").Output(); err == nil {
			candidates = append(candidates, strings.TrimSpace(string(printed)))
		}
	}
	candidates = append(candidates, newestFirst(host.folders)...)

	for _, candidate := range candidates {
		if absolute, err := filepath.Abs(candidate); err == nil && hasBinaries(absolute) {
			return absolute, nil
		}
	}
	return "", nil
}

func hasBinaries(folder string) bool {
	for _, name := range []string{"postgres", "initdb"} {
		if _, err := exec.LookPath(filepath.Join(folder, name)); err != nil {
			return false
		}
	}
	return true
}

// newestFirst returns the folders that match the patterns. A version is the last number of a path; 0 if there is none.
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

// freePort returns a port of 127.0.0.1 that nobody listens on right now. It is below those which Linux (32768 and up) and
// macOS (49152 and up) give to outgoing connections: one of these could take the port while our server is stopped.
func freePort() (int, error) {
	const first, last, attempts = 20000, 32767, 100

	var err error
	for range attempts {
		port := first + rand.IntN(last-first+1)
		var listener net.Listener
		if listener, err = net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			return port, listener.Close()
		}
	}
	return 0, fmt.Errorf("pgserver: find a free port on 127.0.0.1: %w", err)
}

// portTaken reports whether a message of Postgres or Docker says that somebody else listens on the port.
func portTaken(message string) bool {
	for _, sign := range []string{
		"could not create any TCP/IP sockets",
		"could not bind",
		"port is already allocated",
		"address already in use",
	} {
		if strings.Contains(message, sign) {
			return true
		}
	}
	return false
}
