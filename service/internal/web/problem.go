package web

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit"
)

// problem is a problem of RFC 9457. It never has a key.
type problem struct {
	Status int    `json:"status"`
	Title  string `json:"title"`
	Detail string `json:"detail,omitempty"` // how to mend it
	Field  string `json:"field,omitempty"`  // the field that is wrong
	Kind   string `json:"kind,omitempty"`   // what ratelimit.ErrorKind returns, or one of extraKinds
	// MayHaveCounted says that the answer of the database was lost, so the request may have counted.
	MayHaveCounted bool `json:"may_have_counted,omitempty"`
}

func (p problem) Error() string { return p.Title + " " + p.Detail }

func (p problem) write(w http.ResponseWriter) {
	text, err := json.Marshal(p)
	if err != nil { // impossible: it has only strings and numbers
		text = []byte("{}")
	}
	w.Header().Set("Content-Type", "application/problem+json")
	if p.Status == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", "1")
	}
	w.WriteHeader(p.Status)
	_, _ = w.Write(append(text, '\n')) // fails only if the client has left
}

// Refuse writes a problem. The detail says how to mend it.
func Refuse(w http.ResponseWriter, status int, title, detail string) {
	problem{Status: status, Title: title, Detail: detail}.write(w)
}

// wrong returns the problem of a field.
func wrong(field, format string, args ...any) error {
	return problem{Status: http.StatusBadRequest, Title: "A field is wrong.", Field: field, Kind: "invalid_request",
		Detail: fmt.Sprintf(format, args...)}
}

// atField is an error of the library, and the field that it is about.
type atField struct {
	error

	field string
}

func (e atField) Unwrap() error { return e.error }

// fail writes the problem of an error.
func (h *handler) fail(w http.ResponseWriter, r *http.Request, err error) {
	if p, ok := errors.AsType[problem](err); ok {
		p.write(w)
		return
	}
	p := problemOf(err)
	if p.Status >= http.StatusInternalServerError && r.Context().Err() == nil && h.faults.begin(p.Kind, time.Now()) {
		h.Logger.ErrorContext(r.Context(), "ratelimit: requests over HTTP fail; "+
			"errors of this kind are not logged again until there was none for a minute",
			"path", r.URL.Path, "kind", p.Kind, "error", err)
	}
	p.write(w)
}

// faults remembers when requests have failed, so that each kind of error is logged once.
type faults struct {
	mu   sync.Mutex
	last map[string]time.Time // by the kind
}

// begin records an error, and returns whether there was none of its kind for a minute.
func (f *faults) begin(kind string, now time.Time) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.last == nil {
		f.last = map[string]time.Time{}
	}
	before, known := f.last[kind]
	f.last[kind] = now
	return !known || now.Sub(before) >= time.Minute
}

// problemOf returns the problem of an error of the library or of a statement. Texts of the driver stay here.
func problemOf(err error) problem {
	p := problem{Kind: ratelimit.ErrorKind(err), Detail: strings.TrimPrefix(err.Error(), "ratelimit: ")}
	if at, ok := errors.AsType[atField](err); ok {
		p.Field = at.field
	}
	bad := func(status int, title string) problem {
		p.Status, p.Title = status, title
		return p
	}
	_, badReceipt := errors.AsType[*ratelimit.ReceiptError](err)
	_, otherReceipt := errors.AsType[*ratelimit.RefundError](err)
	if badReceipt || otherReceipt {
		p.Kind = "invalid_receipt"
		return bad(http.StatusBadRequest, "The receipt cannot be refunded.")
	}
	if errors.Is(err, ratelimit.ErrNothingToRefund) {
		p.Kind = "nothing_to_refund"
		return bad(http.StatusConflict, "Nothing is left to refund.")
	}
	if errors.Is(err, ratelimit.ErrOwesTooMuch) {
		p.Kind = "owes_too_much"
		return bad(http.StatusConflict, "The key would owe too much.")
	}
	if refused, ok := errors.AsType[*pgconn.PgError](err); ok && refused.Code == "22023" { // of rate_limit_acquire
		p.Kind, p.Detail = "invalid_slot", refused.Message+". "+refused.Hint
		if refused.ColumnName == "cost" {
			p.Field = "cost"
		}
		return bad(http.StatusBadRequest, "The slot cannot be acquired.")
	}
	switch p.Kind {
	case "invalid_key", "invalid_cost", "invalid_request", "invalid_hold", "invalid_slot":
		return bad(http.StatusBadRequest, "A field is wrong.")
	case "hold_unknown":
		return bad(http.StatusNotFound, "There is no such hold.")
	case "hold_ended":
		return bad(http.StatusConflict, "The hold has ended.")
	case "slot_lost":
		return bad(http.StatusConflict, "The slot is lost.")
	case "sharded":
		return bad(http.StatusBadRequest, "The keys are on several shards.")
	}
	p.MayHaveCounted = errors.Is(err, ratelimit.ErrOutcomeUnknown) || errors.Is(err, context.Canceled)
	p.Detail = "The database did not decide. Try again later."
	if p.MayHaveCounted {
		p.Detail = "No answer came from the database, so the request may have counted."
	}
	if p.Kind == "other" {
		p.Detail = "This is a mistake of the service; its log has more."
		return bad(http.StatusInternalServerError, "The service failed.")
	}
	return bad(http.StatusServiceUnavailable, "The service cannot decide for now.")
}
