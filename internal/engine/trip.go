package engine

import (
	"context"
	"errors"
	"time"

	"github.com/pgratelimit/ratelimit/internal/keeper"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/wire"
)

// Door is the database of a process that asks a service, which asks the database for many processes. A request goes
// through the door as soon as it comes, and waits in no queue.
type Door interface {
	pg.DB

	// Direct returns the database to ask while the service is away, or nil.
	Direct() pg.DB
	// Send sends a request to the service, without waiting for the answer. At the latest at the deadline, the request
	// goes to EndTrips.
	Send(r *Request, deadline time.Time)
	// Listen tells of places in line that have become slots: see keeper.Config.
	Listen(ctx context.Context, ready func(), heard func(keeper.Told)) error
}

// ErrDoorTx is the error for a call in a transaction. A service cannot take part in it.
var ErrDoorTx = errors.New("ratelimit: a service is part of no transaction")

// Through is called for the pool of each new engine, if it is not nil. It returns the door that the engine's requests
// go through, or nil. Tests set it, so that they try the door too.
//
//nolint:gochecknoglobals // set by nothing but TestMain
var Through func(db pg.DB, s Settings) Door

// trip is what a request needs on its way to a service and back.
type trip struct {
	queue  *Queue
	before *departed // kept when the request is reused, because it is large
	kind   kind
	err    error
	unsent bool
}

// travel sends a request to the service.
func (q *Queue) travel(r *Request) {
	t, b := &r.trip, q.Batcher
	if t.before == nil {
		t.before = &departed{}
	}
	t.queue, t.kind, t.err, t.unsent = q, r.kind(), nil, false
	t.before.note(b, r.Parts[0].Space.Lease != nil)
	r.Count = 1 + r.Ahead
	b.database.door.Send(r, r.Since.Add(b.timeout))
}

// AppendMessage appends the message of a request that travels.
func (r *Request) AppendMessage(b []byte) []byte { return r.appendMessage(b) }

// Arrive reads the answer to a request that travels.
func (r *Request) Arrive(m *wire.Reader) {
	if !r.readAnswer(m) {
		r.trip.err = pg.NewError(ErrUnlikeAnswer, pg.ErrSetup, pg.ErrOutcomeUnknown)
		return
	}
	// Requests that others have sent were merged with this one. It was denied if its place is above what was granted.
	r.Count = max(r.Count, r.place)
}

// Fail ends the trip of a request with an error. The argument unsent says that the request never left this process.
func (r *Request) Fail(err error, unsent bool) { r.trip.err, r.trip.unsent = err, unsent }

// EndTrips gives callers the decisions of requests that have travelled together. To the breaker and the log, they are
// one statement: if a connection breaks, that is one failure. If requests were not sent, the database is asked that
// Door.Direct has named.
func EndTrips(requests []*Request) {
	for len(requests) > 0 {
		requests = endTrips(requests)
	}
}

// endTrips ends the trips of those requests that are for the same queue and of the same kind as the first, and returns
// the others.
func endTrips(requests []*Request) (others []*Request) {
	q, k := requests[0].trip.queue, requests[0].trip.kind
	b, now := q.Batcher, time.Now()
	reported := requests[0] // the one that tells most about the service
	probe := false
	var instead, ended []*Request
	for _, r := range requests {
		t := &r.trip
		switch {
		case t.queue != q || t.kind != k:
			others = append(others, r)
			continue
		case t.unsent && b.database.direct != nil:
			instead = append(instead, r)
			continue
		}
		ended = append(ended, r)
		probe = probe || r.Probe
		if ended[0] == r || reported.trip.err == nil && t.err != nil || pg.IsAway(t.err) {
			reported = r
		}
	}
	if len(ended) > 0 {
		err := reported.trip.err
		if refusesOne(err) {
			err = nil // the service has answered
		}
		b.report(reported, err, probe)
	}
	for _, r := range ended {
		if b.Denials != nil {
			r.trip.before.settle(b, []*Request{r}, r.trip.err)
		}
		if b.told != nil {
			b.told(Statement{
				Limiter: r.Space.Name, Shard: b.Shard, Size: 1, Err: r.trip.err, Latency: now.Sub(r.Since),
			})
		}
		r.next = nil
		r.Err = r.trip.err
		r.end()
	}
	q.PushBack(instead)
	return others
}

// refusesOne returns whether an error is about a request, and not about the database.
func refusesOne(err error) bool {
	var zone *ZoneError
	return errors.Is(err, pg.ErrKeyRefused) || errors.Is(err, pg.ErrNameRefused) || errors.As(err, &zone)
}

// Admit queues the requests of a service's clients. Each goes to its Recipient when it is decided.
func (e *Engine) Admit(requests []*Request) {
	if len(requests) > 0 {
		e.Queues.submitAll(requests)
	}
}
