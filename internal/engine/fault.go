package engine

import (
	"errors"
	"fmt"

	"github.com/pgratelimit/ratelimit/internal/pg"
)

// GaveUp returns the error for a caller whose context has ended. It wraps err, the context's error.
func GaveUp(err error) error { return fmt.Errorf("ratelimit: gave up waiting: %w", err) }

// ZoneError is the error for callers of a limiter whose time zone is unknown.
type ZoneError struct{ Zone, Why string }

func (e *ZoneError) Error() string {
	return fmt.Sprintf("ratelimit: the time zone %q, %s", e.Zone, e.Why)
}

// keyHeld returns the error for a caller whose row another transaction keeps locked.
func keyHeld() error {
	return pg.NewError(errStillHeld, pg.ErrTimeout, pg.ErrKeyHeld)
}

var (
	errStillHeld = errors.New("it stayed locked, and nothing was taken")
	// errOthersHeld is the error for a caller whose timeout has passed while statements waited for locks. The locked
	// rows were those of other callers, or one transaction after the other locked the caller's row.
	errOthersHeld error = pg.NewError(pg.ErrHeldUp, pg.ErrTimeout)
)

// ErrNotTried is the error of calls that the open breaker turns away, unless OnFailure answers them.
var ErrNotTried error = pg.NewError(
	errors.New("the database, or the service that asks it, has just failed; until it answers again, one call at a "+
		"time tries it, and this call was not sent"), pg.ErrUnavailable).InOwnWords()

// errNotAsked is the error of a call that has waited too long in the queue of this process.
var errNotAsked error = pg.NewError(
	errors.New("the call waited that long behind other statements, and was not sent"), pg.ErrTimeout)

// ErrNoConnection is the error of a call that has waited too long because the pool had no connection for earlier calls.
var ErrNoConnection error = pg.NewError(
	errors.New("the statements before this call got none, and the call was not sent"),
	pg.ErrPoolExhausted, pg.ErrTimeout)
