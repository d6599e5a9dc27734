package ratelimit

import (
	"fmt"
	"time"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// Policy says how much a key may take. It is one of [FixedWindow], [SlidingWindow], [TokenBucket], [SlidingLog]
// and [CalendarWindow], or [All] of several. ([Policies] is something else: a table of them.)
//
// A policy may be changed while keys are in use. What has been taken stays taken, and the new numbers apply at
// once: a raised limit helps immediately, and a lowered one denies until enough has drained. A bucket keeps its
// tokens, up to its new capacity. A key that another kind of policy was used for starts anew. So two kinds of
// policy in turn on one key admit a whole limit at each change between them, because each takes the other's row
// for none. What a row holds is forgotten when it expires, and that is when its key would have been as good as new
// under the policy that last took from it.
//
// Its String is the text that [ParsePolicy] reads.
type Policy interface {
	fmt.Stringer

	// rules has one for each row of a key; of [All] these are several.
	rules() []model.Rules
}

// single is a policy of one row.
type single interface {
	Policy

	one() model.Rules
	// validate returns a *ConfigError for a policy outside the exact range.
	validate() error
}

// validateWindow checks the numbers of a window or a log.
func validateWindow(limit int64, window time.Duration) error {
	if limit < 1 {
		return &ConfigError{Field: "Config.Policy.Limit", Reason: fmt.Sprintf("is %d, and must be at least 1", limit)}
	}
	if err := validateSpan("Config.Policy.Window", window); err != nil {
		return err
	}
	if limit > model.MaxProduct/model.Micros(window) {
		return &ConfigError{Field: "Config.Policy.Limit", Reason: fmt.Sprintf(
			"is %d with a Window of %v, outside the exact range: for this Window it may be at most %d",
			limit, window, model.MaxProduct/model.Micros(window))}
	}
	return nil
}

func validateSpan(field string, d time.Duration) error {
	switch {
	case d < time.Microsecond:
		return &ConfigError{Field: field, Reason: fmt.Sprintf("is %v, and must be at least 1µs", d)}
	case d%time.Microsecond != 0:
		return &ConfigError{Field: field, Reason: fmt.Sprintf(
			"is %v, and must be whole microseconds, the resolution of Postgres's clock", d)}
	case model.Micros(d) > model.MaxSpan:
		return &ConfigError{Field: field, Reason: fmt.Sprintf(
			"is %v, and may be at most %v (71 years)", d, model.Duration(model.MaxSpan))}
	}
	return nil
}
