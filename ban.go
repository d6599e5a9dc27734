package ratelimit

import (
	"fmt"
	"time"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// Ban bans keys that are denied again and again. With Ban{Denials: 100, Within: time.Minute, First: time.Hour, Longest:
// 24 * time.Hour}, a key that is denied 100 times within a minute is banned for an hour in all processes. Its next bans
// last 2, 4, 8, 16 and 24 hours. If a ban ended more than a day ago, the next ban lasts an hour again.
//
// A ban is a row of rate_limit_policy, so it survives restarts. `pgratelimit unban` ends it. The application's role
// needs EXECUTE on rate_limit_ban. Denials of Allow, AllowN, Hold, Reserve and TryAcquire count, so callers that ask
// again and again for a slot get their key banned: let them call Acquire. Each process counts separately, for at most
// 65,536 keys, so with n processes a key may be denied n × Denials times before its ban.
type Ban struct {
	Denials       int           // at least 1
	Within        time.Duration // the time from the first denial until the count restarts
	First         time.Duration // length of the first ban, at least 1 ms
	Longest       time.Duration // the longest that any ban lasts; defaults to First
	ForgivenAfter time.Duration // after this time without a ban, the next ban lasts First; defaults to Longest
}

func (b *Ban) withDefaults() *Ban {
	if b == nil {
		return nil
	}
	with := *b
	if with.Longest == 0 {
		with.Longest = with.First
	}
	if with.ForgivenAfter == 0 {
		with.ForgivenAfter = with.Longest
	}
	return &with
}

// longestBan keeps the end of a ban within the range of timestamptz.
const longestBan = model.MaxSpan * time.Microsecond

func (b *Ban) validate(policies *Policies) error {
	switch d := b.withDefaults(); {
	case b == nil:
		return nil
	case policies == nil:
		return &ConfigError{Field: "Config.Ban", Reason: "needs Config.Policies: a ban is a row that they read"}
	case b.Denials < 1:
		return &ConfigError{
			Field: "Config.Ban.Denials", Reason: fmt.Sprintf("is %d, and must be at least 1", b.Denials),
		}
	case b.Within <= 0:
		return &ConfigError{Field: "Config.Ban.Within", Reason: fmt.Sprintf("is %v, and must be above 0", b.Within)}
	case b.First < time.Millisecond:
		return &ConfigError{Field: "Config.Ban.First", Reason: fmt.Sprintf("is %v, and must be at least 1ms", b.First)}
	case d.Longest < d.First || d.Longest > longestBan:
		return &ConfigError{Field: "Config.Ban.Longest", Reason: fmt.Sprintf(
			"is %v, and must be at least First and at most %v (71 years)", d.Longest, longestBan)}
	case d.ForgivenAfter < 0 || d.ForgivenAfter > longestBan:
		return &ConfigError{Field: "Config.Ban.ForgivenAfter", Reason: fmt.Sprintf(
			"is %v, and must not be negative, and at most %v (71 years)", d.ForgivenAfter, longestBan)}
	}
	return nil
}
