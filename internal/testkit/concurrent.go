// Package testkit has test helpers for goroutines, random numbers, processes, folders and logs. Package pgtest has the
// helpers that need a database.
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
	// Amply is how long a test waits for an event before the test fails. Even a slow machine needs far less.
	Amply = time.Minute

	// tick is the longest pause between two checks of WaitUntil. Most conditions are queries, so shorter pauses would
	// keep a server busy.
	tick = 10 * time.Millisecond
)

// WaitUntil waits until condition returns true. After Amply, WaitUntil fails the test with the message.
func WaitUntil(t testing.TB, condition func() bool, message ...any) {
	t.Helper()
	if len(message) == 0 {
		message = []any{"what the test waits for does not happen"}
	}
	pause := tick / 10
	for deadline := time.Now().Add(Amply); !condition(); pause = min(2*pause, tick) {
		require.True(t, time.Now().Before(deadline), message...)
		<-time.After(pause)
	}
}

// Later runs a call in a new goroutine. The returned function waits for the call to end, and returns its result.
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

// Offspring calls the function run. The result counts the live goroutines that run has started, directly or indirectly.
func Offspring(t testing.TB, run func(ctx context.Context)) (count func() int) {
	t.Helper()
	label := rand.Text()
	pprof.Do(t.Context(), pprof.Labels("offspring", label), run) // a goroutine inherits the label
	return func() int {
		var profile bytes.Buffer
		if err := pprof.Lookup("goroutine").WriteTo(&profile, 1); err != nil {
			return -1
		}
		// pprof groups goroutines that have the same stack. A group begins with a line such as "3 @ 0x43e3a0 …". The
		// next line lists the labels of the group.
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
