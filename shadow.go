package ratelimit

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pg"
)

// shadowSuffix ends the name of the rows that count for policies of the mode shadow.
const shadowSuffix = "/shadow"

// shadow is what a request asks of a policy of the mode shadow. It is decided in the statement of its request, after
// it, and never twice: if anything goes wrong, the request is decided without it.
type shadow struct {
	row     *rule
	request request
}

// rule is nil if there is no shadow.
func (s *shadow) rule() *rule {
	if s == nil {
		return nil
	}
	return s.row
}

// shadowOf returns the row of the mode shadow for a key, or nil.
func (l *Limiter) shadowOf(key string) *rule {
	if l.space.policies == nil {
		return nil
	}
	return l.space.page.Shadow(key, l.space.policies.counts)
}

// newShadow returns a shadow that is still to be decided. It is the caller's.
func (l *Limiter) newShadow(row *rule, key string, cost int64) *shadow {
	s := &shadow{row: row}
	s.request.parts, s.request.policy, s.request.space = s.request.single[:0], row.Value.policy, l.space.shadow
	s.request.place = 1
	s.request.add(l.space.shadow, row.Value.policy.rules(), key, cost, nil)
	for i := range s.request.parts {
		s.request.parts[i].decision.Granted = passedOver
	}
	return s
}

// copyFrom sets what was decided for a request that was merged with another one, of which it is that place.
func (s *shadow) copyFrom(of *shadow, place int64) {
	s.request.place = place
	for i := range s.request.parts {
		s.request.parts[i].decision = of.request.parts[i].decision
	}
}

// result is what the caller is told, or nil if it was left undecided.
func (s *shadow) result() *Result {
	if s == nil || s.request.passedOver() {
		return nil
	}
	for i := range s.request.parts {
		if d := &s.request.parts[i].decision; d.RetryAfter == model.Never { // the cost is above this limit
			d.RetryAfter = model.MaxSpan
		}
	}
	result := s.request.result()
	result.receipt = nil
	return &result
}

// shadowsOf are the shadows of requests that leave together.
func shadowsOf(requests []*request) (shadows []*request) {
	for _, r := range requests {
		if r.shadow != nil {
			r.shadow.request.count = r.count
			shadows = append(shadows, &r.shadow.request)
		}
	}
	return shadows
}

// executeBoth has requests and their shadows decided in one round trip and one transaction. Unless it returns that this
// is over, nothing was taken, and the requests are to be decided without their shadows. If the requests have waited for
// a lock in vain, it is over, or they would wait once more.
func (d *database) executeBoth(
	ctx context.Context, db DBTX, requests, shadows []*request, tx transaction,
) (over bool, err error) {
	first := d.call(requests, tx)
	shadowTx := tx
	shadowTx.lockTimeout = &d.shadowWait
	second := d.call(shadows, shadowTx)
	first.undecide()
	second.undecide()
	decided := false // a shard has decided the requests, which nothing undoes
	err = pg.Use(ctx, db, func(conn *pgx.Conn) error {
		if err := pg.Garbled(conn, first.sql); err != nil {
			return err
		}
		batch := &pgx.Batch{}
		batch.Queue(first.sql, first.args...)
		batch.Queue(second.sql, second.args...)
		results := conn.SendBatch(ctx, batch)
		for i, c := range []*call{&first, &second} {
			rows, err := results.Query()
			if err == nil {
				err = c.read(rows)
			}
			if err != nil {
				_ = results.Close()
				decided = i == 1 && (d.sharded.Load() || pg.FromProxy(err))
				over = i == 0 && pg.LockTimeout(err)
				return statementError(err)
			}
		}
		if err := results.Close(); err != nil {
			return statementError(err)
		}
		return nil
	})
	if err == nil {
		return true, nil
	}
	if decided {
		second.undecide()
		return true, nil
	}
	first.undecide()
	second.undecide()
	if over || errors.Is(err, ErrOutcomeUnknown) {
		return true, err
	}
	return false, nil
}
