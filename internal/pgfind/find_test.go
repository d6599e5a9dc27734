package pgfind

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// emptyHost has nothing but these programs in PATH.
func emptyHost(t *testing.T, path map[string]string) Host {
	t.Helper()
	host := NewHost()
	cache := t.TempDir()
	host.CacheDir = func() (string, error) { return cache, nil }
	host.Folders = []string{filepath.Join(t.TempDir(), "nowhere/*")}
	host.LookPath = func(name string) (string, error) {
		if found, ok := path[name]; ok {
			return found, nil
		}
		return "", &exec.Error{Name: name, Err: exec.ErrNotFound}
	}
	return host
}

// writeProgram writes a shell script.
func writeProgram(t *testing.T, path, script string) string {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
	testkit.WriteProgram(t, path, []byte("#!/bin/sh\n"+script+"\n"))
	return path
}

func TestNothingFoundNamesAllWays(t *testing.T) {
	t.Parallel()

	host := emptyHost(t, nil)
	_, err := host.Find(t.Context(), "")
	require.ErrorIs(t, err, ErrNotFound)
	for _, way := range []string{
		"DATABASE_URL", "RATELIMIT_TEST_DATABASE_URL",
		"apt-get install postgresql", "brew install postgresql", host.Folders[0],
		"Docker", "no docker command in PATH",
		"apt-get install npm", "no npm command in PATH",
	} {
		require.ErrorContains(t, err, way)
	}

	host = emptyHost(t, map[string]string{"npm": "npm"})
	host.releases = nil
	_, err = host.Find(t.Context(), "")
	require.ErrorIs(t, err, ErrNotFound)
	require.ErrorContains(t, err, "no known package of npm has Postgres 17 for ")

	_, err = host.Find(t.Context(), t.TempDir())
	require.ErrorContains(t, err, "no programs postgres and initdb in ")
	require.NotErrorIs(t, err, ErrNotFound)
}

func TestWaysAreTakenInOrder(t *testing.T) {
	t.Parallel()

	root := t.TempDir()
	install := func(folder string, names ...string) string {
		for _, name := range names {
			writeProgram(t, filepath.Join(root, folder, name), "")
		}
		return filepath.Join(root, folder)
	}
	install("lib/9.6/bin", "postgres", "initdb")
	install("lib/18/bin", "initdb") // the client alone
	newest := install("pgsql-17/bin", "postgres", "initdb")
	install("lib/16/bin", "postgres", "initdb")
	unnumbered := install("pgsql/bin", "postgres", "initdb")
	inPath := install("path", "postgres", "initdb")
	configured := install("configured", "postgres", "initdb")
	pgConfig := writeProgram(t, filepath.Join(configured, "pg_config"), "[ $1 = --bindir ] && echo "+configured)
	docker := writeProgram(t, filepath.Join(root, "docker"), "echo 28.0.0")
	silent := writeProgram(t, filepath.Join(root, "silent"), "echo 'Cannot connect to the Docker daemon' >&2; exit 1")

	initdb := filepath.Join(inPath, "initdb")
	for name, test := range map[string]struct {
		binDir  string
		path    map[string]string
		folders []string
		want    Way
	}{
		"the folder asked for": {
			binDir: unnumbered, path: map[string]string{"initdb": initdb}, want: Way{BinDir: unnumbered},
		},
		"PATH": {
			path: map[string]string{"initdb": initdb, "pg_config": pgConfig, "docker": docker},
			want: Way{BinDir: inPath},
		},
		"pg_config": {
			path: map[string]string{"pg_config": pgConfig}, folders: []string{"lib/*/bin"},
			want: Way{BinDir: configured},
		},
		"the newest of the install folders": {
			path: map[string]string{"docker": docker}, folders: []string{"pgsql/bin", "lib/*/bin", "pgsql-*/bin"},
			want: Way{BinDir: newest},
		},
		"a folder without a number": {folders: []string{"pgsql/bin"}, want: Way{BinDir: unnumbered}},
		"Docker": {
			path: map[string]string{"docker": docker, "npm": "/bin/npm"}, folders: []string{"none/*"},
			want: Way{Docker: docker},
		},
		"npm":                        {path: map[string]string{"npm": "/bin/npm"}, want: Way{NPM: "/bin/npm"}},
		"npm beside a silent Docker": {path: map[string]string{"docker": silent, "npm": "/bin/npm"}, want: Way{NPM: "/bin/npm"}},
	} {
		host := emptyHost(t, test.path)
		host.Folders = nil
		for _, folder := range test.folders {
			host.Folders = append(host.Folders, filepath.Join(root, folder))
		}
		found, err := host.Find(t.Context(), test.binDir)
		require.NoError(t, err, name)
		require.Equal(t, test.want, found, name)
	}

	_, err := emptyHost(t, map[string]string{"docker": silent}).Find(t.Context(), "")
	require.ErrorIs(t, err, ErrNotFound)
	require.ErrorContains(t, err, "Cannot connect to the Docker daemon")
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
}
