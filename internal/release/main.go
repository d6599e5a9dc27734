// Command release writes a version into the go.mod and go.sum files of all modules that are published:
//
//	go run ./internal/release v0.1.0
//
// "make release VERSION=v0.1.0" calls it, and it calls "make verify". It works in the working tree of the current
// folder, which must have no uncommitted changes. It commits, tags and pushes nothing, and prints the commands that do
// so.
//
// The release is a commit beside the branch: only tags lead to it. On the branch, the modules keep naming each other by
// folders, so that a change in two modules is one commit.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

const (
	library    = "github.com/pgratelimit/ratelimit"
	unreleased = "v0.0.0-00010101000000-000000000000" // what the modules require of each other on the branch
)

// modules has the folders of the published modules. Each one requires only those before it. The module integration_test
// is not published.
func modules() []string {
	return []string{".", "grpclimit", "otelratelimit", "service", "cmd/pgratelimit"}
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: make release VERSION=v0.1.0")
		os.Exit(2)
	}
	if err := release(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

func release(version string) error {
	if err := check(version); err != nil {
		return err
	}
	verify := exec.Command("make", "--no-print-directory", "verify")
	verify.Stdout, verify.Stderr = os.Stderr, os.Stderr
	if err := verify.Run(); err != nil {
		return fmt.Errorf("make verify: %w", err)
	}
	dir, err := os.MkdirTemp("", "ratelimit-release-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	r, err := newRehearsal(dir, version)
	if err != nil {
		return err
	}
	if err := r.joinModules(); err != nil {
		return err
	}
	for _, module := range modules() {
		if err := r.publish(module); err != nil {
			return fmt.Errorf("module %s: %w", module, err)
		}
	}
	if err := r.copyBack(); err != nil {
		return err
	}
	tell(version)
	return nil
}

// check returns an error if this commit cannot become the version.
func check(version string) error {
	if !regexp.MustCompile(`^v[01]\.\d+\.\d+(-[0-9a-z.]+)?$`).MatchString(version) {
		return fmt.Errorf("%q is no version such as v0.1.0; from v2 on, the modules need other paths", version)
	}
	changes, err := output(".", nil, "git", "status", "--porcelain")
	if err != nil {
		return err
	}
	if changes != "" {
		return fmt.Errorf("these files are not committed:\n%s", changes)
	}
	if _, err := output(".", nil, "git", "rev-parse", "--quiet", "--verify", "refs/tags/"+version); err == nil {
		return fmt.Errorf("the tag %s exists; a published version can never change", version)
	}
	changelog, err := os.ReadFile("CHANGELOG.md")
	if err != nil {
		return err
	}
	if !dated(string(changelog), version) {
		return fmt.Errorf("CHANGELOG.md has no line such as \"## %s (2026-12-24)\"", version[1:])
	}
	return nil
}

// dated tells whether the version has a heading with a date in a changelog.
func dated(changelog, version string) bool {
	heading := `(?m)^## ` + regexp.QuoteMeta(version[1:]) + ` \(\d{4}-\d\d-\d\d\)$`
	return regexp.MustCompile(heading).MatchString(changelog)
}

// rehearsal is a clone in which the release is committed and tagged, module after module. go gets each module from the
// clone when the next one needs its sum.
type rehearsal struct {
	clone, version string
	environment    []string
}

func newRehearsal(dir, version string) (*rehearsal, error) {
	settings, err := output(".", nil, "go", "env", "GOMODCACHE", "GOPROXY")
	if err != nil {
		return nil, err
	}
	cache, proxy, _ := strings.Cut(settings, "\n")
	r := &rehearsal{clone: filepath.Join(dir, "clone"), version: version}
	r.environment = []string{
		"GOWORK=off", "GOFLAGS=-modcacherw",
		"GOMODCACHE=" + filepath.Join(dir, "modules"), // the user's cache must not know the version yet
		"GOPROXY=file://" + cache + "/cache/download," + proxy,
		"GOPRIVATE=" + library,
		"GIT_CONFIG_GLOBAL=" + os.DevNull, // in which the user may want signatures
		"GIT_CONFIG_COUNT=1",
		"GIT_CONFIG_KEY_0=url.file://" + r.clone + ".insteadOf",
		"GIT_CONFIG_VALUE_0=https://" + library,
	}
	_, err = output(".", nil, "git", "clone", "--quiet", "--no-tags", ".", r.clone)
	return r, err
}

// joinModules lets go.work replace a module at the version that go.mod will require. It comes before the first sum,
// because go.work is a file of the library's module.
func (r *rehearsal) joinModules() error {
	name := filepath.Join(r.clone, "go.work")
	content, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	return os.WriteFile(name, bytes.ReplaceAll(content, []byte(unreleased), []byte(r.version)), 0o644)
}

// publish writes, commits and tags a module in the clone.
func (r *rehearsal) publish(module string) error {
	folder := filepath.Join(r.clone, module)
	file, err := r.run(folder, "go", "mod", "edit", "-json")
	if err != nil {
		return err
	}
	edit, err := edits(file, r.version)
	if err != nil {
		return err
	}
	for _, command := range [][]string{
		append([]string{"go", "mod", "edit", "-fmt"}, edit...),
		{"go", "mod", "tidy"},
		{"git", "-c", "user.name=release", "-c", "user.email=release@localhost",
			"commit", "--quiet", "--allow-empty", "-am", module},
		{"git", "tag", tag(module, r.version)},
	} {
		if _, err := r.run(folder, command...); err != nil {
			return err
		}
	}
	return nil
}

// edits returns the flags of go mod edit for a go.mod file in JSON, so that it requires the version of each module of
// this repository, and does not name folders.
func edits(file, version string) (flags []string, err error) {
	var mod struct {
		Require []struct{ Path string }
		Replace []struct{ Old struct{ Path string } }
	}
	if err := json.Unmarshal([]byte(file), &mod); err != nil {
		return nil, err
	}
	ours := func(path string) bool { return path == library || strings.HasPrefix(path, library+"/") }
	for _, require := range mod.Require {
		if ours(require.Path) {
			flags = append(flags, "-require="+require.Path+"@"+version)
		}
	}
	for _, replace := range mod.Replace {
		if !ours(replace.Old.Path) {
			return nil, fmt.Errorf("go.mod replaces %s, which nobody who requires it would see", replace.Old.Path)
		}
		flags = append(flags, "-dropreplace="+replace.Old.Path)
	}
	return flags, nil
}

// copyBack writes what the rehearsal has changed into the working tree.
func (r *rehearsal) copyBack() error {
	names := []string{"go.work"}
	for _, module := range modules() {
		names = append(names, filepath.Join(module, "go.mod"), filepath.Join(module, "go.sum"))
	}
	for _, name := range names {
		content, err := os.ReadFile(filepath.Join(r.clone, name))
		if err != nil {
			return err
		}
		if err := os.WriteFile(name, content, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// tag is the tag by which go finds a version of a module.
func tag(module, version string) string { return strings.TrimPrefix(module+"/"+version, "./") }

// tell prints what to do next.
func tell(version string) {
	var tags []string
	for _, module := range modules() {
		tags = append(tags, tag(module, version))
	}
	all := strings.Join(tags, " ")
	fmt.Fprintf(os.Stdout, `The go.mod files have the version. To publish it:

  git switch --detach
  git commit -am 'release %[1]s'
  for tag in %[2]s; do git tag $tag; done
  git push origin %[2]s
  git switch -

The branch stays as it was. A version that was pushed can never change. To think again instead:

  git restore .
`, version, all)
}

func (r *rehearsal) run(folder string, command ...string) (string, error) {
	return output(folder, r.environment, command[0], command[1:]...)
}

// output runs a program, and returns its standard output.
func output(folder string, environment []string, program string, args ...string) (string, error) {
	cmd := exec.Command(program, args...)
	cmd.Dir = folder
	cmd.Env = append(os.Environ(), environment...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return strings.TrimSpace(string(out)), nil
}
