package envoy

import (
	"strings"

	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	pb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
)

// match is the limit of a descriptor.
type match struct {
	limit *limit
	// counted are the descriptor's entries as the limit counts them: with the pattern instead of the value if the rule
	// has share_threshold.
	counted []entry
	stat    string // the name in the statistics
}

type entry struct{ key, value string }

func entriesOf(descriptor *ratelimitv3.RateLimitDescriptor) []entry {
	entries := make([]entry, len(descriptor.GetEntries()))
	for i, e := range descriptor.GetEntries() {
		entries[i] = entry{key: e.GetKey(), value: e.GetValue()}
	}
	return entries
}

// find returns the limit of a descriptor, or nil if none applies.
func (d *domain) find(descriptor *ratelimitv3.RateLimitDescriptor) *match {
	if own := descriptor.GetLimit(); own != nil {
		return d.override(descriptor, own)
	}
	entries := descriptor.GetEntries()
	at := &d.rules
	path := make([]step, 0, len(entries))
	for _, e := range entries {
		next := at.find(e.GetKey(), e.GetValue())
		if next.rule == nil {
			return nil
		}
		path = append(path, next)
		at = &next.rule.below
	}
	if len(path) == 0 || path[len(path)-1].rule.limit == nil {
		return nil
	}
	m := &match{limit: path[len(path)-1].rule.limit, counted: entriesOf(descriptor)}
	for i, s := range path {
		if s.how == byPattern && s.rule.shareThreshold {
			m.counted[i].value = s.pattern(m.counted[i].key)
		}
	}
	m.stat = d.statName(m, path, entriesOf(descriptor))
	return m
}

// override returns the limit that the request itself has for a descriptor. No rule needs to match.
func (d *domain) override(
	descriptor *ratelimitv3.RateLimitDescriptor, own *ratelimitv3.RateLimitDescriptor_RateLimitOverride,
) *match {
	entries := entriesOf(descriptor)
	return &match{
		limit: &limit{
			perUnit: own.GetRequestsPerUnit(), unit: pb.RateLimitResponse_RateLimit_Unit(own.GetUnit()),
		},
		counted: entries,
		stat:    d.name + "." + joined(entries),
	}
}

// step is the rule that an entry of a descriptor has matched, and by what.
type step struct {
	rule *rule
	how  matchedBy
}

type matchedBy uint8

const (
	byValue matchedBy = iota
	byPattern
	byKey
)

// find returns the rule for an entry: the one with its key and value, else the first wildcard that fits, else the one
// with its key.
func (v *level) find(key, value string) step {
	if len(v.byName) == 0 {
		return step{}
	}
	name := key + "_" + value
	if r := v.byName[name]; r != nil {
		return step{r, byValue}
	}
	for _, r := range v.wildcards {
		if matches(r.parts, name) {
			return step{r, byPattern}
		}
	}
	return step{v.byName[key], byKey}
}

// pattern returns the value with the * that the step has matched.
func (s step) pattern(key string) string { return strings.TrimPrefix(s.rule.name, key+"_") }

// statName returns the name of a limit in the statistics. It is that of the rule, unless a rule on the path has
// value_to_metric, or the last has detailed_metric.
func (d *domain) statName(m *match, path []step, entries []entry) string {
	if m.limit.detailedMetric {
		if !shares(path) {
			var name strings.Builder
			for _, e := range entries { // the reference writes the _ here even if there is no value
				name.WriteString("." + e.key + "_" + e.value)
			}
			return d.name + name.String()
		}
		return d.name + "." + joined(m.counted)
	}
	last := path[len(path)-1].rule
	detailed := false
	for i, s := range path {
		switch {
		case s.how == byValue, s.how == byPattern && (s.rule.shareThreshold || !s.rule.valueToMetric):
			entries[i].value = s.pattern(entries[i].key)
		case !s.rule.valueToMetric:
			entries[i].value = ""
		default:
			detailed = true
		}
	}
	if !detailed {
		return last.statName
	}
	return d.name + "." + joined(entries)
}

func shares(path []step) bool {
	for _, s := range path {
		if s.how == byPattern && s.rule.shareThreshold {
			return true
		}
	}
	return false
}

// joined returns entries in the form of the reference's statistics.
func joined(entries []entry) string {
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.key
		if e.value != "" {
			names[i] += "_" + e.value
		}
	}
	return strings.Join(names, ".")
}
