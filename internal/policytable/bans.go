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
	Denials                       int           // how many
	Within                        time.Duration // the first of them
	First, Longest, ForgivenAfter time.Duration
}

// How much is counted and banned at once.
const (
	strikeShards = 16
	MaxStrikes   = 65536 // keys
	// MaxBans is how many keys a statement bans. It holds other writers up for 50 ms.
	MaxBans = 100
)

// Strikes counts denials.
type Strikes struct {
	name   string // of the limiter
	ban    BanTerms
	seed   maphash.Seed
	Begin  time.Time
	listed atomic.Bool // Table.bans has it
	Shards [strikeShards]struct {
		Mu   sync.Mutex
		Keys map[string]strike
	}
}

// strike is how often a key was denied, and when first.
type strike struct {
	N     int
	since time.Duration
}

// NewStrikes returns strikes that have counted nothing yet.
func NewStrikes(name string, ban BanTerms) *Strikes {
	return &Strikes{name: name, ban: ban, seed: maphash.MakeSeed(), Begin: time.Now()}
}

// Count counts a denial, and tells whether the key is to be banned. It is until there is a ban.
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

// makeRoom drops one of a few keys: one whose time is over, or the one that was denied least. So a crowd of keys that
// are denied once drops none that is denied again and again.
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

// due adds the bans that are to be made.
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

// Banned forgets the denials of a key that there is a ban for.
func (s *Strikes) Banned(key string) {
	shard := &s.Shards[maphash.String(s.seed, key)%strikeShards]
	shard.Mu.Lock()
	defer shard.Mu.Unlock()
	delete(shard.Keys, key)
}

// List has Run look for keys to ban.
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

// KeyBan is a ban that is to be made. over is how often the key was denied since.
type KeyBan struct {
	*Strikes
	Key  string
	over int
}

// NextBans are the bans to make now. Those of keys that were denied most since they were due come first. So whoever
// goes on asking is banned soon, whatever a crowd does.
func (t *Table) NextBans() (bans []KeyBan) {
	t.Mu.Lock()
	all := t.bans
	t.bans = nil
	t.Mu.Unlock()
	for s := range all {
		s.listed.Store(false) // before it looks, so that what is due later lists it again
		bans = s.due(bans)
	}
	slices.SortFunc(bans, func(a, b KeyBan) int { return cmp.Compare(b.over, a.over) })
	for _, b := range bans[min(len(bans), MaxBans):] {
		t.List(b.Strikes)
	}
	return bans[:min(len(bans), MaxBans)]
}

// ban makes bans until the context ends. What fails is tried again.
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

// makeBans makes bans in one statement. If the database refuses one of them, each is made by itself, and what is
// refused is forgotten. Then it does not keep the others from being made.
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

// ofOneBan tells whether the database has refused what is particular to a ban, rather than the function.
func ofOneBan(err error) bool {
	refused, ok := errors.AsType[*pgconn.PgError](err)
	return ok && !pg.IsAway(err) && !pg.LockTimeout(err) && !strings.HasPrefix(refused.Code, "42")
}

func (t *Table) makeBansAtOnce(ctx context.Context, bans []KeyBan) error {
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
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
	args := []any{names, keys, first, longest, forgivenAfter, comments, (loadTimeout / 2).Milliseconds()}
	err := pg.Query(ctx, t.db, true, pg.Qualify(banStatement, t.config.Schema), args, []any{nil},
		func() error { return nil })
	if pg.LockTimeout(err) {
		return fmt.Errorf("ratelimit: somebody has been changing policies for %v: %w", loadTimeout/2, pg.Cause(err))
	}
	if err == nil {
		for _, b := range bans {
			b.Banned(b.Key)
		}
	}
	return pg.ExplainVersion(ctx, t.db, t.config.Schema, err)
}
