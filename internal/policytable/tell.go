package policytable

import (
	"context"
	"log/slog"
	"maps"
	"slices"

	"github.com/pgratelimit/ratelimit/internal/forget"
	"github.com/pgratelimit/ratelimit/internal/pg"
)

// Processes that share Policies tell each other which keys were given back to, granted credit or reset, so that denials
// that others remember of them are forgotten; see package forget.
//
// What is done in a transaction of the caller's is not told. Postgres has all transactions that notify commit one after
// the other, and those of the application should not.

// AddDenials has a client's denials forgotten when others say so.
func (t *Table) AddDenials(d Denials) {
	t.Mu.Lock()
	defer t.Mu.Unlock()
	if !slices.Contains(t.caches, d) {
		t.caches = append(t.caches, d)
	}
}

// forgetIf forgets the denials of some keys, in all caches, and drops caches that are no longer in use.
func (t *Table) forgetIf(is func(limiter, key string) bool) {
	t.Mu.Lock()
	caches := slices.Clone(t.caches)
	t.Mu.Unlock()
	for _, c := range caches {
		if !c.ForgetIf(is) {
			t.Mu.Lock()
			t.caches = slices.DeleteFunc(t.caches, func(other Denials) bool { return other == c })
			t.Mu.Unlock()
		}
	}
}

// Given tells other processes that something was given to a limiter's key, or that it was reset.
func (t *Table) Given(limiter, key string) {
	t.Mu.Lock()
	if t.Running {
		if t.given == nil {
			t.given = make(map[string]bool)
		}
		t.given[forget.Hash(limiter, key)] = true
	}
	t.Mu.Unlock()
	select {
	case t.Telling <- struct{}{}:
	default:
	}
}

// tell tells other processes what was given, four times a second at most, until the context ends.
func (t *Table) tell(ctx context.Context) {
	failing := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.Telling:
		}
		t.Mu.Lock()
		given := t.given
		t.given = nil
		t.Mu.Unlock()
		for payload := range forget.Payloads(given) {
			switch err := t.notify(ctx, payload); {
			case ctx.Err() != nil:
				return
			case err == nil:
				failing = ""
			case pg.KindOf(err) != failing:
				failing = pg.KindOf(err)
				t.log(ctx, slog.LevelWarn, "ratelimit: other processes cannot be told to forget denials, which end "+
					"by their age; further failures are not logged until it works again", slog.Any("error", err))
			}
		}
		sleep(ctx, gatherTime)
	}
}

// hear forgets denials if the payloads of notifications say so. However many there are, it looks at each denial once.
func (t *Table) hear(payloads []string) {
	all := map[string]bool{}
	for _, payload := range payloads {
		if hashes, ok := forget.Read(payload); ok {
			maps.Copy(all, hashes)
		}
	}
	if len(all) > 0 {
		t.forgetIf(func(limiter, key string) bool { return all[forget.Hash(limiter, key)] })
	}
}
