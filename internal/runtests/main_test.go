package main

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestWithoutPostgresNothingIsRun(t *testing.T) {
	t.Setenv("RATELIMIT_TEST_DATABASE_URL", "postgres://me:secret@127.0.0.1:1/app")
	t.Chdir("../..")
	var out bytes.Buffer
	err := run(t.Context(), &out, false, nil)
	require.ErrorIs(t, err, errNoServer)
	require.ErrorContains(t, err, "use the server of the given URL")
	require.NotContains(t, err.Error(), "secret")
	require.Equal(t, 2, exitStatus(err))
	require.Empty(t, out.String())
	require.Equal(t, 1, exitStatus(errors.Join(errFailed, errors.New("and more"))))
}

func TestReport(t *testing.T) {
	t.Parallel()

	var out strings.Builder
	r := &report{out: &out}
	require.NoError(t, r.read(strings.NewReader(`go: downloading something
{"Action":"start","Package":"github.com/pgratelimit/ratelimit"}
{"Action":"output","Package":"github.com/pgratelimit/ratelimit","Test":"TestGood","Output":"a log of a test that passes\n"}
{"Action":"pass","Package":"github.com/pgratelimit/ratelimit","Test":"TestGood","Elapsed":1}
{"Action":"output","Package":"github.com/pgratelimit/ratelimit","Test":"TestA","Output":"    a_test.go:1: PgBouncer: install it\n"}
{"Action":"output","Package":"github.com/pgratelimit/ratelimit","Test":"TestA","Output":"--- SKIP: TestA (0.00s)\n"}
{"Action":"skip","Package":"github.com/pgratelimit/ratelimit","Test":"TestA","Elapsed":0}
{"Action":"output","Package":"github.com/pgratelimit/ratelimit","Test":"TestB","Output":"    b_test.go:1: cron: install it\n"}
{"Action":"skip","Package":"github.com/pgratelimit/ratelimit","Test":"TestB","Elapsed":0}
{"Action":"output","Package":"github.com/pgratelimit/ratelimit","Test":"TestC/sub","Output":"    c_test.go:1: PgBouncer: install it\n"}
{"Action":"skip","Package":"github.com/pgratelimit/ratelimit","Test":"TestC/sub","Elapsed":0}
{"Action":"skip","Package":"github.com/pgratelimit/ratelimit","Test":"TestD","Elapsed":0}
{"Action":"pass","Package":"github.com/pgratelimit/ratelimit","Elapsed":12.34}
{"Action":"skip","Package":"github.com/pgratelimit/ratelimit/without","Elapsed":0}
`)))
	require.NoError(t, r.finish(83*time.Second))
	require.Equal(t, `go: downloading something
ok    (the library)                    12.3 s

Not tested here:
  PgBouncer: install it (TestA and 1 more)
  cron: install it (TestB)
  no reason given (TestD)

All passed in 1m23s.
`, out.String())

	out.Reset()
	r = &report{out: &out}
	require.NoError(t, r.read(strings.NewReader(`
{"Action":"output","Package":"github.com/pgratelimit/ratelimit/sub","Test":"TestBad","Output":"    why it failed\n"}
{"Action":"output","Package":"github.com/pgratelimit/ratelimit/sub","Test":"TestBad","Output":"--- FAIL: TestBad\n"}
{"Action":"fail","Package":"github.com/pgratelimit/ratelimit/sub","Test":"TestBad","Elapsed":1}
{"Action":"output","Package":"github.com/pgratelimit/ratelimit/sub","Output":"exit status 3\n"}
{"Action":"output","Package":"github.com/pgratelimit/ratelimit/sub","Test":"TestHangs","Output":"panic: test timed out\n"}
{"Action":"fail","Package":"github.com/pgratelimit/ratelimit/sub","Elapsed":1}
{"ImportPath":"github.com/pgratelimit/ratelimit/x","Action":"build-output","Output":"x.go:1: syntax error\n"}
{"ImportPath":"github.com/pgratelimit/ratelimit/x","Action":"build-fail"}
`)))
	require.ErrorIs(t, r.finish(time.Second), errFailed)
	require.Equal(t, `
    why it failed
--- FAIL: TestBad
exit status 3
panic: test timed out
FAIL  sub                              1.0 s
x.go:1: syntax error

Nothing was left out.
`, out.String())
}

// If go test ends with an error, the run has failed, whatever go test printed.
func TestExitStatusCounts(t *testing.T) {
	t.Parallel()

	var out strings.Builder
	r := &report{out: &out}
	require.NoError(t, r.run(exec.CommandContext(t.Context(), "sh", "-c", "echo why >&2; exit 1")))
	require.ErrorIs(t, r.finish(0), errFailed)
	require.Contains(t, out.String(), "why\n")
	require.ErrorContains(t, r.run(exec.CommandContext(t.Context(), "/nowhere")), "run the tests")
}

// "make test/thorough" runs only the packages in slowest.
func TestOnlyTheSlowestPackagesHaveThoroughTests(t *testing.T) {
	t.Parallel()

	var want []string
	for module, packages := range slowest() {
		for _, pkg := range packages {
			want = append(want, filepath.Join(module, pkg))
		}
	}
	require.Subset(t, want, packagesWith(t, "TestThorough"))
}

// The Makefile names the packages that have tests of mistakes, because "make test" leaves these tests out.
func TestAllTestsOfMistakesAreRun(t *testing.T) {
	t.Parallel()

	makefile, err := os.ReadFile("../../Makefile")
	require.NoError(t, err)
	for _, pkg := range packagesWith(t, "TestMistakes") {
		require.Regexp(t, `-run '\^TestMistakes'.* \./`+strings.TrimPrefix(pkg, "service/")+`\b`, string(makefile))
	}
}

// packagesWith returns the folders that have a test whose name begins with this prefix.
func packagesWith(t *testing.T, prefix string) (packages []string) {
	t.Helper()
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	require.NoError(t, filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		source, err := os.ReadFile(path)
		if err == nil && bytes.Contains(source, []byte("\nfunc "+prefix)) {
			folder, err := filepath.Rel(root, filepath.Dir(path))
			require.NoError(t, err)
			packages = append(packages, folder)
		}
		return err
	}))
	require.NotEmpty(t, packages)
	return packages
}
