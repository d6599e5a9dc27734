package engine

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pg"
)

// Beside is a shadow policy. It is tried on the same requests as the policy in force, and never changes a decision.
type Beside struct {
	Space  *Space // a separate space, because a shadow policy has separate rows
	Policy *model.Policy
}

// Shadow is a request under a shadow policy. The database decides it right after the real request, in the same round
// trip. If the shadow causes an error, the real request is decided without the shadow.
type Shadow struct{ request Request }

// NewShadow returns an undecided shadow of an ask. It returns nil if the ask has no shadow policy.
func NewShadow(a *Ask) *Shadow {
	if a.Beside == nil {
		return nil
	}
	s := &Shadow{}
	r := &s.request
	r.Parts, r.Policy, r.Space, r.place = r.Single[:0], a.Beside.Policy, a.Beside.Space, 1
	r.Add(r.Space, r.Policy, a.Key, a.Cost, nil)
	for i := range r.Parts {
		r.Parts[i].Decision.Granted = PassedOver
	}
	return s
}

func (s *Shadow) policy() *model.Policy {
	if s == nil {
		return nil
	}
	return s.request.Policy
}

// copyFrom copies the decision of a leader's shadow to the shadow of a merged request. The argument place is the
// request's position in the leader's list.
func (s *Shadow) copyFrom(of *Shadow, place int64) {
	s.request.place = place
	for i := range s.request.Parts {
		s.request.Parts[i].Decision = of.request.Parts[i].Decision
	}
}

// Outcome returns the decision of the shadow. It returns nil if the shadow is undecided.
func (s *Shadow) Outcome() *Outcome {
	if s == nil || s.request.PassedOver() {
		return nil
	}
	for i := range s.request.Parts {
		if d := &s.request.Parts[i].Decision; d.RetryAfter == model.Never { // the cost is above the shadow's limit
			d.RetryAfter = model.MaxSpan
		}
	}
	o := s.request.Outcome()
	o.Claim = Claim{}
	return &o
}

func shadowsOf(requests []*Request) (shadows []*Request) {
	for _, r := range requests {
		if r.Shadow != nil {
			r.Shadow.request.Count = r.Count
			shadows = append(shadows, &r.Shadow.request)
		}
	}
	return shadows
}

// executeBoth decides requests and their shadows in one round trip and one transaction. Compared with two round trips,
// one caller makes 40 % more decisions, and 64 callers make 11 % more. If the result over is false, nothing was taken,
// and the requests must be decided without their shadows. If the requests have waited for a lock in vain, over is true,
// because they must not wait twice.
func (d *Database) executeBoth(
	ctx context.Context, db pg.DB, requests, shadows []*Request, tx Transaction,
) (over bool, err error) {
	first := d.Call(requests, tx)
	shadowTx := tx
	shadowTx.LockTimeout = &d.ShadowWait
	second := d.Call(shadows, shadowTx)
	first.Undecide()
	second.Undecide()
	decided := false // a shard has decided the requests, and a rollback does not undo the decisions
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
