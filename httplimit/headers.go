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

// Headers says which header fields tell clients about their limit. They are on the responses to all requests that the
// limiter decided. A ban that ends more than ten years from now is shown as if it ended in a day. For a
// [ratelimit.Concurrency], what remains are free units, and times are as if nobody renewed or released a slot.
type Headers int

const (
	// None sets only Retry-After, on rejections.
	None Headers = iota

	// IETFDraft11 is revision 11 of draft-ietf-httpapi-ratelimit-headers, a draft that will still change.
	// RateLimit-Policy has the limit and, if the window is a whole number of seconds, the window. RateLimit has what
	// remains. For a denied request, or with a FixedWindow or CalendarWindow, it also has the seconds until more
	// remains. The unit of a Concurrency is concurrent-requests. The fields have a member for each limit that the
	// request passes, and for each policy of an All. The first policy is named login, for example, and the second
	// policy login/2.
	IETFDraft11

	// XRateLimit sets X-RateLimit-Limit, -Remaining and -Reset. Reset is the number of seconds until the key is as good
	// as new. If a request passes several limits, the fields show the last limit. For an All, they show one policy: the
	// one that denies for the longest time, or if the request is allowed, the one with the least left.
	XRateLimit

	// GitHub is XRateLimit, but Reset is in seconds since 1970 by the clock of the database, as on GitHub.
	GitHub

	// IETFDraft6 is revision 6 of draft-ietf-httpapi-ratelimit-headers. It has RateLimit-Limit, -Remaining and -Reset,
	// which later revisions dropped. For an allowed request, Reset is the number of seconds until the key is as good as
	// new. For a denied request, Reset is the number of seconds until the same request is allowed. RateLimit-Policy has
	// the limit and, if the window is a whole number of seconds, the window. If a request passes several limits, the
	// fields show the last limit. For an All, RateLimit-Policy has all policies, and the other fields show one policy,
	// as XRateLimit does.
	IETFDraft6
)

// A ban without an end is reported as a RetryAfter of 71 years. The ban will probably be lifted sooner, so clients
// should ask again: header fields show a duration above noEnd as askAgain.
const noEnd, askAgain = 10 * 365 * 24 * time.Hour, 24 * time.Hour

// foreseeable returns d, or askAgain if d is above noEnd.
func foreseeable(d time.Duration) time.Duration {
	if d > noEnd {
		return askAgain
	}
	return d
}

// maxInteger is the largest integer of a structured field (RFC 9651).
const maxInteger = 999_999_999_999_999

// shape has the numbers of a policy that header fields show.
type shape struct {
	limit  int64
	window int64 // in seconds; see windowSeconds
	fixed  bool  // a FixedWindow or CalendarWindow, where ResetAfter is the time until more remains
	slots  bool  // a Concurrency
}

// shapesOf returns the shape of a policy. For an All, it returns the shapes of its policies.
func shapesOf(policy ratelimit.Policy) []shape {
	if policy == nil {
		return nil
	}
	numbers, err := algorithm.Parse(policy.String())
	if err != nil {
		return nil
	}
	shapes := make([]shape, len(numbers))
	for i, n := range numbers {
		fixed := n.Algorithm == algorithm.FixedWindow || n.Algorithm == algorithm.CalendarWindow
		shapes[i] = shape{n.Limit, windowSeconds(n), fixed, n.HasSlots()}
	}
	return shapes
}

// member has what header fields show of one policy and its decision.
type member struct {
	shape
	result    ratelimit.Result
	remaining int64 // after the decision
}

// membersOf returns the members of a decision. A single member is stored in the argument one, to save an allocation.
// The argument remaining is what remains after the decision.
func membersOf(one *[1]member, shapes []shape, result ratelimit.Result, remaining int64) []member {
	each := result.Each()
	if each == nil && len(shapes) > 1 { // a row of mode off or deny decided for all policies
		for _, s := range shapes {
			each = append(each, result)
			if result.Allowed {
				each[len(each)-1].Remaining = s.limit
			}
			each[len(each)-1].Limit = s.limit
		}
	}
	if each == nil {
		one[0] = member{result: result, remaining: remaining}
		if len(shapes) == 1 {
			one[0].shape = shapes[0]
		}
		return one[:]
	}
	members := make([]member, len(each))
	for i, r := range each {
		members[i] = member{result: r, remaining: r.Remaining + remaining - result.Remaining}
		if len(shapes) == len(each) { // the row in force may have other policies
			members[i].shape = shapes[i]
		}
	}
	return members
}

// shown returns the member for fields that can show only one member: the member that denies for the longest time, or,
// in an allowed decision, the member with the least left.
func shown(members []member) member {
	best := members[0]
	for _, m := range members[1:] {
		longer := m.result.RetryAfter - best.result.RetryAfter
		if longer > 0 || longer == 0 && m.remaining < best.remaining {
			best = m
		}
	}
	return best
}

// Set sets the fields of p for a decision of a limiter with this policy. If it is a denial, Set also sets Retry-After.
// Set is for handlers that ask a limiter themselves. Clients see the name: printable ASCII without quotes and
// backslashes. The policy may be nil. Then the fields have no window.
func (p Headers) Set(header http.Header, name string, policy ratelimit.Policy, result ratelimit.Result) {
	p.set(header, name, shapesOf(policy), result, result.Remaining)
	if !result.Allowed {
		header.Set("Retry-After", strconv.FormatInt(max(1, wholeSeconds(foreseeable(result.RetryAfter))), 10))
	}
}

func (p Headers) set(header http.Header, name string, shapes []shape, result ratelimit.Result, remaining int64) {
	if p == None {
		return
	}
	xRateLimit := [3]string{"X-Ratelimit-Limit", "X-Ratelimit-Remaining", "X-Ratelimit-Reset"}
	draft6 := [3]string{"Ratelimit-Limit", "Ratelimit-Remaining", "Ratelimit-Reset"}
	var one [1]member
	members := membersOf(&one, shapes, result, remaining)
	best := shown(members)
	limit, reset := best.result.Limit, best.result.ResetAfter
	switch p {
	case IETFDraft11:
		text := make([]byte, 0, 128)
		for i, m := range members {
			text = appendMember(text, i, name, ";q=", m.result.Limit)
			if m.slots {
				text = append(text, `;qu="concurrent-requests"`...)
			}
			if m.window > 0 {
				text = append(text, ";w="...)
				text = strconv.AppendInt(text, m.window, 10)
			}
		}
		end := len(text)
		for i, m := range members {
			text = appendMember(text, i, name, ";r=", m.remaining)
			if more, known := m.untilMore(result.Allowed); known {
				text = append(text, ";t="...)
				text = strconv.AppendInt(text, wholeSeconds(more), 10)
			}
		}
		fields := string(text)
		values := []string{fields[:end], fields[end:]}
		add(header, "Ratelimit-Policy", values[0:1:1])
		add(header, "Ratelimit", values[1:2:2])
	case XRateLimit:
		setTriple(header, xRateLimit, limit, best.remaining, wholeSeconds(reset))
	case GitHub:
		at := result.DecidedAt.Add(reset)
		seconds := at.Unix()
		if at.Nanosecond() > 0 {
			seconds++
		}
		setTriple(header, xRateLimit, limit, best.remaining, seconds)
	case IETFDraft6:
		if !result.Allowed {
			reset = best.result.RetryAfter // the draft allows no Retry-After before Reset
		}
		setTriple(header, draft6, min(limit, maxInteger), min(best.remaining, maxInteger), wholeSeconds(reset))
		var policies []string
		for _, m := range members {
			if m.window > 0 {
				policies = append(policies, fmt.Sprintf("%d;w=%d", min(m.result.Limit, maxInteger), m.window))
			}
		}
		if policies != nil {
			header["Ratelimit-Policy"] = []string{strings.Join(policies, ", ")}
		}
	}
}

// untilMore returns the time until more remains of a limit, if the time is known. For a denied request it returns a
// time only for the limits that denied, because other times would seem to contradict Retry-After.
func (m *member) untilMore(allowed bool) (time.Duration, bool) {
	if !allowed {
		return m.result.RetryAfter, m.result.RetryAfter > 0
	}
	return m.result.ResetAfter, m.fixed
}

// appendMember appends a member of a structured field: the argument name as a String, and its first parameter. New has
// checked the characters of name. If the argument i, the policy's index in an All, is above 0, a number is added to the
// name.
func appendMember(text []byte, i int, name, parameter string, value int64) []byte {
	if i > 0 {
		text = append(text, ", "...)
	}
	text = append(text, '"')
	text = append(text, algorithm.RowName(name, i)...)
	text = append(text, '"')
	text = append(text, parameter...)
	return strconv.AppendInt(text, min(value, maxInteger), 10)
}

// add adds a value to the values that an outer middleware has set.
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

// wholeSeconds returns d in seconds, rounded up. d is at least 0.
func wholeSeconds(d time.Duration) int64 {
	seconds := int64(d / time.Second)
	if d%time.Second > 0 {
		seconds++
	}
	return seconds
}

// windowSeconds returns in how many seconds a policy allows its limit in the long run, or 0 if that is not a whole
// number. For a calendar month, it assumes 31 days.
func windowSeconds(n algorithm.Numbers) int64 {
	micros := n.Span.Microseconds()
	if n.Refill > 0 {
		full := n.Limit * micros // at most 2^62, as New has checked
		if micros = full / n.Refill; micros*n.Refill != full {
			return 0
		}
	}
	if micros%1e6 != 0 {
		return 0
	}
	return micros / 1e6
}
