package replay

import (
	"context"
	"fmt"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/rulebook"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/policies"
)

// table has the rows of rate_limit_policy that are in force for a limiter. A nil table has none.
type table struct {
	everybody []tableRow // that begin last come first
	page      *rulebook.Page[tableRow]
	most      int // the most rules of a row's policy
}

type tableRow struct {
	row    *policies.PolicyRow
	policy *Policy
}

// readTable reads the rows that are in force now. Rows of mode shadow decide nothing, and a ban that a limiter made
// was made by the requests of the past, so both are left out.
func readTable(ctx context.Context, a *cli.App, limiter string) (t *table, err error) {
	err = a.InFirst(ctx, func(db cli.DB) error {
		return db.Read(ctx, func(tx cli.Tx) error {
			rows, err := policies.Deciding(ctx, tx, limiter)
			if err != nil {
				return err
			}
			t, err = newTable(limiter, rows)
			return err
		})
	})
	return t, err
}

// newTable returns the table with these rows. Those of one target are in order of precedence.
func newTable(limiter string, rows []policies.PolicyRow) (*table, error) {
	t := &table{}
	var rules []*rulebook.Rule[tableRow]
	for i := range rows {
		row := &rows[i]
		if !row.ObeyedBy(nil) || row.Policy != nil && policies.HasSlots(*row.Policy) {
			continue // limiters cannot read it, or it is for a limiter of slots
		}
		policy := Policy{Text: row.Mode, mode: row.Mode}
		if row.Policy != nil {
			var err error
			if policy, err = ParsePolicy(*row.Policy); err != nil {
				return nil, fmt.Errorf("the row %d of rate_limit_policy: %w", row.ID, err)
			}
		}
		t.most = max(t.most, len(policy.rules))
		rule := &rulebook.Rule[tableRow]{
			ID: row.ID, Name: limiter, From: int64(len(rows) - i), Value: tableRow{row, &policy},
		}
		switch {
		case row.Key != nil:
			rule.Target, rule.Text = rulebook.Key, *row.Key
		case row.KeyPrefix != nil:
			rule.Target, rule.Text = rulebook.Prefix, *row.KeyPrefix
		default:
			t.everybody = append(t.everybody, rule.Value)
			continue
		}
		rules = append(rules, rule)
	}
	var book rulebook.Book[tableRow]
	book.Update(rules, nil, true, len(rules))
	t.page = book.Page(limiter)
	return t, nil
}

// forEverybody returns the policy for keys without a row of their own: that of a row for everybody, or else the policy
// in the code. It returns nil if the policy in the code is needed, and code is nil.
func (t *table) forEverybody(code *Policy) *Policy {
	var own ratelimit.Policy
	if code != nil {
		own = code.parsed
	}
	for _, r := range t.everybody {
		switch {
		case !r.row.ObeyedBy(own):
		case r.policy.parsed != nil:
			return r.policy
		case code == nil:
			return nil
		default: // this row allows or denies everything, and the limiter still obeys rows of its own kind
			return &Policy{Text: r.policy.Text, mode: r.policy.mode, parsed: own}
		}
	}
	return code
}

// policyOf returns the policy of the row for a key or for its longest prefix, or own. A limiter with the policy own in
// its code passes over rows of other kinds.
func (t *table) policyOf(key string, own *Policy) *Policy {
	if t == nil {
		return own
	}
	obeyed := func(r *rulebook.Rule[tableRow]) bool { return r.Value.row.ObeyedBy(own.parsed) }
	if r := t.page.Find(key, obeyed); r != nil {
		return r.Value.policy
	}
	return own
}

func (t *table) longest() int {
	if t == nil {
		return 0
	}
	return t.most
}
