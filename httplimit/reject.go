package httplimit

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/algorithm"
)

// Rejection is why a request does not reach the handler.
type Rejection struct {
	// Status is 429 for a denied request, and 503 if there is no decision. It is 400 for a request without a usable
	// key, or with a cost that can never be taken.
	Status int
	// Policy is the Config.PolicyName of the limit.
	Policy string
	// RetryAfter is when to try again, in whole seconds, as in the response's header. It is 0 if there is no such
	// header. During a ban without an end, or with more than ten years to go, it is a day.
	RetryAfter time.Duration
	// Result is the decision, if the request is denied.
	Result ratelimit.Result
	// Err is why there is no decision, if the request is not denied. It is nil if the limiter fails closed.
	Err error
}

// The types of problems that draft-ietf-httpapi-ratelimit-headers registers.
const (
	quotaExceeded            = "https://iana.org/assignments/http-problem-types#quota-exceeded"
	temporaryReducedCapacity = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity"
)

// ProblemJSON answers with a problem of RFC 9457, application/problem+json. Config.Reject defaults to it.
func ProblemJSON(w http.ResponseWriter, _ *http.Request, rejection Rejection) {
	problemType := ""
	switch rejection.Status {
	case http.StatusTooManyRequests:
		problemType = quotaExceeded
	case http.StatusServiceUnavailable:
		problemType = temporaryReducedCapacity
	}
	body := append(make([]byte, 0, 256), `{"title":"`...)
	body = append(body, rejection.title()...)
	body = append(body, `","status":`...)
	body = strconv.AppendInt(body, int64(rejection.Status), 10)
	if problemType != "" {
		body = append(body, `,"type":"`...)
		body = append(body, problemType...)
		body = append(body, `","violated-policies":["`...)
		body = append(body, strings.Join(rejection.violated(), `","`)...) // New checked that nothing needs escaping
		body = append(body, `"]`...)
	}
	rejection.write(w, "application/problem+json", append(body, "}\n"...))
}

// violated returns the names of the policies that deny.
func (r Rejection) violated() []string {
	var names []string
	for i, one := range r.Result.Each() {
		if one.RetryAfter > 0 {
			names = append(names, algorithm.RowName(r.Policy, i))
		}
	}
	if names == nil {
		return []string{r.Policy}
	}
	return names
}

// PlainText answers with a line of text.
func PlainText(w http.ResponseWriter, _ *http.Request, rejection Rejection) {
	text := rejection.title()
	if rejection.RetryAfter > 0 {
		text += fmt.Sprintf(" Try again in %d s.", wholeSeconds(rejection.RetryAfter))
	}
	rejection.write(w, "text/plain; charset=utf-8", []byte(text+"\n"))
}

func (r Rejection) title() string {
	switch r.Status {
	case http.StatusTooManyRequests:
		return "Too many requests."
	case http.StatusServiceUnavailable:
		return "The service cannot take this request for now."
	default:
		return "The request does not say whom it is from, or asks for what is never allowed."
	}
}

func (r Rejection) write(w http.ResponseWriter, contentType string, body []byte) {
	w.Header().Set("Content-Type", contentType)
	w.WriteHeader(r.Status)
	_, _ = w.Write(body) // fails only if the client has left
}
