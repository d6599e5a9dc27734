package httplimit

import (
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// statusOverloaded is the status of some services that are overloaded.
const statusOverloaded = 529

// minPause is the shortest pause after a refusal.
const minPause = time.Second

// retryAt returns the time that a refusal names for the next try. The bool is false for any other response. See
// [Transport].
func retryAt(response *http.Response) (time.Time, bool) {
	switch response.StatusCode {
	case http.StatusTooManyRequests, http.StatusForbidden, http.StatusServiceUnavailable, statusOverloaded:
	default:
		return time.Time{}, false
	}
	header, now := response.Header, time.Now()
	until := func(at time.Time) time.Duration { return max(0, at.Sub(now)) }
	if sent, ok := readDate(header.Get("Date")); ok {
		until = func(at time.Time) time.Duration {
			pause := at.Sub(sent) // both times are by the server's clock
			// A server with a wrong clock may forward a time that another server read from a right clock.
			if ours := at.Sub(now); sent.Sub(now).Abs() > 24*time.Hour && ours.Abs() < pause.Abs() {
				pause = ours
			}
			return max(0, pause)
		}
	}
	pause := time.Duration(-1)
	for _, text := range itemsOf(strings.Join(header["Retry-After"], ",")) {
		pause = max(pause, pauseOf(text, until))
	}
	for _, text := range itemsOf(strings.Join(header["Retry-After-Ms"], ",")) {
		if millis, ok := roundUp(text); ok {
			pause = max(pause, time.Duration(min(millis, 1e12))*time.Millisecond)
		}
	}
	if pause < 0 {
		for _, limit := range limitsOf(header) {
			unsaid := limit.remaining == "" && response.StatusCode == http.StatusTooManyRequests
			if unsaid || isNothing(limit.remaining) {
				pause = max(pause, pauseOf(limit.reset, until))
			}
		}
	}
	return now.Add(foreseeable(max(pause, minPause))), pause >= 0
}

// itemsOf splits the text of a field at commas, because a proxy may have joined several fields. It drops parameters and
// quotes. The weekday of a date becomes a separate item, which pauseOf cannot read.
func itemsOf(text string) []string {
	items := strings.Split(text, ",")
	for i, item := range items {
		item, _, _ = strings.Cut(item, ";")
		items[i] = strings.Trim(item, " \t\"")
	}
	return items
}

// pauseOf returns the pause that an item asks for, or -1 if it cannot read the item. The argument until returns the
// pause that ends at a given time.
func pauseOf(item string, until func(time.Time) time.Duration) time.Duration {
	number, ok := roundUp(item)
	switch {
	case ok && number >= 1e11:
		return until(time.UnixMilli(number))
	case ok && number >= 1e9: // not a pause of 31 years, but seconds since 1970
		return until(time.Unix(number, 0))
	case ok:
		return time.Duration(number) * time.Second
	}
	date, ok := readDate(item)
	if !ok {
		return -1
	}
	return until(date)
}

// readDate reads a date of HTTP (RFC 9110 section 5.6.7), also in variants that servers send. It skips a weekday before
// a comma.
func readDate(text string) (time.Time, bool) {
	text = strings.ToUpper(strings.TrimSpace(text[strings.LastIndexByte(text, ',')+1:]))
	for _, zone := range [...]string{" GMT", " UTC"} {
		if before, ok := strings.CutSuffix(text, zone); ok {
			text = before + " +0000"
		}
	}
	for _, layout := range [...]string{
		"2 Jan 2006 15:04:05 -0700", "2-Jan-06 15:04:05 -0700", time.ANSIC, time.RFC3339,
	} {
		if date, err := time.Parse(layout, text); err == nil {
			return date, true
		}
	}
	return time.Time{}, false
}

// roundUp reads a number without a sign, and rounds a fraction up. For a number that is too large, it returns the
// largest int64.
func roundUp(text string) (int64, bool) {
	whole, fraction, _ := strings.Cut(text, ".")
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

// isNothing tells whether remaining is 0 or negative.
func isNothing(remaining string) bool {
	number, ok := roundUp(strings.TrimPrefix(remaining, "-"))
	return ok && (number == 0 || remaining[0] == '-')
}

// told is what a response says about one limit.
type told struct{ remaining, reset string }

// limitsOf returns what the fields of a response say about limits. It skips text that it cannot read.
func limitsOf(header http.Header) []told {
	var limits []told
	// add pairs the items of two fields. If one field has fewer items, its last item is repeated.
	add := func(remaining, reset []string) {
		left, again := itemsOf(strings.Join(remaining, ",")), itemsOf(strings.Join(reset, ","))
		for i := range max(len(left), len(again)) {
			limits = append(limits, told{left[min(i, len(left)-1)], again[min(i, len(again)-1)]})
		}
	}
	for _, prefix := range [...]string{"Ratelimit-", "X-Ratelimit-", "X-Rate-Limit-"} {
		add(header[prefix+"Remaining"], header[prefix+"Reset"])
		add(header[prefix+"Remaining"], header[prefix+"Reset-After"])
	}
	var remaining, reset []string // for draft 7, where one limit is limit=100, remaining=0, reset=30
	for _, member := range splitUnquoted(strings.Join(header["Ratelimit"], ","), ',') {
		var r, t []string
		for _, parameter := range splitUnquoted(member, ';') {
			name, value, _ := strings.Cut(parameter, "=")
			switch strings.TrimSpace(name) {
			case "r":
				r = []string{value}
			case "t":
				t = []string{value}
			case "remaining":
				remaining = append(remaining, value)
			case "reset":
				reset = append(reset, value)
			}
		}
		add(r, t)
	}
	add(remaining, reset)
	return limits
}

// splitUnquoted splits a structured field (RFC 9651) at the separators that are not in quotes.
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
