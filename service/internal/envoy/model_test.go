package envoy_test

import (
	"encoding/json"
	"fmt"
	"math"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

// This file has a model of the protocol, written from a description of the reference and not from this package. It
// knows two rules of counting: that of the reference, and ours.

type modelFile struct {
	Domain      string
	Descriptors []*modelRule
}

type modelRule struct {
	Key, Value     string
	RateLimit      *modelLimit `yaml:"rate_limit"`
	Descriptors    []*modelRule
	ShadowMode     bool `yaml:"shadow_mode"`
	QuotaMode      bool `yaml:"quota_mode"`
	ShareThreshold bool `yaml:"share_threshold"`
}

type modelLimit struct {
	Unit            string
	RequestsPerUnit uint32 `yaml:"requests_per_unit"`
	Unlimited       bool
	Name            string
	Replaces        []struct{ Name string }
}

// mistake is one that a test makes in the model on purpose.
type mistake string

const (
	none                  mistake = ""
	keyBeforeValue        mistake = "key before value"
	wildcardsBeforeValue  mistake = "wildcards before value"
	wildcardsInReverse    mistake = "wildcards in reverse"
	wildcardOfOneOrMore   mistake = "wildcard of one or more"
	keyBeforeWildcards    mistake = "key before wildcards"
	limitInTheMiddle      mistake = "limit in the middle"
	overrideIgnored       mistake = "override ignored"
	shareIgnored          mistake = "share ignored"
	shareAlways           mistake = "share always"
	unitNotInKey          mistake = "unit not in key"
	oneMonthIs31Days      mistake = "one month is 31 days"
	weekOnMonday          mistake = "week on monday"
	resetRoundsDown       mistake = "reset rounds down"
	zeroHitsCountOne      mistake = "zero hits count one"
	hitsOfRequestFirst    mistake = "hits of request first"
	hitsOfRequestIgnored  mistake = "hits of request ignored"
	negativeIgnored       mistake = "negative ignored"
	negativeBelowZero     mistake = "negative below zero"
	deniedTakes           mistake = "denied takes"
	eachByItself          mistake = "each by itself"
	lookIsTake            mistake = "look is take"
	lookAtTheLimitIsOver  mistake = "look at the limit is over"
	shadowDenies          mistake = "shadow denies"
	shadowTakesWhenDenied mistake = "shadow takes when denied"
	shadowNeverCounts     mistake = "shadow never counts"
	quotaDenies           mistake = "quota denies"
	quotaNeverDenies      mistake = "quota never denies"
	quotaTakesWhenOver    mistake = "quota takes when over"
	unlimitedCounts       mistake = "unlimited counts"
	replacedCounts        mistake = "replaced counts"
	replacesOnlyLater     mistake = "replaces only later"
	duplicatesTogether    mistake = "duplicates together"
	deniedShowsItsHits    mistake = "denied shows its hits"
)

var mistakes = []mistake{
	keyBeforeValue,
	wildcardsBeforeValue,
	wildcardsInReverse,
	wildcardOfOneOrMore,
	keyBeforeWildcards,
	limitInTheMiddle,
	overrideIgnored,
	shareIgnored,
	shareAlways,
	unitNotInKey,
	oneMonthIs31Days,
	weekOnMonday,
	resetRoundsDown,
	zeroHitsCountOne,
	hitsOfRequestFirst,
	hitsOfRequestIgnored,
	negativeIgnored,
	negativeBelowZero,
	deniedTakes,
	eachByItself,
	lookIsTake,
	lookAtTheLimitIsOver,
	shadowDenies,
	shadowTakesWhenDenied,
	shadowNeverCounts,
	quotaDenies,
	quotaNeverDenies,
	quotaTakesWhenOver,
	unlimitedCounts,
	replacedCounts,
	replacesOnlyLater,
	duplicatesTogether,
	deniedShowsItsHits,
}

// model has the counts of all keys.
type model struct {
	files     map[string]*modelFile
	reference bool // denied requests count, and each descriptor is counted by itself
	mistake   mistake
	counts    map[string]int64
}

func newModel(t testing.TB, files map[string][]byte) *model {
	t.Helper()
	m := &model{files: map[string]*modelFile{}, counts: map[string]int64{}}
	for name, content := range files {
		var f modelFile
		require.NoError(t, yaml.Unmarshal(content, &f), name)
		m.files[f.Domain] = &f
	}
	return m
}

type modelRequest struct {
	Unix        int64             `json:"unix"`
	Domain      string            `json:"domain"`
	Descriptors []modelDescriptor `json:"descriptors"`
	Hits        uint32            `json:"hits_addend"`
}

type modelDescriptor struct {
	Entries  [][2]string `json:"entries"`
	Hits     *uint64     `json:"hits_addend"`
	Negative bool        `json:"negative"`
	Limit    []string    `json:"limit"` // the number and the unit
}

type modelAnswer struct {
	Overall  string        `json:"overall"`
	Statuses []modelStatus `json:"statuses"`
	Error    string        `json:"error"`
}

type modelStatus struct {
	Code      string `json:"code"`
	Limit     string `json:"limit"`
	Remaining uint32 `json:"remaining"`
	Reset     int64  `json:"reset_s"`
}

// modelAsk is a descriptor with the limit that counts it.
type modelAsk struct {
	limit                    *modelLimit
	shadow, quota, unlimited bool
	negative                 bool
	hits, most               int64
	key                      string
	reset                    int64
	over                     bool
	remaining                int64
}

func (m *model) find(f *modelFile, d modelDescriptor) (found *modelRule, entries [][2]string) {
	entries = append([][2]string(nil), d.Entries...)
	rules := f.Descriptors
	for i, e := range d.Entries {
		rule, wild := m.level(rules, e)
		if rule == nil {
			return nil, nil
		}
		if m.mistake != shareIgnored && wild && (rule.ShareThreshold || m.mistake == shareAlways) {
			entries[i][1] = rule.Value
		}
		if m.mistake == limitInTheMiddle && rule.RateLimit != nil {
			return rule, entries
		}
		found, rules = rule, rule.Descriptors
	}
	return found, entries
}

func (m *model) level(rules []*modelRule, e [2]string) (rule *modelRule, wild bool) {
	exact := func() *modelRule {
		for _, r := range rules {
			if r.Key == e[0] && r.Value != "" && r.Value == e[1] {
				return r
			}
		}
		return nil
	}
	pattern := func() (found *modelRule) {
		something := "(?s:.*)"
		if m.mistake == wildcardOfOneOrMore {
			something = "(?s:.+)"
		}
		for _, r := range rules {
			expression := strings.ReplaceAll(regexp.QuoteMeta(r.Value), `\*`, something)
			if r.Key == e[0] && strings.Contains(r.Value, "*") &&
				regexp.MustCompile("^"+expression+"$").MatchString(e[1]) {
				if found = r; m.mistake != wildcardsInReverse {
					break
				}
			}
		}
		return found
	}
	bare := func() *modelRule {
		for _, r := range rules {
			if r.Key == e[0] && r.Value == "" {
				return r
			}
		}
		return nil
	}
	order := []func() *modelRule{exact, pattern, bare}
	at := 1 // the place of pattern
	switch m.mistake {
	case keyBeforeValue:
		order, at = []func() *modelRule{bare, exact, pattern}, 2
	case wildcardsBeforeValue:
		order, at = []func() *modelRule{pattern, exact, bare}, 0
	case keyBeforeWildcards:
		order, at = []func() *modelRule{exact, bare, pattern}, 2
	}
	for i, try := range order {
		if r := try(); r != nil {
			return r, i == at
		}
	}
	return nil, false
}

func (m *model) ask(q modelRequest, d modelDescriptor) *modelAsk {
	f := m.files[q.Domain]
	if f == nil {
		return nil
	}
	a := &modelAsk{negative: d.Negative && m.mistake != negativeIgnored}
	entries := d.Entries
	if d.Limit != nil && m.mistake != overrideIgnored {
		a.limit = &modelLimit{Unit: d.Limit[1]}
		_, _ = fmt.Sscan(d.Limit[0], &a.limit.RequestsPerUnit)
	} else {
		rule, counted := m.find(f, d)
		if rule == nil || rule.RateLimit == nil {
			return nil
		}
		a.limit, a.shadow, a.quota, entries = rule.RateLimit, rule.ShadowMode, rule.QuotaMode, counted
	}
	a.unlimited = a.limit.Unlimited
	a.most = int64(a.limit.RequestsPerUnit)
	a.hits = max(int64(q.Hits), 1)
	if m.mistake == hitsOfRequestIgnored {
		a.hits = 1
	}
	if d.Hits != nil && (m.mistake != hitsOfRequestFirst || q.Hits == 0) {
		a.hits = int64(min(*d.Hits, math.MaxInt64/1000))
		if m.mistake == zeroHitsCountOne {
			a.hits = max(a.hits, 1)
		}
	}
	if a.unlimited {
		return a
	}
	const day = 24 * 3600
	lasts := map[string]int64{
		"SECOND": 1, "MINUTE": 60, "HOUR": 3600, "DAY": day, "WEEK": 7 * day, "MONTH": 30 * day, "YEAR": 365 * day,
	}[strings.ToUpper(a.limit.Unit)]
	if m.mistake == oneMonthIs31Days && lasts == 30*day {
		lasts = 31 * day
	}
	now := q.Unix
	if m.mistake == weekOnMonday && lasts == 7*day {
		now += 3 * day
	}
	begins := now / lasts * lasts
	a.reset = begins + lasts - now
	if m.mistake == resetRoundsDown {
		a.reset--
	}
	unit := strings.ToUpper(a.limit.Unit)
	if m.mistake == unitNotInKey {
		unit, begins = "", 0
	}
	text, _ := json.Marshal([]any{q.Domain, entries, unit, begins})
	a.key = string(text)
	return a
}

func (m *model) answer(q modelRequest) modelAnswer {
	switch {
	case q.Domain == "":
		return modelAnswer{Error: "Unknown: rate limit domain must not be empty"}
	case len(q.Descriptors) == 0:
		return modelAnswer{Error: "Unknown: rate limit descriptor list must not be empty"}
	}
	asks := make([]*modelAsk, len(q.Descriptors))
	replaced := map[string]bool{}
	for i, d := range q.Descriptors {
		asks[i] = m.ask(q, d)
		if asks[i] == nil {
			continue
		}
		if m.mistake == replacesOnlyLater && replaced[asks[i].limit.Name] {
			asks[i] = nil
			continue
		}
		for _, r := range asks[i].limit.Replaces {
			replaced[r.Name] = true
		}
	}
	var counted []*modelAsk
	for i, a := range asks {
		if a == nil {
			continue
		}
		if !a.unlimited && replaced[a.limit.Name] && m.mistake != replacedCounts && m.mistake != replacesOnlyLater {
			asks[i] = nil
		} else if !a.unlimited || m.mistake == unlimitedCounts {
			counted = append(counted, a)
		}
	}
	var denied bool
	if m.reference {
		denied = m.countAsTheReference(counted)
	} else {
		denied = m.count(counted)
	}
	answer := modelAnswer{Overall: code(denied)}
	for _, a := range asks {
		switch {
		case a == nil:
			answer.Statuses = append(answer.Statuses, modelStatus{Code: "OK"})
		case a.unlimited && m.mistake != unlimitedCounts:
			answer.Statuses = append(answer.Statuses, modelStatus{Code: "OK", Remaining: math.MaxUint32})
		default:
			status := modelStatus{Code: code(a.over && !a.shadow), Reset: a.reset}
			status.Limit = fmt.Sprintf("%d per %s", a.most, strings.ToUpper(a.limit.Unit))
			if a.limit.Name != "" {
				status.Limit = a.limit.Name + ": " + status.Limit
			}
			if !a.over {
				status.Remaining = uint32(max(a.remaining, 0))
			}
			answer.Statuses = append(answer.Statuses, status)
		}
	}
	return answer
}

func code(over bool) string {
	if over {
		return "OVER_LIMIT"
	}
	return "OK"
}

func (m *model) countAsTheReference(asks []*modelAsk) bool {
	for _, a := range asks {
		m.counts[a.key] += a.hits
		a.over = m.counts[a.key] > a.most
		a.remaining = a.most - m.counts[a.key]
	}
	return m.denied(asks)
}

func (m *model) denied(asks []*modelAsk) bool {
	quotas, over := 0, 0
	for _, a := range asks {
		isOver := a.over && (!a.shadow || m.mistake == shadowDenies)
		switch {
		case a.quota && m.mistake == quotaNeverDenies:
		case a.quota && m.mistake != quotaDenies:
			quotas++
			if isOver {
				over++
			}
		case isOver:
			return true
		}
	}
	return quotas > 0 && quotas == over
}

// count applies our rule: the descriptors take in their order, and all of it is undone if the request is denied.
func (m *model) count(asks []*modelAsk) bool {
	taken := map[string]int64{}
	for _, a := range asks {
		if a.shadow && m.mistake != shadowDenies || a.negative {
			continue
		}
		counts := m.counts[a.key] + taken[a.key]
		if m.mistake == duplicatesTogether {
			counts = m.counts[a.key]
		}
		a.over = counts+a.hits > a.most || m.mistake == lookAtTheLimitIsOver && a.hits == 0 && counts >= a.most
		switch {
		case m.mistake == lookIsTake && a.hits == 0 && !a.over && counts < a.most:
			taken[a.key]++
		case !a.over || m.mistake == quotaTakesWhenOver && a.quota:
			taken[a.key] += a.hits
		}
		a.remaining = a.most - counts - a.hits
	}
	denied := m.denied(asks)
	if denied && m.mistake != deniedTakes {
		if m.mistake == eachByItself {
			for _, a := range asks {
				if !a.over && !a.shadow && !a.negative {
					m.counts[a.key] += a.hits
				}
			}
		}
		in := map[string]int64{}
		for _, a := range asks {
			if a.shadow && !a.negative {
				counts := m.counts[a.key] + in[a.key]
				if a.over = counts+a.hits > a.most; !a.over {
					in[a.key] += a.hits
				}
			}
			if m.mistake != deniedShowsItsHits || a.shadow || a.negative {
				a.remaining = a.most - m.counts[a.key]
			}
		}
		if m.mistake == shadowTakesWhenDenied {
			for key, hits := range in {
				m.counts[key] += hits
			}
		}
		return true
	}
	for key, hits := range taken {
		m.counts[key] += hits
	}
	for _, a := range asks {
		if a.negative {
			m.counts[a.key] -= a.hits
			if m.mistake != negativeBelowZero {
				m.counts[a.key] = max(m.counts[a.key], 0)
			}
			a.remaining = a.most - m.counts[a.key]
		}
	}
	for _, a := range asks {
		if a.shadow && !a.negative {
			a.over = m.counts[a.key]+a.hits > a.most
			a.remaining = a.most - m.counts[a.key] - a.hits
			if !a.over && m.mistake != shadowNeverCounts {
				m.counts[a.key] += a.hits
			}
		}
	}
	return denied
}
