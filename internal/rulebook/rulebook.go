// Package rulebook finds the rule for a key, among as many rules as a process can hold.
//
// The rule of the exact key wins, then the longest prefix, then the rule for all keys. Of several rules for the same
// target, the one that began last wins. Only rules count that have begun and have not ended. The oracle in the tests
// does this in ten lines, and this package does it in 100 ns.
package rulebook

import (
	"cmp"
	"hash/maphash"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

// Rule is a value for the keys of its target. A rule in a book never changes.
type Rule[V any] struct {
	ID     int64
	Name   string // of the limiter
	Target Target
	Text   string // the key or the prefix
	Shadow bool   // shadows are looked up separately
	From   int64  // when it begins
	Weak   bool   // if the book is full, it makes room for a rule that is not weak
	Value  V
}

// Target is the keys that a rule applies to.
type Target uint8

// The targets.
const (
	Everybody Target = iota
	Prefix
	Key
)

// Book holds rules. One goroutine writes to it, while any number of others look up rules. The zero Book is empty.
type Book[V any] struct {
	mu    sync.Mutex
	pages map[string]*Page[V] // by the limiter's name
	byID  map[int64]*Rule[V]
	weak  int // how many of these are weak, because finding none takes long
}

// Page returns the rules of one limiter. Changes of the book reach the page.
func (b *Book[V]) Page(name string) *Page[V] {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.page(name)
}

func (b *Book[V]) page(name string) *Page[V] {
	if b.pages == nil {
		b.pages = make(map[string]*Page[V])
	}
	page, ok := b.pages[name]
	if !ok {
		page = &Page[V]{}
		for i := range page.sections {
			page.sections[i].seed = maphash.MakeSeed()
		}
		b.pages[name] = page
	}
	return page
}

// Len is the number of rules.
func (b *Book[V]) Len() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.byID)
}

// Rule returns the rule with an id, or nil.
func (b *Book[V]) Rule(id int64) *Rule[V] {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.byID[id]
}

// IDs lists rules.
func (b *Book[V]) IDs(is func(*Rule[V]) bool) (ids []int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for id, r := range b.byID {
		if is(r) {
			ids = append(ids, id)
		}
	}
	return ids
}

// Update replaces the rules with the same ids, and removes others. If all is true, it also removes every rule that is
// not in rules. The book holds at most limit rules. If there are more, it keeps the first ones, and replaces weak rules
// by others. Update returns how many rules were left out.
//
// A key finds an old or a new rule at any time, and never none between the two, because all new rules are added before
// an old one is removed.
func (b *Book[V]) Update(rules []*Rule[V], removed []int64, all bool, limit int) (noRoom int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.byID == nil {
		b.byID = make(map[int64]*Rule[V])
	}
	comes, goes := change[V]{}, change[V]{}
	drop := func(id int64) {
		if old, ok := b.byID[id]; ok {
			goes.of(old).dropped[old] = true
			delete(b.byID, id)
			if old.Weak {
				b.weak--
			}
		}
	}
	if all { // in their order, independent of the old rules
		noRoom = max(len(rules)-limit, 0)
		rules = rules[:len(rules)-noRoom]
		stays := make(map[int64]bool, len(rules))
		for _, r := range rules {
			stays[r.ID] = true
		}
		for id := range b.byID {
			if !stays[id] {
				drop(id)
			}
		}
	}
	for _, id := range removed {
		drop(id)
	}
	for _, r := range rules {
		old, known := b.byID[r.ID]
		if known && old == r {
			continue
		}
		if !known && len(b.byID) >= limit {
			noRoom++
			if r.Weak {
				continue
			}
			weak, found := b.anyWeak()
			if !found {
				continue
			}
			drop(weak)
		}
		drop(r.ID)
		b.byID[r.ID] = r
		if r.Weak {
			b.weak++
		}
		comes.of(r).added = append(comes.of(r).added, r)
	}
	for at, what := range comes {
		b.page(at.name).section(at.shadow).apply(what)
	}
	for at := range goes {
		b.page(at.name).section(at.shadow).changes.Add(1)
	}
	for at, what := range goes {
		b.page(at.name).section(at.shadow).apply(what)
	}
	return noRoom
}

// anyWeak returns the id of one of the weak rules.
func (b *Book[V]) anyWeak() (id int64, found bool) {
	if b.weak == 0 {
		return 0, false
	}
	for id, r := range b.byID {
		if r.Weak {
			return id, true
		}
	}
	return 0, false
}

// change has the changes of targets, by section.
type change[V any] map[place]map[target]*layersChange[V]

type place struct {
	name   string
	shadow bool
}

type target struct {
	kind Target
	text string
}

type layersChange[V any] struct {
	added   []*Rule[V]
	dropped map[*Rule[V]]bool
}

// of returns the change of a rule's target.
func (c change[V]) of(r *Rule[V]) *layersChange[V] {
	at, to := place{r.Name, r.Shadow}, target{r.Target, r.Text}
	if c[at] == nil {
		c[at] = map[target]*layersChange[V]{}
	}
	if c[at][to] == nil {
		c[at][to] = &layersChange[V]{dropped: map[*Rule[V]]bool{}}
	}
	return c[at][to]
}

// Page has the rules of one limiter.
type Page[V any] struct{ sections [2]section[V] } // the deciding rules, and the shadows

func (p *Page[V]) section(shadow bool) *section[V] {
	if shadow {
		return &p.sections[1]
	}
	return &p.sections[0]
}

// Find returns the rule for a key, or nil if there is none. counts tells which rules count now.
func (p *Page[V]) Find(key string, counts func(*Rule[V]) bool) *Rule[V] {
	return p.sections[0].find(key, counts)
}

// Shadow returns the shadow rule for a key, or nil.
func (p *Page[V]) Shadow(key string, counts func(*Rule[V]) bool) *Rule[V] {
	return p.sections[1].find(key, counts)
}

// Empty tells whether the page has no rules.
func (p *Page[V]) Empty() bool { return p.sections[0].empty() && p.sections[1].empty() }

// layers are the rules for one target; the one that begins last is first.
type layers[V any] []*Rule[V]

func (l layers[V]) find(counts func(*Rule[V]) bool) *Rule[V] {
	for _, r := range l {
		if counts(r) {
			return r
		}
	}
	return nil
}

func (l layers[V]) with(what *layersChange[V]) layers[V] {
	var next layers[V]
	for _, r := range append(slices.Clone(l), what.added...) {
		if !what.dropped[r] {
			next = append(next, r)
		}
	}
	slices.SortFunc(next, func(a, b *Rule[V]) int {
		return cmp.Or(cmp.Compare(b.From, a.From), cmp.Compare(b.ID, a.ID))
	})
	return next
}

const shards = 16

// section is a set of rules with its own lookup.
type section[V any] struct {
	seed maphash.Seed
	// changes is the number of removals so far. A reader looks again if it changed meanwhile, because the new rule may
	// be in a place where the reader has already looked.
	changes atomic.Uint64
	keys    atomic.Int64 // how many keys have their own rules
	shards  [shards]struct {
		mu   sync.RWMutex
		keys map[string]layers[V]
	}
	// prefixes are sorted. Consider the last prefix that sorts before a key. It is a prefix of the key, or it begins
	// with the key's longest prefix, because everything that sorts between a prefix of the key and the key begins with
	// that prefix.
	prefixes  atomic.Pointer[[]prefix[V]]
	everybody atomic.Pointer[layers[V]]
}

type prefix[V any] struct {
	text   string
	layers layers[V]
	within int // the longest other prefix at the start of this one, or -1
}

func (s *section[V]) empty() bool {
	return s.keys.Load() == 0 && s.prefixes.Load() == nil && s.everybody.Load() == nil
}

func (s *section[V]) find(key string, counts func(*Rule[V]) bool) *Rule[V] {
	for {
		changes := s.changes.Load()
		r := s.findOnce(key, counts)
		if s.changes.Load() == changes {
			return r
		}
	}
}

func (s *section[V]) findOnce(key string, counts func(*Rule[V]) bool) *Rule[V] {
	if s.keys.Load() > 0 {
		shard := &s.shards[maphash.String(s.seed, key)%shards]
		shard.mu.RLock()
		l := shard.keys[key]
		shard.mu.RUnlock()
		if r := l.find(counts); r != nil {
			return r
		}
	}
	if prefixes := s.prefixes.Load(); prefixes != nil {
		all := *prefixes
		i, found := slices.BinarySearchFunc(all, key, func(p prefix[V], key string) int {
			return strings.Compare(p.text, key)
		})
		if !found {
			i--
		}
		for i >= 0 {
			if strings.HasPrefix(key, all[i].text) {
				if r := all[i].layers.find(counts); r != nil {
					return r
				}
			}
			i = all[i].within
		}
	}
	if everybody := s.everybody.Load(); everybody != nil {
		return everybody.find(counts)
	}
	return nil
}

// apply changes the layers of some targets.
func (s *section[V]) apply(what map[target]*layersChange[V]) {
	changed := map[string]*layersChange[V]{} // prefixes
	for at, change := range what {
		switch at.kind {
		case Key:
			s.applyToKey(at.text, change)
		case Prefix:
			changed[at.text] = change
		case Everybody:
			var l layers[V]
			if before := s.everybody.Load(); before != nil {
				l = *before
			}
			if l = l.with(change); l == nil {
				s.everybody.Store(nil)
			} else {
				s.everybody.Store(&l)
			}
		}
	}
	if len(changed) > 0 {
		s.applyToPrefixes(changed)
	}
}

func (s *section[V]) applyToKey(key string, change *layersChange[V]) {
	shard := &s.shards[maphash.String(s.seed, key)%shards]
	// There is only one writer, so the slow part needs no lock.
	before, there := shard.keys[key]
	l := before.with(change)
	shard.mu.Lock()
	defer shard.mu.Unlock()
	if shard.keys == nil {
		shard.keys = make(map[string]layers[V])
	}
	shard.keys[key] = l
	if l == nil {
		delete(shard.keys, key)
	}
	switch {
	case there && l == nil:
		s.keys.Add(-1)
	case !there && l != nil:
		s.keys.Add(1)
	}
}

func (s *section[V]) applyToPrefixes(changed map[string]*layersChange[V]) {
	var all []prefix[V]
	if before := s.prefixes.Load(); before != nil {
		for _, p := range *before {
			if change, ok := changed[p.text]; ok {
				p.layers = p.layers.with(change)
				delete(changed, p.text)
			}
			if p.layers != nil {
				all = append(all, p)
			}
		}
	}
	for text, change := range changed {
		if l := (layers[V](nil)).with(change); l != nil {
			all = append(all, prefix[V]{text: text, layers: l})
		}
	}
	if all == nil {
		s.prefixes.Store(nil)
		return
	}
	slices.SortFunc(all, func(a, b prefix[V]) int { return strings.Compare(a.text, b.text) })
	for i := range all {
		within := i - 1
		for within >= 0 && !strings.HasPrefix(all[i].text, all[within].text) {
			within = all[within].within
		}
		all[i].within = within
	}
	s.prefixes.Store(&all)
}
