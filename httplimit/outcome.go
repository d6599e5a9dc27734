package httplimit

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// refundWait is how long the end of a response waits for the refund or the settlement, which usually takes one round
// trip. A slower refund may be interrupted, and then the cost stays counted. A slower settlement goes on.
const refundWait = 100 * time.Millisecond

// ChargeFailures is a Config.Charge that charges a request if its status is 400 or more. It is for passwords and other
// secrets that clients could guess.
func ChargeFailures(status int) bool { return status >= 400 }

// ChargeSuccesses is a Config.Charge that charges a request if its status is below 400.
func ChargeSuccesses(status int) bool { return status < 400 }

// ChargeAllButServerErrors is a Config.Charge that charges a request unless its status is 500 or more.
func ChargeAllButServerErrors(status int) bool { return status < 500 }

// serveAndSettle runs the handler for a request that has taken its cost, and gives the cost back if the status says so.
// Only a status seen before the handler returns counts, because code outside the middleware may write the status later.
// After a panic the request stays charged, because the server or a recoverer may drop what the handler wrote.
func (m *middleware) serveAndSettle(w http.ResponseWriter, r *http.Request, next http.Handler, charged charge) {
	recorder := &recorder{ResponseWriter: w, middleware: m, request: r, charge: charged}
	defer recorder.keep()
	if hold := charged.hold; hold != nil {
		used := charged.cost
		defer func() { m.end(r.Context(), hold, used) }()
		next.ServeHTTP(recorder.wrap(), hold.in(r))
		if recorder.refunds() {
			used = 0
		}
		return
	}
	next.ServeHTTP(recorder.wrap(), r)
	if recorder.refunds() {
		m.giveBack(r.Context(), charged)
	}
}

// charge is what a request has taken or holds, and from which limit.
type charge struct {
	limit  limit
	cost   int64
	result ratelimit.Result
	hold   *held // nil if the cost was taken
}

func (m *middleware) giveBack(ctx context.Context, charged charge) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), refundWait)
	defer cancel()
	_, err := charged.limit.limiter.Refund(ctx, charged.result)
	if m.refunds.changed(err) {
		if err != nil {
			m.warn(ctx,
				"httplimit: what a request has taken may not have been given back; further cases are not logged", err)
		} else {
			m.info(ctx, "httplimit: what requests have taken is given back again")
		}
	}
}

// recorder watches the statuses that a handler writes. If a handler writes several, most ResponseWriters send the first
// status, and some send the last. So the cost is given back only if no status is charged, and at least one status was
// written without an error. wrap adds the optional interfaces of a server's ResponseWriter.
type recorder struct {
	http.ResponseWriter
	middleware *middleware
	request    *http.Request
	charge     charge

	mu      sync.Mutex // for goroutines that write after their handler has returned
	begun   bool       // the header fields are set, because a status was seen or the charge is final
	passed  bool       // the server's ResponseWriter has accepted a status
	charged bool       // the request stays charged, because of a status or in doubt
}

// see records a status before it is written. If the client has left by then, the request stays charged: otherwise
// clients could leave early to get around the limit.
func (r *recorder) see(status int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.charged = r.charged || r.request.Context().Err() != nil || r.middleware.config.Charge(status)
	r.begin()
}

// begin sets the header fields, once. If the cost will probably be given back, the fields show what will then remain.
// The caller holds r.mu.
func (r *recorder) begin() {
	if r.begun {
		return
	}
	r.begun = true
	remaining := r.charge.result.Remaining
	if !r.charged {
		remaining += r.charge.cost
	}
	r.middleware.setHeaders(r.Header(), r.charge.limit, r.charge.result, remaining)
}

// pass records that the server's ResponseWriter has accepted a status or a part of the body.
func (r *recorder) pass() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.passed = true
}

// keep makes the charge final, and sets the header fields.
func (r *recorder) keep() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.charged = true
	r.begin()
}

// refunds tells whether to give the cost back. The handler has returned.
func (r *recorder) refunds() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	// After the request's deadline, http.TimeoutHandler may have answered instead of the handler.
	return r.passed && !r.charged &&
		!errors.Is(r.request.Context().Err(), context.DeadlineExceeded) && !r.contradicted()
}

// contradicted tells whether the ResponseWriter reports that no status was sent, or a status that is charged. Gin's
// writer sends a status only with the first part of the body, and may send an earlier status.
func (r *recorder) contradicted() bool {
	if w, ok := beneath[interface{ Written() bool }](r.ResponseWriter); ok && !w.Written() {
		return true
	}
	w, ok := beneath[interface{ Status() int }](r.ResponseWriter)
	return ok && w.Status() != 0 && r.middleware.config.Charge(w.Status())
}

func (r *recorder) WriteHeader(status int) {
	if status < 200 { // an informational status, or 101, which hijacks the connection
		r.ResponseWriter.WriteHeader(status)
		return
	}
	r.see(status)
	r.ResponseWriter.WriteHeader(status)
	r.pass()
}

// seeText records a part of the body before it is written. Without an earlier status, the status is 200.
func (r *recorder) seeText() {
	if !r.hasBegun() {
		r.see(http.StatusOK)
	}
}

func (r *recorder) hasBegun() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.begun
}

func (r *recorder) Write(data []byte) (int, error) {
	r.seeText()
	n, err := r.ResponseWriter.Write(data)
	if err == nil {
		r.pass()
	}
	return n, err
}

func (r *recorder) WriteString(text string) (int, error) {
	r.seeText()
	n, err := io.WriteString(r.ResponseWriter, text)
	if err == nil {
		r.pass()
	}
	return n, err
}

// sniffed is how many bytes of a response net/http reads before it lets the system send the rest.
const sniffed = 512

// ReadFrom uses the ReadFrom of the server's ResponseWriter, if it has one. The first part goes through Write: if the
// source is empty or fails at once, the handler may still write a status.
func (r *recorder) ReadFrom(source io.Reader) (int64, error) {
	n, err := io.CopyN(struct{ io.Writer }{r}, source, sniffed)
	switch {
	case errors.Is(err, io.EOF): // the source has ended
		return n, nil
	case err != nil:
		return n, err
	}
	rest, err := io.Copy(r.ResponseWriter, source)
	return n + rest, err
}

// http.ResponseController calls these three methods. Without them it would call Unwrap.

func (r *recorder) SetReadDeadline(deadline time.Time) error {
	return http.NewResponseController(r.ResponseWriter).SetReadDeadline(deadline)
}

func (r *recorder) SetWriteDeadline(deadline time.Time) error {
	return http.NewResponseController(r.ResponseWriter).SetWriteDeadline(deadline)
}

func (r *recorder) EnableFullDuplex() error {
	return http.NewResponseController(r.ResponseWriter).EnableFullDuplex()
}

// Unwrap returns the server's ResponseWriter. The request then stays charged, because the recorder does not see what
// the caller writes there.
func (r *recorder) Unwrap() http.ResponseWriter {
	r.keep()
	return r.ResponseWriter
}

// inner returns the same writer as Unwrap, for callers that do not write.
func (r *recorder) inner() http.ResponseWriter { return r.ResponseWriter }

// wrap returns the recorder with those optional interfaces that the server's ResponseWriter has.
func (r *recorder) wrap() http.ResponseWriter {
	_, flushes := beneath[http.Flusher](r.ResponseWriter)
	_, hijacks := beneath[http.Hijacker](r.ResponseWriter)
	pusher, pushes := beneath[http.Pusher](r.ResponseWriter)
	switch {
	case flushes && hijacks:
		return struct {
			*recorder
			flusher
			hijacker
		}{r, flusher{r}, hijacker{r}}
	case flushes && pushes:
		return struct {
			*recorder
			flusher
			http.Pusher
		}{r, flusher{r}, pusher}
	case flushes:
		return struct {
			*recorder
			flusher
		}{r, flusher{r}}
	case hijacks:
		return struct {
			*recorder
			hijacker
		}{r, hijacker{r}}
	default:
		return r
	}
}

// beneath returns the first writer that is a T, in a chain of wrapped writers that begins with w.
func beneath[T any](w http.ResponseWriter) (T, bool) {
	for {
		if t, ok := w.(T); ok {
			return t, true
		}
		switch wrapper := w.(type) {
		case interface{ inner() http.ResponseWriter }:
			w = wrapper.inner()
		case interface{ Unwrap() http.ResponseWriter }:
			w = wrapper.Unwrap()
		default:
			return *new(T), false
		}
	}
}

type flusher struct{ recorder *recorder }

func (f flusher) Flush() { _ = f.FlushError() }

// FlushError writes status 200 first, as a server would. A ResponseWriter that compresses may write no status.
func (f flusher) FlushError() error {
	if !f.recorder.hasBegun() {
		f.recorder.WriteHeader(http.StatusOK)
	}
	return http.NewResponseController(f.recorder.ResponseWriter).Flush()
}

type hijacker struct{ recorder *recorder }

// Hijack charges the request, because the recorder does not see what is written to the connection.
func (h hijacker) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buffer, err := http.NewResponseController(h.recorder.ResponseWriter).Hijack()
	if err == nil {
		h.recorder.keep()
	}
	return conn, buffer, err
}
