package httplimit

import (
	"net/http"
	"strconv"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// Headers says which header fields tell clients about their limit, on all responses that the database has decided.
type Headers int

const (
	// None is no fields but Retry-After, with a rejection.
	None Headers = iota

	// IETFDraft11 is revision 11 of draft-ietf-httpapi-ratelimit-headers, a draft that will still change: RateLimit-Policy with
	// the limit and, if it is whole seconds, its window; RateLimit with what remains, and the seconds until there is more, where that
	// is known: if the request is denied, and in a fixed window. Several limits on one way are members of one list.
	IETFDraft11

	// XRateLimit is X-RateLimit-Limit, -Remaining and -Reset: the seconds from now until the key is as good as new. Of several limits
	// on one way, the last one is shown.
	XRateLimit

	// GitHub is XRateLimit with Reset as that service has it: in seconds since 1970, by the clock of the database.
	GitHub
)

// maxInteger is the largest integer of a structured field (RFC 9651).
const maxInteger = 999_999_999_999_999

// set writes the fields for a decision after which so much remains.
func (p Headers) set(header http.Header, name string, policy ratelimit.Policy, result ratelimit.Result, remaining int64) {
	switch p {
	case IETFDraft11:
		text := make([]byte, 0, 128)
		text = appendMember(text, name, ";q=", result.Limit)
		if window := windowSeconds(policy); window > 0 {
			text = append(text, ";w="...)
			text = strconv.AppendInt(text, window, 10)
		}
		end := len(text)
		text = appendMember(text, name, ";r=", remaining)
		if !result.Allowed {
			text = append(text, ";t="...)
			text = strconv.AppendInt(text, wholeSeconds(result.RetryAfter), 10)
		} else if _, ok := policy.(ratelimit.FixedWindow); ok {
			text = append(text, ";t="...)
			text = strconv.AppendInt(text, wholeSeconds(result.ResetAfter), 10)
		}
		fields := string(text)
		values := []string{fields[:end], fields[end:]}
		add(header, "Ratelimit-Policy", values[0:1:1])
		add(header, "Ratelimit", values[1:2:2])
	case XRateLimit:
		setTriple(header, result.Limit, remaining, wholeSeconds(result.ResetAfter))
	case GitHub:
		reset := result.DecidedAt.Add(result.ResetAfter)
		seconds := reset.Unix()
		if reset.Nanosecond() > 0 {
			seconds++
		}
		setTriple(header, result.Limit, remaining, seconds)
	}
}

// appendMember appends a String of a structured field, whose characters New has checked, and its first parameter.
func appendMember(text []byte, name, parameter string, value int64) []byte {
	text = append(text, '"')
	text = append(text, name...)
	text = append(text, '"')
	text = append(text, parameter...)
	return strconv.AppendInt(text, min(value, maxInteger), 10)
}

// add adds a value to those of an outer middleware, if there are any.
func add(header http.Header, name string, value []string) {
	if outer := header[name]; len(outer) > 0 {
		value = append(outer, value...)
	}
	header[name] = value
}

func setTriple(header http.Header, limit, remaining, reset int64) {
	values := []string{strconv.FormatInt(limit, 10), strconv.FormatInt(remaining, 10), strconv.FormatInt(reset, 10)}
	header["X-Ratelimit-Limit"] = values[0:1:1]
	header["X-Ratelimit-Remaining"] = values[1:2:2]
	header["X-Ratelimit-Reset"] = values[2:3:3]
}

// wholeSeconds rounds up, for a duration ≥ 0.
func wholeSeconds(d time.Duration) int64 {
	seconds := int64(d / time.Second)
	if d%time.Second > 0 {
		seconds++
	}
	return seconds
}

// windowSeconds is the time in which a policy allows its limit, in the long run; 0 if that is not whole seconds.
func windowSeconds(policy ratelimit.Policy) int64 {
	var micros int64
	switch p := policy.(type) {
	case ratelimit.FixedWindow:
		micros = p.Window.Microseconds()
	case ratelimit.SlidingWindow:
		micros = p.Window.Microseconds()
	case ratelimit.SlidingLog:
		micros = p.Window.Microseconds()
	case ratelimit.TokenBucket:
		full := p.Capacity * p.Every.Microseconds() // in the exact range
		if micros = full / p.Refill; micros*p.Refill != full {
			return 0
		}
	}
	if micros%1e6 != 0 {
		return 0
	}
	return micros / 1e6
}
