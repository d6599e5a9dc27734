package engine

import (
	"cmp"
	"slices"
	"strings"
)

// compareLockOrder compares two rows by the lock order: ephemeral rows first, then longer keys first, then by the bytes
// of key and name. All statements lock rows in this order, so that two statements never wait for each other. The
// functions _rate_limit_rows_in_lock_order and _rate_limit_keys_in_lock_order in sql/ sort in the same order.
func compareLockOrder(a, b *Part) int {
	table := func(p *Part) int {
		if p.Space.Durable {
			return 1
		}
		return 0
	}
	return cmp.Or(
		table(a)-table(b), len(b.Key)-len(a.Key), strings.Compare(a.Key, b.Key), strings.Compare(a.Name, b.Name))
}

// sortInLockOrder sorts requests of one group by the lock order of their first rows.
func sortInLockOrder(requests []*Request) {
	slices.SortStableFunc(requests, func(a, b *Request) int { return compareLockOrder(&a.Parts[0], &b.Parts[0]) })
}
