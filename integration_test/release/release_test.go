// Package release tests a release: it publishes all modules, and uses them from empty folders as a stranger would.
package release

import (
	"bytes"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const (
	library = "github.com/pgratelimit/ratelimit"
	version = "v0.1.0"
)

// modules has the folder of each published module, and those of its packages that have examples.
var modules = map[string][]string{
	"":          {"", "cleanup", "httplimit", "livepage", "migrations", "observe", "ratelimittest", "sqldb"},
	"grpclimit": {""}, "otelratelimit": {""}, "service": {""}, "cmd/pgratelimit": nil,
}

// A stranger gets the library, the command and the other modules. The test makes a release of the files in the working
// tree, and pushes it to a repository on this machine.
func TestRelease(t *testing.T) {
	t.Parallel()

	tree, origin := workingTree(t), t.TempDir()
	in(t, origin, nil, "git", "init", "--quiet", "--bare")
	in(t, tree, nil, "git", "remote", "add", "origin", origin)
	before := in(t, tree, nil, "git", "rev-parse", "main")
	told := in(t, tree, nil, "make", "release", "VERSION="+version)
	commands := regexp.MustCompile(`(?s)To publish it:\n\n(.*?)\n\nThe branch`).FindStringSubmatch(told)
	require.NotNil(t, commands, told)
	in(t, tree, nil, "sh", "-ec", commands[1])
	require.Equal(t, before, in(t, tree, nil, "git", "rev-parse", "HEAD"))
	require.Equal(t, "main", in(t, tree, nil, "git", "branch", "--show-current"))
	require.Empty(t, in(t, tree, nil, "git", "status", "--porcelain"))
	require.Len(t, strings.Fields(in(t, origin, nil, "git", "tag")), len(modules))

	environment := stranger(t, publish(t, origin))
	t.Run("checkout", func(t *testing.T) { checkout(t, tree, environment) })
	t.Run("library", func(t *testing.T) { readme(t, tree, environment) })
	t.Run("command", func(t *testing.T) { command(t, environment) })
	for module, packages := range modules {
		for _, folder := range packages {
			name := strings.Trim(module+"/"+folder, "/")
			t.Run("examples/"+name, func(t *testing.T) { examples(t, tree, name, environment) })
		}
	}
}

// workingTree returns a copy of the working tree whose files are committed, and whose changelog has a date.
func workingTree(t *testing.T) string {
	t.Helper()
	tree := t.TempDir()
	for name := range strings.SplitSeq(in(t, "../..", nil, "git", "ls-files", "-co", "--exclude-standard"), "\n") {
		content, err := os.ReadFile(filepath.Join("../..", name))
		if os.IsNotExist(err) {
			continue // it was removed, and that is not committed yet
		}
		require.NoError(t, err)
		if name == "CHANGELOG.md" {
			content = regexp.MustCompile(`(?m)^## 0\.1\.0 .*$`).ReplaceAll(content, []byte("## 0.1.0 (2026-12-24)"))
		}
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(tree, name)), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(tree, name), content, 0o644))
	}
	in(t, tree, nil, "git", "init", "--quiet", "--initial-branch=main")
	in(t, tree, nil, "git", "config", "user.name", "test")
	in(t, tree, nil, "git", "config", "user.email", "test@localhost")
	in(t, tree, nil, "git", "add", ".")
	in(t, tree, nil, "git", "commit", "--quiet", "-m", "everything")
	return tree
}

// publish lets go get all modules from a repository, and returns a folder that serves as a module proxy.
func publish(t *testing.T, origin string) (proxy string) {
	t.Helper()
	cache := t.TempDir()
	environment := []string{
		"GOMODCACHE=" + cache, "GOFLAGS=-modcacherw", "GOWORK=off", "GOPRIVATE=" + library, "GIT_CONFIG_COUNT=1",
		"GIT_CONFIG_KEY_0=url.file://" + origin + ".insteadOf", "GIT_CONFIG_VALUE_0=https://" + library,
	}
	for module := range modules {
		module = strings.TrimSuffix(library+"/"+module, "/") + "@" + version
		in(t, cache, environment, "go", "mod", "download", module)
		require.FileExists(t, filepath.Join(cache, module, "LICENSE"))
		content, err := os.ReadFile(filepath.Join(cache, module, "go.mod"))
		require.NoError(t, err)
		require.NotContains(t, string(content), "replace")
	}
	return filepath.Join(cache, "cache/download")
}

// stranger returns the environment of a user who has an empty module cache. With -trimpath, go compiles a module once,
// and not again for each temporary folder.
func stranger(t *testing.T, proxy string) []string {
	t.Helper()
	return []string{
		"GOPROXY=file://" + proxy + "," + otherModules(t), "GOMODCACHE=" + t.TempDir(),
		"GOFLAGS=-trimpath -modcacherw", "CGO_ENABLED=0", "GOWORK=off", "GOSUMDB=off",
	}
}

// otherModules returns the proxies for modules that are not ours. The first one is the cache of this machine.
func otherModules(t *testing.T) string {
	t.Helper()
	cache, proxies, _ := strings.Cut(in(t, ".", nil, "go", "env", "GOMODCACHE", "GOPROXY"), "\n")
	return "file://" + cache + "/cache/download," + proxies
}

// checkout requires that the modules can be built from their tags with the sums in go.sum, and that the line in the
// Dockerfile builds a command that knows its version, also before anybody can get the modules.
func checkout(t *testing.T, tree string, environment []string) {
	in(t, tree, nil, "git", "switch", "--quiet", "--detach", version)
	defer in(t, tree, nil, "git", "switch", "--quiet", "main")
	for module := range modules {
		in(t, filepath.Join(tree, module), environment, "go", "build", "./...")
	}

	dockerfile, err := os.ReadFile(filepath.Join(tree, "deploy/Dockerfile"))
	require.NoError(t, err)
	line := regexp.MustCompile(`(?m)^RUN (.* go build .*) -o /pgratelimit (.*)$`).FindSubmatch(dockerfile)
	require.NotNil(t, line)
	require.Contains(t, string(dockerfile), "\nENTRYPOINT [\"/pgratelimit\"]\n")
	program := filepath.Join(t.TempDir(), "pgratelimit")
	image := slices.Concat(environment, []string{"GOWORK=", "GOPROXY=" + otherModules(t), "GOFLAGS=-modcacherw -buildvcs=true",
		"GOMODCACHE=" + t.TempDir()})
	in(t, tree, image, "sh", "-c", string(line[1])+" -o "+program+" "+string(line[2]))
	require.Equal(t, "pgratelimit version "+version, in(t, tree, nil, program, "--version"))
}

// readme does what README says: it gets the library, and runs the program.
func readme(t *testing.T, tree string, environment []string) {
	text, err := os.ReadFile(filepath.Join(tree, "README.md"))
	require.NoError(t, err)
	get := regexp.MustCompile(`(?m)^go get .*$`).Find(text)
	program := regexp.MustCompile("(?s)```go\n(package main\n.*?)```").FindSubmatch(text)
	require.NotNil(t, get)
	require.NotNil(t, program)
	address := testkit.FreeAddress(t)
	require.Contains(t, string(program[1]), "localhost:8080")

	dir := emptyModule(t, environment)
	write(t, dir, "main.go", bytes.ReplaceAll(program[1], []byte("localhost:8080"), []byte(address)))
	in(t, dir, environment, "sh", "-c", string(get))
	require.Contains(t, in(t, dir, environment, "go", "list", "-m", "all"), library+" "+version+"\n")
	in(t, dir, environment, "go", "build", "-o", "program", ".")

	testkit.Start(t, testkit.Accepts(address),
		"env", "DATABASE_URL="+pgtest.Empty(t).URL, filepath.Join(dir, "program"))
	for i := range 12 {
		response, err := http.Get("http://" + address)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		require.Equal(t, i < 10, response.StatusCode == http.StatusOK)
		require.Equal(t, i >= 10, response.StatusCode == http.StatusTooManyRequests)
	}
}

// command installs the command, runs the demo, and looks at how its sessions are named.
func command(t *testing.T, environment []string) {
	bin := t.TempDir()
	in(t, bin, slices.Concat(environment, []string{"GOBIN=" + bin}), "go", "install", library+"/cmd/pgratelimit@"+version)
	program := filepath.Join(bin, "pgratelimit")
	require.Equal(t, "pgratelimit version "+version, in(t, bin, nil, program, "--version"))

	db := pgtest.New(t)
	database := []string{"DATABASE_URL=" + db.URL}
	require.Contains(t, in(t, bin, database, program, "demo"), " 429 ")

	tx, err := db.Pool.Begin(t.Context()) // the command limits waits for it
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	_, err = tx.Exec(t.Context(), "LOCK TABLE rate_limit_ephemeral")
	require.NoError(t, err)
	for name, args := range map[string][]string{
		"pgratelimit " + version:       {"limits"},
		"pgratelimit serve " + version: {"serve", "--grpc", "", "--http", testkit.FreeAddress(t)},
	} {
		cmd := exec.CommandContext(t.Context(), program, args...)
		cmd.Env = append(os.Environ(), database...)
		require.NoError(t, cmd.Start())
		testkit.WaitUntil(t, func() bool {
			return pgtest.Scalar[bool](t, db.Pool, `SELECT EXISTS (SELECT FROM pg_stat_activity
				WHERE application_name = $1 AND datname = current_database())`, name)
		}, "there is no %q", name)
		require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
		_ = cmd.Wait()
	}
}

// examples compiles the examples of a package.
func examples(t *testing.T, tree, name string, environment []string) {
	files, err := filepath.Glob(filepath.Join(tree, name, "example*_test.go"))
	require.NoError(t, err)
	require.NotEmpty(t, files)
	dir := emptyModule(t, environment)
	for _, file := range files {
		content, err := os.ReadFile(file)
		require.NoError(t, err)
		write(t, dir, filepath.Base(file), content)
	}
	in(t, dir, environment, "go", "get", strings.TrimSuffix(library+"/"+name, "/")+"@"+version)
	in(t, dir, environment, "go", "vet", "-mod=mod", ".")
}

func emptyModule(t *testing.T, environment []string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	in(t, dir, environment, "go", "mod", "init", "example.com/stranger")
	return dir
}

func write(t *testing.T, dir, name string, content []byte) {
	t.Helper()
	require.NoError(t, os.WriteFile(filepath.Join(dir, name), content, 0o600))
}

// in runs a program in a folder, and returns its output without the end of the last line.
func in(t *testing.T, dir string, environment []string, program string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), environment...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	output, err := cmd.Output()
	require.NoError(t, err, "%s\n%s\n%s", cmd, output, stderr.String())
	return strings.TrimSuffix(string(output), "\n")
}
