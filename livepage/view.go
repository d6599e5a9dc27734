package livepage

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"time"
)

// view is what the page shows at one moment.
type view struct {
	At       time.Time
	Since    string // how long the page has counted
	Over     string // the time over which rates are computed
	Limiters []limiterView
	Leases   []limiterView // those whose leases have taken or given back units
	Sent     int64
	Failed   int64
	SentRate string
	PerSent  string // calls per statement
	SentP50  string
	SentP99  string
	Breakers []string // those that are open
	Policies string
	Stale    bool // whether the last query for policies failed
	Denied   []keyCount
	Masked   bool

	Names  []string // the limiters that the database can be asked about
	HasDB  bool
	Answer *answer // nil if nobody has asked the database
}

// limiterView has the numbers of a limiter since the counting began, and rates.
type limiterView struct {
	Name                                    string
	Allowed, Denied, Errors                 int64
	FailedOpen, FailedClosed, Fallback      int64
	Remembered, Leased                      int64
	Taken, Returned, Stranded               int64
	AllowedRate, DeniedRate, RememberedRate string
	LeasedRate, FailedOpenRate              string
	FailedClosedRate                        string
	P50, P99                                string
}

// view returns what the page shows now. Rates are those since the view before, or since the counting began if before is
// nil.
func (p *Page) view(before *view, a *answer) *view {
	since := p.look()
	now := time.Now()
	v := &view{At: now, Since: short(now.Sub(since)), Answer: a, Masked: !p.config.ShowKeys, HasDB: p.config.DB != nil}
	over, old := now.Sub(since), map[string]limiterView{}
	var oldSent int64
	// The counting begins again if this goroutine has stood still for longer than keepCounting.
	if before != nil && !before.At.Before(since) {
		over, oldSent = now.Sub(before.At), before.Sent
		for _, l := range before.Limiters {
			old[l.Name] = l
		}
	}
	v.Over = short(over)
	counts := *p.counts.Load()
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		c := counts[name]
		l := limiterView{
			Name: printable(name), Allowed: c.allowed.Load(), Denied: c.denied.Load(), Errors: c.errors.Load(),
			FailedOpen: c.failedOpen.Load(), FailedClosed: c.failedClosed.Load(), Fallback: c.fallback.Load(),
			Remembered: c.remembered.Load(), Leased: c.leased.Load(),
			Taken: c.taken.Load(), Returned: c.returned.Load(), Stranded: c.stranded.Load(),
			P50: micros(c.latency.quantile(0.5)), P99: micros(c.latency.quantile(0.99)),
		}
		o := old[l.Name]
		l.AllowedRate, l.DeniedRate = rate(l.Allowed-o.Allowed, over), rate(l.Denied-o.Denied, over)
		l.RememberedRate, l.LeasedRate = rate(l.Remembered-o.Remembered, over), rate(l.Leased-o.Leased, over)
		l.FailedOpenRate = rate(l.FailedOpen-o.FailedOpen, over)
		l.FailedClosedRate = rate(l.FailedClosed-o.FailedClosed, over)
		v.Limiters = append(v.Limiters, l)
		if l.Taken+l.Returned+l.Stranded > 0 {
			v.Leases = append(v.Leases, l)
		}
	}
	v.Sent, v.Failed = p.all.sent.Load(), p.all.errors.Load()
	v.SentRate = rate(v.Sent-oldSent, over)
	v.PerSent = strconv.FormatFloat(float64(p.all.calls.Load())/float64(max(v.Sent, 1)), 'f', 1, 64)
	v.SentP50, v.SentP99 = micros(p.all.latency.quantile(0.5)), micros(p.all.latency.quantile(0.99))
	v.Denied = p.denied.top(p.shown)
	for i := range v.Denied {
		v.Denied[i].Limiter = printable(v.Denied[i].Limiter)
	}
	if p.config.Policies != nil {
		status := p.config.Policies.Status()
		v.Stale = status.Err != nil
		v.Policies = "not read yet"
		if status.Age > 0 {
			v.Policies = strconv.Itoa(status.Rows) + " rows, read " + short(status.Age) + " ago"
		}
	}
	p.addState(v)
	return v
}

// addState adds the open breakers and the names of the limiters.
func (p *Page) addState(v *view) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for b, open := range p.breakers {
		if open {
			name := b.limits
			if b.shard > 0 {
				name += ", shard " + strconv.Itoa(b.shard)
			}
			v.Breakers = append(v.Breakers, name)
		}
	}
	slices.Sort(v.Breakers)
	for _, l := range p.limiters {
		v.Names = append(v.Names, l.Config().Name)
	}
	slices.SortFunc(v.Names, cmp.Compare[string])
	v.Names = slices.Compact(v.Names)
}

// short returns a duration with two or three digits.
func short(d time.Duration) string {
	if d < 10*time.Second {
		return d.Round(100 * time.Millisecond).String()
	}
	return d.Round(time.Second).String()
}

// micros returns a latency with at most three digits.
func micros(d time.Duration) string {
	switch {
	case d == 0:
		return "–"
	case d < 10*time.Microsecond:
		return d.Round(10 * time.Nanosecond).String()
	case d < 10*time.Millisecond:
		return d.Round(10 * time.Microsecond).String()
	default:
		return d.Round(time.Millisecond).String()
	}
}
