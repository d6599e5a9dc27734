package httplimit

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// Waiter is what a [Transport] needs of a [ratelimit.Limiter].
type Waiter interface {
	Wait(ctx context.Context, key string) (ratelimit.Result, error)
	// Refund gives back what Wait has taken for a request that is not sent.
	Refund(ctx context.Context, result ratelimit.Result) (ratelimit.Result, error)
}

var _ Waiter = (*ratelimit.Limiter)(nil)

// Transport is an [http.RoundTripper] for clients. It keeps all processes that ask somebody else's API within a limit
// that they share:
//
//	client := &http.Client{Transport: &httplimit.Transport{Limiter: limiter}}
//
// Each request waits until the limiter allows it, see [ratelimit.Limiter.Wait]. So does each further try.
//
// If a response with status 429 or 503 has a Retry-After, seconds or a date, this Transport sends nothing more for that
// key until then, and for a second at least. If that is more than ten years ahead, as when a ban without an end is told
// so, the pause is a day. Other processes do not know, and learn it from a response of their own.
// Then the request is sent again, as often as it is answered like that, until its context ends. It is not sent again,
// and the caller gets the response, if
//
//   - the context's deadline, or the Timeout of the http.Client, comes before that time;
//   - its body cannot be read again: there is one, and no GetBody, which http.NewRequest sets for bodies in memory;
//   - the status is 503, and sending it twice may do something twice: the method is neither GET, HEAD, OPTIONS, TRACE,
//     PUT nor DELETE, and there is no header Idempotency-Key.
//
// A request that is not sent because its deadline comes too early gets a [*ratelimit.WaitError]. Other errors are those
// of the context, of Wait, of Key and of Base.
//
// A Transport is safe for concurrent use. Its fields must not change once it is in use.
type Transport struct {
	Limiter Waiter // required
	// Key says whom a request is charged to, and for whom a Retry-After counts. Defaults to the host and port of the
	// URL.
	Key Key
	// Base sends the requests. Defaults to http.DefaultTransport.
	Base http.RoundTripper

	mu     sync.Mutex
	pauses map[string]time.Time // until when nothing is sent for a key
}

// RoundTrip sends a request as soon as the limit allows it.
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	key, err := t.key(r)
	for err == nil {
		if err = t.wait(r.Context(), key); err != nil {
			break
		}
		var response *http.Response
		if response, err = t.base().RoundTrip(r); err != nil {
			return nil, err
		}
		until, ok := retryAt(response)
		if !ok {
			return response, nil
		}
		t.pause(key, until)
		again, ok := repeated(r, response, until)
		if !ok {
			return response, nil
		}
		// Base can use the connection again if little is left of the response.
		_, _ = io.CopyN(io.Discard, response.Body, 64<<10)
		_ = response.Body.Close()
		r = again
	}
	if r.Body != nil {
		_ = r.Body.Close()
	}
	return nil, err
}

func (t *Transport) key(r *http.Request) (string, error) {
	switch {
	case t.Limiter == nil:
		return "", &ratelimit.ConfigError{Field: "httplimit.Transport.Limiter", Reason: "is required"}
	case t.Key.find == nil && t.Key.err == nil:
		return strings.ToLower(r.URL.Host), nil
	}
	return t.Key.Of(r)
}

func (t *Transport) base() http.RoundTripper {
	if t.Base == nil {
		return http.DefaultTransport
	}
	return t.Base
}

// wait returns when a request may be sent, or when that will not be before the end of its context.
func (t *Transport) wait(ctx context.Context, key string) error {
	for {
		if err := t.sitOut(ctx, key); err != nil {
			return err
		}
		result, err := t.Limiter.Wait(ctx, key)
		if err != nil {
			return err
		}
		if t.pausedUntil(key).IsZero() {
			return nil
		}
		// Meanwhile the server has asked for a pause. Those who have waited must not come all at once after it.
		_, _ = t.Limiter.Refund(ctx, result) // if it gets lost, the others wait for longer than they have to
	}
}

// sitOut returns when there is no pause for a key any more.
func (t *Transport) sitOut(ctx context.Context, key string) error {
	for {
		until := t.pausedUntil(key)
		if until.IsZero() {
			return nil
		}
		pause := time.Until(until)
		if deadline, ok := ctx.Deadline(); ok && deadline.Before(until) {
			return &ratelimit.WaitError{RetryAfter: pause, Deadline: deadline}
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		}
	}
}

// pausedUntil is the zero time if there is no pause.
func (t *Transport) pausedUntil(key string) time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	until := t.pauses[key]
	if !until.After(time.Now()) {
		delete(t.pauses, key)
		return time.Time{}
	}
	return until
}

func (t *Transport) pause(key string, until time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.pauses == nil {
		t.pauses = map[string]time.Time{}
	}
	for other, end := range t.pauses { // there are few, and none may stay for good
		if !end.After(time.Now()) {
			delete(t.pauses, other)
		}
	}
	if until.After(t.pauses[key]) {
		t.pauses[key] = until
	}
}

// retryAt is the time that a response names for the next try, if it does.
func retryAt(response *http.Response) (time.Time, bool) {
	if response.StatusCode != http.StatusTooManyRequests && response.StatusCode != http.StatusServiceUnavailable {
		return time.Time{}, false
	}
	text, now := response.Header.Get("Retry-After"), time.Now()
	seconds, err := strconv.ParseUint(text, 10, 64)
	if err == nil || errors.Is(err, strconv.ErrRange) {
		pause := time.Duration(min(seconds, uint64(noEnd/time.Second)+1)) * time.Second
		return now.Add(foreseeable(max(pause, time.Second))), true
	}
	date, err := http.ParseTime(text)
	if err != nil {
		return time.Time{}, false
	}
	// The date is of the server's clock, as is the response's own.
	sent, err := http.ParseTime(response.Header.Get("Date"))
	if err != nil {
		sent = now
	}
	return now.Add(foreseeable(max(date.Sub(sent), time.Second))), true
}

// repeated is the request to send again at a time, if it can be.
func repeated(r *http.Request, response *http.Response, at time.Time) (*http.Request, bool) {
	if deadline, ok := r.Context().Deadline(); ok && deadline.Before(at) {
		return nil, false
	}
	// A request that gets a 429 was not processed. One that gets a 503 may have been, for example before a proxy's
	// time was up.
	if response.StatusCode == http.StatusServiceUnavailable && !idempotent(r) {
		return nil, false
	}
	again := r.Clone(r.Context())
	if r.Body == nil || r.Body == http.NoBody {
		return again, true
	}
	if r.GetBody == nil {
		return nil, false
	}
	body, err := r.GetBody()
	if err != nil {
		return nil, false
	}
	again.Body = body
	return again, true
}

// idempotent tells whether sending a request twice does what sending it once does (RFC 9110 section 9.2.2).
func idempotent(r *http.Request) bool {
	switch r.Method {
	case "", http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace, http.MethodPut, http.MethodDelete:
		return true
	}
	return r.Header.Get("Idempotency-Key") != ""
}
