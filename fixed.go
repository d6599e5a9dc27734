package ratelimit

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// FixedWindow admits Limit per Window. A window starts with the first request after the key's last window. A key may
// take all of Limit at once, and so 2 × Limit around the edge of two windows. A [SlidingWindow] prevents that.
//
// With FixedWindow{Limit: 10, Window: time.Minute}, a key that asks for 1 each second gets 10 from 0 s to 9 s. At 10 s
// the key is told to retry after 50 s, and at 60 s it has 10 again.
type FixedWindow struct {
	Limit  int64         // in units of cost: at least 1, and Limit × Window in microseconds at most 2^62
	Window time.Duration // whole microseconds, from 1 µs to 2^51 µs (71 years)
}

func (p FixedWindow) String() string { return p.one().Numbers().String() }

func (p FixedWindow) one() model.Rules     { return model.FixedWindow(p) }
func (p FixedWindow) rules() []model.Rules { return []model.Rules{p.one()} }
func (p FixedWindow) validate() error      { return validateWindow(p.Limit, p.Window) }
