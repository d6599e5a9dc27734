package ratelimit

import (
	"fmt"
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
)

// FixedWindow admits Limit per Window. A window starts with the first request after the key's last window. A key may
// take all of Limit at once, and so 2 × Limit around the edge of two windows. A [SlidingWindow] prevents that.
//
// With FixedWindow{Limit: 10, Window: time.Minute}, a key that asks for 1 each second gets 10 from 0 s to 9 s. At 10 s
// the key is told to retry after 50 s, and at 60 s it has 10 again.
//
// With Align, windows start at whole multiples of Window since 1970 in UTC, by the database's clock, so that those of
// all keys begin together. A Window of a minute begins at each full minute: a key that takes 10 from 12:00:50 on has 10
// again at 12:01:00. Other limiters work like this, for example Envoy's reference service. A Window of 7 days begins on
// a Thursday, as 1970 did; a [CalendarWindow] has weeks that begin on Monday, months, and time zones.
type FixedWindow struct {
	// Limit is in units of cost. It is at least 1. Without Align, Limit × Window in microseconds is at most 2^62. With
	// Align, Limit is at most 2^62.
	Limit  int64
	Window time.Duration // whole microseconds, from 1 µs to 2^51 µs (71 years)
	Align  bool          // a policy with Align is of another kind than one without it: see [Policy]
}

func (p FixedWindow) String() string { return p.one().Numbers().String() }

func (p FixedWindow) one() model.Rules {
	if p.Align {
		return model.CalendarWindow{Limit: p.Limit, Span: p.Window, Zone: algorithm.Epoch}
	}
	return model.FixedWindow{Limit: p.Limit, Window: p.Window}
}

func (p FixedWindow) rules() []model.Rules { return []model.Rules{p.one()} }

func (p FixedWindow) validate() error {
	if !p.Align {
		return validateWindow(p.Limit, p.Window)
	}
	if p.Limit < 1 || p.Limit > model.MaxProduct {
		return &ConfigError{Field: "Config.Policy.Limit", Reason: fmt.Sprintf(
			"is %d, and must be at least 1 and at most 2^62", p.Limit)}
	}
	return validateSpan("Config.Policy.Window", p.Window)
}
