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

// refundWait is how long the end of a response waits for the cost to be given back, one round trip usually. What takes longer
// goes on without it: the end of a limiter's context ends only the wait.
const refundWait = 100 * time.Millisecond

// ChargeFailures is a Config.Charge for logins and whatever is not to be guessed: a request is charged if its status is 400 or more, or
// if it has none when the handler has returned.
func ChargeFailures(status int) bool { return status >= 400 }

// ChargeSuccesses is a Config.Charge: a request is charged if its status is below 400.
func ChargeSuccesses(status int) bool { return status < 400 }

// ChargeAllButServerErrors is a Config.Charge: a request is not charged if its status is 500 or more.
func ChargeAllButServerErrors(status int) bool { return status < 500 }

// serveAndSettle runs the handler for a request that has taken its cost, and gives that back if the outcome says so. An outcome that
// was not seen by the time the handler has returned, or panicked, says nothing: the status may be written by somebody who stands before
// this middleware, or past its ResponseWriter.
func (m *middleware) serveAndSettle(w http.ResponseWriter, r *http.Request, next http.Handler, charged charge) {
	recorder := &recorder{ResponseWriter: w, middleware: m, request: r, charge: charged}
	defer func() {
		if recorder.end() {
			m.giveBack(r.Context(), charged)
		}
	}()
	next.ServeHTTP(recorder.wrap(), r)
}

// charge is what a request has taken.
type charge struct {
	cost   int64
	result ratelimit.Result
}

func (m *middleware) giveBack(ctx context.Context, charged charge) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), refundWait)
	defer cancel()
	result, err := m.limiter.Refund(ctx, charged.result)
	if err == nil && result.Source != ratelimit.SourceDatabase {
		err = errors.New("Postgres is away: " + result.Source.String())
	}
	if m.refunds.changed(err) {
		if err != nil {
			m.warn(ctx, "httplimit: what a request has taken may not have been given back; further cases are not logged", err)
		} else {
			m.info(ctx, "httplimit: what requests have taken is given back again")
		}
	}
}

// recorder finds out the status of a response before it is sent. What else a server's ResponseWriter can do, it can, see wrap.
type recorder struct {
	http.ResponseWriter
	middleware *middleware
	request    *http.Request
	charge     charge

	mu      sync.Mutex // a handler may leave a goroutine behind that writes
	settled bool
	refund  bool
}

// settle decides by the status whether the request is charged, and sets the header fields. If the client has left before, the
// charge stays: else leaving early would be a way around the limit. What comes later changes nothing.
func (r *recorder) settle(status int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.settled {
		return
	}
	refund := r.request.Context().Err() == nil && !r.middleware.config.Charge(status)
	r.settleAs(refund)
}

// end settles what is not settled yet, as charged, and tells whether the cost is to be given back.
func (r *recorder) end() (refund bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.settled {
		r.settleAs(false)
	}
	return r.refund
}

func (r *recorder) settleAs(refund bool) {
	r.settled, r.refund = true, refund
	remaining := r.charge.result.Remaining
	if refund {
		remaining = min(remaining+r.charge.cost, r.charge.result.Limit)
	}
	r.middleware.setHeaders(r.Header(), r.charge.result, remaining)
}

func (r *recorder) WriteHeader(status int) {
	if status >= 200 || status == http.StatusSwitchingProtocols { // the others are not the last
		r.settle(status)
	}
	r.ResponseWriter.WriteHeader(status)
}

func (r *recorder) Write(data []byte) (int, error) {
	r.settle(http.StatusOK)
	return r.ResponseWriter.Write(data)
}

// ReadFrom uses the ReadFrom beneath, if there is one.
func (r *recorder) ReadFrom(source io.Reader) (int64, error) {
	r.settle(http.StatusOK)
	return io.Copy(r.ResponseWriter, source)
}

// Unwrap is for http.ResponseController.
func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }

// wrap returns the recorder with those interfaces that what is beneath has, since handlers ask for them.
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

// beneath finds the first of the writers within each other that is a T.
func beneath[T any](w http.ResponseWriter) (T, bool) {
	for {
		if t, ok := w.(T); ok {
			return t, true
		}
		wrapper, ok := w.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			return *new(T), false
		}
		w = wrapper.Unwrap()
	}
}

type flusher struct{ recorder *recorder }

func (f flusher) Flush() { _ = f.FlushError() }

func (f flusher) FlushError() error {
	f.recorder.settle(http.StatusOK)
	return http.NewResponseController(f.recorder.ResponseWriter).Flush()
}

type hijacker struct{ recorder *recorder }

func (h hijacker) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buffer, err := http.NewResponseController(h.recorder.ResponseWriter).Hijack()
	if err == nil {
		h.recorder.end() // what is written from now on is not seen
	}
	return conn, buffer, err
}
