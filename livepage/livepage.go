// Package livepage has a page that shows what the limiters of this process decide, as they decide. Mount a [Page] like
// the pages of net/http/pprof, and set its Observer in [ratelimit.ClientConfig]. See the example.
//
// The page shows rates, latencies, statements, units of leases, the breaker, and the keys denied most. If it has a
// database, it also shows bans, holds, slots and the fullest keys on demand. It changes nothing.
package livepage

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// Config configures a [Page]. The zero value is useful.
type Config struct {
	// ShowKeys shows whole keys. By default, the page shows the first characters of a key and a part of its hash,
	// because keys are personal data.
	ShowKeys bool
	// AnyAddress shows the page to everybody who can reach it. By default, only programs on the same host see it, and
	// only if no proxy has forwarded their request. Set AnyAddress only behind a log-in of your own.
	AnyAddress bool
	// Policies adds the age of the process's copy of rate_limit_policy.
	Policies *ratelimit.Policies
	// DB lets the page read bans, holds, slots and the fullest keys when somebody asks. Its role needs the rights of
	// rate_limit_reader in deploy/grants.sql, and EXECUTE on rate_limit_all for the fullest keys. Such a query ends
	// after 3 seconds, and only one runs at a time.
	DB     ratelimit.DBTX
	Schema string // the schema that has the tables; defaults to "": search_path finds it
}

// Page is an http.Handler that shows what limiters decide. It counts only while somebody looks, and for a minute
// afterwards: an open page is told every second. The counts begin with the first look. A Page is safe for concurrent
// use. It has no goroutine of its own.
type Page struct {
	config  Config
	closed  chan struct{}
	closing sync.Once
	streams chan struct{} // has a value for each open stream of events
	asking  chan struct{} // has a value while a query runs

	looking atomic.Bool                       // whether decisions are counted
	counts  atomic.Pointer[map[string]*count] // by the limiter's name; a new limiter makes a new map
	all     statements
	denied  sketch

	mu       sync.Mutex
	since    time.Time // when counting began
	lastLook time.Time
	stop     *time.Timer          // ends counting
	breakers map[breakerName]bool // whether each breaker is open
	limiters []*ratelimit.Limiter
}

type breakerName struct {
	limits string
	shard  int
}

const (
	// keepCounting is how long the page counts after the last look. A table that is reloaded by hand shows more than a
	// moment.
	keepCounting = time.Minute
	maxStreams   = 16
	maxLimiters  = 200 // limiters beyond them share a line
	others       = "(others)"
)

// New returns a page.
func New(config Config) *Page {
	p := &Page{
		config: config, closed: make(chan struct{}), streams: make(chan struct{}, maxStreams),
		asking: make(chan struct{}, 1), breakers: make(map[breakerName]bool),
	}
	p.counts.Store(&map[string]*count{})
	return p
}

// AddLimiters tells the page of limiters, so that it can ask the database about them.
func (p *Page) AddLimiters(limiters ...*ratelimit.Limiter) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.limiters = append(p.limiters, limiters...)
}

// Close ends all streams of events. Pass it to the RegisterOnShutdown of the http.Server, because its Shutdown waits
// for the streams otherwise.
func (p *Page) Close() { p.closing.Do(func() { close(p.closed) }) }

// Observer returns the observer that counts for the page. To use another observer too, pass both to
// [ratelimit.Observers].
func (p *Page) Observer() *ratelimit.Observer {
	return &ratelimit.Observer{
		Decision: func(e ratelimit.DecisionEvent) { // a method value would copy the event once more
			if p.looking.Load() {
				p.decision(&e)
			}
		},
		Statement: p.statement,
		Lease:     p.lease,
		Breaker:   p.breaker,
		DeniedKey: p.deniedKey,
	}
}

// decision counts a call that took something, was denied or failed. A Peek is no decision.
func (p *Page) decision(e *ratelimit.DecisionEvent) {
	if e.Cost == 0 && e.Err == nil {
		return
	}
	c := p.countOf(e.Limiter)
	switch { // e.Outcome would copy the event
	case e.Err != nil:
		c.errors.Add(1)
	case e.Result.Allowed:
		c.allowed.Add(1)
	default:
		c.denied.Add(1)
	}
	if e.Err == nil {
		switch e.Result.Source {
		case ratelimit.SourceCachedDenial:
			c.remembered.Add(1)
		case ratelimit.SourceLease:
			c.leased.Add(1)
		case ratelimit.SourceFailedOpen:
			c.failedOpen.Add(1)
		case ratelimit.SourceFailedClosed:
			c.failedClosed.Add(1)
		case ratelimit.SourceFallback:
			c.fallback.Add(1)
		}
	}
	c.latency.add(e.Latency)
}

func (p *Page) statement(e ratelimit.StatementEvent) {
	if !p.looking.Load() {
		return
	}
	p.all.sent.Add(1)
	p.all.calls.Add(int64(e.Size))
	if e.Err != nil {
		p.all.errors.Add(1)
	}
	p.all.latency.add(e.Latency)
}

func (p *Page) lease(e ratelimit.LeaseEvent) {
	if !p.looking.Load() {
		return
	}
	c := p.countOf(e.Limiter)
	c.taken.Add(e.Taken)
	c.returned.Add(e.Returned)
	c.stranded.Add(e.Stranded)
}

// breaker notes a change even if nobody looks. Otherwise the page could not tell which breakers are open.
func (p *Page) breaker(e ratelimit.BreakerEvent) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.breakers[breakerName{e.Limits, e.Shard}] = e.Open
}

func (p *Page) deniedKey(limiter, key string) {
	if p.looking.Load() {
		p.denied.add(limiter, key)
	}
}

// look makes the page count, and returns when the counting began.
func (p *Page) look() time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lastLook = time.Now()
	if !p.looking.Load() {
		p.since = p.lastLook
		p.forget() // a call that was counting while the counting ended may have left something
		p.stop = time.AfterFunc(keepCounting, p.stopCounting)
		p.looking.Store(true)
	}
	return p.since
}

// stopCounting ends the counting and forgets everything, if nobody has looked for long enough.
func (p *Page) stopCounting() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if left := keepCounting - time.Since(p.lastLook); left > 0 {
		p.stop.Reset(left)
		return
	}
	p.looking.Store(false)
	p.forget()
}

// forget forgets all counts and keys. p.mu is held.
func (p *Page) forget() {
	p.counts.Store(&map[string]*count{})
	p.all.reset()
	p.denied.reset()
}
