package httplimit

import (
	"context"
	"errors"
	"net/http"
	"slices"

	"github.com/pgratelimit/ratelimit"
)

// SlotOf returns the slot of a request, for example for its Fence. ctx is the context of the request, or made from it.
// If a request passes several middlewares with slots, SlotOf returns the slot of the innermost one. It returns nil for
// a request without a slot, such as a request with cost 0.
//
// The context of the request ends if the slot is lost: then [context.Cause] is [ratelimit.ErrSlotLost]. The middleware
// releases the slot when the handler has returned. So a handler that hijacks its connection, and wants to keep the
// slot, must not return before it closes the connection.
func SlotOf(ctx context.Context) *ratelimit.Slot {
	slot, _ := ctx.Value(slotKey{}).(*ratelimit.Slot)
	return slot
}

// slotKey is the key of a request's slot in its context.
type slotKey struct{}

// inSlot returns the request with the slot in its context, which ends with the slot.
func inSlot(r *http.Request, slot *ratelimit.Slot) *http.Request {
	return r.WithContext(context.WithValue(slot.Context(r.Context()), slotKey{}, slot))
}

// release releases the slot of a request whose handler has returned, unless the handler has done so.
func (m *middleware) release(ctx context.Context, slot *ratelimit.Slot) {
	if slot.Fence() == 0 { // an empty slot says nothing about whether the database releases slots
		return
	}
	afterwards(ctx, func(ctx context.Context) {
		err := slot.Release(ctx)
		if errors.Is(err, ratelimit.ErrSlotReleased) || errors.Is(err, ratelimit.ErrSlotLost) {
			return
		}
		if m.releases.changed(err) {
			if err != nil {
				m.warn(ctx, "httplimit: a slot may last until its TTL ends, because it could not be released; "+
					"further cases are not logged", err)
			} else {
				m.info(ctx, "httplimit: slots are released again")
			}
		}
	})
}

// full tells whether a denied request found no free slot.
func (l *limit) full(result *ratelimit.Result) bool {
	if !l.slots || result.Source == ratelimit.SourcePolicy {
		return false
	}
	each := result.Each()
	slots := slices.IndexFunc(l.shapes, func(s shape) bool { return s.slots })
	return len(each) != len(l.shapes) || each[slots].RetryAfter > 0 // the row in force may have other policies
}
