package livepage

import (
	"cmp"
	"fmt"
	"hash/maphash"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

const (
	parts     = 8
	partKeys  = 16 // the number of keys that a part of a sketch knows
	shownKeys = 20
	maxKeyLen = 512 // bytes; the longest key that a limiter accepts
)

// sketch counts the keys that are denied most, by the algorithm Space-Saving: a new key replaces the key with the
// fewest denials, and inherits its count. So a count may be too high, by at most its error. A hash chooses the part
// that counts a key, because add looks at all keys of a part. Each key that has more than 1/partKeys of all denials is
// among those kept. The sketch allocates nothing after the first key of a part.
type sketch struct{ parts [parts]part }

type part struct {
	mu   sync.Mutex
	kept *[partKeys]deniedKey // nil without keys
	// hashes and counts have the same order as kept. They are apart because add looks at all of them.
	hashes [partKeys]uint64
	counts [partKeys]int64
	used   int
}

// deniedKey is a key that was denied. Its arrays have room for any key, so that none has to be allocated.
type deniedKey struct {
	limiter   string
	key       [maxKeyLen]byte
	len       int
	inherited int64 // how much of the count may be another key's
}

// keyCount is how often a key was denied.
type keyCount struct {
	Limiter, Key   string
	Count, TooMany int64 // the count is at most TooMany too high
}

// AtLeast is how often the key was denied at least.
func (k keyCount) AtLeast() int64 { return k.Count - k.TooMany }

// add counts a denial. Two keys with the same hash would be counted as one: the hash has 64 bits and a random seed.
func (s *sketch) add(limiter, key string) {
	if len(key) > maxKeyLen {
		return
	}
	hash := maphash.String(seed, key) ^ 3*maphash.String(seed, limiter)
	p := &s.parts[hash%parts]
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.kept == nil {
		p.kept = new([partKeys]deniedKey)
	}
	least := 0
	for i := range p.used {
		if p.hashes[i] == hash {
			p.counts[i]++
			return
		}
		if p.counts[i] < p.counts[least] {
			least = i
		}
	}
	at, inherited := least, p.counts[least]
	if p.used < partKeys {
		at, inherited = p.used, 0
		p.used++
	}
	p.hashes[at], p.counts[at] = hash, inherited+1
	k := &p.kept[at]
	k.limiter, k.len, k.inherited = limiter, copy(k.key[:], key), inherited
}

// top returns the keys that were denied most.
func (s *sketch) top(show func(key string) string) []keyCount {
	var keys []keyCount
	for i := range s.parts {
		keys = append(keys, s.parts[i].keys()...)
	}
	slices.SortFunc(keys, func(a, b keyCount) int {
		return cmp.Or(cmp.Compare(b.AtLeast(), a.AtLeast()), cmp.Compare(a.Limiter, b.Limiter),
			cmp.Compare(a.Key, b.Key))
	})
	keys = keys[:min(shownKeys, len(keys))]
	for i := range keys {
		keys[i].Key = show(keys[i].Key)
	}
	return keys
}

func (p *part) keys() []keyCount {
	p.mu.Lock()
	defer p.mu.Unlock()
	keys := make([]keyCount, p.used)
	for i := range keys {
		k := &p.kept[i]
		keys[i] = keyCount{k.limiter, string(k.key[:k.len]), p.counts[i], k.inherited}
	}
	return keys
}

// reset forgets all keys.
func (s *sketch) reset() {
	for i := range s.parts {
		p := &s.parts[i]
		p.mu.Lock()
		p.kept, p.used = nil, 0
		p.mu.Unlock()
	}
}

//nolint:gochecknoglobals // all pages of a process mask a key in the same way
var seed = maphash.MakeSeed()

// shown returns a key as the page shows it.
func (p *Page) shown(key string) string {
	if p.config.ShowKeys {
		return printable(key)
	}
	return mask(key)
}

// mask returns at most three characters of a key, and at most a third of it, and a part of a hash that this process has
// chosen. So a reader can tell keys apart.
func mask(key string) string {
	n := min(3, utf8.RuneCountInString(key)/3)
	end := 0
	for range n {
		_, size := utf8.DecodeRuneInString(key[end:])
		end += size
	}
	return fmt.Sprintf("%s… #%06x", printable(key[:end]), maphash.String(seed, key)&0xffffff)
}

// printable returns a text in which characters that do not print, or that turn the direction of text, are escaped.
func printable(text string) string {
	var out strings.Builder
	for _, r := range text {
		if unicode.IsPrint(r) {
			out.WriteRune(r)
		} else {
			quoted := strconv.QuoteRuneToASCII(r)
			out.WriteString(quoted[1 : len(quoted)-1])
		}
	}
	return out.String()
}
