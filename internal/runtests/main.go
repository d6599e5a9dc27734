// The command runtests runs the tests of the modules in the given folders:
//
//	go run ./internal/runtests [FOLDER...]
//
// Without folders these are all modules but integration_test, whose tests need more programs and more time. Tests of
// the tests, whose names begin with TestMistakes, are left to make test/mistakes.
//
// It looks for a Postgres before anything else is built. It says at once if there is none, and how to get one. At the
// end it says what could not be tested, and what that needs.
//
// The exit status is 2 if there is no Postgres, and 1 if a test has failed.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit/internal/pgfind"
)

const (
	ownVariable     = "RATELIMIT_TEST_DATABASE_URL"
	generalVariable = "DATABASE_URL"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, pgfind.NewHost(), os.Stdout, os.Environ(), os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(exitStatus(err))
	}
}

// errNoServer is an error that a person has to mend before the tests can run.
var errNoServer = errors.New("the tests need a Postgres")

func exitStatus(err error) int {
	if errors.Is(err, errNoServer) || errors.Is(err, pgfind.ErrNotFound) {
		return 2
	}
	return 1
}

// run tests the modules in these folders, or the usual ones.
func run(ctx context.Context, host pgfind.Host, out io.Writer, environment, modules []string) error {
	server, environment, err := findServer(ctx, host, environment)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "Postgres:", server)
	// One test, which makes a database as all others do, tells whether the server is of use.
	probe := goTest(ctx, environment, ".", "-count=1", "-run=^TestNewGivesEachTestItsOwnDatabase$", "./internal/pgtest")
	if output, err := probe.CombinedOutput(); err != nil {
		return fmt.Errorf("%w that they can use (%w):\n%s", errNoServer, err, output)
	}
	if len(modules) == 0 {
		modules = []string{".", "otelratelimit", "grpclimit"}
		fmt.Fprintln(out, "This takes about 10 minutes on two cores, and some more when the tests are built first.")
	}

	began := time.Now()
	report := &report{out: out}
	// All modules at once, because many tests mostly wait. But two packages of each: more only get into each other's
	// way.
	errs := make([]error, len(modules))
	var tests sync.WaitGroup
	for i, module := range modules {
		// Go keeps results, but it knows nothing of the programs that they depend on. go vet is for make lint.
		tests.Go(func() {
			errs[i] = report.run(goTest(ctx, environment, module,
				"-json", "-count=1", "-vet=off", "-timeout=40m", "-p=2", "-skip=^TestMistakes", "./..."))
		})
	}
	tests.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return report.finish(time.Since(began))
}

func goTest(ctx context.Context, environment []string, module string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "go", append([]string{"test"}, args...)...)
	cmd.Dir, cmd.Env = module, environment
	// As from the terminal: go test ends what it has started, and waits for it.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	return cmd
}

// findServer says which server the tests will use, and returns the environment that makes them use it. DATABASE_URL
// does not count: it may be a server that others share.
func findServer(ctx context.Context, host pgfind.Host, environment []string) (string, []string, error) {
	value := func(name string) string {
		for _, variable := range environment {
			if value, ok := strings.CutPrefix(variable, name+"="); ok {
				return value
			}
		}
		return ""
	}
	if url := value(ownVariable); url != "" {
		return "the server of " + ownVariable + `. The tests make databases of their own there, called
ratelimit_test_…, and drop them. They change nothing else. Those that stop or kill a server start one of their own.`,
			setURL(environment, url), nil
	}

	way, err := host.Find(ctx, "")
	if err != nil {
		return "", nil, err
	}
	environment = setURL(environment, "")
	switch {
	case way.Docker != "":
		return "throwaway servers in Docker", environment, nil
	case way.NPM != "":
		return "throwaway servers, from a package of npm that is kept in the cache", environment, nil
	}
	return "throwaway servers, from " + way.BinDir, environment, nil
}

// setURL names the server to the tests. Tests of the command set DATABASE_URL themselves.
func setURL(environment []string, url string) []string {
	environment = slices.DeleteFunc(slices.Clone(environment), func(variable string) bool {
		name, _, _ := strings.Cut(variable, "=")
		return name == ownVariable || name == generalVariable
	})
	if url == "" {
		return environment
	}
	return append(environment, ownVariable+"="+url)
}

// run runs one go test -json. It returns an error only if that could not be run at all.
func (r *report) run(cmd *exec.Cmd) error {
	output, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	var complaint bytes.Buffer
	cmd.Stderr = &complaint
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("run the tests: %w", err)
	}
	readErr := r.read(output)
	err = cmd.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	fmt.Fprint(r.out, complaint.String())
	if _, failed := errors.AsType[*exec.ExitError](err); failed {
		r.failed = true
		err = nil
	}
	return errors.Join(readErr, err)
}
