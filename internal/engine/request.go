package engine

import (
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
)

// Space is the keys of one name in one table. Who asks for the same keys shares it, because what is remembered of them
// hangs on it.
type Space struct {
	Engine        *Engine
	Name          string // of the limiter
	Durable       bool
	Flush         bool // a commit waits until the WAL is flushed
	Remember      bool // denials are remembered
	ReturnsErrors bool // so the breaker turns none of its requests away
	Lease         *LeaseTerms
	Given         func(key string) // is told that something was given to a key, or it was reset; may be nil
}

// tell tells that something was given to a key.
func (s *Space) tell(key string) {
	if s.Given != nil {
		s.Given(key)
	}
}

// Request is a caller's question. It belongs to its caller until it is submitted, and again once it has been
// decided. A caller who leaves before that never touches it again.
type Request struct {
	Space  *Space        // whose turn it takes: that of its limiter, or the one that all sets share
	Policy *model.Policy // of all its parts; nil for a set
	Parts  []Part
	Single [1]Part // the memory of parts for the usual request
	Since  time.Time
	Probe  bool          // it may ask the database although the breaker is open
	Done   chan struct{} // gets one value, once the parts' decisions or err are set
	Err    error
	Shadow *Shadow // decided beside it; nil if there is none
	Ahead  int64   // how many requests more are asked for, to be spent later; part of count
	// ofLease tells that it gives back what is left of a lease.
	OfLease bool

	// Requests of the same key, policy and cost are decided as one, the first of them.
	Count int64    // how many there are, this one and those behind next
	next  *Request // the next of them
	last  *Request // the last of them
	Place int64    // which of them this one is, from 1
}

// Part is a row that a request asks for, and what was decided about it.
type Part struct {
	Space    *Space
	Rules    model.Rules
	Name     string // the row's: that of the space, or of a further policy of All, such as api/2
	Key      string
	Cost     int64 // 0 looks; below 0 gives back refund, or grants if refund is nil
	Refund   *model.Take
	Decision model.Decision
}

// The values of granted in a part that is not decided.
const (
	PassedOver = -3 // the statement did not come to it
	Locked     = -2 // a transaction has locked its row; remaining tells which one, or 0 if the row is being made
	Undecided  = -1 // another part of the request is locked
)

// sparedParts is how many parts a request may have whose memory is used again.
const sparedParts = 16

// requestPool has requests used again.
type requestPool struct{ pool sync.Pool }

// get returns a request without parts. Its space and policy say which calls it may leave with.
func (p *requestPool) Get(space *Space, policy *model.Policy) *Request {
	r, ok := p.pool.Get().(*Request)
	if !ok {
		r = &Request{Done: make(chan struct{}, 1)}
	}
	if r.Parts == nil {
		r.Parts = r.Single[:0]
	}
	r.Space, r.Policy, r.Count, r.last, r.Place = space, policy, 1, r, 1
	return r
}

// Add adds the parts of one limiter, one for each of its rows.
func (r *Request) Add(space *Space, policy *model.Policy, key string, cost int64, refunds []model.Take) {
	for i, m := range policy.Rules {
		p := Part{Space: space, Rules: m, Name: algorithm.RowName(space.Name, i), Key: key, Cost: cost}
		if refunds != nil {
			p.Refund = &refunds[i]
		}
		r.Parts = append(r.Parts, p)
	}
}

// put has a request used again. Only its caller may do that, and only once the request has been decided.
func (p *requestPool) put(r *Request) {
	clear(r.Parts)
	if r.Parts = r.Parts[:0]; cap(r.Parts) > sparedParts {
		r.Parts = nil
	}
	r.Space, r.Policy, r.Err, r.next, r.last, r.Shadow = nil, nil, nil, nil, nil, nil
	r.Ahead, r.OfLease = 0, false
	p.pool.Put(r)
}

// Looks tells whether it takes nothing, and so locks no row.
func (r *Request) Looks() bool { return r.Parts[0].Cost == 0 }

// gives tells whether it gives back or grants.
func (r *Request) gives() bool { return r.Parts[0].Cost < 0 }

// leased is what the database has to know of a lease from a bucket: how many of the units that are asked for are to be
// spent later, or how many are not held any more.
func (r *Request) leased(p *Part) int64 {
	units := r.Ahead * p.Cost
	if p.Refund != nil {
		units = p.Refund.Ended
	}
	if units == 0 || p.Rules.Numbers().Algorithm != algorithm.TokenBucket {
		return 0
	}
	return units
}

// asksAnyway tells whether it asks the database even while the breaker is open.
func (r *Request) asksAnyway() bool {
	for i := range r.Parts {
		if !r.Parts[i].Space.ReturnsErrors {
			return false
		}
	}
	return true
}

// joins tells whether a request can be decided as one with another one in the same line.
func (r *Request) joins(other *Request) bool {
	return r.Policy != nil && !r.gives() &&
		r.Parts[0].Key == other.Parts[0].Key && r.Parts[0].Cost == other.Parts[0].Cost &&
		r.Shadow.policy().Is(other.Shadow.policy())
}

// PassedOver tells whether a statement has left the request undecided.
func (r *Request) PassedOver() bool { return r.Parts[0].Decision.Granted < 0 }

// Finish tells the caller of a request, and those of the requests that were decided as one with it.
func (r *Request) Finish(err error) {
	place := int64(2)
	for f := r.next; f != nil; place++ {
		next := f.next // read now, because its caller goes on and uses it again
		for i := range f.Parts {
			f.Parts[i].Decision = r.Parts[i].Decision
		}
		if f.Shadow != nil {
			f.Shadow.copyFrom(r.Shadow, place)
		}
		f.Place, f.Err = place, err
		f.Done <- struct{}{}
		f = next
	}
	r.Err = err
	r.Done <- struct{}{}
}

// limiterGroups are the groups of one limiter in a queue.
type limiterGroups struct {
	space  *Space
	groups []group
}

// group is requests that the function of one algorithm can decide in one statement, first come, first served. They
// belong to one limiter and have one policy. Either all of them look, or all take. Sets of AllowAll have no policy.
// Those of one kind are a group, and rate_limit_all decides them.
type group struct {
	policy   *model.Policy
	looks    bool
	kind     kind
	requests []*Request
}
