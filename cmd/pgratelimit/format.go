package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// printable returns a name or key in a form that is safe for a terminal. It may have control characters in it.
func printable(text string) string {
	odd := func(r rune) bool { return !unicode.IsPrint(r) || r == utf8.RuneError }
	if strings.ContainsFunc(text, odd) || strings.HasPrefix(text, `"`) || strings.TrimSpace(text) != text {
		return strconv.QuoteToGraphic(text)
	}
	return text
}

func instant(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05Z") }

// wait formats a time in microseconds, rounded up to milliseconds, so that it is over when the text says so.
func wait(micros int64) string {
	return (time.Duration((micros+999)/1000) * time.Millisecond).String()
}

func size(bytes int64) string {
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
