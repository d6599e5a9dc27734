package engine

import (
	"errors"
	"fmt"

	"github.com/pgratelimit/ratelimit/internal/pg"
)

// GaveUp is what callers get whose context has ended.
func GaveUp(err error) error { return fmt.Errorf("ratelimit: gave up waiting: %w", err) }

// ZoneError is for all callers of a limiter with such a time zone.
type ZoneError struct{ Zone, Why string }

func (e *ZoneError) Error() string {
	return fmt.Sprintf("ratelimit: the time zone %q, %s", e.Zone, e.Why)
}

// keyHeld is what callers are told whose key is held.
func keyHeld() error {
	return pg.NewError(errStillHeld, pg.ErrTimeout, pg.ErrKeyHeld)
}

var (
	errStillHeld = errors.New("it was held each time that it was asked for, and nothing was taken")
	// errOthersHeld is for callers whom held rows have kept from being decided in time. The rows may be those
	// of other callers, or their own, which one transaction after the other has held.
	errOthersHeld error = pg.NewError(pg.ErrHeldUp, pg.ErrTimeout)
)

// ErrNotTried is why a call is not made while the breaker is open. The callers of Allow, Peek and Wait get the
// answer of OnFailure instead.
var ErrNotTried error = pg.NewError(
	errors.New("it has just failed, and is tried by one call at a time; this was not the one"), pg.ErrUnavailable)

// errNotAsked is why a call is given up that has waited too long in the process.
var errNotAsked error = pg.NewError(
	errors.New("the statements before this one took that long; it was not asked"), pg.ErrTimeout)

// ErrNoConnection is why a call is given up that has waited too long behind statements without a connection.
var ErrNoConnection error = pg.NewError(
	errors.New("the statements before this one got none; it was not asked"), pg.ErrPoolExhausted, pg.ErrTimeout)
