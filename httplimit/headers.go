package httplimit

import (
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/algorithm"
)

// Headers says which header fields tell clients about their limit, on all responses that the database has decided. Of a
// ban that lasts for more than ten years, or has no end, they say that it is over in a day.
type Headers int

const (
	// None is no fields but Retry-After, with a rejection.
	None Headers = iota

	// IETFDraft11 is revision 11 of draft-ietf-httpapi-ratelimit-headers, a draft that will still change.
	// RateLimit-Policy has the limit and, if it is whole seconds, its window. RateLimit has what remains, and the
	// seconds until there is more, where that is known: if the request is denied, and in a fixed window. If a
	// request passes several limits, they are members of one list.
	IETFDraft11

	// XRateLimit is X-RateLimit-Limit, -Remaining and -Reset, which is the seconds from now until the key is as
	// good as new. If a request passes several limits, the last one is shown.
	XRateLimit

	// GitHub is XRateLimit with Reset as GitHub has it: in seconds since 1970, by the clock of the database.
	GitHub

	// IETFDraft6 is revision 6 of draft-ietf-httpapi-ratelimit-headers, for clients that know RateLimit-Limit,
	// -Remaining and -Reset, which later revisions have not. Reset is the seconds from now until the key is as good as
	// new or, if the request is denied, until the same request is allowed. RateLimit-Policy has the limit and its
	// window, if that is whole seconds. If a request passes several limits, the last one is shown.
	IETFDraft6
)

// A ban without an end seems to last for 71 years. Somebody will end it sooner, so clients should ask again. Nothing
// above noEnd is taken for an end. It counts as askAgain.
const noEnd, askAgain = 10 * 365 * 24 * time.Hour, 24 * time.Hour

// foreseeable is d, unless that is above noEnd.
func foreseeable(d time.Duration) time.Duration {
	if d > noEnd {
		return askAgain
	}
	return d
}

// maxInteger is the largest integer of a structured field (RFC 9651).
const maxInteger = 999_999_999_999_999

// shape is what header fields tell of a policy. They tell nothing of All.
type shape struct {
	window int64 // in seconds; see windowSeconds
	fixed  bool  // it is a FixedWindow or CalendarWindow, for which it is known when there is more
}

func shapeOf(policy ratelimit.Policy) shape {
	if policy == nil {
		return shape{}
	}
	numbers, err := algorithm.Parse(policy.String())
	if err != nil || len(numbers) != 1 {
		return shape{}
	}
	n := numbers[0]
	return shape{windowSeconds(n), n.Algorithm == algorithm.FixedWindow || n.Algorithm == algorithm.CalendarWindow}
}

// set writes the fields for a decision. remaining is what remains after it.
func (p Headers) set(header http.Header, name string, policy shape, result ratelimit.Result, remaining int64) {
	xRateLimit := [3]string{"X-Ratelimit-Limit", "X-Ratelimit-Remaining", "X-Ratelimit-Reset"}
	draft6 := [3]string{"Ratelimit-Limit", "Ratelimit-Remaining", "Ratelimit-Reset"}
	switch p {
	case IETFDraft11:
		text := make([]byte, 0, 128)
		text = appendMember(text, name, ";q=", result.Limit)
		if policy.window > 0 {
			text = append(text, ";w="...)
			text = strconv.AppendInt(text, policy.window, 10)
		}
		end := len(text)
		text = appendMember(text, name, ";r=", remaining)
		if !result.Allowed {
			text = append(text, ";t="...)
			text = strconv.AppendInt(text, wholeSeconds(result.RetryAfter), 10)
		} else if policy.fixed {
			text = append(text, ";t="...)
			text = strconv.AppendInt(text, wholeSeconds(result.ResetAfter), 10)
		}
		fields := string(text)
		values := []string{fields[:end], fields[end:]}
		add(header, "Ratelimit-Policy", values[0:1:1])
		add(header, "Ratelimit", values[1:2:2])
	case XRateLimit:
		setTriple(header, xRateLimit, result.Limit, remaining, wholeSeconds(result.ResetAfter))
	case GitHub:
		reset := result.DecidedAt.Add(result.ResetAfter)
		seconds := reset.Unix()
		if reset.Nanosecond() > 0 {
			seconds++
		}
		setTriple(header, xRateLimit, result.Limit, remaining, seconds)
	case IETFDraft6:
		reset := result.ResetAfter
		if !result.Allowed {
			reset = result.RetryAfter // or Retry-After would be earlier, which the draft does not want
		}
		limit := min(result.Limit, maxInteger)
		setTriple(header, draft6, limit, min(remaining, maxInteger), wholeSeconds(reset))
		if policy.window > 0 {
			header["Ratelimit-Policy"] = []string{fmt.Sprintf("%d;w=%d", limit, policy.window)}
		}
	}
}

// appendMember appends a String of a structured field and its first parameter. New has checked the characters of
// name.
func appendMember(text []byte, name, parameter string, value int64) []byte {
	text = append(text, '"')
	text = append(text, name...)
	text = append(text, '"')
	text = append(text, parameter...)
	return strconv.AppendInt(text, min(value, maxInteger), 10)
}

// add adds a value to those that an outer middleware has set.
func add(header http.Header, name string, value []string) {
	if outer := header[name]; len(outer) > 0 {
		value = append(outer, value...)
	}
	header[name] = value
}

// setTriple sets three fields. Their names are canonical.
func setTriple(header http.Header, names [3]string, limit, remaining, reset int64) {
	values := []string{strconv.FormatInt(limit, 10), strconv.FormatInt(remaining, 10), strconv.FormatInt(reset, 10)}
	for i, name := range names {
		header[name] = values[i : i+1 : i+1]
	}
}

// wholeSeconds rounds up, for a duration ≥ 0.
func wholeSeconds(d time.Duration) int64 {
	seconds := int64(d / time.Second)
	if d%time.Second > 0 {
		seconds++
	}
	return seconds
}

// windowSeconds is the time in which a policy allows its limit, in the long run; 0 if that is not whole seconds. A
// month of the calendar has 31 days here.
func windowSeconds(n algorithm.Numbers) int64 {
	micros := n.Span.Microseconds()
	if n.Refill > 0 {
		full := n.Limit * micros // in the exact range
		if micros = full / n.Refill; micros*n.Refill != full {
			return 0
		}
	}
	if micros%1e6 != 0 {
		return 0
	}
	return micros / 1e6
}
