package policytable

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/rulebook"
)

// View is the part of the table for the keys of one limiter. A limiter without Policies has a nil View.
type View struct {
	Table   *Table
	name    string // the limiter's name
	page    *rulebook.Page[Ruling]
	Strikes *Strikes // nil if the limiter bans nobody
}

// View returns the view of a limiter. If ban is not nil, the limiter bans keys by these terms.
func (t *Table) View(limiter string, ban *BanTerms) *View {
	v := &View{Table: t, name: limiter, page: t.Book.Page(limiter)}
	if ban != nil {
		v.Strikes = NewStrikes(limiter, *ban)
	}
	return v
}

// InForce returns the policy for a key now: the argument own, or the policy of a row. If a row allows or denies
// everything, InForce also returns the row. It waits until the rows have been read once, or until the context ends.
func (v *View) InForce(
	ctx context.Context, timeout time.Duration, own *model.Policy, key string,
) (*model.Policy, *Row, error) {
	if v == nil {
		return own, nil, nil
	}
	if err := v.Table.Await(ctx, timeout); err != nil {
		return own, nil, err
	}
	if v.page.Empty() {
		return own, nil, nil
	}
	switch r := v.Row(own, key); {
	case r == nil:
		return own, nil, nil
	case r.Value.Mode != ModeEnforce:
		return own, r, nil
	default:
		return r.Value.Policy, nil, nil
	}
}

// Known returns the policy for a key as this process knows it, or the argument own if a row allows or denies
// everything.
func (v *View) Known(own *model.Policy, key string) *model.Policy {
	if v == nil || !v.Table.IsReady() {
		return own
	}
	if r := v.Row(own, key); r != nil && r.Value.Mode == ModeEnforce {
		return r.Value.Policy
	}
	return own
}

// Slots returns how many slots a key has at a time, as this process knows it.
func (v *View) Slots(own *model.Policy, key string) int64 {
	if v != nil && v.Table.IsReady() {
		if r := v.Row(own, key); r != nil && r.Value.Mode == ModeOff {
			return model.MaxSlots
		}
	}
	return v.Known(own, key).Slots()
}

// IsReady returns whether the rows have been read.
func (t *Table) IsReady() bool { return t.Clock.Load() != nil }

// Row returns the row for a key, or nil if no row applies.
func (v *View) Row(own *model.Policy, key string) *Row {
	return v.page.Find(key, func(r *Row) bool { return v.Table.counts(r) && v.canObey(r, own) })
}

// Everybody returns the policy of the row for all keys of a limiter, or nil if there is no such row of mode enforce.
func (t *Table) Everybody(limiter string) *model.Policy {
	page := t.Book.Known(limiter)
	if page == nil || !t.IsReady() {
		return nil
	}
	r := page.Find("", func(r *Row) bool { return r.Target == rulebook.Everybody && t.counts(r) })
	if r == nil || r.Value.Mode != ModeEnforce {
		return nil
	}
	return r.Value.Policy
}

// Shadow returns the shadow row for a key, or nil. A limiter with slots decides no shadow: Shadow logs that once.
func (v *View) Shadow(own *model.Policy, key string) *Row {
	if v == nil {
		return nil
	}
	r := v.page.Shadow(key, v.Table.counts)
	if r != nil && own.HasSlots {
		v.passOver(r, "a limiter with a Concurrency decides no policies of mode shadow")
		return nil
	}
	return r
}

// Now returns the database's clock as this process computes it.
func (v *View) Now() time.Time { return time.UnixMicro(v.Table.now()) }

// canObey returns whether a row's policy can decide the limiter's keys. If it cannot, canObey logs that once.
func (v *View) canObey(r *Row, own *model.Policy) bool {
	if r.Value.Mode != ModeEnforce {
		return true
	}
	if r.Value.Policy.HasSlots != own.HasSlots { // the application calls other methods for a policy with slots
		v.passOver(r, "only one of the row's policy and Config.Policy has a Concurrency")
		return false
	}
	row, code, differ := r.Value.Policy.KindsDiffer(own)
	if !differ {
		return true
	}
	v.passOver(r, fmt.Sprintf("the row's policy is a %s, and Config.Policy is a %s", row, code))
	return false
}

// passOver logs once that the limiter does not obey a row.
func (v *View) passOver(r *Row, reason string) {
	if before, told := v.Table.told.Swap(r.ID, r.Value.Policy); !told || !r.Value.Policy.Is(before.(*model.Policy)) {
		v.Table.log(context.Background(), slog.LevelWarn, "ratelimit: a policy is of another kind than the limiter's, "+
			"and is passed over", slog.Int64("id", r.ID), slog.String("limiter", v.name),
			slog.String("error", reason))
	}
}

// Strike counts a denial of a key. After BanTerms.Denials denials, Run bans the key.
func (v *View) Strike(key string) {
	if v != nil && v.Strikes != nil && v.Strikes.Count(key) {
		v.Table.List(v.Strikes)
	}
}
