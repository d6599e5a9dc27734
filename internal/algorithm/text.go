package algorithm

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Parse parses one or more policies, separated by commas. Parse does not check whether the numbers are in range.
func Parse(text string) ([]Numbers, error) {
	var all []Numbers
	for one := range strings.SplitSeq(text, ",") {
		n, err := parse(strings.Fields(one))
		if err != nil {
			return nil, err
		}
		all = append(all, n)
	}
	return all, nil
}

// String returns the policy's text, which Parse can read.
func (n Numbers) String() string {
	a := &table[n.Algorithm-1]
	switch {
	case n.HasSlots():
		return fmt.Sprintf("%s %d", a.Word, n.Limit)
	case a.Refills():
		return fmt.Sprintf("%s %d %d/%s", a.Word, n.Limit, n.Refill, spanText(n.Span))
	case a.Zoned() && n.Zone == Epoch:
		return fmt.Sprintf("%s %d/%s", a.Word, n.Limit, spanText(n.Span))
	case a.Zoned() && n.Zone == utc:
		return fmt.Sprintf("%s %d/%s", a.Word, n.Limit, UnitName(n.Span))
	case a.Zoned():
		return fmt.Sprintf("%s %d/%s %s", a.Word, n.Limit, UnitName(n.Span), n.Zone)
	}
	return fmt.Sprintf("%s %d/%s", a.Word, n.Limit, spanText(n.Span))
}

func parse(words []string) (Numbers, error) {
	if len(words) == 0 {
		return Numbers{}, errors.New("is empty")
	}
	a, ok := ByWord(words[0])
	if !ok {
		return Numbers{}, fmt.Errorf("%q is no algorithm", words[0])
	}
	words = words[1:]
	if a.Zoned() {
		return parseZoned(&a, words)
	}
	want := 1
	if a.Refills() {
		want = 2
	}
	if len(words) != want {
		return Numbers{}, fmt.Errorf("has %d words after %q, and needs %d", len(words), a.Word, want)
	}
	if a.Code == Concurrency {
		limit, err := parseAmount(words[0])
		return Numbers{Algorithm: a.Code, Limit: limit}, err
	}
	amount, span, err := parseRate(words[want-1])
	if err != nil {
		return Numbers{}, err
	}
	n := Numbers{Algorithm: a.Code, Limit: amount, Span: span}
	if a.Refills() {
		n.Refill = amount
		n.Limit, err = parseAmount(words[0])
	}
	return n, err
}

// utc is the time zone of a calendar window whose text names no time zone.
const utc = "UTC"

// parseZoned parses words such as "1000/month" and "Europe/Berlin", or "100/30s" for windows that are aligned to the
// epoch. Without a second word, the time zone of a month is UTC.
func parseZoned(a *Algorithm, words []string) (Numbers, error) {
	if len(words) != 1 && len(words) != 2 {
		return Numbers{}, fmt.Errorf("has %d words after %q, and needs 1 or 2", len(words), a.Word)
	}
	amount, unit, err := parsePer(words[0])
	if err != nil {
		return Numbers{}, err
	}
	n := Numbers{Algorithm: a.Code, Limit: amount, Span: UnitSpan(unit), Zone: utc}
	switch {
	case len(words) == 2 && words[1] == Epoch:
		return Numbers{}, fmt.Errorf("%q is no time zone; for windows since the epoch, write 10s or 30d", words[1])
	case n.Span == 0 && len(words) == 2:
		return Numbers{}, fmt.Errorf("%q is not %s, and only these have a time zone", unit, UnitNames())
	case n.Span == 0:
		if n.Span, err = parseSpan(unit); err != nil {
			return Numbers{}, fmt.Errorf("%q is not %s, and no duration like 10s or 30d", unit, UnitNames())
		}
		n.Zone = Epoch
	case len(words) == 2:
		n.Zone = words[1]
	}
	return n, nil
}

// parseRate parses a text such as "100/1m".
func parseRate(text string) (amount int64, span time.Duration, err error) {
	amount, after, err := parsePer(text)
	if err != nil {
		return 0, 0, err
	}
	span, err = parseSpan(after)
	return amount, span, err
}

// parsePer parses the amount before a slash, and returns the text after the slash.
func parsePer(text string) (amount int64, after string, err error) {
	before, after, ok := strings.Cut(text, "/")
	if !ok {
		return 0, "", fmt.Errorf("%q has no slash between amount and duration", text)
	}
	amount, err = parseAmount(before)
	return amount, after, err
}

func parseAmount(text string) (int64, error) {
	amount, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%q is not a whole number of at most %d", text, math.MaxInt64)
	}
	return amount, nil
}

const day = 24 * time.Hour

func parseSpan(text string) (span time.Duration, err error) {
	bad := fmt.Errorf("%q is not a duration like 10s, 1m, 1h30m or 30d, of at most 292 years", text)
	days, rest, ok := strings.Cut(text, "d")
	if ok {
		n, err := strconv.ParseUint(days, 10, 64)
		if err != nil || n > uint64(math.MaxInt64/day) || strings.HasPrefix(rest, "-") || strings.HasPrefix(rest, "+") {
			return 0, bad
		}
		if span = time.Duration(n) * day; rest == "" {
			return span, nil
		}
	} else {
		rest = text
	}
	part, err := time.ParseDuration(rest)
	if err != nil || part > math.MaxInt64-span {
		return 0, bad
	}
	return span + part, nil
}

// spanText formats a duration without its zero parts: "1m" instead of "1m0s". Whole days are formatted like "30d".
func spanText(span time.Duration) string {
	if span >= day && span%day == 0 {
		return strconv.FormatInt(int64(span/day), 10) + "d"
	}
	text := span.String()
	for _, zero := range []string{"m0s", "h0m"} {
		if strings.HasSuffix(text, zero) {
			text = text[:len(text)-2]
		}
	}
	return text
}
