package envoy

import (
	"fmt"
	"slices"
	"strings"

	pb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/protobuf/types/known/structpb"
)

// Config has the rules of all domains. It does not change after Load has returned it.
type Config struct {
	domains map[string]*domain
}

// Domains returns the names of the domains, in order.
func (c *Config) Domains() []string {
	names := make([]string, 0, len(c.domains))
	for name := range c.domains {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// ConfigError says what is wrong in a file, and where.
type ConfigError struct {
	File   string
	Line   int // counted from 1; 0 if the whole file is meant
	Reason string
}

func (e *ConfigError) Error() string {
	if e.Line == 0 {
		return e.File + ": " + e.Reason
	}
	return fmt.Sprintf("%s:%d: %s", e.File, e.Line, e.Reason)
}

type domain struct {
	name  string
	file  string
	rules level
}

// level has the rules that an entry of a descriptor is compared with.
type level struct {
	// byName has each rule by the name that the reference gives it: its key, or its key and its value with _ between
	// them. So a rule with the key a_b also matches an entry with the key a and the value b, as in the reference.
	byName    map[string]*rule
	wildcards []*rule // the rules with a * in their names, in the order of the file
}

type rule struct {
	name     string   // see level
	parts    []string // the parts of name between the * of a wildcard
	below    level
	limit    *limit // nil if the rule only leads to others
	statName string // the rule's name in the statistics
	line     int    // where the rule is in its file

	valueToMetric, shareThreshold bool
}

// limit is how much a rule allows.
type limit struct {
	perUnit  uint32
	unit     pb.RateLimitResponse_RateLimit_Unit
	name     string   // by which other rules replace this one
	replaces []string // the names of the limits that do not apply beside this one
	metadata *structpb.Struct

	unlimited, shadow, quota, detailedMetric bool
}

// message returns the limit in the form of an answer.
func (l *limit) message() *pb.RateLimitResponse_RateLimit {
	return &pb.RateLimitResponse_RateLimit{Name: l.name, RequestsPerUnit: l.perUnit, Unit: l.unit}
}

func (v *level) add(r *rule) {
	if v.byName == nil {
		v.byName = map[string]*rule{}
	}
	v.byName[r.name] = r
	if strings.Contains(r.name, "*") {
		r.parts = strings.Split(r.name, "*")
		v.wildcards = append(v.wildcards, r)
	}
}

// matches tells whether name fits the parts of a pattern, between which there may be anything.
func matches(parts []string, name string) bool {
	first, last := parts[0], parts[len(parts)-1]
	if len(name) < len(first)+len(last) || !strings.HasPrefix(name, first) || !strings.HasSuffix(name, last) {
		return false
	}
	between := name[len(first) : len(name)-len(last)]
	for _, part := range parts[1 : len(parts)-1] {
		_, after, found := strings.Cut(between, part)
		if !found {
			return false
		}
		between = after
	}
	return true
}

// seconds is how long each unit lasts. A month has 30 days, and a year 365.
func seconds(unit pb.RateLimitResponse_RateLimit_Unit) int64 {
	const day = 24 * 60 * 60
	switch unit {
	case pb.RateLimitResponse_RateLimit_SECOND:
		return 1
	case pb.RateLimitResponse_RateLimit_MINUTE:
		return 60
	case pb.RateLimitResponse_RateLimit_HOUR:
		return 60 * 60
	case pb.RateLimitResponse_RateLimit_DAY:
		return day
	case pb.RateLimitResponse_RateLimit_WEEK:
		return 7 * day
	case pb.RateLimitResponse_RateLimit_MONTH:
		return 30 * day
	case pb.RateLimitResponse_RateLimit_YEAR:
		return 365 * day
	}
	return 0
}
