package engine

import (
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
)

// Space is the set of keys that one limiter name has in one table, as a limiter and the limiters of its With use it.
// Other limiters of this name have Spaces of their own, and share only the remembered denials.
type Space struct {
	Engine        *Engine
	Name          string // the name of the limiter
	Durable       bool
	Flush         bool // commits wait until the WAL is flushed
	Remember      bool // the process remembers denials
	ReturnsErrors bool // true if the breaker must turn no request away
	Lease         *LeaseTerms
	Given         func(key string) // called after a reset, refund or grant of a key; may be nil
}

// tell calls s.Given for a key, if s.Given is set.
func (s *Space) tell(key string) {
	if s.Given != nil {
		s.Given(key)
	}
}

// Request is an ask that goes to the database. Before the request is submitted, and after it is decided, only its
// caller may use it. If the caller gives up before the decision, the caller must not touch the request again.
type Request struct {
	Space  *Space        // the limiter's space, or Engine.sets for a set; used for turns
	Policy *model.Policy // the policy of all parts; nil for a set
	Parts  []Part
	Single [1]Part // memory for Parts with a single element
	Since  time.Time
	Probe  bool          // the request may ask the database although the breaker is open
	Done   chan struct{} // receives a value after the decisions or Err are set
	Err    error
	Shadow *Shadow // may be nil
	Ahead  int64   // how many requests of Count are for a lease
	// ofLease is true if the request gives unused units of a lease back.
	ofLease bool
	apart   bool // the request is never merged with others
	trip    trip // if the request travels to a service
	// To gets the request when it is decided, instead of Done. It is for a service, which gives the request the ID.
	To Recipient
	ID uint64

	// Merged requests are a linked list. The database is asked about the first request, the leader.
	Count int64    // the number of requests in a leader's list, with the leader
	next  *Request // the next in the list
	last  *Request // the last in the list
	place int64    // the place in the list, from 1
}

// Recipient gets a request that is decided, in place of a caller that waits for it. Decided must not block, and may be
// called while a queue is locked.
type Recipient interface{ Decided(r *Request) }

// Part is one row that a request asks for, and the decision about this row.
type Part struct {
	Space  *Space
	Rules  model.Rules
	Name   string // Space.Name; rows of further policies of an All have a suffix, as in api/2
	Key    string
	Cost   int64  // 0 looks; a negative Cost gives Refund back, or grants units without a Refund
	Charge bool   // count Cost whether it fits or not
	Delay  *int64 // for a reservation, how many microseconds later it may be ready; otherwise nil
	Refund *model.Take
	// Hold is the id of the hold that the request makes, settles or extends. It is "" for other requests. A settlement
	// is a Charge, and an extension has a Cost of 0.
	Hold     string
	Slot     string // the id of the slot that the request acquires, or releases if TTL is 0; "" for other requests
	Wish     string // for a slot that is acquired, a SlotWish in JSON
	TTL      int64  // how long the hold or slot shall last from now on, in microseconds; 0 ends it
	Decision model.Decision
}

// Decision.Granted has one of these values if a part is not decided.
const (
	PassedOver = -5 // the statement has not reached this part
	Locked     = -2 // Remaining is the id of the transaction that locks the row; 0 if it is being inserted
	Undecided  = -1 // the row of another part is locked
)

// sparedParts is the largest number of parts of a request whose memory a later request reuses.
const sparedParts = 16

// requestPool keeps requests for reuse. With one busy key, reuse adds 16 to 25 % to the decisions per second.
type requestPool struct{ pool sync.Pool }

// Get returns a request without parts. The arguments space and policy determine the request's group in the queue.
func (p *requestPool) Get(space *Space, policy *model.Policy) *Request {
	r, ok := p.pool.Get().(*Request)
	if !ok {
		r = &Request{Done: make(chan struct{}, 1)}
	}
	if r.Parts == nil {
		r.Parts = r.Single[:0]
	}
	r.Space, r.Policy, r.Count, r.last, r.place = space, policy, 1, r, 1
	return r
}

// Add adds a part for each row of a key under the policy. The argument refunds is nil, or has an element for each row.
func (r *Request) Add(space *Space, policy *model.Policy, key string, cost int64, refunds []model.Take) {
	for i, m := range policy.Rules {
		p := Part{Space: space, Rules: m, Name: algorithm.RowName(space.Name, i), Key: key, Cost: cost}
		if refunds != nil {
			p.Refund = &refunds[i]
		}
		r.Parts = append(r.Parts, p)
	}
}

// Put returns a request to the pool. Only the request's caller may call Put, and only after the decision.
func (p *requestPool) Put(r *Request) {
	clear(r.Parts)
	if r.Parts = r.Parts[:0]; cap(r.Parts) > sparedParts {
		r.Parts = nil
	}
	r.Space, r.Policy, r.Err, r.next, r.last, r.Shadow = nil, nil, nil, nil, nil, nil
	r.Ahead, r.ofLease, r.apart, r.To = 0, false, false, nil
	p.pool.Put(r)
}

// Looks returns whether the request has a cost of 0, so that it locks no row.
func (r *Request) Looks() bool { return r.Parts[0].Cost == 0 && !r.ofHold() && !r.ofSlot() }

// gives returns whether the request gives units back or grants units.
func (r *Request) gives() bool { return r.Parts[0].Cost < 0 }

// charges returns whether the request counts its costs whether they fit or not.
func (r *Request) charges() bool { return r.Parts[0].Charge }

// ofHold returns whether the request makes, settles or extends a hold.
func (r *Request) ofHold() bool { return r.Parts[0].Hold != "" && r.Parts[0].Slot == "" }

// ofSlot returns whether the request acquires or releases a slot.
func (r *Request) ofSlot() bool { return r.Parts[0].Slot != "" }

// endsHold returns whether the request settles or extends a hold.
func (r *Request) endsHold() bool { return r.ofHold() && (r.Parts[0].Charge || r.Parts[0].Cost == 0) }

// leased returns how many units of a token bucket the request leases, or how many units its lease no longer holds. For
// other algorithms it returns 0.
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

// asksAnyway returns whether the request may ask the database even while the breaker is open.
func (r *Request) asksAnyway() bool {
	for i := range r.Parts {
		if !r.Parts[i].Space.ReturnsErrors {
			return false
		}
	}
	return true
}

// joins returns whether a request can be merged with another request of its group.
func (r *Request) joins(other *Request) bool {
	return r.Policy != nil && !r.apart && !other.apart && !r.gives() && !r.charges() && !other.charges() &&
		!r.ofHold() && !other.ofHold() && !r.ofSlot() && !other.ofSlot() && !r.reserves() && !other.reserves() &&
		r.Parts[0].Key == other.Parts[0].Key && r.Parts[0].Cost == other.Parts[0].Cost &&
		r.Shadow.policy().Is(other.Shadow.policy())
}

// PassedOver returns whether a statement has left the request undecided.
func (r *Request) PassedOver() bool {
	switch r.Parts[0].Decision.Granted {
	case PassedOver, Locked, Undecided:
		return true
	}
	return false
}

// Finish ends a request and the requests merged with it, and wakes up the callers.
func (r *Request) Finish(err error) {
	place := int64(2)
	for f := r.next; f != nil; place++ {
		next := f.next // read now, because the caller may reuse f after f.Done
		for i := range f.Parts {
			f.Parts[i].Decision = r.Parts[i].Decision
		}
		if f.Shadow != nil {
			f.Shadow.copyFrom(r.Shadow, place)
		}
		f.place, f.Err = place, err
		f.end()
		f = next
	}
	r.Err = err
	r.end()
}

// end gives a request back to its caller.
func (r *Request) end() {
	if r.To != nil {
		r.To.Decided(r)
		return
	}
	r.Done <- struct{}{}
}

// limiterGroups are the groups of one limiter in the queue.
type limiterGroups struct {
	space  *Space
	groups []group
}

// group is a list of waiting requests that one function can decide in one statement, in the order of arrival. The
// requests of a group belong to one limiter and have one policy. Requests that look and requests that take are in
// different groups. Requests of AllowAll have no policy, so all such requests of one kind are a group.
type group struct {
	policy   *model.Policy
	looks    bool
	kind     kind
	requests []*Request
}
