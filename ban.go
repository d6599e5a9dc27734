package ratelimit

import (
	"fmt"
	"time"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// Ban bans keys that are denied again and again. With
//
//	Ban{Denials: 100, Within: time.Minute, First: time.Hour, Longest: 24 * time.Hour}
//
// a key that is denied 100 times within a minute of the first of these denials is denied everything for an hour, in all
// processes. If it comes to that again, it is 2 hours, then 4, 8, 16 and 24. A day after the end of a ban the key is
// forgiven, and the next ban lasts an hour again.
//
// A ban is a row of rate_limit_policy, made by the function rate_limit_ban, which the application's role must be
// allowed to execute. So a ban survives restarts, `pgratelimit policy list --bans` shows it and `pgratelimit unban`
// ends it. A row for a prefix or for everybody does not end it; an exact row that begins later does.
//
// Denials are counted by each process for itself, in memory, and only denials: those of Allow and AllowN and of their
// twins for transactions, but none of a ban itself, of Wait or while Postgres is away. So with n processes a key is
// banned after at most n × Denials of them. Bans are made 100 at a time, first those of keys that go on being denied
// most. What fails is tried again. A process counts for at most 65,536 keys. If more are denied, those that were denied
// least are forgotten first.
type Ban struct {
	Denials int           // how many, at least 1
	Within  time.Duration // how long denials are counted from the first one on; then the count begins anew
	First   time.Duration // how long the first ban lasts, at least 1 ms
	Longest time.Duration // how long a ban lasts at most; defaults to First
	// ForgivenAfter is how long after the end of a ban the next one is a first one again. Defaults to Longest.
	ForgivenAfter time.Duration
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

// longestBan keeps times within the range of Postgres.
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
