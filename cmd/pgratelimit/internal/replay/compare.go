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
type comparison struct {
	keys      []changes
	forgotten Change // of keys that are forgotten
}

type changes struct{ nowDenied, nowAllowed int64 }

func (c *comparison) count(key int32, before, after bool) {
	for int(key) >= len(c.keys) {
		c.keys = append(c.keys, changes{})
	}
	switch {
	case before && !after:
		c.keys[key].nowDenied++
	case !before && after:
		c.keys[key].nowAllowed++
	}
}

func (c *comparison) forget(key int) {
	if key < len(c.keys) {
		c.forgotten.add(c.keys[key])
		c.keys[key] = changes{}
	}
}

func (c *Change) add(k changes) {
	c.NowDenied += k.nowDenied
	c.NowAllowed += k.nowAllowed
	switch {
	case k.nowDenied > k.nowAllowed:
		c.KeysWorse++
	case k.nowDenied < k.nowAllowed:
		c.KeysBetter++
	}
}

// most returns the n keys that changed most.
func (c *comparison) most(n int) []int {
	return largest(len(c.keys), n, func(key int) int64 { return c.keys[key].nowDenied + c.keys[key].nowAllowed })
}

func (c *comparison) change(name func(key int) string, n int) *Change {
	change := c.forgotten
	change.Most = []ChangedKey{}
	for _, k := range c.keys {
		change.add(k)
	}
	for _, key := range c.most(n) {
		change.Most = append(change.Most, ChangedKey{name(key), c.keys[key].nowDenied, c.keys[key].nowAllowed})
	}
	return &change
}
