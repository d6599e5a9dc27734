package ratelimit

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// SlidingWindow admits Limit in any Window, by an estimate from two counters: what was taken in the current window, and
// what was taken in the window before. Of the latter, the share counts that a Window ending now still covers. The
// estimate is exact if the traffic of the window before was even.
//
// A window starts at a key's first request after two windows without any. While requests go on, windows follow each
// other without a gap. A request of cost n, at time e of the current window, is allowed if
//
//	prev × (Window − e) + (count + n) × Window ≤ Limit × Window
//
// With SlidingWindow{Limit: 50, Window: time.Minute}, 40 were taken in the window before and 10 in this one, which is
// 15 s old. Of these, 40 × 0.75 + 10 = 40 count, so 10 more are allowed. With 10 a minute, all taken at 0 s, a request
// at 5 s is told to retry after 61 s: at 60 s all 10 still count, and at 66 s nine tenths of them do.
type SlidingWindow struct {
	Limit  int64         // in units of cost: at least 1, and Limit × Window in microseconds at most 2^62
	Window time.Duration // whole microseconds, from 1 µs to 2^51 µs (71 years)
}

func (p SlidingWindow) String() string { return p.one().Numbers().String() }

func (p SlidingWindow) one() model.Rules     { return model.SlidingWindow(p) }
func (p SlidingWindow) rules() []model.Rules { return []model.Rules{p.one()} }
func (p SlidingWindow) validate() error      { return validateWindow(p.Limit, p.Window) }
