// Package testkit holds what tests of several packages need, and what needs neither a database nor a limiter:
// goroutines, random numbers, processes, folders and logs. Helpers that need a database are in package pgtest.
package testkit

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"runtime/pprof"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const (
	// Amply is the longest that a test waits for an event that is certain to come. It is longer than anything
	// takes, however slow the machine.
	Amply = time.Minute

	// tick is how often WaitUntil checks the condition.
	tick = 2 * time.Millisecond
)

// WaitUntil returns when condition is true. If that never happens, it fails the test with the message.
func WaitUntil(t testing.TB, condition func() bool, message ...any) {
	t.Helper()
	if len(message) == 0 {
		message = []any{"what the test waits for does not happen"}
	}
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for deadline := time.Now().Add(Amply); !condition(); <-ticker.C {
		require.True(t, time.Now().Before(deadline), message...)
	}
}

// Later runs a call in the background. The function that it returns waits for the call.
func Later[T any](call func() (T, error)) (wait func() (T, error)) {
	var result T
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		result, err = call()
	}()
	return func() (T, error) {
		<-done
		return result, err
	}
}

// Together runs n calls at the same time and waits for all of them.
func Together(n int, call func(i int)) {
	var wg sync.WaitGroup
	start := make(chan struct{})
	for i := range n {
		wg.Go(func() {
			<-start
			call(i)
		})
	}
	close(start)
	wg.Wait()
}

// Offspring runs a function. The count that it returns is how many goroutines are running that the function has
// started, or that these have started.
func Offspring(t testing.TB, run func(ctx context.Context)) (count func() int) {
	t.Helper()
	label := rand.Text()
	pprof.Do(t.Context(), pprof.Labels("offspring", label), run) // a goroutine inherits the label
	return func() int {
		var profile bytes.Buffer
		if err := pprof.Lookup("goroutine").WriteTo(&profile, 1); err != nil {
			return -1
		}
		// Goroutines with the same stack are a group. It begins with a line like "3 @ 0x43e3a0 …". The line of
		// its labels comes next.
		var total, group int
		for line := range strings.Lines(profile.String()) {
			if before, _, ok := strings.Cut(line, " @ "); ok {
				group = 0
				_, _ = fmt.Sscan(before, &group)
			}
			if strings.HasPrefix(line, "# labels:") && strings.Contains(line, fmt.Sprintf("%q", label)) {
				total += group
			}
		}
		return total
	}
}
