package door

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/wire"
)

// An error travels as a tree, so that the client finds in it what the service has found: the kinds of package pg, and
// the fields of a *pgconn.PgError. These bytes say what a node of the tree is.
const (
	errorText  = 't' // a text, and the errors that it wraps
	errorKnown = 'k' // one of known
	errorKinds = 'e' // a *pg.Error
	errorPg    = 'p' // a *pgconn.PgError
	errorZone  = 'z' // an *engine.ZoneError
)

// known are errors that callers compare with. An error's place is its number on the wire: add new ones at the end.
//
//nolint:gochecknoglobals // nobody changes it
var known = []error{
	pg.ErrNotMigrated, pg.ErrNewerSchema, pg.ErrNotPermitted, pg.ErrPreparedStatements, pg.ErrSetup, pg.ErrUnavailable,
	pg.ErrReadOnly, pg.ErrTimeout, pg.ErrPoolExhausted, pg.ErrKeyHeld, pg.ErrOutcomeUnknown, pg.ErrSharded,
	pg.ErrHeldUp, pg.ErrKeyRefused, pg.ErrNameRefused, engine.ErrNotTried, engine.ErrNoConnection,
	engine.ErrHoldUnknown,
	context.Canceled, context.DeadlineExceeded,
}

// deepest is how deep the tree of an error may be.
const deepest = 16

func appendError(b []byte, err error, depth int) []byte {
	for i, one := range known {
		if err == one { //nolint:errorlint // an error that wraps it says more
			return wire.AppendInt(append(b, errorKnown), int64(i))
		}
	}
	if depth == deepest {
		return wire.AppendInt(wire.AppendText(append(b, errorText), err.Error()), 0)
	}
	var wrapped []error
	switch e := err.(type) { //nolint:errorlint // the errors that it wraps follow
	case *pg.Error:
		b, wrapped = append(b, errorKinds), e.Unwrap()
	case *pgconn.PgError:
		b = append(b, errorPg)
		for _, text := range textsOf(e) {
			b = wire.AppendText(b, *text)
		}
		return b
	case *engine.ZoneError:
		return wire.AppendText(wire.AppendText(append(b, errorZone), e.Zone), e.Why)
	default:
		b = wire.AppendText(append(b, errorText), err.Error())
		switch e := err.(type) { //nolint:errorlint // as above
		case interface{ Unwrap() error }:
			if inner := e.Unwrap(); inner != nil {
				wrapped = []error{inner}
			}
		case interface{ Unwrap() []error }:
			wrapped = e.Unwrap()
		}
	}
	b = wire.AppendInt(b, int64(len(wrapped)))
	for _, one := range wrapped {
		b = appendError(b, one, depth+1)
	}
	return b
}

// textsOf returns the fields of an error of the database that callers or this library look at.
func textsOf(e *pgconn.PgError) [11]*string {
	return [...]*string{
		&e.Severity, &e.SeverityUnlocalized, &e.Code, &e.Message, &e.Detail, &e.Hint, &e.Where, &e.ColumnName,
		&e.ConstraintName, &e.TableName, &e.Routine,
	}
}

// readError reads an error. A message that is none becomes an error too.
func readError(m *wire.Reader, depth int) error {
	kind := m.Byte()
	switch {
	case depth > deepest:
		m.Fail()
	case kind == errorKnown:
		if i := m.Int(); i >= 0 && i < int64(len(known)) {
			return known[i]
		}
		m.Fail()
	case kind == errorPg:
		e := &pgconn.PgError{}
		for _, text := range textsOf(e) {
			*text = m.Text()
		}
		return e
	case kind == errorZone:
		return &engine.ZoneError{Zone: m.Text(), Why: m.Text()}
	case kind == errorKinds:
		wrapped := readErrors(m, depth)
		if last := len(wrapped) - 1; last >= 0 {
			return pg.NewError(wrapped[last], wrapped[:last]...)
		}
		m.Fail()
	case kind == errorText:
		text := m.Text()
		if wrapped := readErrors(m, depth); len(wrapped) > 0 {
			return &relayed{text, wrapped}
		}
		return errors.New(text)
	}
	return errFrame
}

func readErrors(m *wire.Reader, depth int) []error {
	var all []error
	for range m.Count() {
		if all = append(all, readError(m, depth+1)); m.Bad() {
			break
		}
	}
	return all
}

// relayed is an error of the service that has no type of its own.
type relayed struct {
	text    string
	wrapped []error
}

func (e *relayed) Error() string   { return e.text }
func (e *relayed) Unwrap() []error { return e.wrapped }
