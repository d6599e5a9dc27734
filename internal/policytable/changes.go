package policytable

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"time"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/rulebook"
)

const (
	// readTimeout limits one query. Reading a million rows takes two seconds.
	readTimeout = 20 * time.Second
	// againPerRow times the number of rows is the pause between two full reads. So a process reads at most 200 rows a
	// second, and a hundred processes do not overload Postgres.
	againPerRow = 5 * time.Millisecond
	// sweepPeriod is how often Run drops rows that have ended.
	sweepPeriod = time.Minute
	// maxPolicyText is longer than any policy that the database accepts.
	maxPolicyText = 4096
)

// These are the times of a row without a beginning, and of a row without an end.
const (
	AlwaysBegun = math.MinInt64
	NoEnd       = math.MaxInt64
)

// ReadChanges reads the changed rows and stores them. From time to time it reads all rows, because logical replication
// and restored dumps write rows without an entry in rate_limit_policy_history.
func (t *Table) ReadChanges(ctx context.Context, db pg.DB, timeout time.Duration) error {
	t.Mu.Lock()
	known, knownAt := t.Version, t.versionAt
	t.Mu.Unlock()
	if err := t.readSince(ctx, db, known, knownAt, timeout); err != nil || known == nil {
		return err
	}
	t.Mu.Lock()
	rows, now := t.Book.Len()+t.status.NoRoom, time.Now()
	due := now.Sub(t.CompleteAt) > max(listenPeriod, time.Duration(rows)*t.PerRow) ||
		t.status.NoRoom > 0 && t.Book.Len() < t.config.MaxRows
	if due {
		t.CompleteAt = now // also set after errors: otherwise a connection that dies soon would never read changes
	}
	t.Mu.Unlock()
	if !due {
		return nil
	}
	return t.readSince(ctx, db, nil, 0, readTimeout)
}

// readSince reads the changes since a version, or all rows if the version is nil.
func (t *Table) readSince(ctx context.Context, db pg.DB, known *int64, knownAt int64, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	asked := time.Now()
	a, err := t.ask(ctx, db, known, knownAt)
	if err != nil {
		t.note(ctx, err)
		return err
	}
	t.applyChanges(ctx, a, asked)
	t.note(ctx, nil)
	return nil
}

// applyChanges puts an answer in force. The argument asked is when the query was sent.
func (t *Table) applyChanges(ctx context.Context, a *policyAnswer, asked time.Time) {
	// The database read the clock before the answer arrived. So the stored clock is late, and no ban ends early.
	t.Clock.Store(&DatabaseClock{Micros: a.clock, At: time.Now()})
	for i, r := range a.rules {
		r.Value.Learnt = a.clock
		if known := t.Book.Rule(r.ID); known != nil && saysTheSame(known, r) {
			a.rules[i] = known
		}
	}
	t.Mu.Lock()
	full := t.status.NoRoom > 0
	t.Mu.Unlock()
	if now := a.clock; full || now-t.swept > sweepPeriod.Microseconds() {
		t.swept = now
		ended := t.Book.IDs(func(r *Row) bool { return r.Value.Until <= now })
		t.Book.Update(nil, ended, false, t.config.MaxRows)
	}
	noRoom := t.Book.Update(a.rules, a.removed, a.complete, t.config.MaxRows)

	t.Mu.Lock()
	t.Version = new(a.version) // a copy, because a pointer into the answer would keep the answer in memory
	t.versionAt, t.asked = a.changed, asked
	before, unread := t.status, map[int64]error{}
	for id, err := range a.unreadable {
		if t.unreadable[id] != err.Error() { // a row may be read again without a change
			unread[id] = err
		}
	}
	if a.complete {
		t.unreadable = map[int64]string{}
		t.status.NoRoom, t.CompleteAt = 0, asked
	}
	for _, id := range a.removed {
		delete(t.unreadable, id)
	}
	for _, r := range a.rules {
		delete(t.unreadable, r.ID)
	}
	for id, err := range a.unreadable {
		t.unreadable[id] = err.Error()
	}
	t.status.Unreadable = len(t.unreadable)
	t.status.NoRoom = max(t.status.NoRoom, noRoom) // the next full read corrects the number
	after := t.status
	t.Mu.Unlock()

	for id, err := range unread {
		t.log(ctx, slog.LevelWarn, "ratelimit: a policy cannot be read, and is passed over", slog.Int64("id", id),
			slog.Any("error", err))
	}
	if after.NoRoom > 0 && before.NoRoom == 0 {
		t.log(ctx, slog.LevelError, "ratelimit: there are more policies than this process may hold; some are left out",
			slog.Int("left_out", after.NoRoom), slog.Int("max_rows", t.config.MaxRows))
	}
}

// note stores whether the query worked, and logs each change between success and failure.
func (t *Table) note(ctx context.Context, err error) {
	if err != nil && ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return // Run is ending
	}
	t.Mu.Lock()
	before := t.status.Err
	t.status.Err = err
	t.Mu.Unlock()
	switch {
	case err != nil:
		t.failed.Store(&err)
		if before == nil || pg.KindOf(before) != pg.KindOf(err) {
			t.log(ctx, slog.LevelWarn, "ratelimit: policies cannot be read, and what was known last stays in force; "+
				"further failures are not logged until it works again", slog.Any("error", err))
		}
		return
	case before != nil:
		t.log(ctx, slog.LevelInfo, "ratelimit: policies can be read again")
	}
	t.failed.Store(nil)
	select {
	case <-t.Ready:
	default:
		close(t.Ready)
	}
}

// policyAnswer is an answer of rate_limit_policies.
type policyAnswer struct {
	version, changed, clock int64
	complete                bool
	rules                   []*Row
	removed                 []int64
	unreadable              map[int64]error // by the row's ID
}

func (t *Table) ask(ctx context.Context, db pg.DB, known *int64, knownAt int64) (*policyAnswer, error) {
	a := &policyAnswer{unreadable: map[int64]error{}}
	var row *int64
	var removed bool
	var name, mode, policy string
	var automatic bool
	var key, prefix *string
	var from, until *int64
	var changed int64
	read := map[nameAndText]*model.Policy{} // most rows share a few texts
	names := map[string]string{}
	targets := []any{
		&a.version, &a.changed, &a.complete, &a.clock, &row, &removed, &name, &key, &prefix, &mode, &policy,
		&from, &until, &automatic, &changed,
	}
	args := []any{known, knownAt}
	err := pg.Query(ctx, db, true, pg.Qualify(policiesStatement, t.config.Schema), args, targets, func() error {
		if row == nil {
			return nil
		}
		id := *row
		if removed {
			a.removed = append(a.removed, id)
			return nil
		}
		if same, ok := names[name]; ok {
			name = same // otherwise each row would keep a copy of the name
		}
		names[name] = name
		r := &Row{
			ID: id, Name: name, From: math.MinInt64, Weak: automatic,
			Value: Ruling{Mode: Mode(mode), From: AlwaysBegun, Until: NoEnd, Changed: changed},
		}
		if from != nil {
			r.From = *from
		}
		if r.From > a.clock {
			r.Value.From = r.From
		}
		if until != nil {
			r.Value.Until = *until
		}
		switch {
		case key != nil:
			r.Target, r.Text = rulebook.Key, *key
		case prefix != nil:
			r.Target, r.Text = rulebook.Prefix, *prefix
		}
		r.Shadow = r.Value.Mode == modeShadow
		var err error
		if r.Value.Policy, err = t.readPolicy(r, policy, read); err != nil {
			a.unreadable[id] = err
		} else if r.Value.Until > a.clock {
			a.rules = append(a.rules, r)
			return nil
		}
		a.removed = append(a.removed, id) // the earlier content of this row no longer counts
		return nil
	})
	return a, pg.ExplainVersion(ctx, db, t.config.Schema, err)
}

// nameAndText is equal for rows that share a policy.
type nameAndText struct {
	name, text string
	shadow     bool
}

// readPolicy parses the policy of a row.
func (t *Table) readPolicy(r *Row, text string, read map[nameAndText]*model.Policy) (*model.Policy, error) {
	switch r.Value.Mode {
	case ModeOff, modeDeny:
		return nil, nil //nolint:nilnil // a row of this mode has none
	case ModeEnforce, modeShadow:
	default:
		return nil, fmt.Errorf("ratelimit: the mode %q is not known", r.Value.Mode)
	}
	if len(text) > maxPolicyText {
		return nil, fmt.Errorf("ratelimit: the text of the policy has %d bytes", len(text))
	}
	of := nameAndText{r.Name, text, r.Shadow}
	if policy := read[of]; policy != nil {
		return policy, nil
	}
	policy, err := t.config.Read(r.Name, text, r.Shadow)
	read[of] = policy
	return policy, err
}
