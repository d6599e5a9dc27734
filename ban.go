package ratelimit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit/internal/model"
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

const (
	strikeShards = 16
	maxStrikes   = 65536 // keys
	// maxBans is how many keys a statement bans. It holds other writers up for 50 ms.
	maxBans = 100
)

// strikes counts denials.
type strikes struct {
	name   string // of the limiter
	ban    Ban
	seed   maphash.Seed
	begin  time.Time
	listed atomic.Bool // Policies.bans has it
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

func newStrikes(name string, ban *Ban) *strikes {
	return &strikes{name: name, ban: *ban.withDefaults(), seed: maphash.MakeSeed(), begin: time.Now()}
}

// config is the Ban of Config.
func (s *strikes) config() *Ban {
	if s == nil {
		return nil
	}
	return s.ban.withDefaults() // a copy
}

// count counts a denial, and tells whether the key is to be banned. It is until there is a ban.
func (s *strikes) count(key string) bool {
	now := time.Since(s.begin)
	shard := &s.shards[maphash.String(s.seed, key)%strikeShards]
	shard.mu.Lock()
	defer shard.mu.Unlock()
	k, ok := shard.keys[key]
	if !ok || k.n < s.ban.Denials && now-k.since > s.ban.Within {
		k = strike{since: now}
	}
	k.n++
	if ok {
		shard.keys[key] = k
		return k.n >= s.ban.Denials
	}
	if shard.keys == nil {
		shard.keys = make(map[string]strike)
	}
	for len(shard.keys) >= maxStrikes/strikeShards {
		s.makeRoom(shard.keys, now)
	}
	shard.keys[strings.Clone(key)] = k
	return k.n >= s.ban.Denials
}

// makeRoom drops one of a few keys: one whose time is over, or the one that was denied least. So a crowd of keys that
// are denied once drops none that is denied again and again.
func (s *strikes) makeRoom(keys map[string]strike, now time.Duration) {
	least, fewest := "", math.MaxInt
	seen := 0
	for key, k := range keys {
		if k.n < s.ban.Denials && now-k.since > s.ban.Within {
			k.n = 0
		}
		if k.n < fewest {
			least, fewest = key, k.n
		}
		if seen++; seen == 8 || fewest == 0 {
			break
		}
	}
	delete(keys, least)
}

// due adds the bans that are to be made.
func (s *strikes) due(bans []keyBan) []keyBan {
	for i := range s.shards {
		shard := &s.shards[i]
		shard.mu.Lock()
		for key, k := range shard.keys {
			if k.n >= s.ban.Denials {
				bans = append(bans, keyBan{s, key, k.n - s.ban.Denials})
			}
		}
		shard.mu.Unlock()
	}
	return bans
}

// banned forgets the denials of a key that there is a ban for.
func (s *strikes) banned(key string) {
	shard := &s.shards[maphash.String(s.seed, key)%strikeShards]
	shard.mu.Lock()
	defer shard.mu.Unlock()
	delete(shard.keys, key)
}

// strike counts a decision if it is a denial, and has Policies.Run ban the key if there were enough. Only what the
// database denies counts.
func (l *Limiter) strike(key string, n int64, result *Result, err error) {
	s := l.space.strikes
	if s == nil || err != nil || result.Allowed || n == 0 || result.Source > SourceCachedDenial || !s.count(key) {
		return
	}
	l.space.policies.list(s)
}

// list has Run look for keys to ban.
func (p *Policies) list(s *strikes) {
	if s.listed.Swap(true) {
		return
	}
	p.mu.Lock()
	if p.bans == nil {
		p.bans = make(map[*strikes]bool)
	}
	p.bans[s] = true
	p.mu.Unlock()
	select {
	case p.banning <- struct{}{}:
	default:
	}
}

// keyBan is a ban that is to be made. over is how often the key was denied since.
type keyBan struct {
	*strikes
	key  string
	over int
}

// nextBans are the bans to make now. Those of keys that were denied most since they were due come first. So whoever
// goes on asking is banned soon, whatever a crowd does.
func (p *Policies) nextBans() (bans []keyBan) {
	p.mu.Lock()
	all := p.bans
	p.bans = nil
	p.mu.Unlock()
	for s := range all {
		s.listed.Store(false) // before it looks, so that what is due later lists it again
		bans = s.due(bans)
	}
	slices.SortFunc(bans, func(a, b keyBan) int { return cmp.Compare(b.over, a.over) })
	for _, b := range bans[min(len(bans), maxBans):] {
		p.list(b.strikes)
	}
	return bans[:min(len(bans), maxBans)]
}

// ban makes bans until the context ends. What fails is tried again.
func (p *Policies) ban(ctx context.Context) {
	failing := ""
	var pause time.Duration
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.banning:
		}
		bans := p.nextBans()
		if len(bans) == 0 {
			continue
		}
		err := p.makeBans(ctx, bans)
		if err == nil {
			failing, pause = "", 0
			continue
		}
		if ctx.Err() == nil && ErrorKind(err) != failing {
			failing = ErrorKind(err)
			p.log(ctx, slog.LevelWarn, "ratelimit: a key cannot be banned; further failures are not logged until a "+
				"ban is made", slog.String("limiter", bans[0].name), slog.Any("error", err))
		}
		for _, b := range bans {
			p.list(b.strikes)
		}
		pause = min(max(2*pause, time.Second), 10*time.Second)
		sleep(ctx, pause)
	}
}

// makeBans makes bans in one statement. If the database refuses one of them, each is made by itself, and what is
// refused is forgotten. Then it does not keep the others from being made.
func (p *Policies) makeBans(ctx context.Context, bans []keyBan) error {
	err := p.makeBansAtOnce(ctx, bans)
	if !ofOneBan(err) {
		return err
	}
	var errs []error
	for i, b := range bans {
		err := p.makeBansAtOnce(ctx, bans[i:i+1])
		if ofOneBan(err) {
			b.banned(b.key)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// ofOneBan tells whether the database has refused what is particular to a ban, rather than the function.
func ofOneBan(err error) bool {
	refused, ok := errors.AsType[*pgconn.PgError](err)
	return ok && !isAway(err) && !pg.LockTimeout(err) && !strings.HasPrefix(refused.Code, "42")
}

func (p *Policies) makeBansAtOnce(ctx context.Context, bans []keyBan) error {
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	var names, keys, comments []string
	var first, longest, forgivenAfter []int64
	for _, b := range bans {
		names, keys = append(names, b.name), append(keys, b.key)
		first = append(first, b.ban.First.Microseconds())
		longest = append(longest, b.ban.Longest.Microseconds())
		forgivenAfter = append(forgivenAfter, b.ban.ForgivenAfter.Microseconds())
		comments = append(comments, fmt.Sprintf("%d denials within %v", b.ban.Denials, b.ban.Within))
	}
	args := []any{names, keys, first, longest, forgivenAfter, comments, lockTimeout(loadTimeout / 2)}
	err := query(ctx, p.db, true, pg.Qualify(banStatement, p.config.Schema), args, []any{nil},
		func() error { return nil })
	if pg.LockTimeout(err) {
		return fmt.Errorf("ratelimit: somebody has been changing policies for %v: %w", loadTimeout/2, pg.Cause(err))
	}
	if err == nil {
		for _, b := range bans {
			b.banned(b.key)
		}
	}
	return (&database{schema: p.config.Schema}).explainVersion(ctx, p.db, err)
}
