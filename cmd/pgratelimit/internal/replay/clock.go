package replay

import (
	"bytes"
	"errors"
	"time"
)

var errTime = errors.New("the time cannot be read")

// parseTime returns the microseconds since 1970 of a text, whose shape says which format it has: RFC 3339, also with a
// space or without a zone (then UTC), the format of access logs, or a number of seconds, milliseconds, microseconds or
// nanoseconds since 1970. If layout is not "", it is a layout of package time.
func parseTime(text []byte, layout string) (int64, error) {
	switch {
	case layout != "":
		t, err := time.Parse(layout, string(text))
		if err != nil || t.Year() < 1970 || t.Year() > lastYear {
			return 0, errTime
		}
		return t.UnixMicro(), nil
	case len(text) > 4 && text[4] == '-':
		return parseRFC3339(text)
	case bytes.IndexByte(text, '/') > 0:
		return parseAccessTime(text)
	}
	return parseUnix(text)
}

const lastYear = 2200

// digits reads the first n bytes of text as a number.
func digits(text []byte, n int) (number int64, rest []byte, ok bool) {
	if len(text) < n {
		return 0, nil, false
	}
	for _, c := range text[:n] {
		if c < '0' || c > '9' {
			return 0, nil, false
		}
		number = number*10 + int64(c-'0')
	}
	return number, text[n:], true
}

// take removes one of the separators from the front of text.
func take(text []byte, separators string) (rest []byte, ok bool) {
	if len(text) == 0 || bytes.IndexByte([]byte(separators), text[0]) < 0 {
		return nil, false
	}
	return text[1:], true
}

// parseRFC3339 reads a time such as 2026-11-28T20:00:00.123+01:00.
func parseRFC3339(text []byte) (int64, error) {
	year, text, ok1 := digits(text, 4)
	text, ok2 := take(text, "-")
	month, text, ok3 := digits(text, 2)
	text, ok4 := take(text, "-")
	day, text, ok5 := digits(text, 2)
	text, ok6 := take(text, "Tt ")
	if !ok1 || !ok2 || !ok3 || !ok4 || !ok5 || !ok6 {
		return 0, errTime
	}
	return parseClock(year, month, day, text)
}

// parseAccessTime reads a time such as 28/Nov/2026:20:00:00 +0100.
func parseAccessTime(text []byte) (int64, error) {
	day, text, ok1 := digits(text, 2)
	text, ok2 := take(text, "/")
	if !ok1 || !ok2 || len(text) < 3 {
		return 0, errTime
	}
	at := bytes.Index([]byte("JanFebMarAprMayJunJulAugSepOctNovDec"), text[:3])
	text, ok3 := take(text[3:], "/")
	year, text, ok4 := digits(text, 4)
	text, ok5 := take(text, ":")
	if at < 0 || at%3 != 0 || !ok3 || !ok4 || !ok5 {
		return 0, errTime
	}
	return parseClock(year, int64(at/3+1), day, text)
}

// parseClock reads the time of the day, its fraction and its zone. Without a zone, it is UTC.
func parseClock(year, month, day int64, text []byte) (int64, error) {
	hour, text, ok1 := digits(text, 2)
	text, ok2 := take(text, ":")
	minute, text, ok3 := digits(text, 2)
	text, ok4 := take(text, ":")
	second, text, ok5 := digits(text, 2)
	if !ok1 || !ok2 || !ok3 || !ok4 || !ok5 || year < 1970 || year > lastYear || month < 1 || month > 12 ||
		day < 1 || day > 31 || hour > 23 || minute > 59 || second > 60 {
		return 0, errTime
	}
	micros, unit := int64(0), int64(100_000)
	if rest, ok := take(text, ".,"); ok {
		for text = rest; len(text) > 0 && '0' <= text[0] && text[0] <= '9'; text = text[1:] {
			micros += int64(text[0]-'0') * unit
			unit /= 10
		}
	}
	offset, err := parseZone(text)
	seconds := daysSince1970(year, month, day)*86400 + hour*3600 + minute*60 + second - offset
	if err != nil || seconds < 0 {
		return 0, errTime
	}
	return seconds*1e6 + micros, nil
}

// parseZone returns the seconds that a zone is ahead of UTC.
func parseZone(text []byte) (int64, error) {
	if text = bytes.TrimLeft(text, " "); len(text) == 0 || len(text) == 1 && (text[0] == 'Z' || text[0] == 'z') {
		return 0, nil
	}
	sign := int64(1)
	if text[0] == '-' {
		sign = -1
	}
	rest, ok1 := take(text, "+-")
	hours, rest, ok2 := digits(rest, 2)
	if len(rest) > 0 && rest[0] == ':' {
		rest = rest[1:]
	}
	if len(rest) == 0 && ok1 && ok2 { // Postgres writes +00
		return sign * hours * 3600, nil
	}
	minutes, rest, ok3 := digits(rest, 2)
	if !ok1 || !ok2 || !ok3 || len(rest) > 0 || hours > 23 || minutes > 59 {
		return 0, errTime
	}
	return sign * (hours*3600 + minutes*60), nil
}

// daysSince1970 counts days, with March as the first month of a year, so that a leap day is the last day of a year.
func daysSince1970(year, month, day int64) int64 {
	if month <= 2 {
		year, month = year-1, month+12
	}
	return 365*year + year/4 - year/100 + year/400 + (153*(month-3)+2)/5 + day - 719469
}

// parseUnix reads a number of seconds, or of milliseconds, microseconds or nanoseconds if it is too large for seconds.
func parseUnix(text []byte) (int64, error) {
	whole, n := int64(0), 0
	for ; n < len(text) && n < 19 && '0' <= text[n] && text[n] <= '9'; n++ {
		whole = whole*10 + int64(text[n]-'0')
	}
	if n == 0 || whole < 0 {
		return 0, errTime
	}
	perUnit, divisor := int64(1e6), int64(1)
	switch {
	case whole >= 1e17:
		perUnit, divisor = 1, 1000
	case whole >= 1e14:
		perUnit = 1
	case whole >= 1e11:
		perUnit = 1000
	}
	micros := whole * perUnit / divisor
	if n == len(text) {
		return micros, nil
	}
	if text[n] != '.' {
		return 0, errTime
	}
	for unit, i := perUnit/10, n+1; i < len(text); i, unit = i+1, unit/10 {
		if text[i] < '0' || text[i] > '9' {
			return 0, errTime
		}
		micros += int64(text[i]-'0') * unit
	}
	return micros, nil
}
