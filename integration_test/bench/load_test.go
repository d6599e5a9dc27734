package bench

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// take asks for one request of a key, and tells whether it was admitted.
type take func(ctx context.Context, key string) (admitted bool, err error)

// keySource gives each caller its own source of keys.
type keySource func(caller int) func() string

// loadOptions say how a load asks.
type loadOptions struct {
	callers int
	timed   int64         // one call in so many is timed
	pace    time.Duration // from one call of a caller to its next; 0: it asks again as soon as it is answered
}

// load is a number of callers who keep asking.
type load struct {
	take    take
	options loadOptions
	phase   atomic.Int32
	callers sync.WaitGroup
	tallies []tally
	begun   time.Time // of the measurement

	failing sync.Once
	cancel  context.CancelFunc
	err     error // the first that a caller got
}

const (
	warmingUp int32 = iota // as it starts
	measuring
	stopped
)

// tally is what callers have seen.
type tally struct {
	measured  int64           // decisions that came while it was measured
	elapsed   time.Duration   // how long that was
	latencies []time.Duration // of a sample of these decisions; sorted

	total, admitted int64 // from the first to the last, warm-up included
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

// call is the life of one caller. Two clock readings are next to nothing beside a round trip, but not when a thousand
// callers share a few cores, hence options.timed. Callers take turns at it: those who share a batch are not all timed.
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

// pacemaker says when a caller asks, each at another time within the pace. With nil it asks at once.
func (l *load) pacemaker(caller int64) (due <-chan time.Time, release func()) {
	if l.options.pace == 0 {
		return nil, func() {}
	}
	<-time.After(l.options.pace * time.Duration(caller) / time.Duration(l.options.callers))
	ticker := time.NewTicker(l.options.pace)
	return ticker.C, ticker.Stop
}

// measure ends the warm-up.
func (l *load) measure() {
	l.begun = time.Now()
	l.phase.Store(measuring)
}

// stop ends the load, and returns what all callers together have seen.
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
