package algorithm

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Parse reads the text of a policy, or of several with commas between them. It does not check the numbers.
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

// String is the text that Parse reads.
func (n Numbers) String() string {
	a := &table[n.Algorithm-1]
	if a.Refills() {
		return fmt.Sprintf("%s %d %d/%s", a.Word, n.Limit, n.Refill, spanText(n.Span))
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
	want := 1
	if a.Refills() {
		want = 2
	}
	if len(words) != want {
		return Numbers{}, fmt.Errorf("has %d words after %q, and needs %d", len(words), a.Word, want)
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

// parseRate reads 100/1m.
func parseRate(text string) (amount int64, span time.Duration, err error) {
	before, after, ok := strings.Cut(text, "/")
	if !ok {
		return 0, 0, fmt.Errorf("%q has no slash between amount and duration", text)
	}
	if amount, err = parseAmount(before); err != nil {
		return 0, 0, err
	}
	span, err = parseSpan(after)
	return amount, span, err
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

// spanText is a duration without parts that are zero: 1m rather than 1m0s. Whole days are written as 30d.
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
