package bench

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// take makes one request for a key, and returns whether it was allowed.
type take func(ctx context.Context, key string) (admitted bool, err error)

// keySource returns the source of keys for a caller.
type keySource func(caller int) func() string

// loadOptions describes the callers of a load.
type loadOptions struct {
	callers int
	timed   int64         // one call in this many is timed
	pace    time.Duration // the time between two calls of a caller; 0 means no pause
}

// load is a number of callers that make requests without end.
type load struct {
	take    take
	options loadOptions
	phase   atomic.Int32
	callers sync.WaitGroup
	tallies []tally
	begun   time.Time // when the measurement began

	failing sync.Once
	cancel  context.CancelFunc
	err     error // the first error of a caller
}

const (
	warmingUp int32 = iota // a load begins with this phase
	measuring
	stopped
)

// tally is the result of a load.
type tally struct {
	measured  int64           // decisions during the measurement
	elapsed   time.Duration   // the length of the measurement
	latencies []time.Duration // of a sample of the measured decisions, sorted

	total, admitted int64 // units of the whole load, including the warm-up
}

func startLoad(ctx context.Context, take take, keys keySource, options loadOptions) *load {
	ctx, cancel := context.WithCancel(ctx)
	l := &load{take: take, options: options, cancel: cancel, tallies: make([]tally, options.callers)}
	for i := range options.callers {
		next := keys(i)
		l.callers.Go(func() {
			var err error
			if l.tallies[i], err = l.call(ctx, int64(i), next); err != nil {
				l.failing.Do(func() { l.err = err })
				cancel()
			}
		})
	}
	return l
}

// call runs one caller. Compared with a round trip, reading the clock twice costs nothing, except when a thousand
// callers share a few cores. So only one call in options.timed is timed. Each caller times other calls, so that not all
// calls of one batch are timed.
func (l *load) call(ctx context.Context, caller int64, next func() string) (t tally, err error) {
	due, release := l.pacemaker(caller)
	defer release()
	for ; ; t.total++ {
		if due != nil {
			<-due
		}
		phase := l.phase.Load()
		if phase == stopped {
			return t, nil
		}
		key := next()
		timed := phase == measuring && (t.total+caller)%l.options.timed == 0
		var begun time.Time
		if timed {
			begun = time.Now()
		}
		admitted, err := l.take(ctx, key)
		if err != nil {
			return t, err
		}
		if admitted {
			t.admitted++
		}
		if l.phase.Load() == measuring {
			t.measured++
			if timed {
				t.latencies = append(t.latencies, time.Since(begun))
			}
		}
	}
}

// pacemaker returns a channel that says when a caller makes its next request. Each caller has another offset within the
// pace. A nil channel means no pause.
func (l *load) pacemaker(caller int64) (due <-chan time.Time, release func()) {
	if l.options.pace == 0 {
		return nil, func() {}
	}
	<-time.After(l.options.pace * time.Duration(caller) / time.Duration(l.options.callers))
	ticker := time.NewTicker(l.options.pace)
	return ticker.C, ticker.Stop
}

// measure ends the warm-up, and begins the measurement.
func (l *load) measure() {
	l.begun = time.Now()
	l.phase.Store(measuring)
}

// stop ends the load, and returns the result of all callers together.
func (l *load) stop() (tally, error) {
	l.phase.Store(stopped)
	all := tally{elapsed: time.Since(l.begun)}
	l.callers.Wait()
	l.cancel()
	for _, t := range l.tallies {
		all.measured += t.measured
		all.total += t.total
		all.admitted += t.admitted
		all.latencies = append(all.latencies, t.latencies...)
	}
	slices.Sort(all.latencies)
	return all, l.err
}
