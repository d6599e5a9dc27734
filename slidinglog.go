package ratelimit

import (
	"fmt"
	"time"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// SlidingLog admits Limit in any Window, exactly. It keeps a log of what was taken and when, and an entry counts for
// one Window. Denials are not logged, so a client that keeps asking is not denied for longer. An entry has 8 bytes, and
// each allowed request writes the whole log.
//
// With SlidingLog{Limit: 3, Window: time.Minute}, let 1 be taken at 0 s, at 10 s and at 20 s. A request at 30 s is told
// to retry after 30 s, when the entry of 0 s ends. A request of cost 2 is told 40 s. ResetAfter is 50 s.
type SlidingLog struct {
	Limit  int64         // in units of cost: from 1 to 1,000, because a key's log may need that many entries
	Window time.Duration // whole microseconds, from 1 µs to 2^51 µs (71 years)
}

func (p SlidingLog) String() string { return p.one().Numbers().String() }

func (p SlidingLog) one() model.Rules     { return model.SlidingLog(p) }
func (p SlidingLog) rules() []model.Rules { return []model.Rules{p.one()} }

func (p SlidingLog) validate() error {
	if p.Limit > model.MaxLogLimit {
		return &ConfigError{Field: "Config.Policy.Limit", Reason: fmt.Sprintf(
			"is %d, and may be at most %d for a SlidingLog; a SlidingWindow takes more", p.Limit, model.MaxLogLimit)}
	}
	return validateWindow(p.Limit, p.Window)
}
