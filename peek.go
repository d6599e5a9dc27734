package ratelimit

import "context"

// Peek takes nothing, and Allowed says whether a cost of 1 would fit. It locks no row and waits for none, so it
// does not see what transactions under way are about to take. Errors: as Allow.
func (l *Limiter) Peek(ctx context.Context, key string) (Result, error) {
	return l.allow(ctx, key, 0, true)
}
