package replay

// replayed is what several policies make of a log.
type replayed struct {
	keys     *keyring
	runs     []*run
	changes  []comparison // from the first run, if compares is true
	compares bool
	requests int64
	from, to int64 // the times of the first and the last request
	maxKeys  int   // from here on, keys that are idle are forgotten
	keep     int   // how many of the keys that were denied most are kept
	next     int   // the number of keys at which to try again
}

// busyKeys is how many of the busiest keys are kept.
const busyKeys = 10_000

func (a *replayed) decide(q request) {
	if a.requests++; a.requests == 1 {
		a.from = q.at
	}
	a.to = q.at
	a.keys.requests[q.key]++
	before := false
	for i, r := range a.runs {
		allowed := r.decide(q, a.keys.names[q.key])
		switch {
		case !a.compares:
		case i == 0:
			before = allowed
		default:
			a.changes[i].count(q.key, before, allowed)
		}
	}
	if n := len(a.keys.number); n > a.maxKeys && n > a.next {
		a.forget()
	}
}

// forget forgets keys that count nothing any more, and whose requests are all decided. It keeps those that the report
// may name.
func (a *replayed) forget() {
	kept := map[int]bool{}
	keep := func(keys []int) {
		for _, key := range keys {
			kept[key] = true
		}
	}
	keep(a.keys.busiest(min(busyKeys, a.maxKeys/10)))
	for i, r := range a.runs {
		keep(r.most(a.keep))
		if a.compares {
			keep(a.changes[i].most(a.keep))
		}
	}
	for key, name := range a.keys.names {
		if name == "" || kept[key] || a.keys.waiting[key] > 0 || !a.isIdle(key) {
			continue
		}
		for i, r := range a.runs {
			r.forget(key)
			if a.compares {
				a.changes[i].forget(key)
			}
		}
		a.keys.forget(key)
	}
	a.next = 2 * len(a.keys.number)
}

func (a *replayed) isIdle(key int) bool {
	for _, r := range a.runs {
		if !r.isIdle(key, a.to) {
			return false
		}
	}
	return true
}
