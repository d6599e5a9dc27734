package policytable

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

	"github.com/pgratelimit/ratelimit/internal/pg"
)

// BanTerms say when a key is banned, and for how long.
type BanTerms struct {
	Denials                       int           // the number of denials that lead to a ban
	Within                        time.Duration // the time since the first of these denials
	First, Longest, ForgivenAfter time.Duration
}

// These constants limit how much is counted and banned at once.
const (
	strikeShards = 16
	MaxStrikes   = 65536 // the most keys whose denials are counted
	// MaxBans is the most keys that one statement bans. A statement with so many bans delays other writers by 50 ms.
	MaxBans = 100
)

// Strikes counts the denials of a limiter's keys.
type Strikes struct {
	name   string // the limiter's name
	ban    BanTerms
	seed   maphash.Seed
	Begin  time.Time
	listed atomic.Bool // whether Table.bans has these Strikes
	Shards [strikeShards]struct {
		Mu   sync.Mutex
		Keys map[string]strike
	}
}

// strike has the number of a key's denials, and the time of the first denial.
type strike struct {
	N     int
	since time.Duration
}

// NewStrikes returns an empty Strikes.
func NewStrikes(name string, ban BanTerms) *Strikes {
	return &Strikes{name: name, ban: ban, seed: maphash.MakeSeed(), Begin: time.Now()}
}

// Count counts a denial, and returns whether the key is to be banned. Then Count returns true until Banned is called.
func (s *Strikes) Count(key string) bool {
	now := time.Since(s.Begin)
	shard := &s.Shards[maphash.String(s.seed, key)%strikeShards]
	shard.Mu.Lock()
	defer shard.Mu.Unlock()
	k, ok := shard.Keys[key]
	if !ok || k.N < s.ban.Denials && now-k.since > s.ban.Within {
		k = strike{since: now}
	}
	k.N++
	if ok {
		shard.Keys[key] = k
		return k.N >= s.ban.Denials
	}
	if shard.Keys == nil {
		shard.Keys = make(map[string]strike)
	}
	for len(shard.Keys) >= MaxStrikes/strikeShards {
		s.makeRoom(shard.Keys, now)
	}
	shard.Keys[strings.Clone(key)] = k
	return k.N >= s.ban.Denials
}

// makeRoom drops one of up to eight keys: a key whose period is over, or the key with the fewest denials. Therefore a
// crowd of keys with one denial each cannot push out a key that is denied again and again.
func (s *Strikes) makeRoom(keys map[string]strike, now time.Duration) {
	least, fewest := "", math.MaxInt
	seen := 0
	for key, k := range keys {
		if k.N < s.ban.Denials && now-k.since > s.ban.Within {
			k.N = 0
		}
		if k.N < fewest {
			least, fewest = key, k.N
		}
		if seen++; seen == 8 || fewest == 0 {
			break
		}
	}
	delete(keys, least)
}

// due extends the slice bans by the keys that have to be banned.
func (s *Strikes) due(bans []KeyBan) []KeyBan {
	for i := range s.Shards {
		shard := &s.Shards[i]
		shard.Mu.Lock()
		for key, k := range shard.Keys {
			if k.N >= s.ban.Denials {
				bans = append(bans, KeyBan{s, key, k.N - s.ban.Denials})
			}
		}
		shard.Mu.Unlock()
	}
	return bans
}

// Banned clears the denials of a key that has been banned.
func (s *Strikes) Banned(key string) {
	shard := &s.Shards[maphash.String(s.seed, key)%strikeShards]
	shard.Mu.Lock()
	defer shard.Mu.Unlock()
	delete(shard.Keys, key)
}

// List makes Run look in s for keys to ban.
func (t *Table) List(s *Strikes) {
	if s.listed.Swap(true) {
		return
	}
	t.Mu.Lock()
	if t.bans == nil {
		t.bans = make(map[*Strikes]bool)
	}
	t.bans[s] = true
	t.Mu.Unlock()
	select {
	case t.banning <- struct{}{}:
	default:
	}
}

// KeyBan is a ban to make. The field over is the number of denials after the ban became due.
type KeyBan struct {
	*Strikes
	Key  string
	over int
}

// NextBans returns the bans to make now. The keys with the most denials after their ban became due come first. So a key
// that keeps asking is banned soon, even among many other keys.
func (t *Table) NextBans() (bans []KeyBan) {
	t.Mu.Lock()
	all := t.bans
	t.bans = nil
	t.Mu.Unlock()
	for s := range all {
		s.listed.Store(false) // cleared before due() reads the keys, so that a later key sets it again
		bans = s.due(bans)
	}
	slices.SortFunc(bans, func(a, b KeyBan) int { return cmp.Compare(b.over, a.over) })
	for _, b := range bans[min(len(bans), MaxBans):] {
		t.List(b.Strikes)
	}
	return bans[:min(len(bans), MaxBans)]
}

// ban makes bans until the context ends. After an error it tries again.
func (t *Table) ban(ctx context.Context) {
	failing := ""
	var pause time.Duration
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.banning:
		}
		bans := t.NextBans()
		if len(bans) == 0 {
			continue
		}
		err := t.makeBans(ctx, bans)
		if err == nil {
			failing, pause = "", 0
			continue
		}
		if ctx.Err() == nil && pg.KindOf(err) != failing {
			failing = pg.KindOf(err)
			t.log(ctx, slog.LevelWarn, "ratelimit: a key cannot be banned; further failures are not logged until a "+
				"ban is made", slog.String("limiter", bans[0].name), slog.Any("error", err))
		}
		for _, b := range bans {
			t.List(b.Strikes)
		}
		pause = min(max(2*pause, time.Second), 10*time.Second)
		sleep(ctx, pause)
	}
}

// makeBans makes all bans in one statement. If the database refuses one ban, each ban gets its own statement. A refused
// ban is dropped, so that it does not prevent other bans.
func (t *Table) makeBans(ctx context.Context, bans []KeyBan) error {
	err := t.makeBansAtOnce(ctx, bans)
	if !ofOneBan(err) {
		return err
	}
	var errs []error
	for i, b := range bans {
		err := t.makeBansAtOnce(ctx, bans[i:i+1])
		if ofOneBan(err) {
			b.Banned(b.Key)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// ofOneBan returns whether the database refused a particular ban, and not the function as a whole.
func ofOneBan(err error) bool {
	refused, ok := errors.AsType[*pgconn.PgError](err)
	return ok && !pg.IsAway(err) && !pg.LockTimeout(err) && !strings.HasPrefix(refused.Code, "42")
}

func (t *Table) makeBansAtOnce(ctx context.Context, bans []KeyBan) error {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	var names, keys, comments []string
	var first, longest, forgivenAfter []int64
	for _, b := range bans {
		names, keys = append(names, b.name), append(keys, b.Key)
		first = append(first, b.ban.First.Microseconds())
		longest = append(longest, b.ban.Longest.Microseconds())
		forgivenAfter = append(forgivenAfter, b.ban.ForgivenAfter.Microseconds())
		comments = append(comments, fmt.Sprintf("%d denials within %v", b.ban.Denials, b.ban.Within))
	}
	args := []any{names, keys, first, longest, forgivenAfter, comments, (readTimeout / 2).Milliseconds()}
	err := pg.Query(ctx, t.db, true, pg.Qualify(banStatement, t.config.Schema), args, []any{nil},
		func() error { return nil })
	if pg.LockTimeout(err) {
		return fmt.Errorf("ratelimit: somebody has been changing policies for %v: %w", readTimeout/2, pg.Cause(err))
	}
	if err == nil {
		for _, b := range bans {
			b.Banned(b.Key)
		}
	}
	return pg.ExplainVersion(ctx, t.db, t.config.Schema, err)
}
