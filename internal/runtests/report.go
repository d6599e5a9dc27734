package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"
)

// module is the module path that begins every package's path.
const module = "github.com/pgratelimit/ratelimit"

// event is a line of the output of go test -json. See "go doc test2json".
type event struct {
	Action  string
	Package string
	Test    string
	Elapsed float64 // seconds
	Output  string
}

// report prints the results of the tests: a line for each package, the output of failed tests, and at the end the
// skipped tests.
type report struct {
	mu      sync.Mutex // protects the report, because several go test commands may run at once
	out     io.Writer
	failed  bool
	skipped []skip
}

// skip is a reason for skipped tests, with their names.
type skip struct {
	reason string
	tests  []string
}

// testKey names a test. If test is "", the testKey names a package.
type testKey struct{ pkg, test string }

// read reads the events of a go test command.
func (r *report) read(events io.Reader) error {
	written := map[testKey]*strings.Builder{}
	scanner := bufio.NewScanner(events)
	scanner.Buffer(nil, 16<<20)
	for scanner.Scan() {
		r.readLine(scanner.Bytes(), written)
	}
	return scanner.Err()
}

// readLine reads an event. The argument written has the output of the running tests.
func (r *report) readLine(line []byte, written map[testKey]*strings.Builder) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var e event
	if json.Unmarshal(line, &e) != nil {
		fmt.Fprintln(r.out, string(line)) // go itself prints lines that are not JSON
		return
	}
	k := testKey{e.Package, e.Test}
	if written[k] == nil {
		written[k] = &strings.Builder{}
	}
	switch e.Action {
	case "build-output":
		fmt.Fprint(r.out, e.Output)
	case "output":
		written[k].WriteString(e.Output)
	case "pass", "fail", "skip":
		text := written[k].String()
		delete(written, k)
		if e.Action == "fail" {
			r.failed = true
			fmt.Fprint(r.out, text)
			if e.Test == "" {
				r.unfinished(e.Package, written)
			}
		}
		if e.Test == "" {
			r.packageEnded(e)
		} else if e.Action == "skip" {
			r.skip(e.Test, text)
		}
	}
}

// unfinished prints the output of tests that still ran when their package ended.
func (r *report) unfinished(pkg string, written map[testKey]*strings.Builder) {
	for k, text := range written {
		if k.pkg == pkg {
			fmt.Fprint(r.out, text)
		}
	}
}

func (r *report) packageEnded(e event) {
	name := strings.TrimPrefix(strings.TrimPrefix(e.Package, module), "/")
	if name == "" {
		name = "(the library)"
	}
	switch e.Action {
	case "pass":
		fmt.Fprintf(r.out, "ok    %-32s %.1f s\n", name, e.Elapsed)
	case "fail":
		fmt.Fprintf(r.out, "FAIL  %-32s %.1f s\n", name, e.Elapsed)
	}
}

// skip records why a test was skipped. The output contains "file.go:1: the reason" and "--- SKIP", in either order.
func (r *report) skip(test, text string) {
	reason := "no reason given"
	for line := range strings.Lines(text) {
		if place, after, ok := strings.Cut(strings.TrimSpace(line), ": "); ok && strings.Contains(place, ".go:") {
			reason = after
		}
	}
	r.leaveOut(test, reason)
}

// leaveOut records that a test was not run.
func (r *report) leaveOut(test, reason string) {
	i := slices.IndexFunc(r.skipped, func(s skip) bool { return s.reason == reason })
	if i < 0 {
		i = len(r.skipped)
		r.skipped = append(r.skipped, skip{reason: reason})
	}
	r.skipped[i].tests = append(r.skipped[i].tests, test)
}

var errFailed = errors.New("FAILED: see above")

func (r *report) finish(took time.Duration) error {
	if len(r.skipped) == 0 {
		fmt.Fprintln(r.out, "\nNothing was left out.")
	} else {
		fmt.Fprintln(r.out, "\nNot tested here:")
	}
	for _, s := range r.skipped {
		more := ""
		if len(s.tests) > 1 {
			more = fmt.Sprintf(" and %d more", len(s.tests)-1)
		}
		fmt.Fprintf(r.out, "  %s (%s%s)\n", s.reason, s.tests[0], more)
	}
	if r.failed {
		return errFailed
	}
	_, err := fmt.Fprintf(r.out, "\nAll passed in %s.\n", took.Round(time.Second))
	return err
}
