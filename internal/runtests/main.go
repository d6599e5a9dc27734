// Command runtests runs the tests of the modules in the given folders:
//
//	go run ./internal/runtests [-thorough] [FOLDER...]
//
// Without folders, it runs the tests of all modules except integration_test, which needs more programs and more time.
// Tests whose names begin with TestThorough try many combinations, so they take long. Only the flag -thorough runs
// them, and runs nothing else. "make test/mistakes" runs the TestMistakes tests. The flag -short of go test leaves out
// the tests that "make test/shards" runs.
//
// All packages share one server: the one at RATELIMIT_TEST_DATABASE_URL, or one that runtests starts. If Postgres is
// missing, runtests says how to get one. At the end, runtests lists the skipped tests with the reasons.
//
// The exit status is 2 if Postgres is missing, and 1 if a test failed.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit/internal/pgserver"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	thorough := flag.Bool("thorough", false, "run only the TestThorough tests")
	flag.Parse()
	if err := run(ctx, os.Stdout, *thorough, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(exitStatus(err))
	}
}

// errNoServer means that the user must install a Postgres before the tests can run.
var errNoServer = errors.New("the tests need a Postgres")

func exitStatus(err error) int {
	if errors.Is(err, errNoServer) {
		return 2
	}
	return 1
}

// slowest returns the slowest packages of each module. They start first, because otherwise the run would end with one
// of them alone. No other package has TestThorough tests.
func slowest() map[string][]string {
	return map[string][]string{
		".":               {"./internal/engine", "./sql", ".", "./migrations", "./internal/keeper"},
		"cmd/pgratelimit": {"."},
	}
}

// run runs the tests of the modules in these folders. Without folders, run tests the default modules.
func run(ctx context.Context, out io.Writer, thorough bool, modules []string) (err error) {
	server, err := pgserver.Start(ctx, pgserver.Config{
		URL:      os.Getenv("RATELIMIT_TEST_DATABASE_URL"),
		Major:    os.Getenv("RATELIMIT_TEST_POSTGRES_MAJOR"),
		Settings: map[string]string{"max_connections": "1000"}, // up to 100 for each package
	})
	if err != nil {
		return fmt.Errorf("%w: %w", errNoServer, err)
	}
	defer func() { err = errors.Join(err, server.Close()) }()
	fmt.Fprintln(out, server.Describe())
	if len(modules) == 0 {
		modules = []string{".", "cmd/pgratelimit", "otelratelimit", "grpclimit", "service"}
		if thorough {
			modules = slices.Sorted(maps.Keys(slowest()))
		}
		fmt.Fprintln(out, "This takes some minutes, and more when the tests are built first.")
	}

	began := time.Now()
	report := &report{out: out}
	if !thorough && slices.ContainsFunc(modules, func(module string) bool { return slowest()[module] != nil }) {
		report.leaveOut("TestThorough…", `thorough tests: run "make test/thorough"`)
	}
	// Run all modules at once, because most tests wait for something. With -p=2, go test runs only two packages of a
	// module at once, because more would slow each other down.
	errs := make([]error, len(modules))
	var tests sync.WaitGroup
	for i, module := range modules {
		// Do not use cached results, because Go does not know the other programs that the tests depend on. Leave out go
		// vet, because "make lint" runs it.
		tests.Go(func() {
			args := []string{"-json", "-short", "-count=1", "-vet=off", "-timeout=40m", "-p=2"}
			if thorough {
				args = append(args, "-run=^TestThorough")
				args = append(args, slowest()[module]...)
			} else {
				args = append(args, "-skip=^TestMistakes|^TestThorough")
				args = append(append(args, slowest()[module]...), "./...")
			}
			test := goTest(ctx, module, args...)
			test.Env = append(os.Environ(), "RATELIMIT_TEST_DATABASE_URL="+server.URL())
			errs[i] = report.run(test)
		})
	}
	tests.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return report.finish(time.Since(began))
}

func goTest(ctx context.Context, module string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "go", append([]string{"test"}, args...)...)
	cmd.Dir = module
	// On an interrupt, go test ends its child processes and waits for them.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	return cmd
}

// run runs go test -json. run returns an error only if go test could not run at all.
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
