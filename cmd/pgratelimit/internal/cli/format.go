package cli

import (
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Printable returns a name or key in a form that cannot control a terminal. Printable quotes control characters.
func Printable(text string) string {
	odd := func(r rune) bool { return !unicode.IsPrint(r) || r == utf8.RuneError }
	if strings.ContainsFunc(text, odd) || strings.HasPrefix(text, `"`) || strings.TrimSpace(text) != text {
		return strconv.QuoteToGraphic(text)
	}
	return text
}

func Instant(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05Z") }

// Count returns a number with a noun, such as "1 row" or "2 rows".
func Count[N int | int64](n N, thing string) string {
	switch {
	case n == 1:
	case strings.HasSuffix(thing, "ch"):
		thing += "es"
	case strings.HasSuffix(thing, "xy"):
		thing = strings.TrimSuffix(thing, "y") + "ies"
	default:
		thing += "s"
	}
	return fmt.Sprintf("%d %s", n, thing)
}

// Span formats a time in microseconds. Span rounds up to milliseconds, so that the time is over when the text says so.
// From an hour on, the text has two units, such as 1h5m or 4d9h. Minutes are rounded up, and hours to the nearest hour.
func Span(micros int64) string {
	const day = 24 * time.Hour
	span := time.Duration((micros+999)/1000) * time.Millisecond
	if span < time.Hour {
		return span.String()
	}
	span = (span + time.Minute - 1).Truncate(time.Minute)
	if span < day {
		return fmt.Sprintf("%dh", span/time.Hour) + part(span%time.Hour, time.Minute, "m")
	}
	span = span.Round(time.Hour)
	return fmt.Sprintf("%dd", span/day) + part(span%day, time.Hour, "h")
}

// part formats the number of a unit, such as 5m. part returns "" for 0.
func part(span, unit time.Duration, name string) string {
	if span < unit {
		return ""
	}
	return fmt.Sprintf("%d%s", span/unit, name)
}

func Size(bytes int64) string {
	const units = "kMGTP"
	if bytes < 1000 {
		return fmt.Sprintf("%d B", bytes)
	}
	value, unit := float64(bytes), -1
	for ; value >= 1000 && unit < len(units)-1; unit++ {
		value /= 1000
	}
	return fmt.Sprintf("%.1f %cB", value, units[unit])
}
