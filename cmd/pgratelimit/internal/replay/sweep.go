package replay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Sweep is the search for the smallest limit that denies little enough.
type Sweep struct {
	Policy string  `json:"policy"` // with N in place of the limit
	Target string  `json:"deny_at_most"`
	Limit  *int64  `json:"limit"` // null if no limit does
	Found  string  `json:"found"` // the policy with this limit, or ""
	Curve  []Point `json:"curve"` // by limit
}

// Point is what one limit would deny.
type Point struct {
	Limit       int64   `json:"limit"`
	Denied      int64   `json:"denied"`
	DeniedShare float64 `json:"denied_share"`
	KeysDenied  int64   `json:"keys_denied"`
}

// Shown returns the points without those that deny as much as the one before.
func (s *Sweep) Shown() (points []Point) {
	for i, p := range s.Curve {
		if i == 0 || p.Denied != s.Curve[i-1].Denied || s.Limit != nil && p.Limit == *s.Limit {
			points = append(points, p)
		}
	}
	return points
}

// Target is the largest share of requests, or number of keys, that may be denied.
type Target struct {
	text  string
	share float64
	keys  int64 // -1 if share counts
}

// ParseTarget reads a text such as "0.1%" or "5 keys".
func ParseTarget(text string) (Target, error) {
	if count, _, ok := strings.Cut(text, " key"); ok {
		n, err := strconv.ParseInt(strings.TrimSpace(count), 10, 64)
		if err == nil && n >= 0 {
			return Target{text: text, keys: n}, nil
		}
	}
	if share, err := ParseShare(text); err == nil {
		return Target{text: text, share: share, keys: -1}, nil
	}
	return Target{}, fmt.Errorf(`%q is neither a share like "0.1%%" nor a number like "5 keys"`, text)
}

// ParseShare reads a percentage such as "0.1%".
func ParseShare(text string) (float64, error) {
	number, ok := strings.CutSuffix(strings.TrimSpace(text), "%")
	share, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
	if !ok || err != nil || !(0 <= share && share <= 100) {
		return 0, fmt.Errorf(`%q is not a share like "0.1%%"`, text)
	}
	return share / 100, nil
}

func (t Target) metBy(p Point) bool {
	if t.keys >= 0 {
		return p.KeysDenied <= t.keys
	}
	return p.DeniedShare <= t.share
}

var placeholder = regexp.MustCompile(`\bN\b`)

// atOnce is how many limits one reading of the log tries.
const atOnce = 16

// sweep searches for a limit. Each reading of the log tries 16 limits: first the powers of 4, then limits between the
// largest that denies too much and the smallest that does not. If each request costs 1, a larger limit never denies
// more. With other costs it can, and then the limit that is found meets the target, and the limit below it does not.
func (in *Input) sweep(ctx context.Context, text string, target Target, t *table, maxKeys int) (*Sweep, error) {
	s := &Sweep{Policy: text, Target: target.text}
	below, found := int64(0), int64(0) // below denies too much, and found does not; 0 means there is none yet
	for limit, tries := int64(1), []int64(nil); ; tries = nil {
		switch {
		case limit > 0:
			for ; len(tries) < atOnce; limit *= 4 {
				tries = append(tries, limit)
			}
			limit = 0
		case found == 0 || found-below <= 1:
			slices.SortFunc(s.Curve, func(a, b Point) int { return cmp.Compare(a.Limit, b.Limit) })
			if found > 0 {
				s.Limit, s.Found = &found, placeholder.ReplaceAllString(text, strconv.FormatInt(found, 10))
			}
			return s, nil
		default:
			for i := int64(1); i <= atOnce; i++ {
				if try := below + max((found-below)*i/(atOnce+1), i); try < found && !slices.Contains(tries, try) {
					tries = append(tries, try)
				}
			}
		}
		points, err := in.try(ctx, text, tries, t, maxKeys)
		if err != nil {
			return nil, err
		}
		s.Curve = append(s.Curve, points...)
		for _, p := range points {
			if target.metBy(p) {
				found = p.Limit
				break
			}
			below = p.Limit
		}
	}
}

// checkSweep returns an error if a sweep of this policy cannot be done.
func (in *Input) checkSweep(text string) error {
	if !placeholder.MatchString(text) {
		return fmt.Errorf("%q has no N in place of the limit", text)
	}
	if slices.Contains(in.Files, "-") {
		return errors.New("it reads the log several times, so the log cannot be standard input")
	}
	_, err := ParsePolicy(placeholder.ReplaceAllString(text, "1"))
	return err
}

// try replays the log with several limits. It leaves out limits that the policy does not allow.
func (in *Input) try(
	ctx context.Context, text string, limits []int64, t *table, maxKeys int,
) (points []Point, err error) {
	all := &replayed{keys: newKeyring(), maxKeys: maxKeys}
	var refused error
	for _, limit := range limits {
		p, err := ParsePolicy(placeholder.ReplaceAllString(text, strconv.FormatInt(limit, 10)))
		if err != nil {
			refused = err
			continue
		}
		all.runs, points = append(all.runs, newRun(p, t)), append(points, Point{Limit: limit})
	}
	if len(points) == 0 {
		return nil, refused
	}
	_, err = in.each(ctx, all.keys, all.decide)
	for i, r := range all.runs {
		t := r.totals(all.keys, nil, 0)
		points[i].Denied, points[i].DeniedShare, points[i].KeysDenied = t.Denied, t.DeniedShare, t.KeysDenied
	}
	return points, err
}
