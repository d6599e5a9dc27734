package faults

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// leaseJudge checks that the requests that several processes allowed stay within the policies' limits, by the
// database's clock. It does not know which requests used a lease, but it knows how late such a decision may be.
type leaseJudge struct {
	leaseWork

	// forward is how far a test moved the database's clock forward, or 0. A clock that is moved shows some times twice,
	// and skips others.
	forward time.Duration
}

// skew is how many microseconds a process's clock may be ahead of the database's clock at the end of a lease.
const skew = 2000

// judge returns an error if a request broke a limit.
func (j leaseJudge) judge(uses []leaseUse) error {
	for _, name := range j.Names {
		var of []leaseUse
		for _, u := range uses {
			if u.Policy == name {
				of = append(of, u)
			}
		}
		slices.SortStableFunc(of, func(a, b leaseUse) int { return cmp.Compare(a.DecidedAt, b.DecidedAt) })
		for part, policy := range j.parts(name) {
			var err error
			switch {
			case j.forward > 0:
				err = j.judgeSteps(policy, part, of)
			default:
				if err = j.judgeTimes(policy, of); err != nil {
					break
				}
				if bucket, ok := policy.(ratelimit.TokenBucket); ok {
					err = judgeBucket(bucket, of)
				} else {
					err = j.judgeWindows(policy, part, of)
				}
			}
			if err != nil {
				return fmt.Errorf("%s, policy %d: %w", name, part, err)
			}
		}
	}
	return nil
}

// judgeTimes checks that each decision has the time of its call, or a time that is earlier by at most a lease's length.
func (j leaseJudge) judgeTimes(policy ratelimit.Policy, uses []leaseUse) error {
	longest := j.Window.Microseconds() / 8
	switch p := policy.(type) {
	case ratelimit.TokenBucket:
		longest = p.Capacity * p.Every.Microseconds() / p.Refill / 128
	case ratelimit.FixedWindow:
		longest = p.Window.Microseconds() / 8
	case ratelimit.CalendarWindow:
		longest = j.Window.Microseconds()
	}
	for _, u := range uses {
		earliest, latest := u.Call, u.Return
		if u.Leased {
			earliest, latest = u.Call-longest, u.Return+skew
		}
		if u.DecidedAt < earliest || u.DecidedAt > latest {
			return fmt.Errorf("a call from %d to %d is told to be of %d (leased: %t)", u.Call, u.Return, u.DecidedAt, u.Leased)
		}
	}
	return nil
}

// leaseWindow is the start of a window, and the units allowed in it.
type leaseWindow struct{ from, units int64 }

// windowsOf returns the windows of a policy's row, from the calls that the database answered.
func (j leaseJudge) windowsOf(
	policy ratelimit.Policy, part int, uses []leaseUse,
) (windows []leaseWindow, length int64) {
	var starts []int64
	switch p := policy.(type) {
	case ratelimit.CalendarWindow:
		length = j.Window.Microseconds()
		for _, u := range uses {
			starts = append(starts, u.DecidedAt/length*length)
		}
	case ratelimit.FixedWindow:
		length = p.Window.Microseconds()
	case ratelimit.SlidingWindow:
		length = p.Window.Microseconds()
	}
	for _, u := range uses {
		if _, calendar := policy.(ratelimit.CalendarWindow); !calendar && !u.Leased {
			starts = append(starts, u.In[part])
		}
	}
	slices.Sort(starts)
	for _, start := range slices.Compact(starts) {
		windows = append(windows, leaseWindow{from: start})
	}
	return windows, length
}

// judgeWindows checks that no window has more than the policy allows.
func (j leaseJudge) judgeWindows(policy ratelimit.Policy, part int, uses []leaseUse) error {
	windows, length := j.windowsOf(policy, part, uses)
	limit := limitOf(policy)
	for _, u := range uses { // sorted by time
		i, exact := slices.BinarySearchFunc(windows, u.DecidedAt, func(w leaseWindow, at int64) int {
			return cmp.Compare(w.from, at)
		})
		if !exact {
			i--
		}
		if i < 0 || u.DecidedAt >= windows[i].from+length {
			return fmt.Errorf("%d at %d, in no window (leased: %t)", u.N, u.DecidedAt, u.Leased)
		}
		w := &windows[i]
		if u.Call >= w.from+length {
			return fmt.Errorf("%d by a call of %d, of the window that ended at %d", u.N, u.Call, w.from+length)
		}
		if u.back {
			continue
		}
		w.units += u.N
		weighed := w.units * length
		_, sliding := policy.(ratelimit.SlidingWindow)
		if sliding && i > 0 && windows[i-1].from == w.from-length {
			weighed += windows[i-1].units * (length - (u.DecidedAt - w.from))
		}
		if weighed > limit*length {
			return fmt.Errorf("%d of %d in the window from %d until %d, with what counts of the one before: %.2f",
				w.units, limit, w.from, u.DecidedAt, float64(weighed)/float64(length))
		}
	}
	for i := range windows[min(1, len(windows)):] {
		// A row begins a new window early only if all units of the old window were given back.
		if w, next := windows[i], windows[i+1]; next.from < w.from+length && w.units > 0 {
			return fmt.Errorf("a window of %d begins at %d, and the next one at %d", w.units, w.from, next.from)
		}
	}
	return nil
}

// judgeBucket checks that a bucket has enough tokens for each allowed request at its time.
func judgeBucket(bucket ratelimit.TokenBucket, uses []leaseUse) error {
	every := bucket.Every.Microseconds()
	full := bucket.Capacity * every
	level, last := full, int64(0)
	for _, u := range uses {
		if u.back {
			continue
		}
		if last == 0 {
			last = u.DecidedAt
		}
		level, last = min(level+(u.DecidedAt-last)*bucket.Refill, full)-u.N*every, u.DecidedAt
		if level < 0 {
			return fmt.Errorf("%d at %d from a bucket that lacks %.2f", u.N, last, float64(-level)/float64(every))
		}
	}
	return nil
}

// judgeSteps is like judge, but for a clock that a test has set. Each decision belongs to the window in its result. The
// windows and the refill of a bucket must fit into the time by which the clock went forward.
func (j leaseJudge) judgeSteps(policy ratelimit.Policy, part int, uses []leaseUse) error {
	limit, total := limitOf(policy), int64(0)
	window := j.Window
	inWindow := map[int64]int64{}
	for _, u := range uses {
		if u.back {
			continue
		}
		total += u.N
		switch p := policy.(type) {
		case ratelimit.FixedWindow:
			window = p.Window
		case ratelimit.SlidingWindow:
			window = p.Window
		default:
			continue
		}
		in, length := u.In[part], window.Microseconds()
		if inWindow[in] += u.N; inWindow[in] > limit {
			return fmt.Errorf("%d of %d in the window from %d", inWindow[in], limit, in)
		}
		if u.DecidedAt >= in+length {
			return fmt.Errorf("%d at %d, in the window that ended at %d", u.N, u.DecidedAt, in+length)
		}
	}
	most := (int64(j.forward/window) + 2) * limit
	if bucket, ok := policy.(ratelimit.TokenBucket); ok {
		most = bucket.Capacity + int64(j.forward)*bucket.Refill/int64(bucket.Every) + 1
	}
	if total > most {
		return fmt.Errorf("%d, and no more than %d while the clock goes forward by %v", total, most, j.forward)
	}
	return nil
}

func limitOf(policy ratelimit.Policy) int64 {
	switch p := policy.(type) {
	case ratelimit.FixedWindow:
		return p.Limit
	case ratelimit.SlidingWindow:
		return p.Limit
	case ratelimit.CalendarWindow:
		return p.Limit
	}
	return 0
}
