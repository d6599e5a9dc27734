package ratelimit

import (
	"context"
	"log/slog"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit/internal/pg"
)

const (
	reportPeriod = 10 * time.Second
	// maxReported is how many keys that a shadow would have denied are counted in a period, for each row.
	maxReported = 500
)

// shadowCount is what a row of the mode shadow would have decided.
type shadowCount struct {
	decided, denied, wouldDeny int64
	keys                       map[string]*keyCount // those that it would have denied
}

type keyCount struct{ denied, wouldDeny int64 }

// count counts a decision for `pgratelimit policy compare`. beside is the row that was decided beside it, or nil.
func (l *Limiter) count(beside *rule, key string, result *Result) {
	if beside == nil || result.Shadow == nil {
		return
	}
	p := l.space.policies
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.shadows[beside.ID]
	if c == nil {
		if !p.running {
			return
		}
		c = &shadowCount{keys: make(map[string]*keyCount)}
		if p.shadows == nil {
			p.shadows = make(map[int64]*shadowCount)
		}
		p.shadows[beside.ID] = c
	}
	c.decided++
	if !result.Allowed {
		c.denied++
	}
	if result.Shadow.Allowed {
		return
	}
	c.wouldDeny++
	k := c.keys[key]
	if k == nil {
		if len(c.keys) == maxReported {
			return
		}
		k = &keyCount{}
		c.keys[strings.Clone(key)] = k
	}
	k.wouldDeny++
	if !result.Allowed {
		k.denied++
	}
}

// report reports what was counted until the context ends, and once more then.
func (p *Policies) report(ctx context.Context) {
	failing := ""
	for ctx.Err() == nil {
		sleep(ctx, reportPeriod)
		err := p.reportOnce(context.WithoutCancel(ctx))
		switch {
		case err == nil:
			failing = ""
		case ErrorKind(err) != failing:
			failing = ErrorKind(err)
			p.log(ctx, slog.LevelWarn, "ratelimit: what shadow policies would have decided cannot be reported; "+
				"further failures are not logged until it works again", slog.Any("error", err))
		}
	}
}

// reportOnce reports what was counted since the last time. After an error that is lost.
func (p *Policies) reportOnce(ctx context.Context) error {
	p.mu.Lock()
	shadows := p.shadows
	p.shadows = nil
	p.mu.Unlock()
	if shadows == nil {
		return nil
	}
	var ids, decided, denied, wouldDeny []int64
	var keys []string
	add := func(id int64, key string, d, denials, wouldBe int64) {
		ids, keys = append(ids, id), append(keys, key)
		decided, denied, wouldDeny = append(decided, d), append(denied, denials), append(wouldDeny, wouldBe)
	}
	for id, c := range shadows {
		add(id, "", c.decided, c.denied, c.wouldDeny)
		for key, k := range c.keys {
			add(id, key, 0, k.denied, k.wouldDeny)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, reportPeriod/2)
	defer cancel()
	return query(ctx, p.db, true, pg.Qualify(reportStatement, p.config.Schema),
		[]any{ids, keys, decided, denied, wouldDeny}, []any{nil}, func() error { return nil })
}
