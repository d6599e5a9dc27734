package ratelimit

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
)

// Reservation is the decision of a [Limiter.Reserve]. Its Result is Allowed if the tokens are booked.
type Reservation struct {
	Result

	// ReadyAfter is how long after DecidedAt the caller may act: 150 ms for the fourth caller of a bucket that lets one
	// pass every 50 ms. It is 0 if the caller may act at once, or if the reservation is denied.
	ReadyAfter time.Duration
}

// UnmarshalJSON reads all fields, but not what [Limiter.Refund] needs.
func (r *Reservation) UnmarshalJSON(text []byte) error {
	var rest struct{ ReadyAfter time.Duration }
	if err := json.Unmarshal(text, &rest); err != nil {
		return err
	}
	r.ReadyAfter = rest.ReadyAfter
	return r.Result.UnmarshalJSON(text)
}

// ReserveError says that a key's policy has no places in the future.
type ReserveError struct{ Policy Policy }

func (e *ReserveError) Error() string {
	one := TokenBucket{Capacity: 1, Refill: 20, Every: time.Second}
	return fmt.Sprintf("ratelimit: the policy %q has no places in the future; reserve from a TokenBucket, "+
		"such as %q, which lets one pass every 50 ms", e.Policy, one)
}

// Reserve books n tokens of key's [TokenBucket], if they will have flowed in within maxDelay. The caller waits for
// ReadyAfter, and then acts. It is Reserve of golang.org/x/time/rate for all processes together.
//
// A bucket with a Capacity of 1 and a Refill of 20 every second is full. Four callers in three processes reserve 1 at
// once: their ReadyAfter is 0, 50, 100 and 150 ms, in the order in which the database decides. With a maxDelay of 120
// ms, the fourth is denied, with a RetryAfter of 30 ms: then the same call is allowed, if nobody else books or takes.
// [Limiter.Wait] keeps no such order, because each process waits on its own, and callers who are allowed at the same
// time act at the same time.
//
// Until a booking is ready, the bucket owes its tokens, so that later requests and bookings come after it. A bucket can
// be booked for 7 days, or for the time in which 10 times its Capacity flows in, if this is longer. A longer maxDelay
// changes nothing. While a bucket owes more than 10 times its Capacity, it accepts no [Limiter.Charge] and no
// [Hold.Settle] above 0.
//
// A booking whose work is not done is given back by [Limiter.Refund] of its Result, or by its [Result.Receipt], and the
// callers behind it keep their times. While the bucket owes, only the last booking can be given back.
//
// With [All], each policy must be a TokenBucket, and ReadyAfter is the longest. Leases and OnFailure do not answer a
// Reserve. Errors: those of AllowN; a [*ReserveError] for another policy; a [*CostError] for n below 1; a
// [*ConfigError] for a negative maxDelay.
func (l *Limiter) Reserve(ctx context.Context, key string, n int64, maxDelay time.Duration) (Reservation, error) {
	return l.reserve(ctx, nil, key, n, maxDelay)
}

// Reserve is [Limiter.Reserve]. The order of bookings is that of the commits: other callers wait until tx ends.
func (t TxLimiter) Reserve(ctx context.Context, key string, n int64, maxDelay time.Duration) (Reservation, error) {
	if err := checkTx(t.tx); err != nil {
		return Reservation{}, err
	}
	return t.limiter.reserve(ctx, t.tx, key, n, maxDelay)
}

func (l *Limiter) reserve(
	ctx context.Context, tx pgx.Tx, key string, n int64, maxDelay time.Duration,
) (r Reservation, err error) {
	if l.client.observer != nil {
		defer l.observe(time.Now(), key, n, &r.Result, &err)
	}
	if err := checkKey(key); err != nil {
		return Reservation{}, err
	}
	if maxDelay < 0 {
		return Reservation{}, &ConfigError{
			Field: "maxDelay", Reason: fmt.Sprintf("is %v, and must be at least 0", maxDelay),
		}
	}
	policy, row, err := l.inForce(ctx, key)
	switch {
	case n < 1:
		return Reservation{}, &CostError{Cost: n, Limit: policy.Limit, Least: 1}
	case err != nil:
		return Reservation{}, err
	case row != nil:
		r.Result, err = l.byRow(row, n)
		return r, err
	}
	if err := checkTakes(policy); err != nil {
		return Reservation{}, err
	}
	for _, m := range policy.Rules {
		if m.Numbers().Algorithm != algorithm.TokenBucket {
			return Reservation{}, &ReserveError{Policy: policyFrom(policy)}
		}
	}
	if err := checkCost(n, policy); err != nil {
		return Reservation{}, err
	}
	if err := ctx.Err(); err != nil {
		return Reservation{}, gaveUp(err)
	}
	o, readyAfter, err := l.client.engine.Reserve(ctx, tx, l.question(policy, key, n), model.Micros(maxDelay))
	if err != nil {
		return Reservation{}, publicError(err)
	}
	r = Reservation{Result: resultOf(&o), ReadyAfter: readyAfter}
	l.countDenial(key, n, &r.Result, nil)
	return r, nil
}
