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

// Waiter has the methods of a [ratelimit.Limiter] that a [Transport] needs.
type Waiter interface {
	Wait(ctx context.Context, key string) (ratelimit.Result, error)
	// Refund gives back what Wait took for a request that is not sent.
	Refund(ctx context.Context, result ratelimit.Result) (ratelimit.Balance, error)
}

// Reserver has the methods of a [ratelimit.Limiter] that a [Transport] with a MaxDelay needs.
type Reserver interface {
	Waiter

	Reserve(ctx context.Context, key string, n int64, maxDelay time.Duration) (ratelimit.Reservation, error)
}

var _ Reserver = (*ratelimit.Limiter)(nil)

// Transport is an [http.RoundTripper] that keeps all processes that call an external API within one shared limit:
//
//	client := &http.Client{Transport: &httplimit.Transport{Limiter: limiter}}
//
// Each request waits until the limiter allows it, also when it is sent again: see [ratelimit.Limiter.Wait]. Requests
// that were allowed together are sent together. With MaxDelay, the requests of all processes are spread: each books a
// place of its own, and is sent when its place is ready.
//
// The Limiter's policy must not have a [ratelimit.Concurrency]: then each request gets a [*ratelimit.SlotError]. A
// limit on requests in flight lasts until the body of the response has been read, and only the caller knows when that
// is. So let the caller call [ratelimit.Limiter.Acquire], send the request with the slot's Context, close the body, and
// call Release.
//
// If the server refuses a request and names a time, the Transport pauses: it sends nothing for the key until this time,
// and for at least one second. These statuses are refusals:
//
//	429, 403  the request was not processed
//	503, 529  it may have been processed
//
// A success causes no pause, even if nothing remains, because the Limiter keeps requests within the limit. The time
// that the server names is in one of these fields:
//
//	Retry-After                   seconds, also with a fraction, which rounds up; or a date
//	Retry-After-Ms                milliseconds; if both are there, the later time counts
//	RateLimit                     t of members with r=0 (drafts 8 to 11), or reset beside remaining=0 (draft 7)
//	RateLimit-Reset               seconds, if RateLimit-Remaining is 0 (drafts 0 to 6)
//	X-RateLimit-, X-Rate-Limit-   the same; GitHub's Reset is in seconds since 1970
//	…-Reset-After                 seconds, in place of any such Reset
//
// The first two fields take precedence. Of several times, the latest counts. A limit of which something remains is
// ignored. With status 429, a limit without a remaining count is used too. A number from 10^9 on is seconds since 1970,
// and from 10^11 on milliseconds since 1970. For a time more than ten years ahead, the pause is one day. Times are by
// the server's clock, which the field Date shows. If Date is more than a day off, a time is read by both clocks, the
// server's and this machine's, and the shorter pause counts.
//
// Other processes do not know of the pause until the server refuses their own requests. After the pause the Transport
// sends the request again. It tries again until the server accepts the request or the context ends. RoundTrip returns
// the refusal at once if
//
//   - the context's deadline, or the Timeout of the http.Client, is before the end of the pause;
//   - the pause is longer than MaxPause;
//   - the request's body cannot be read again, because it has no GetBody (http.NewRequest sets it for bodies in
//     memory);
//   - the status is 503 or 529, and the request is not idempotent: it has another method than GET, HEAD, OPTIONS,
//     TRACE, PUT or DELETE, and no header Idempotency-Key.
//
// A request that begins during a pause gets a [*ratelimit.WaitError] if its deadline is before the end of the pause,
// and a [*PauseError] if the pause is longer than MaxPause. Other errors come from the context, the Limiter, Key and
// Base.
//
// A Transport is safe for concurrent use. Do not change its fields after the first request.
type Transport struct {
	Limiter Waiter // required
	// Key finds the key that a request takes from. A pause is for one key. Defaults to the host and port of the URL.
	Key Key
	// Base sends the requests. Defaults to http.DefaultTransport.
	Base http.RoundTripper
	// MaxPause is the longest pause that callers wait for. Without MaxPause, a server could block callers without a
	// deadline for a whole day. MaxPause does not bound the wait for the Limiter. If MaxPause is negative, callers do
	// not wait for any pause. Defaults to one hour, because the limits of most services, such as GitHub, restart within
	// an hour.
	MaxPause time.Duration
	// MaxDelay is how long a request may wait for its place: see [ratelimit.Limiter.Reserve]. The Limiter must be a
	// Reserver, and its policy a TokenBucket. With a Capacity of 1 and a Refill of 20 every second, at most 20 requests
	// a second are sent, one every 50 ms. A request that would wait longer gets a [*PaceError] at once, or a
	// [*ratelimit.WaitError] if its deadline is the reason. If the context ends before the place is ready, the place is
	// given back, if it is the last one. Defaults to no places: requests wait by Wait.
	MaxDelay time.Duration

	mu     sync.Mutex
	pauses map[string]time.Time // the end of each key's pause
}

// PauseError says that a Transport did not send a request, because the server has asked for a pause longer than
// MaxPause.
type PauseError struct {
	Until    time.Time // when to try again, by this machine's clock
	MaxPause time.Duration
}

func (e *PauseError) Error() string {
	return fmt.Sprintf("httplimit: the server wants no requests until %s, which is further ahead than the Transport's "+
		"MaxPause of %v: try again then", e.Until.Format(time.RFC3339Nano), e.MaxPause)
}

// PaceError says that a Transport did not send a request, because no place is ready within MaxDelay.
type PaceError struct {
	RetryAfter time.Duration // when a place can be booked
	MaxDelay   time.Duration
}

func (e *PaceError) Error() string {
	return fmt.Sprintf("httplimit: no place is ready within the Transport's MaxDelay of %v: try again in %v",
		e.MaxDelay, e.RetryAfter)
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
	case t.MaxDelay < 0:
		return "", &ratelimit.ConfigError{
			Field: "httplimit.Transport.MaxDelay", Reason: fmt.Sprintf("is %v, and must be at least 0", t.MaxDelay),
		}
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

// wait waits until a request may be sent. It returns an error if the request must not be sent.
func (t *Transport) wait(ctx context.Context, key string) error {
	for {
		if err := t.sitOut(ctx, key); err != nil {
			return err
		}
		result, err := t.allowed(ctx, key)
		if err != nil {
			return err
		}
		if t.pausedUntil(key).IsZero() {
			return nil
		}
		// Meanwhile, the server has asked for a pause. Requests that waited must not all be sent at once after the
		// pause.
		_, _ = t.Limiter.Refund(ctx, result) // after a lost refund, other requests wait longer
	}
}

// allowed waits until the limiter allows a request.
func (t *Transport) allowed(ctx context.Context, key string) (ratelimit.Result, error) {
	if t.MaxDelay == 0 {
		return t.Limiter.Wait(ctx, key)
	}
	places, ok := t.Limiter.(Reserver)
	if !ok {
		return ratelimit.Result{}, &ratelimit.ConfigError{
			Field: "httplimit.Transport.Limiter", Reason: "has no method Reserve, which MaxDelay needs",
		}
	}
	longest := t.MaxDelay
	deadline, bounded := ctx.Deadline()
	if bounded {
		longest = min(longest, max(time.Until(deadline), 0))
	}
	if err := ctx.Err(); err != nil {
		return ratelimit.Result{}, err
	}
	// If the context ends meanwhile, the place must be known, so that it can be given back.
	r, err := places.Reserve(context.WithoutCancel(ctx), key, 1, longest)
	switch {
	case err != nil:
		return ratelimit.Result{}, err
	case !r.Allowed && longest < t.MaxDelay:
		return ratelimit.Result{}, &ratelimit.WaitError{RetryAfter: longest + r.RetryAfter, Deadline: deadline}
	case !r.Allowed:
		return ratelimit.Result{}, &PaceError{RetryAfter: r.RetryAfter, MaxDelay: t.MaxDelay}
	}
	timer := time.NewTimer(r.ReadyAfter)
	defer timer.Stop()
	select {
	case <-timer.C:
		return r.Result, nil
	case <-ctx.Done():
		_, _ = places.Refund(context.WithoutCancel(ctx), r.Result) // after a lost refund, its place stays empty
		return ratelimit.Result{}, ctx.Err()
	}
}

// sitOut waits for the end of a key's pause.
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

// pausedUntil returns the end of a key's pause, or the zero time if there is no pause.
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
	for other, end := range t.pauses { // deletes pauses that have ended; there are few
		if !end.After(time.Now()) {
			delete(t.pauses, other)
		}
	}
	if until.After(t.pauses[key]) {
		t.pauses[key] = until
	}
}

// discard reads the rest of a response's body and closes it, so that Base can reuse the connection. It reads for at
// most minPause, because a body may be slow or endless.
func discard(ctx context.Context, body io.ReadCloser) {
	if body == nil { // as from some test doubles of a Base
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

// repeated returns a copy of the request that can be sent again at a time. The bool is false if it must not be sent
// again.
func repeated(r *http.Request, response *http.Response, at time.Time) (*http.Request, bool) {
	if deadline, ok := r.Context().Deadline(); ok && deadline.Before(at) {
		return nil, false
	}
	// A 503 may come from a proxy that timed out while the server processed the request.
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

// idempotent tells whether sending a request twice has the same effect as once (RFC 9110 section 9.2.2).
func idempotent(r *http.Request) bool {
	switch r.Method {
	case "", http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace, http.MethodPut, http.MethodDelete:
		return true
	}
	return r.Header.Get("Idempotency-Key") != ""
}
