package policytable

import (
	"context"
	"log/slog"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit/internal/pg"
)

const (
	reportPeriod = 10 * time.Second
	// MaxReported is the most keys that are counted for each shadow row between two reports.
	MaxReported = 500
)

// RowVersion identifies a row between two changes.
type RowVersion struct{ ID, Changed int64 }

// ShadowCount counts the decisions of a row whose mode is shadow.
type ShadowCount struct {
	Decided, denied, WouldDeny int64
	Keys                       map[string]*keyCount // the keys that the row would have denied
}

type keyCount struct{ denied, wouldDeny int64 }

// Count counts a decision for `pgratelimit policy compare`. The argument denied says whether the decision was a denial,
// and wouldDeny says whether the shadow row would have denied.
func (t *Table) Count(row *Row, key string, denied, wouldDeny bool) {
	t.Mu.Lock()
	defer t.Mu.Unlock()
	version := RowVersion{row.ID, row.Value.Changed}
	c := t.Shadows[version]
	if c == nil {
		if !t.Running {
			return
		}
		c = &ShadowCount{Keys: make(map[string]*keyCount)}
		if t.Shadows == nil {
			t.Shadows = make(map[RowVersion]*ShadowCount)
		}
		t.Shadows[version] = c
	}
	c.Decided++
	if denied {
		c.denied++
	}
	if !wouldDeny {
		return
	}
	c.WouldDeny++
	k := c.Keys[key]
	if k == nil {
		if len(c.Keys) == MaxReported {
			return
		}
		k = &keyCount{}
		c.Keys[strings.Clone(key)] = k
	}
	k.wouldDeny++
	if denied {
		k.denied++
	}
}

// report reports the counts until the context ends, and then once more.
func (t *Table) report(ctx context.Context) {
	failing := ""
	for ctx.Err() == nil {
		sleep(ctx, reportPeriod)
		err := t.ReportOnce(context.WithoutCancel(ctx))
		switch {
		case err == nil:
			failing = ""
		case pg.KindOf(err) != failing:
			failing = pg.KindOf(err)
			t.log(ctx, slog.LevelWarn, "ratelimit: what shadow policies would have decided cannot be reported; "+
				"further failures are not logged until it works again", slog.Any("error", err))
		}
	}
}

// ReportOnce reports the counts since the last report. If it fails, these counts are lost. The database ignores counts
// of rows that have changed since.
func (t *Table) ReportOnce(ctx context.Context) error {
	t.Mu.Lock()
	shadows := t.Shadows
	t.Shadows = nil
	t.Mu.Unlock()
	if shadows == nil {
		return nil
	}
	var ids, changed, decided, denied, wouldDeny []int64
	var keys []string
	add := func(v RowVersion, key string, d, denials, wouldBe int64) {
		ids, changed, keys = append(ids, v.ID), append(changed, v.Changed), append(keys, key)
		decided, denied, wouldDeny = append(decided, d), append(denied, denials), append(wouldDeny, wouldBe)
	}
	for version, c := range shadows {
		add(version, "", c.Decided, c.denied, c.WouldDeny)
		for key, k := range c.Keys {
			add(version, key, 0, k.denied, k.wouldDeny)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, reportPeriod/2)
	defer cancel()
	return pg.Query(ctx, t.db, true, pg.Qualify(reportStatement, t.config.Schema),
		[]any{ids, changed, keys, decided, denied, wouldDeny}, []any{nil}, func() error { return nil })
}
