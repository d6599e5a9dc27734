package httplimit

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// ErrNoHold is returned by Settle and Extend for a context of a request without a hold.
var ErrNoHold = errors.New("httplimit: the context has no hold; " +
	"pass the context of a request of a middleware with Config.HoldFor")

// Settle counts what a request of a middleware with [Config].HoldFor has really used, and ends its hold. ctx is the
// context of the request, or made from it. It may have ended, because what was used counts even if the client has gone.
// Settle takes as long as [ratelimit.ClientConfig].Timeout at most. If used is more than the hold, it counts as well.
//
// A handler may call Settle once. After that, calls change nothing and return the first answer. If Settle returns an
// error, the middleware tries again after the handler has returned, with the same number. But after an error about the
// number itself, such as [ratelimit.ErrOwesTooMuch], the handler may call Settle with another number. If it does not,
// the request ends as if Settle had not been called.
//
// Errors: [ErrNoHold], and those of [ratelimit.Hold.Settle].
func Settle(ctx context.Context, used int64) (ratelimit.Settlement, error) {
	h, ok := ctx.Value(heldKey{}).(*held)
	if !ok {
		return ratelimit.Settlement{}, ErrNoHold
	}
	return h.settle(context.WithoutCancel(ctx), used)
}

// Extend makes the hold of a request last for at least ttl from now. A handler whose response takes long calls it again
// and again, for example for each part of a stream. ctx is that of Settle.
//
// Errors: [ErrNoHold], and those of [ratelimit.Hold.Extend].
func Extend(ctx context.Context, ttl time.Duration) error {
	h, ok := ctx.Value(heldKey{}).(*held)
	if !ok {
		return ErrNoHold
	}
	return h.hold.Extend(ctx, ttl)
}

// heldKey is the key of a request's hold in its context.
type heldKey struct{}

// held is the hold of a request.
type held struct {
	hold *ratelimit.Hold

	mu      sync.Mutex
	used    *int64 // what the handler has told Settle, or nil
	settled bool
}

// settle settles the hold, and remembers the number for another attempt. Only the first number counts.
func (h *held) settle(ctx context.Context, used int64) (ratelimit.Settlement, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.used != nil {
		used = *h.used
	}
	settlement, err := h.hold.Settle(ctx, used)
	if errors.Is(err, ratelimit.ErrInvalidCost) || errors.Is(err, ratelimit.ErrCostExceedsLimit) ||
		errors.Is(err, ratelimit.ErrOwesTooMuch) {
		return settlement, err // the handler may settle with another number
	}
	h.used, h.settled = &used, err == nil
	return settlement, err
}

// open returns whether the hold is not settled yet.
func (h *held) open() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return !h.settled
}

// in returns the request with the hold in its context.
func (h *held) in(r *http.Request) *http.Request {
	return r.WithContext(context.WithValue(r.Context(), heldKey{}, h))
}

// end settles the hold of a request whose handler has returned, if the handler has not done so. The argument used is
// what the request has used if the handler has said nothing.
func (m *middleware) end(ctx context.Context, h *held, used int64) {
	if !h.open() || h.hold.String() == "" { // an empty hold has nothing to settle
		return
	}
	afterwards(ctx, func(ctx context.Context) {
		_, err := h.settle(ctx, used)
		if m.refunds.changed(err) {
			if err != nil {
				m.warn(ctx,
					"httplimit: what a request has used may not have been counted; further cases are not logged", err)
			} else {
				m.info(ctx, "httplimit: what requests have used is counted again")
			}
		}
	})
}

// afterwards makes a call that the end of ctx does not end, and waits for it for at most refundWait.
func afterwards(ctx context.Context, call func(context.Context)) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		call(context.WithoutCancel(ctx))
	}()
	timer := time.NewTimer(refundWait)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
	}
}
