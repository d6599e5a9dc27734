package replay

// Change is what a policy would change for requests and keys.
type Change struct {
	NowDenied  int64        `json:"now_denied"`  // requests that the current policy allows
	NowAllowed int64        `json:"now_allowed"` // requests that the current policy denies
	KeysWorse  int64        `json:"keys_worse"`  // keys that are denied more often
	KeysBetter int64        `json:"keys_better"`
	Most       []ChangedKey `json:"most_changed"`
}

// ChangedKey is how a key's requests would change.
type ChangedKey struct {
	Key        string `json:"key"`
	NowDenied  int64  `json:"now_denied"`
	NowAllowed int64  `json:"now_allowed"`
}

// comparison counts changes by the key's number.
type comparison struct{ nowDenied, nowAllowed []int64 }

func (c *comparison) count(key int32, before, after bool) {
	for int(key) >= len(c.nowDenied) {
		c.nowDenied, c.nowAllowed = append(c.nowDenied, 0), append(c.nowAllowed, 0)
	}
	switch {
	case before && !after:
		c.nowDenied[key]++
	case !before && after:
		c.nowAllowed[key]++
	}
}

func (c *comparison) change(name func(key int) string, n int) *Change {
	change := &Change{Most: []ChangedKey{}}
	changed := make([]int64, len(c.nowDenied))
	for key, denied := range c.nowDenied {
		allowed := c.nowAllowed[key]
		change.NowDenied += denied
		change.NowAllowed += allowed
		changed[key] = denied + allowed
		switch {
		case denied > allowed:
			change.KeysWorse++
		case denied < allowed:
			change.KeysBetter++
		}
	}
	for _, key := range largest(changed, n) {
		change.Most = append(change.Most, ChangedKey{name(key), c.nowDenied[key], c.nowAllowed[key]})
	}
	return change
}
