// Package rulebook finds the rule for a key, such as a user's own policy or ban.
//
// The rule of the exact key wins over the longest prefix, and a prefix wins over the rule for all keys. Of several
// rules for one target, the rule that began last wins. Rules that have not begun or have ended do not count. The oracle
// in the tests finds the same rules in ten lines. A look-up in this package takes 100 ns.
package rulebook

import (
	"cmp"
	"hash/maphash"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

// Rule is a value for the keys of a target. A rule in a book must not change.
type Rule[V any] struct {
	ID     int64
	Name   string // the name of the limiter
	Target Target
	Text   string // the key, or the prefix of keys; "" for Everybody
	Shadow bool   // shadow rules are found by Shadow, and all others by Find
	From   int64  // the time when the rule begins
	Weak   bool   // whether a full book may drop the rule for a rule that is not weak
	Value  V
}

// Target says which keys a rule applies to.
type Target uint8

// The targets of a rule.
const (
	Everybody Target = iota
	Prefix
	Key
)

// Book holds rules. Readers may look up rules while a goroutine changes the book. The zero Book is empty.
type Book[V any] struct {
	mu    sync.Mutex
	pages map[string]*Page[V] // pages by the name of the limiter
	byID  map[int64]*Rule[V]
	weak  int // the number of weak rules, because a search for one may take long
}

// Page returns the rules of a limiter. Later changes of the book also change the page.
func (b *Book[V]) Page(name string) *Page[V] {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.page(name)
}

// Known returns the rules of a limiter, or nil if there has never been one. Unlike Page, it uses no memory for the
// name.
func (b *Book[V]) Known(name string) *Page[V] {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.pages[name]
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

// Len returns the number of rules in the book.
func (b *Book[V]) Len() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.byID)
}

// Rule returns the rule with this id, or nil.
func (b *Book[V]) Rule(id int64) *Rule[V] {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.byID[id]
}

// IDs returns the ids of all rules for which is() returns true.
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

// Update adds rules, replaces the rules that have the same ids, and removes the rules with the removed ids. If the
// argument all is true, Update also removes every rule that is not in rules. The book holds at most limit rules. Weak
// rules make room for other new rules. Further new rules are left out. Update returns how many rules had no room.
//
// Update adds all new rules before it removes the first old rule. So a reader always finds the old or the new rule of a
// key.
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
	if all { // keep the first rules, independent of the old rules
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

// anyWeak returns the id of a weak rule.
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

// change maps sections and targets to the changes of their rules.
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

// Page has the rules of a limiter.
type Page[V any] struct{ sections [2]section[V] } // the rules that Find finds, and the shadow rules

func (p *Page[V]) section(shadow bool) *section[V] {
	if shadow {
		return &p.sections[1]
	}
	return &p.sections[0]
}

// Find returns the rule for a key, or nil if there is none. counts() tells whether a rule has begun and not ended.
func (p *Page[V]) Find(key string, counts func(*Rule[V]) bool) *Rule[V] {
	return p.sections[0].find(key, counts)
}

// Shadow returns the shadow rule for a key, or nil if there is none.
func (p *Page[V]) Shadow(key string, counts func(*Rule[V]) bool) *Rule[V] {
	return p.sections[1].find(key, counts)
}

// Empty tells whether the page has no rules.
func (p *Page[V]) Empty() bool { return p.sections[0].empty() && p.sections[1].empty() }

// layers are the rules for a target. The rule that begins last comes first.
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

// section has the shadow rules of a page, or all other rules.
type section[V any] struct {
	seed maphash.Seed
	// changes is the number of updates that removed rules. A reader repeats a look-up if this number has changed,
	// because a rule may have moved to a place where the reader had already looked.
	changes atomic.Uint64
	keys    atomic.Int64 // the number of keys that have rules
	shards  [shards]struct {
		mu   sync.RWMutex
		keys map[string]layers[V]
	}
	// prefixes are sorted. The last prefix that sorts before a key begins with the key's longest prefix, because every
	// text that sorts between that prefix and the key begins with that prefix.
	prefixes  atomic.Pointer[[]prefix[V]]
	everybody atomic.Pointer[layers[V]]
}

type prefix[V any] struct {
	text   string
	layers layers[V]
	within int // the index of the longest other prefix of this prefix, or -1
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

// apply changes the rules of some targets.
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
	// Only one goroutine writes, so reading and copying need no lock.
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
