package ratelimit

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// SlidingWindow admits Limit in any Window, by an estimate from two counters: count is what was taken in the current
// window, and prev in the window before. prev counts by the share of its window that is less than a Window ago. The
// estimate is exact if the traffic of the previous window was even.
//
// A key's first request starts a window. Windows follow each other without a gap, until nothing is taken for a whole
// window. A request of cost n, at time e of the current window, is allowed if
//
//	prev × (Window − e) + (count + n) × Window ≤ Limit × Window
//
// With SlidingWindow{Limit: 50, Window: time.Minute}, let 40 be taken in the previous window, and 10 in the current
// one, which is 15 s old. Then 40 × 0.75 + 10 = 40 count, so 10 more are allowed. If the limit is 10 a minute, and all
// 10 were taken at 0 s, a request at 5 s is told to retry after 61 s: at 60 s all 10 still count, and at 66 s only 9.
type SlidingWindow struct {
	Limit  int64         // in units of cost: at least 1, and Limit × Window in microseconds at most 2^62
	Window time.Duration // whole microseconds, from 1 µs to 2^51 µs (71 years)
}

func (p SlidingWindow) String() string { return p.one().Numbers().String() }

func (p SlidingWindow) one() model.Rules     { return model.SlidingWindow(p) }
func (p SlidingWindow) rules() []model.Rules { return []model.Rules{p.one()} }
func (p SlidingWindow) validate() error      { return validateWindow(p.Limit, p.Window) }
