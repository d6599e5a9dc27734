package ratelimit

import (
	"context"
	"fmt"
	"hash/maphash"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit/internal/pg"
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
// banned after at most n × Denials of them. A process counts for at most 65,536 keys. If more are denied, some are
// forgotten.
type Ban struct {
	Denials int           // how many, at least 1
	Within  time.Duration // how long denials are counted from the first one on; then the count begins anew
	First   time.Duration // how long the first ban lasts, at least 1 ms
	Longest time.Duration // how long a ban lasts at most; defaults to First
	// ForgivenAfter is how long after the end of a ban the next one is a first one again. Defaults to Longest.
	ForgivenAfter time.Duration
}

func (b Ban) withDefaults() Ban {
	if b.Longest == 0 {
		b.Longest = b.First
	}
	if b.ForgivenAfter == 0 {
		b.ForgivenAfter = b.Longest
	}
	return b
}

// longestBan keeps times within the range of Postgres.
const longestBan = maxSpan * time.Microsecond

func (b Ban) validate(policies *Policies) error {
	switch d := b.withDefaults(); {
	case b == (Ban{}):
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

const (
	strikeShards   = 16
	maxStrikes     = 65536 // keys
	maxBanRequests = 1024
)

// strikes counts denials.
type strikes struct {
	ban    Ban
	seed   maphash.Seed
	begin  time.Time
	shards [strikeShards]struct {
		mu   sync.Mutex
		keys map[string]strike
	}
}

// strike is how often a key was denied, and when first.
type strike struct {
	n     int
	since time.Duration
}

func newStrikes(ban Ban) *strikes {
	return &strikes{ban: ban.withDefaults(), seed: maphash.MakeSeed(), begin: time.Now()}
}

// config is the Ban of Config.
func (s *strikes) config() Ban {
	if s == nil {
		return Ban{}
	}
	return s.ban
}

// count counts a denial, and tells whether the key is to be banned for it.
func (s *strikes) count(key string) bool {
	now := time.Since(s.begin)
	shard := &s.shards[maphash.String(s.seed, key)%strikeShards]
	shard.mu.Lock()
	defer shard.mu.Unlock()
	k, ok := shard.keys[key]
	if !ok || now-k.since > s.ban.Within {
		k = strike{since: now}
	}
	if k.n++; k.n >= s.ban.Denials {
		delete(shard.keys, key)
		return true
	}
	if ok {
		shard.keys[key] = k
		return false
	}
	if shard.keys == nil {
		shard.keys = make(map[string]strike)
	}
	for other := range shard.keys {
		if len(shard.keys) < maxStrikes/strikeShards {
			break
		}
		delete(shard.keys, other)
	}
	shard.keys[strings.Clone(key)] = k
	return false
}

// strike counts a decision if it is a denial, and has Policies.Run ban the key if there were enough. If Run cannot keep
// up, the denials are counted anew. Only what the database denies counts.
func (l *Limiter) strike(key string, n int64, result *Result, err error) {
	s := l.space.strikes
	if s == nil || err != nil || result.Allowed || n == 0 || result.Source > SourceCachedDenial || !s.count(key) {
		return
	}
	select {
	case l.space.policies.bans <- banRequest{name: l.space.name, key: strings.Clone(key), ban: s.ban}:
	default:
	}
}

// banRequest is a ban that is to be made.
type banRequest struct {
	name, key string
	ban       Ban
}

// ban makes bans until the context ends.
func (p *Policies) ban(ctx context.Context) {
	failing := ""
	for {
		var b banRequest
		select {
		case <-ctx.Done():
			return
		case b = <-p.bans:
		}
		switch err := p.makeBan(ctx, b); {
		case ctx.Err() != nil:
		case err == nil:
			failing = ""
		case ErrorKind(err) != failing:
			failing = ErrorKind(err)
			p.log(ctx, slog.LevelWarn, "ratelimit: a key cannot be banned; further failures are not logged until a "+
				"ban is made", slog.String("limiter", b.name), slog.Any("error", err))
		}
	}
}

func (p *Policies) makeBan(ctx context.Context, b banRequest) error {
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	comment := fmt.Sprintf("%d denials within %v", b.ban.Denials, b.ban.Within)
	args := []any{b.name, b.key, b.ban.First, b.ban.Longest, b.ban.ForgivenAfter, comment, lockTimeout(loadTimeout / 2)}
	err := query(ctx, p.db, true, pg.Qualify(banStatement, p.config.Schema), args, []any{nil},
		func() error { return nil })
	if pg.LockTimeout(err) {
		return fmt.Errorf("ratelimit: somebody has been changing policies for %v: %w", loadTimeout/2, pg.Cause(err))
	}
	return (&database{schema: p.config.Schema}).explainVersion(ctx, p.db, err)
}
