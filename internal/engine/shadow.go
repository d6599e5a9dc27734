package engine

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pg"
)

// Beside is a policy that is decided beside another one, and changes nothing: a shadow.
type Beside struct {
	Space  *Space // of its own, because it counts for itself
	Policy *model.Policy
}

// Shadow is what a request asks of such a policy. It is decided in the statement of its request, after it, and never
// twice: if anything goes wrong, the request is decided without it.
type Shadow struct{ request Request }

// NewShadow returns a shadow that is still to be decided, or nil if the question has none. It is the caller's.
func NewShadow(a *Ask) *Shadow {
	if a.Beside == nil {
		return nil
	}
	s := &Shadow{}
	r := &s.request
	r.Parts, r.Policy, r.Space, r.Place = r.Single[:0], a.Beside.Policy, a.Beside.Space, 1
	r.Add(r.Space, r.Policy, a.Key, a.Cost, nil)
	for i := range r.Parts {
		r.Parts[i].Decision.Granted = PassedOver
	}
	return s
}

// policy is nil if there is no shadow.
func (s *Shadow) policy() *model.Policy {
	if s == nil {
		return nil
	}
	return s.request.Policy
}

// copyFrom sets what was decided for a request that was merged with another one, of which it is that place.
func (s *Shadow) copyFrom(of *Shadow, place int64) {
	s.request.Place = place
	for i := range s.request.Parts {
		s.request.Parts[i].Decision = of.request.Parts[i].Decision
	}
}

// Outcome is what the caller is told, or nil if it was left undecided.
func (s *Shadow) Outcome() *Outcome {
	if s == nil || s.request.PassedOver() {
		return nil
	}
	for i := range s.request.Parts {
		if d := &s.request.Parts[i].Decision; d.RetryAfter == model.Never { // the cost is above this limit
			d.RetryAfter = model.MaxSpan
		}
	}
	o := s.request.Outcome()
	o.Claim = Claim{}
	return &o
}

// shadowsOf are the shadows of requests that leave together.
func shadowsOf(requests []*Request) (shadows []*Request) {
	for _, r := range requests {
		if r.Shadow != nil {
			r.Shadow.request.Count = r.Count
			shadows = append(shadows, &r.Shadow.request)
		}
	}
	return shadows
}

// executeBoth has requests and their shadows decided in one round trip and one transaction. Unless it returns that this
// is over, nothing was taken, and the requests are to be decided without their shadows. If the requests have waited for
// a lock in vain, it is over, or they would wait once more.
func (d *Database) executeBoth(
	ctx context.Context, db pg.DB, requests, shadows []*Request, tx Transaction,
) (over bool, err error) {
	first := d.Call(requests, tx)
	shadowTx := tx
	shadowTx.LockTimeout = &d.ShadowWait
	second := d.Call(shadows, shadowTx)
	first.Undecide()
	second.Undecide()
	decided := false // a shard has decided the requests, which nothing undoes
	err = pg.Use(ctx, db, func(conn *pgx.Conn) error {
		if err := pg.Garbled(conn, first.SQL); err != nil {
			return err
		}
		batch := &pgx.Batch{}
		batch.Queue(first.SQL, first.Args...)
		batch.Queue(second.SQL, second.Args...)
		results := conn.SendBatch(ctx, batch)
		for i, c := range []*Call{&first, &second} {
			rows, err := results.Query()
			if err == nil {
				err = c.Read(rows)
			}
			if err != nil {
				_ = results.Close()
				decided = i == 1 && (d.sharded.Load() || pg.FromProxy(err))
				over = i == 0 && pg.LockTimeout(err)
				return pg.StatementError(err)
			}
		}
		if err := results.Close(); err != nil {
			return pg.StatementError(err)
		}
		return nil
	})
	if err == nil {
		return true, nil
	}
	if decided {
		second.Undecide()
		return true, nil
	}
	first.Undecide()
	second.Undecide()
	if over || errors.Is(err, pg.ErrOutcomeUnknown) {
		return true, err
	}
	return false, nil
}
