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

// Rejection says why a request does not reach the handler.
type Rejection struct {
	// Status is 429 for a denied request, or Config.FullStatus if no slot is free. It is 503 if the limiter did not
	// decide, and 400 for a request without a usable key, or with a cost that can never be taken.
	Status int
	// Policy is the Config.PolicyName of the limit.
	Policy string
	// RetryAfter is the time until the next try in whole seconds, as in the header Retry-After. RetryAfter is 0 without
	// this header, and a day for a ban that ends more than ten years from now.
	RetryAfter time.Duration
	// Result is the decision if the request is denied.
	Result ratelimit.Result
	// Err is the error if the request is not denied. It is nil if the limiter failed closed.
	Err error
}

// These are types of problems in draft-ietf-httpapi-ratelimit-headers.
const (
	quotaExceeded            = "https://iana.org/assignments/http-problem-types#quota-exceeded"
	temporaryReducedCapacity = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity"
)

// ProblemJSON writes a problem of RFC 9457, application/problem+json. It is the default of Config.Reject.
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

// violated returns the names of the policies that denied the request.
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

// PlainText writes a line of text.
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
