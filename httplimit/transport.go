package httplimit

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/http"
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
// If the server refuses a request and names a time, this Transport sends nothing more for that key until then, and for
// a second at least. A refusal is one of these statuses:
//
//	429, 403  the request was not processed
//	503, 529  it may have been processed
//
// No other status is one. A success that says that nothing remains delays nobody: the Limiter is what keeps within the
// limit. The time is in one of these fields:
//
//	Retry-After                   seconds, also with a fraction, which rounds up; or a date
//	Retry-After-Ms                milliseconds; if both are there, the later time counts
//	RateLimit                     t of members with r=0 (drafts 8 to 11), or reset beside remaining=0 (draft 7)
//	RateLimit-Reset               seconds, if RateLimit-Remaining is 0 (drafts 0 to 6)
//	X-RateLimit-, X-Rate-Limit-   the same; GitHub's Reset is in seconds since 1970
//	…-Reset-After                 seconds, in place of any such Reset
//
// The first two have precedence. Of several limits of which nothing remains, the latest time counts, and so it does of
// several values of a field. A limit of which something remains is not what has refused. With a 429, one that does not
// say what remains counts too. Any number from 10^9 on is a time since 1970, in seconds, or from 10^11 on in
// milliseconds. A time that is more than ten years ahead, as when a ban without an end is told so, counts as a day. A
// time is by the clock that Date shows. If that is more than a day off, it may also be by this machine's clock, and the
// nearer of the two counts.
//
// Other processes do not know of the pause, and learn of it from a response of their own. Then the request is sent
// again, as often as it is answered like that, until its context ends. It is not sent again, and the caller gets the
// response, if
//
//   - the context's deadline, or the Timeout of the http.Client, comes before that time;
//   - that time is more than MaxPause ahead;
//   - its body cannot be read again: there is one, and no GetBody, which http.NewRequest sets for bodies in memory;
//   - the status is 503 or 529, and sending it twice may do something twice: the method is neither GET, HEAD, OPTIONS,
//     TRACE, PUT nor DELETE, and there is no header Idempotency-Key.
//
// A request that is not sent because its deadline comes too early gets a [*ratelimit.WaitError]. One that is not sent
// because the pause is too long gets a [*PauseError]. Other errors are those of the context, of Wait, of Key and of
// Base.
//
// A Transport is safe for concurrent use. Its fields must not change once it is in use.
type Transport struct {
	Limiter Waiter // required
	// Key says whom a request is charged to, and for whom a pause counts. Defaults to the host and port of the URL.
	Key Key
	// Base sends the requests. Defaults to http.DefaultTransport.
	Base http.RoundTripper
	// MaxPause is the longest pause that callers wait for, so that a server cannot block those without a deadline for
	// a day. It does not bound the wait for the Limiter. If it is negative, nobody waits for a pause. Defaults to an
	// hour, in which the limits of most services, such as GitHub's, begin anew.
	MaxPause time.Duration

	mu     sync.Mutex
	pauses map[string]time.Time // until when nothing is sent for a key
}

// PauseError is why a Transport has not sent a request: the server has asked for a pause, and its end is further ahead
// than MaxPause.
type PauseError struct {
	Until    time.Time // when to try again, by this machine's clock
	MaxPause time.Duration
}

func (e *PauseError) Error() string {
	return fmt.Sprintf("httplimit: the server wants no requests until %s, which is further ahead than the Transport's "+
		"MaxPause of %v: try again then", e.Until.Format(time.RFC3339Nano), e.MaxPause)
}

// RoundTrip sends a request as soon as the limit allows it.
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	key, err := t.key(r)
	for err == nil {
		if err = t.wait(r.Context(), key); err != nil {
			break
		}
		var response *http.Response
		if response, err = t.base().RoundTrip(r); err != nil || response == nil {
			return nil, err
		}
		until, ok := retryAt(response)
		if !ok {
			return response, nil
		}
		t.pause(key, until)
		if time.Until(until) > t.maxPause() {
			return response, nil
		}
		again, ok := repeated(r, response, until)
		if !ok {
			return response, nil
		}
		discard(r.Context(), response.Body)
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

func (t *Transport) maxPause() time.Duration { return cmp.Or(t.MaxPause, time.Hour) }

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
		if pause > t.maxPause() {
			return &PauseError{Until: until, MaxPause: t.maxPause()}
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

// discard closes the body of a response. Base can use the connection again if little was left of it. It reads for no
// longer than the shortest pause, because a body may trickle, or never end.
func discard(ctx context.Context, body io.ReadCloser) {
	if body == nil { // some test doubles of a Base do that
		return
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = io.CopyN(io.Discard, body, 64<<10)
	}()
	timer := time.NewTimer(minPause)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
	case <-ctx.Done():
	}
	_ = body.Close() // ends the reading
}

// repeated is the request to send again at a time, if it can be.
func repeated(r *http.Request, response *http.Response, at time.Time) (*http.Request, bool) {
	if deadline, ok := r.Context().Deadline(); ok && deadline.Before(at) {
		return nil, false
	}
	// A 503 may come from a proxy whose time was up while the server went on.
	if response.StatusCode >= http.StatusInternalServerError && !idempotent(r) {
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
