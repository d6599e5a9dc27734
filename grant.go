package ratelimit

import (
	"context"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// Grant gives key a credit of n above its limit, for support or a purchase, say, and tells what remains with it.
// Requests take from it once there is no ordinary room, each unit once. It does not refill, and lets no single
// request cost more than the limit. With [All], each policy has a credit of n.
//
// Credit lasts until it is spent, or until nothing was taken from the key, given back or granted to it for a Window
// (of a [SlidingWindow] or [CalendarWindow] two, of a [TokenBucket] the time to fill it), as ResetAfter tells. It
// stays when the policy's numbers change, and is gone after a Reset or under another kind of policy. A key holds up
// to 2^61, and the rest is lost. The result says Allowed. Errors: as Allow, and a [*CostError] for n below 1 or
// above 2^61.
func (l *Limiter) Grant(ctx context.Context, key string, n int64) (Result, error) {
	if err := checkGrant(key, n); err != nil {
		return Result{}, err
	}
	return l.give(ctx, l.knownInForce(key).newRequest(key, -n))
}

func checkGrant(key string, n int64) error {
	if err := checkKey(key); err != nil {
		return err
	}
	if n < 1 || n > model.MaxCredit {
		return &CostError{Cost: n, Limit: model.MaxCredit, Least: 1, grant: true}
	}
	return nil
}
