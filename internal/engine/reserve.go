package engine

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// Reserve books the cost of an ask, if all of its token buckets will have got it within maxDelay microseconds. The
// result readyAfter is how long that takes. All rules of the ask's policy must be token buckets. tx is the caller's
// transaction, or nil.
func (e *Engine) Reserve(
	ctx context.Context, tx pgx.Tx, a Ask, maxDelay int64,
) (o Outcome, readyAfter time.Duration, err error) {
	r := e.Request(&a)
	for i := range r.Parts {
		r.Parts[i].Delay = &maxDelay
	}
	if err := e.submit(ctx, tx, r); err != nil {
		return Outcome{}, 0, err
	}
	for i := range r.Parts {
		if d := &r.Parts[i].Decision; d.Granted == 1 {
			readyAfter = max(readyAfter, model.Duration(d.RetryAfter))
		}
	}
	o = r.Outcome()
	e.Requests.Put(r)
	return o, readyAfter, nil
}

// reserves returns whether the request is a reservation.
func (r *Request) reserves() bool { return r.Parts[0].Delay != nil }
