package ratelimit

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"weak"

	"github.com/pgratelimit/ratelimit/internal/forget"
)

// Processes that share Policies tell each other which keys were given back to, granted credit or reset, so that denials
// that others remember of them are forgotten; see package forget.
//
// What is done in a transaction of the caller's is not told. Postgres has all transactions that notify commit one after
// the other, and those of the application should not.

// addCache has a client's denials forgotten when others say so. It is nil if nothing is remembered.
func (p *Policies) addCache(d *denials) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.caches = slices.DeleteFunc(p.caches, func(c weak.Pointer[denials]) bool { return c.Value() == nil })
	if d != nil && !slices.Contains(p.caches, weak.Make(d)) {
		p.caches = append(p.caches, weak.Make(d))
	}
}

// forgetIf forgets the denials of some keys, in all caches.
func (p *Policies) forgetIf(is func(denialKey) bool) {
	p.mu.Lock()
	caches := slices.Clone(p.caches)
	p.mu.Unlock()
	for _, c := range caches {
		if d := c.Value(); d != nil {
			d.forgetIf(is)
		}
	}
}

// announce tells other processes that something was given to a key.
func (s *keyspace) announce(key string) {
	p := s.policies
	if p == nil {
		return
	}
	p.mu.Lock()
	if p.running {
		if p.given == nil {
			p.given = make(map[string]bool)
		}
		p.given[forget.Hash(s.name, key)] = true
	}
	p.mu.Unlock()
	select {
	case p.telling <- struct{}{}:
	default:
	}
}

// tell tells other processes what was given, four times a second at most, until the context ends.
func (p *Policies) tell(ctx context.Context) {
	failing := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.telling:
		}
		p.mu.Lock()
		given := p.given
		p.given = nil
		p.mu.Unlock()
		for payload := range forget.Payloads(given) {
			switch err := p.notify(ctx, payload); {
			case ctx.Err() != nil:
				return
			case err == nil:
				failing = ""
			case ErrorKind(err) != failing:
				failing = ErrorKind(err)
				p.log(ctx, slog.LevelWarn, "ratelimit: other processes cannot be told to forget denials, which end "+
					"by their age; further failures are not logged until it works again", slog.Any("error", err))
			}
		}
		sleep(ctx, gatherTime)
	}
}

// hear forgets denials if the payloads of notifications say so. However many there are, it looks at each denial once.
func (p *Policies) hear(payloads []string) {
	all := map[string]bool{}
	for _, payload := range payloads {
		if hashes, ok := forget.Read(payload); ok {
			maps.Copy(all, hashes)
		}
	}
	if len(all) > 0 {
		p.forgetIf(func(k denialKey) bool { return all[forget.Hash(k.space.name, k.key)] })
	}
}

// forgetIf forgets the denials of some keys, and remembers none that are still on their way.
func (d *denials) forgetIf(is func(denialKey) bool) {
	d.early.Add(1)
	shards := d.shards.Load()
	if shards == nil {
		return
	}
	for i := range shards {
		s := &shards[i]
		s.mu.Lock()
		for _, generation := range []map[denialKey]denial{s.young, s.old} {
			for k := range generation {
				if is(k) {
					delete(generation, k)
				}
			}
		}
		s.mu.Unlock()
	}
}
