package replay

import (
	"cmp"
	"math/bits"
	"slices"
)

// keyring numbers the keys, and counts their requests. A key that is forgotten leaves its number to another key.
type keyring struct {
	number   map[string]int32
	names    []string
	requests []int64 // that were decided
	waiting  []int32 // requests that were read, and are not decided yet
	free     []int32 // numbers of forgotten keys
	// forgotten are the keys that were forgotten. A key that comes back is a new key.
	forgotten []KeyGroup
}

func newKeyring() *keyring { return &keyring{number: map[string]int32{}} }

// of returns the number of a key, of which a request was read.
func (k *keyring) of(name []byte) int32 {
	if n, ok := k.number[string(name)]; ok {
		k.waiting[n]++
		return n
	}
	text := string(name)
	if last := len(k.free) - 1; last >= 0 {
		n := k.free[last]
		k.free = k.free[:last]
		k.names[n], k.waiting[n], k.number[text] = text, 1, n
		return n
	}
	n := int32(len(k.names)) //nolint:gosec // 2 billion keys do not fit into memory
	k.names, k.requests, k.waiting = append(k.names, text), append(k.requests, 0), append(k.waiting, 1)
	k.number[text] = n
	return n
}

func (k *keyring) forget(key int) {
	k.forgotten = count(k.forgotten, k.requests[key])
	delete(k.number, k.names[key])
	k.names[key], k.requests[key] = "", 0
	k.free = append(k.free, int32(key)) //nolint:gosec // it was an int32
}

// count returns how many keys there were.
func (k *keyring) count() int64 { return int64(len(k.number)) + k.countForgotten() }

func (k *keyring) countForgotten() (n int64) {
	for _, g := range k.forgotten {
		n += g.Keys
	}
	return n
}

// groups groups keys by their number of requests: 1, 2, up to 4, up to 8 and so on.
func (k *keyring) groups() []KeyGroup {
	groups := append([]KeyGroup{}, k.forgotten...)
	for _, n := range k.requests {
		if n > 0 {
			groups = count(groups, n)
		}
	}
	return groups
}

// count counts a key that made n requests.
func count(groups []KeyGroup, n int64) []KeyGroup {
	group := bits.Len64(uint64(n - 1)) //nolint:gosec // n is at least 1
	for group >= len(groups) {
		groups = append(groups, KeyGroup{UpTo: 1 << len(groups)})
	}
	groups[group].Keys++
	return groups
}

// busiest returns the n keys that made most requests.
func (k *keyring) busiest(n int) []int {
	return largest(len(k.requests), n, func(key int) int64 { return k.requests[key] })
}

// largest returns those n of the keys below end whose positive number is the largest, with the largest first.
func largest(end, n int, number func(key int) int64) (keys []int) {
	if n == 0 {
		return nil
	}
	least := int64(0)
	keepLargest := func() {
		slices.SortFunc(keys, func(a, b int) int {
			return cmp.Or(cmp.Compare(number(b), number(a)), cmp.Compare(a, b))
		})
		if len(keys) >= n {
			keys = keys[:n]
			least = number(keys[n-1])
		}
	}
	for key := range end {
		if number(key) > least {
			keys = append(keys, key)
		}
		if len(keys) == 2*n {
			keepLargest()
		}
	}
	keepLargest()
	return keys
}
