// The command runtests runs the tests of the modules in the given folders:
//
//	go run ./internal/runtests [FOLDER...]
//
// Without folders it takes all modules except integration_test, whose tests need more programs and more time. It leaves
// tests whose names begin with TestMistakes to make test/mistakes: they test the tests.
//
// First it runs one test that needs Postgres. If there is no Postgres, it says so, and how to get one. At the end it
// lists the tests that were skipped, and what they need.
//
// The exit status is 2 if there is no Postgres, and 1 if a test failed.
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
	"regexp"
	"sync"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(exitStatus(err))
	}
}

// errNoServer is an error that the user has to fix before the tests can run.
var errNoServer = errors.New("the tests need a Postgres")

func exitStatus(err error) int {
	if errors.Is(err, errNoServer) {
		return 2
	}
	return 1
}

// run tests the modules in these folders, or the default ones.
func run(ctx context.Context, out io.Writer, modules []string) error {
	output, err := goTest(ctx, ".", "-count=1", "-v", "-run=^TestNewGivesEachTestItsOwnDatabase$", "./internal/pgtest").
		CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w (%w):\n%s", errNoServer, err, output)
	}
	fmt.Fprintf(out, "%s\n", regexp.MustCompile(`PostgreSQL \d.*`).Find(output))
	if len(modules) == 0 {
		modules = []string{".", "cmd/pgratelimit", "otelratelimit", "grpclimit"}
		fmt.Fprintln(out, "This takes some minutes, and more when the tests are built first.")
	}

	began := time.Now()
	report := &report{out: out}
	// All modules run at once, because most tests wait for something. But each runs only two packages at once, because
	// more would slow each other down.
	errs := make([]error, len(modules))
	var tests sync.WaitGroup
	for i, module := range modules {
		// Do not use cached results: Go does not know the other programs that the tests depend on. make lint runs go
		// vet.
		tests.Go(func() {
			errs[i] = report.run(goTest(ctx, module,
				"-json", "-count=1", "-vet=off", "-timeout=40m", "-p=2", "-skip=^TestMistakes", "./..."))
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
	// Send an interrupt, as a terminal does: go test then ends its child processes and waits for them.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	return cmd
}

// run runs one go test -json. It returns an error only if go test could not run at all.
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
