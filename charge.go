package ratelimit

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/policytable"
)

// Charged is what a key has after a charge.
type Charged struct {
	Limit, Remaining int64 // as in [Result]
	// Owed is how much the key counts above its limit: 20 after charges of 90 and 30 to a limit of 100.
	Owed int64
	// RetryAfter is the time from DecidedAt until a cost of 1 is allowed, if nobody else takes. It is 0 if one would be
	// allowed now.
	RetryAfter time.Duration
	ResetAfter time.Duration
	DecidedAt  time.Time

	taken engine.Claim
}

// Result returns the charge as a Result that [Limiter.Refund] and [Result.Receipt] accept.
func (c Charged) Result() Result {
	return Result{
		Allowed: true, Limit: c.Limit, Remaining: c.Remaining, ResetAfter: c.ResetAfter, DecidedAt: c.DecidedAt,
		taken: c.taken,
	}
}

// Charge counts n that key has used, whether it fits or not. It is for costs that are known only afterwards, such as
// the tokens of a finished answer. The charge uses the limit's room, then granted credit, and the key owes the rest:
// requests are denied until enough has drained. That is when the [FixedWindow] or [CalendarWindow] ends, at the latest
// when the next [SlidingWindow] ends, when the entries have left the [SlidingLog], or when the [TokenBucket] has got
// the owed tokens.
//
// A key may owe up to 10 limits. With [All], each policy counts n, or none does. A ban stops no charge, which then
// counts for Config.Policy; a row of mode off counts nothing. [Limiter.Refund] takes back a charge's [Charged.Result].
// OnFailure does not answer a Charge. Errors: those of Allow; a [*ChargeError], which is an [ErrOwesTooMuch]; a
// [*CostError] for n below 0.
func (l *Limiter) Charge(ctx context.Context, key string, n int64) (Charged, error) {
	return l.charge(ctx, nil, key, n)
}

func (l *Limiter) charge(ctx context.Context, tx pgx.Tx, key string, n int64) (Charged, error) {
	if err := checkKey(key); err != nil {
		return Charged{}, err
	}
	policy, row, err := l.inForce(ctx, key)
	switch {
	case n < 0:
		return Charged{}, &CostError{Cost: n, Limit: policy.Limit}
	case err != nil:
		return Charged{}, err
	case row != nil && row.Value.Mode == policytable.ModeOff:
		return Charged{Limit: policy.Limit, Remaining: policy.Limit, DecidedAt: l.view.Now()}, nil
	}
	if err := checkTakes(policy); err != nil {
		return Charged{}, err
	}
	if err := ctx.Err(); err != nil {
		return Charged{}, gaveUp(err)
	}
	c, err := l.client.engine.Charge(ctx, tx, l.question(policy, key, n))
	switch {
	case err != nil:
		return Charged{}, publicError(err)
	case !c.Allowed:
		return Charged{}, &ChargeError{Charge: n, Accepted: c.Accepted}
	}
	return Charged{
		Limit: c.Limit, Remaining: c.Remaining, Owed: c.Owed, RetryAfter: c.RetryAfter, ResetAfter: c.ResetAfter,
		DecidedAt: c.DecidedAt, taken: c.Claim,
	}, nil
}
