package envoy

import (
	"context"
	"errors"
	"sync"
	"time"

	pb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/receipttext"
)

// limiters makes the limiters of all domains, and keeps them, because a limiter is too large to make for each request.
type limiters struct {
	client  *ratelimit.Client
	durable bool

	mu      sync.RWMutex
	domains map[string]*ratelimit.Limiter
	kept    map[policy]*ratelimit.Limiter
}

// policy is what makes a limiter different from others.
type policy struct {
	domain string
	limit  int64
	unit   pb.RateLimitResponse_RateLimit_Unit
}

// maxLimiters is how many limiters are kept. A configuration has fewer, but the limits in requests can be any.
const maxLimiters = 4096

// window returns the policy of a limit in windows of a unit, which begin at multiples of its length since 1970.
func window(limit int64, unit pb.RateLimitResponse_RateLimit_Unit) ratelimit.FixedWindow {
	return ratelimit.FixedWindow{Limit: limit, Window: time.Duration(seconds(unit)) * time.Second, Align: true}
}

func (l *limiters) get(p policy) (*ratelimit.Limiter, error) {
	l.mu.RLock()
	limiter := l.kept[p]
	l.mu.RUnlock()
	if limiter != nil {
		return limiter, nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	of := l.domains[p.domain]
	var err error
	if of == nil {
		of, err = l.client.Limiter(ratelimit.Config{
			Name: limiterName(p.domain), Policy: window(p.limit, p.unit), Durable: l.durable,
		})
		if err != nil {
			return nil, err
		}
		l.domains[p.domain] = of
	}
	if limiter, err = of.With(window(p.limit, p.unit)); err != nil {
		return nil, err
	}
	if len(l.kept) >= maxLimiters {
		clear(l.kept)
	}
	l.kept[p] = limiter
	return limiter, nil
}

// most is the largest number that a key can count. It is also the limit of a limiter that reads what a key counts,
// because a result says nothing of what is above its limit.
const most = 1 << 32

// count returns what a key counts.
func (l *limiters) count(
	ctx context.Context, domain, key string, unit pb.RateLimitResponse_RateLimit_Unit,
) (count, error) {
	limiter, err := l.get(policy{domain, most, unit})
	if err != nil {
		return count{}, err
	}
	result, err := limiter.Peek(ctx, key)
	return count{hits: max(most-result.Remaining, 0), at: result.DecidedAt}, err
}

// giveBack makes a key count n less, but not below 0, and returns what it counts then. The library gives back only what
// a receipt says was taken. So giveBack takes 1, and gives back the receipt for it with n more.
func (l *limiters) giveBack(
	ctx context.Context, domain, key string, unit pb.RateLimitResponse_RateLimit_Unit, n int64,
) (count, error) {
	if n == 0 {
		return l.count(ctx, domain, key, unit)
	}
	limiter, err := l.get(policy{domain, most, unit})
	if err != nil {
		return count{}, err
	}
	charged, err := limiter.Charge(ctx, key, 1)
	if err != nil {
		return count{}, err
	}
	text, err := charged.Result().Receipt()
	if err != nil {
		return count{}, err
	}
	receipt, ok := receipttext.Parse(text)
	if !ok || len(receipt.Parts) != 1 {
		return count{}, errors.New("envoy: the library wrote a receipt that cannot be read")
	}
	receipt.Units += min(n, most)
	receipt.Parts[0].Units = receipt.Units
	taken, err := limiter.ParseReceipt(receipt.String())
	if err != nil {
		return count{}, err
	}
	balance, err := limiter.Refund(ctx, taken)
	return count{hits: most - balance.Remaining, at: balance.DecidedAt}, err
}
