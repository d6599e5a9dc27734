package ratelimit

import (
	"fmt"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/rulebook"
)

const (
	maxNameLen = 128 // bytes
	// maxKeyLen keeps every index entry within a page. Only a SlidingLog's log can need TOAST.
	maxKeyLen = 512 // bytes
)

// keyspace is the keys of one name in one table. A limiter and those that its With has returned share it.
type keyspace struct {
	database      *database
	name          string
	durable       bool
	flush         bool                   // SynchronousCommit
	remember      bool                   // whether its denials are remembered
	returnsErrors bool                   // OnFailure does, so the breaker turns none of its requests away
	policies      *Policies              // nil if the limiter obeys no table of policies
	page          *rulebook.Page[ruling] // of these, those with the name
	strikes       *strikes               // nil if nobody is banned
	shadow        *keyspace              // the keys of its shadow policies; nil without policies
	lease         *Lease                 // nil if nothing is taken ahead
}

// request is a caller's question. It belongs to its caller until it is submitted, and again once it has been
// decided. A caller who leaves before that never touches it again.
type request struct {
	space  *keyspace // whose turn it takes: that of its limiter, or the one that all AllowAll share
	policy Policy    // of all its parts; nil for AllowAll
	parts  []part
	single [1]part // the memory of parts for the usual request
	since  time.Time
	probe  bool          // it may ask the database although the breaker is open
	done   chan struct{} // gets one value, once the parts' decisions or err are set
	err    error
	shadow *shadow // decided beside it; nil if there is none
	ahead  int64   // how many requests more are asked for, to be spent later; part of count
	// ofLease tells that it gives back what is left of a lease.
	ofLease bool

	// Requests of the same key, policy and cost are decided as one, the first of them.
	count int64    // how many there are, this one and those behind next
	next  *request // the next of them
	last  *request // the last of them
	place int64    // which of them this one is, from 1
}

// part is a row that a request asks for, and what was decided about it.
type part struct {
	space    *keyspace
	rules    model.Rules
	name     string // the row's: that of the space, or of a further policy of All, such as api/2
	key      string
	cost     int64 // 0 looks; below 0 gives back refund, or grants if refund is nil
	refund   *model.Take
	decision model.Decision
}

// The values of granted in a part that is not decided.
const (
	passedOver = -3 // the statement did not come to it
	locked     = -2 // a transaction has locked its row; remaining tells which one, or 0 if the row is being made
	undecided  = -1 // another part of the request is locked
)

// sparedParts is how many parts a request may have whose memory is used again.
const sparedParts = 16

// requestPool has requests used again.
type requestPool struct{ pool sync.Pool }

// get returns a request without parts. Its space and policy say which calls it may leave with.
func (p *requestPool) get(space *keyspace, policy Policy) *request {
	r, ok := p.pool.Get().(*request)
	if !ok {
		r = &request{done: make(chan struct{}, 1)}
	}
	if r.parts == nil {
		r.parts = r.single[:0]
	}
	r.space, r.policy, r.count, r.last, r.place = space, policy, 1, r, 1
	return r
}

// add adds the parts of one limiter, one for each of its models.
func (r *request) add(space *keyspace, models []model.Rules, key string, cost int64, refunds []model.Take) {
	for i, m := range models {
		p := part{space: space, rules: m, name: algorithm.RowName(space.name, i), key: key, cost: cost}
		if refunds != nil {
			p.refund = &refunds[i]
		}
		r.parts = append(r.parts, p)
	}
}

// put has a request used again. Only its caller may do that, and only once the request has been decided.
func (p *requestPool) put(r *request) {
	clear(r.parts)
	if r.parts = r.parts[:0]; cap(r.parts) > sparedParts {
		r.parts = nil
	}
	r.space, r.policy, r.err, r.next, r.last, r.shadow = nil, nil, nil, nil, nil, nil
	r.ahead, r.ofLease = 0, false
	p.pool.Put(r)
}

// looks tells whether it takes nothing, and so locks no row.
func (r *request) looks() bool { return r.parts[0].cost == 0 }

// gives tells whether it gives back or grants.
func (r *request) gives() bool { return r.parts[0].cost < 0 }

// leased is what the database has to know of a lease from a bucket: how many of the units that are asked for are to be
// spent later, or how many are not held any more.
func (r *request) leased(p *part) int64 {
	units := r.ahead * p.cost
	if p.refund != nil {
		units = p.refund.Ended
	}
	if units == 0 || p.rules.Numbers().Algorithm != algorithm.TokenBucket {
		return 0
	}
	return units
}

// asksAnyway tells whether it asks the database even while the breaker is open.
func (r *request) asksAnyway() bool {
	for i := range r.parts {
		if !r.parts[i].space.returnsErrors {
			return false
		}
	}
	return true
}

// joins tells whether a request can be decided as one with another one in the same line.
func (r *request) joins(other *request) bool {
	return r.policy != nil && !r.gives() &&
		r.parts[0].key == other.parts[0].key && r.parts[0].cost == other.parts[0].cost &&
		r.shadow.rule() == other.shadow.rule()
}

// passedOver tells whether a statement has left the request undecided.
func (r *request) passedOver() bool { return r.parts[0].decision.Granted < 0 }

// finish tells the caller of a request, and those of the requests that were decided as one with it.
func (r *request) finish(err error) {
	place := int64(2)
	for f := r.next; f != nil; place++ {
		next := f.next // read now, because its caller goes on and uses it again
		for i := range f.parts {
			f.parts[i].decision = r.parts[i].decision
		}
		if f.shadow != nil {
			f.shadow.copyFrom(r.shadow, place)
		}
		f.place, f.err = place, err
		f.done <- struct{}{}
		f = next
	}
	r.err = err
	r.done <- struct{}{}
}

func checkKey(key string) error {
	switch {
	case key == "":
		return &KeyError{Reason: "is empty, and needs at least 1 byte"}
	case len(key) > maxKeyLen:
		return &KeyError{Reason: fmt.Sprintf(
			"has %d bytes, and may have at most %d; hash long keys", len(key), maxKeyLen)}
	case strings.IndexByte(key, 0) >= 0:
		return &KeyError{Reason: "contains a NUL byte, which Postgres cannot store"}
	case !utf8.ValidString(key):
		return &KeyError{Reason: "is not valid UTF-8; encode binary keys, for example in base64"}
	}
	return nil
}

// lines are those of one limiter in a queue.
type lines struct {
	space *keyspace
	each  []line
	spare []*request // memory that an emptied line has left for the next one
}

// line holds requests that the function of one algorithm can decide together, first come, first served. They are
// of one limiter, under one policy, and either all look or all take. Those of AllowAll are of one kind, have no
// policy, and rate_limit_all decides them.
type line struct {
	policy   Policy
	looks    bool
	kind     kind
	requests []*request
}
