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

// refundWait is how long the end of a response waits for the cost to be given back, which is usually one round
// trip. A refund that takes longer goes on without the response, because the end of its context ends only the
// wait.
const refundWait = 100 * time.Millisecond

// ChargeFailures is a Config.Charge for logins and whatever else must not be guessed. A request is charged if its
// status is 400 or more, or if it has none when the handler has returned.
func ChargeFailures(status int) bool { return status >= 400 }

// ChargeSuccesses is a Config.Charge. A request is charged if its status is below 400.
func ChargeSuccesses(status int) bool { return status < 400 }

// ChargeAllButServerErrors is a Config.Charge. A request is not charged if its status is 500 or more.
func ChargeAllButServerErrors(status int) bool { return status < 500 }

// serveAndSettle runs the handler for a request that has taken its cost, and gives the cost back if the outcome
// says so. An outcome counts only if it was seen by the time the handler returned. Otherwise the status may be
// written by something in front of this middleware, or past its ResponseWriter. What a handler wrote before it
// panicked does not count either, because the server, or whoever recovers, may drop it.
func (m *middleware) serveAndSettle(w http.ResponseWriter, r *http.Request, next http.Handler, charged charge) {
	recorder := &recorder{ResponseWriter: w, middleware: m, request: r, charge: charged}
	defer recorder.keep()
	next.ServeHTTP(recorder.wrap(), r)
	if recorder.refunds() {
		m.giveBack(r.Context(), charged)
	}
}

// charge is what a request has taken.
type charge struct {
	limit  limit
	cost   int64
	result ratelimit.Result
}

func (m *middleware) giveBack(ctx context.Context, charged charge) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), refundWait)
	defer cancel()
	result, err := charged.limit.limiter.Refund(ctx, charged.result)
	if err == nil && result.Source != ratelimit.SourceDatabase {
		err = errors.New("Postgres is away: " + result.Source.String())
	}
	if m.refunds.changed(err) {
		if err != nil {
			m.warn(ctx,
				"httplimit: what a request has taken may not have been given back; further cases are not logged", err)
		} else {
			m.info(ctx, "httplimit: what requests have taken is given back again")
		}
	}
}

// recorder watches the statuses of a response. If there are several, the writers beneath choose which one is
// sent: most send the first, some the last. So the cost is given back only if none of them is charged, and at
// least one was passed on without an error. The recorder can do what a server's ResponseWriter can, see wrap.
type recorder struct {
	http.ResponseWriter
	middleware *middleware
	request    *http.Request
	charge     charge

	mu      sync.Mutex // held since a handler may leave a goroutine behind that writes
	begun   bool       // a status was seen, or none will be; the header fields are set
	passed  bool       // what is beneath has taken a status
	charged bool       // for good, because a status says so or there is doubt
}

// see takes note of a status that is about to be passed on. If the client has left before, the charge stays.
// Otherwise clients could leave early to get around the limit.
func (r *recorder) see(status int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.charged = r.charged || r.request.Context().Err() != nil || r.middleware.config.Charge(status)
	r.begin()
}

// begin sets the header fields, once. If the cost will probably be given back, they show what remains after that.
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

// pass takes note that what is beneath has taken a status, or a part of the response.
func (r *recorder) pass() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.passed = true
}

// keep has the request charged, whatever else comes.
func (r *recorder) keep() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.charged = true
	r.begin()
}

// refunds tells whether the cost is to be given back, once the handler has returned.
func (r *recorder) refunds() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	// When the request's deadline has passed, whoever set it, such as http.TimeoutHandler, may have answered in
	// the handler's place.
	return r.passed && !r.charged &&
		!errors.Is(r.request.Context().Err(), context.DeadlineExceeded) && !r.contradicted()
}

// contradicted tells whether a writer beneath says that it has sent no status, or one that is charged. Gin's
// writer holds a status back until there is text, and may have been given another status before.
func (r *recorder) contradicted() bool {
	if w, ok := beneath[interface{ Written() bool }](r.ResponseWriter); ok && !w.Written() {
		return true
	}
	w, ok := beneath[interface{ Status() int }](r.ResponseWriter)
	return ok && w.Status() != 0 && r.middleware.config.Charge(w.Status())
}

func (r *recorder) WriteHeader(status int) {
	if status < 200 { // not the last status, or 101, with which the connection is taken over
		r.ResponseWriter.WriteHeader(status)
		return
	}
	r.see(status)
	r.ResponseWriter.WriteHeader(status)
	r.pass()
}

// seeText takes note of a part of the response that is about to be passed on. Without a status before, its status
// is 200.
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

// sniffed is how much of a response net/http wants to see before it leaves the rest to the system, in bytes.
const sniffed = 512

// ReadFrom uses the ReadFrom beneath, if there is one. The first part goes through Write, because a source that
// is empty, or fails at once, is no response, and the handler may still write a status.
func (r *recorder) ReadFrom(source io.Reader) (int64, error) {
	n, err := io.CopyN(struct{ io.Writer }{r}, source, sniffed)
	switch {
	case errors.Is(err, io.EOF): // that was all
		return n, nil
	case err != nil:
		return n, err
	}
	rest, err := io.Copy(r.ResponseWriter, source)
	return n + rest, err
}

// These methods are for http.ResponseController, which would call Unwrap for them.

func (r *recorder) SetReadDeadline(deadline time.Time) error {
	return http.NewResponseController(r.ResponseWriter).SetReadDeadline(deadline)
}

func (r *recorder) SetWriteDeadline(deadline time.Time) error {
	return http.NewResponseController(r.ResponseWriter).SetWriteDeadline(deadline)
}

func (r *recorder) EnableFullDuplex() error {
	return http.NewResponseController(r.ResponseWriter).EnableFullDuplex()
}

// Unwrap is for what else the writer beneath can do. The request is then charged, because its caller can send
// what the recorder does not see.
func (r *recorder) Unwrap() http.ResponseWriter {
	r.keep()
	return r.ResponseWriter
}

// inner is Unwrap for callers that only look.
func (r *recorder) inner() http.ResponseWriter { return r.ResponseWriter }

// wrap returns the recorder with the optional interfaces that the writer beneath has, since handlers ask for
// them.
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

// beneath finds the first T in a chain of writers, from the outermost inwards.
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

// FlushError itself writes the status of 200 that a server would write, because a writer that compresses may not
// do anything yet.
func (f flusher) FlushError() error {
	if !f.recorder.hasBegun() {
		f.recorder.WriteHeader(http.StatusOK)
	}
	return http.NewResponseController(f.recorder.ResponseWriter).Flush()
}

type hijacker struct{ recorder *recorder }

// Hijack has the request charged, because nobody sees what is written to the connection.
func (h hijacker) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buffer, err := http.NewResponseController(h.recorder.ResponseWriter).Hijack()
	if err == nil {
		h.recorder.keep()
	}
	return conn, buffer, err
}
