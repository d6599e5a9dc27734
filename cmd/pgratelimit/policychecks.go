package main

import (
	"context"
	_ "embed"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
)

// mostPolicies is how many policies a process holds. Those that come after them it does not obey.
const mostPolicies = 200_000

var (
	//go:embed sql/doctor/policies.sql
	policiesSQL string
	//go:embed sql/doctor/triggers.sql
	triggersSQL string
)

// foundPolicies are rows of rate_limit_policy that say the same.
type foundPolicies struct {
	mode, policy *string
	count        int64
	live         int64   // have not ended
	ended        int64   // have, and were made by people
	ofNobody     []int64 // ids of rows with a name, key or prefix that cannot be
	ids          []int64
}

// reason says why limiters cannot read the rows, or "".
func (f foundPolicies) reason() string {
	switch {
	case f.mode == nil || !slices.Contains([]string{modeEnforce, modeShadow, modeOff, modeDeny}, *f.mode):
		return "a mode that this release does not know"
	case (f.policy != nil) != (*f.mode == modeEnforce || *f.mode == modeShadow):
		return "a policy where there is none, or none where there should be one"
	case f.policy != nil:
		if _, err := ratelimit.ParsePolicy(*f.policy); err != nil {
			return "a policy that this release cannot read"
		}
	}
	return ""
}

// checkPolicies looks for policies that limiters do not obey.
func (e *examination) checkPolicies(ctx context.Context) (finding, error) {
	if !*e.server.policies {
		return ok("not looked at, because this role may not read the policies"), nil
	}
	var found []foundPolicies
	var disabled []string
	err := e.app.look(ctx, e.pool, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, triggersSQL)
		if err != nil {
			return err
		}
		if disabled, err = pgx.CollectRows(rows, pgx.RowTo[string]); err != nil {
			return err
		}
		if rows, err = tx.Query(ctx, policiesSQL); err != nil {
			return err
		}
		found, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (f foundPolicies, err error) {
			return f, row.Scan(&f.mode, &f.policy, &f.count, &f.live, &f.ended, &f.ofNobody, &f.ids)
		})
		return err
	})
	return e.server.judgePolicies(found, disabled), err
}

func (s server) judgePolicies(found []foundPolicies, disabled []string) finding {
	var wrong, mend, ids []string
	var count, live, ended int64
	table := s.name("rate_limit_policy")
	note := func(reason string, of []int64) {
		var numbers []string
		for _, id := range of {
			numbers = append(numbers, strconv.FormatInt(id, 10))
		}
		wrong = append(wrong, fmt.Sprintf("rows with %s (id %s)", reason, strings.Join(numbers, ", ")))
		ids = append(ids, numbers...)
	}
	for _, f := range found {
		count, live, ended = count+f.count, live+f.live, ended+f.ended
		if reason := f.reason(); reason != "" {
			note(reason, f.ids)
		} else if len(f.ofNobody) > 0 {
			note("a name, key or prefix that no limiter has", f.ofNobody)
		}
	}
	if len(ids) > 0 {
		mend = append(mend, fmt.Sprintf("upgrade to the release that has written them, or correct them, or "+
			"`DELETE FROM %s WHERE id IN (%s)`", table, strings.Join(ids, ", ")))
	}
	if len(disabled) > 0 {
		wrong = append(wrong, "triggers are turned off, so nobody checks what is written, and no process learns of it")
		mend = append(mend, "turn them on: `"+strings.Join(disabled, "`, `")+
			"`, and have processes read what they have missed: `UPDATE "+table+" SET comment = comment`")
	}
	switch {
	case len(wrong) > 0:
		return problem.finding(strings.Join(mend, "; then "), "limiters do not obey all: %s",
			strings.Join(wrong, "; "))
	case live > mostPolicies:
		return warning.finding("use prefixes instead of single keys, or remove what nobody needs; what there is: "+
			"`SELECT name, mode, automatic, count(*) FROM "+table+" GROUP BY 1, 2, 3 ORDER BY 4 DESC`",
			"%d have not ended, and a process obeys %d at most, those that people have written first",
			live, mostPolicies)
	case ended > 0:
		return ok("%d, and %d that have ended, which nobody needs any more", count-ended, ended)
	}
	return ok("%d", count)
}
