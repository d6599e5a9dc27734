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

// Span formats a duration in microseconds, rounded up to milliseconds, so that it is over when the text says so. From
// an hour on, the text has two units, such as 1h5m or 4d9h. Minutes are rounded up, and hours to the nearest hour.
func Span(micros int64) string {
	const day = 24 * time.Hour
	span := time.Duration((micros+999)/1000) * time.Millisecond
	if span < time.Hour {
		return span.String()
	}
	span = (span + time.Minute - 1).Truncate(time.Minute)
	large, small, names := time.Hour, time.Minute, "hm"
	if span >= day {
		span, large, small, names = span.Round(time.Hour), day, time.Hour, "dh"
	}
	text := fmt.Sprintf("%d%c", span/large, names[0])
	if rest := span % large / small; rest > 0 {
		text += fmt.Sprintf("%d%c", rest, names[1])
	}
	return text
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
