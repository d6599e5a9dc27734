package httplimit

import (
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// statusOverloaded is what some services answer when they have too much to do.
const statusOverloaded = 529

// minPause is the shortest pause.
const minPause = time.Second

// retryAt is the time that a response names for the next try, if it refuses and names one. See [Transport].
func retryAt(response *http.Response) (time.Time, bool) {
	switch response.StatusCode {
	case http.StatusTooManyRequests, http.StatusForbidden, http.StatusServiceUnavailable, statusOverloaded:
	default:
		return time.Time{}, false
	}
	header, now := response.Header, time.Now()
	clock := now
	if sent, err := http.ParseTime(header.Get("Date")); err == nil {
		clock = sent // dates are by the server's clock, as is the response's own
	}
	pause := time.Duration(-1)
	for _, text := range header["Retry-After"] {
		pause = max(pause, pauseOf(text, clock))
	}
	for _, text := range header["Retry-After-Ms"] {
		if millis, ok := roundUp(text); ok {
			pause = max(pause, time.Duration(min(millis, 1e12))*time.Millisecond)
		}
	}
	if pause < 0 {
		for _, limit := range limitsOf(header) {
			unsaid := limit.remaining == "" && response.StatusCode == http.StatusTooManyRequests
			if unsaid || isNothing(limit.remaining) {
				pause = max(pause, pauseOf(limit.reset, clock))
			}
		}
	}
	return now.Add(foreseeable(max(pause, minPause))), pause >= 0
}

// pauseOf is how long after that time of the server's clock a text says to try again, or -1 if it does not say.
func pauseOf(text string, clock time.Time) time.Duration {
	number, ok := roundUp(text)
	switch {
	case ok && number >= 1e11:
		return max(0, time.UnixMilli(number).Sub(clock))
	case ok && number >= 1e9: // as a pause, 31 years
		return max(0, time.Unix(number, 0).Sub(clock))
	case ok:
		return time.Duration(number) * time.Second
	}
	if before, utc := strings.CutSuffix(text, " UTC"); utc { // a common mistake
		text = before + " GMT"
	}
	date, err := http.ParseTime(text)
	if err != nil {
		date, err = time.Parse(time.RFC3339, text)
	}
	if err != nil {
		return -1
	}
	return max(0, date.Sub(clock))
}

// roundUp reads a number that is not negative, and rounds a fraction up. One that is too large is the largest.
func roundUp(text string) (int64, bool) {
	whole, fraction, _ := strings.Cut(strings.TrimSpace(text), ".")
	if whole+fraction == "" || strings.Trim(whole+fraction, "0123456789") != "" {
		return 0, false
	}
	number, err := strconv.ParseInt("0"+whole, 10, 64)
	if err != nil { // out of range, because there are only digits
		return math.MaxInt64, true
	}
	if strings.Trim(fraction, "0") != "" && number < math.MaxInt64 {
		number++
	}
	return number, true
}

// isNothing tells whether nothing remains of a limit.
func isNothing(remaining string) bool {
	number, ok := roundUp(strings.TrimPrefix(remaining, "-"))
	return ok && (number == 0 || remaining[0] == '-')
}

// told is what a response tells of a limit.
type told struct{ remaining, reset string }

// limitsOf returns what the fields of a response tell of limits. What it cannot read, it leaves out.
func limitsOf(header http.Header) []told {
	var limits []told
	for _, prefix := range [...]string{"Ratelimit-", "X-Ratelimit-", "X-Rate-Limit-"} {
		limits = append(limits, told{header.Get(prefix + "Remaining"), header.Get(prefix + "Reset")})
	}
	var draft7 told // in which all is of one limit: limit=100, remaining=0, reset=30
	for _, member := range splitUnquoted(strings.Join(header["Ratelimit"], ","), ',') {
		var limit told
		for _, parameter := range splitUnquoted(member, ';') {
			name, value, _ := strings.Cut(strings.TrimSpace(parameter), "=")
			switch name {
			case "r":
				limit.remaining = value
			case "t":
				limit.reset = value
			case "remaining":
				draft7.remaining = value
			case "reset":
				draft7.reset = value
			}
		}
		limits = append(limits, limit)
	}
	return append(limits, draft7)
}

// splitUnquoted splits a structured field (RFC 9651) at a separator that stands in no String.
func splitUnquoted(text string, separator byte) []string {
	var parts []string
	begin, quoted := 0, false
	for i := 0; i < len(text); i++ {
		switch {
		case text[i] == '"':
			quoted = !quoted
		case quoted && text[i] == '\\':
			i++
		case !quoted && text[i] == separator:
			parts, begin = append(parts, text[begin:i]), i+1
		}
	}
	return append(parts, text[begin:])
}
