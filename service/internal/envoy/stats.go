package envoy

import (
	"cmp"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

// Stats are the numbers of a Server since it was made. Their names are those of the reference.
type Stats struct {
	Rules            []RuleStats // in the order of their names
	UnknownDomains   []DomainStats
	RedisErrors      uint64 // requests that the database did not decide; the reference has Redis
	ServiceErrors    uint64 // requests that are wrong
	GlobalShadowMode uint64 // requests that Options.ShadowMode let pass
	ConfigLoads      uint64 // calls of Use
	ConfigLoadErrors uint64 // calls of LoadFailed
}

// RuleStats are the numbers of a rule, in hits.
type RuleStats struct {
	Name                    string // such as "shop.method_login"
	TotalHits               uint64
	OverLimit               uint64 // denied
	NearLimit               uint64 // allowed above 0.8 of the limit
	OverLimitWithLocalCache uint64 // denied from this process's memory of denials
	WithinLimit             uint64 // allowed
	ShadowMode              uint64 // allowed although the limit has no room
}

// DomainStats counts the requests for a domain that is not configured.
type DomainStats struct {
	Name     string
	NotFound uint64
}

// Each calls f with each number and its full name in the reference, such as
// "ratelimit.service.rate_limit.shop.method_login.total_hits".
func (s *Stats) Each(f func(name string, value uint64)) {
	const service = "ratelimit.service."
	for i := range s.Rules {
		r := &s.Rules[i]
		name := service + "rate_limit." + sanitized(r.Name)
		f(name+".total_hits", r.TotalHits)
		f(name+".over_limit", r.OverLimit)
		f(name+".near_limit", r.NearLimit)
		f(name+".over_limit_with_local_cache", r.OverLimitWithLocalCache)
		f(name+".within_limit", r.WithinLimit)
		f(name+".shadow_mode", r.ShadowMode)
	}
	for _, d := range s.UnknownDomains {
		f(service+"rate_limit."+sanitized(d.Name)+".domain_not_found", d.NotFound)
	}
	f(service+"call.should_rate_limit.redis_error", s.RedisErrors)
	f(service+"call.should_rate_limit.service_error", s.ServiceErrors)
	f(service+"global_shadow_mode", s.GlobalShadowMode)
	f(service+"config_load_success", s.ConfigLoads)
	f(service+"config_load_error", s.ConfigLoadErrors)
}

var address = regexp.MustCompile(`\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}`)

// sanitized returns the name as the reference writes it, without : and |, and without the dots of addresses.
func sanitized(name string) string {
	name = strings.NewReplacer(":", "_", "|", "_").Replace(name)
	return address.ReplaceAllStringFunc(name, func(ip string) string { return strings.ReplaceAll(ip, ".", "_") })
}

// counters counts for the Stats.
type counters struct {
	mu      sync.RWMutex
	rules   map[string]*ruleCounters
	domains map[string]*atomic.Uint64

	redisErrors, serviceErrors, globalShadowMode, configLoads, configLoadErrors atomic.Uint64
}

type ruleCounters struct {
	total, over, near, remembered, within, shadow atomic.Uint64
}

// Callers choose the domain and, with limits in requests and detailed_metric, the names of rules. So there is a bound,
// beyond which all names count together under the name overflow.
const (
	maxRuleNames   = 10_000
	maxDomainNames = 100
	overflow       = "overflow"
)

// counterOf returns the counter of a name. If this call makes a counter, made is its name.
func counterOf[C any](mu *sync.RWMutex, all map[string]*C, name string, largest int) (c *C, made string) {
	mu.RLock()
	c = all[name]
	mu.RUnlock()
	if c != nil {
		return c, ""
	}
	mu.Lock()
	defer mu.Unlock()
	if all[name] == nil && len(all) >= largest {
		name = overflow
	}
	if all[name] == nil {
		all[name], made = new(C), name
	}
	return all[name], made
}

// unknownDomain counts a request for a domain that is not configured. If this is its first request, made is the name
// under which the domain counts.
func (c *counters) unknownDomain(name string) (made string) {
	n, made := counterOf(&c.mu, c.domains, name, maxDomainNames)
	n.Add(1)
	return made
}

const nearLimitRatio = float32(0.8)

// count counts a descriptor whose answer is known.
func (c *counters) count(a *ask) {
	r, _ := counterOf(&c.mu, c.rules, a.stat, maxRuleNames)
	if a.back {
		return
	}
	hits := uint64(a.hits)
	r.total.Add(hits)
	if a.over {
		r.over.Add(hits)
		if a.cached {
			r.remembered.Add(hits)
		}
		if a.limit.shadow {
			r.shadow.Add(hits)
		}
		return
	}
	r.within.Add(hits)
	near := int64(nearLimitRatio * float32(a.total))
	if after := a.total - a.remaining; after > near {
		r.near.Add(uint64(min(a.hits, after-near)))
	}
}

func (c *counters) snapshot() *Stats {
	s := &Stats{
		RedisErrors: c.redisErrors.Load(), ServiceErrors: c.serviceErrors.Load(),
		GlobalShadowMode: c.globalShadowMode.Load(),
		ConfigLoads:      c.configLoads.Load(), ConfigLoadErrors: c.configLoadErrors.Load(),
	}
	c.mu.RLock()
	defer c.mu.RUnlock()
	for name, r := range c.rules {
		s.Rules = append(s.Rules, RuleStats{
			Name: name, TotalHits: r.total.Load(), OverLimit: r.over.Load(), NearLimit: r.near.Load(),
			OverLimitWithLocalCache: r.remembered.Load(), WithinLimit: r.within.Load(), ShadowMode: r.shadow.Load(),
		})
	}
	for name, n := range c.domains {
		s.UnknownDomains = append(s.UnknownDomains, DomainStats{Name: name, NotFound: n.Load()})
	}
	slices.SortFunc(s.Rules, func(a, b RuleStats) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortFunc(s.UnknownDomains, func(a, b DomainStats) int { return cmp.Compare(a.Name, b.Name) })
	return s
}
