package doctor

import (
	"context"
	_ "embed"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/policies"
)

// MostPolicies is how many policies a process holds. Those that come after them it does not obey.
const MostPolicies = 200_000

var (
	//go:embed sql/policies.sql
	policiesSQL string
	//go:embed sql/triggers.sql
	triggersSQL string
	//go:embed sql/enforced.sql
	enforcedSQL string
)

// FoundPolicies are rows of rate_limit_policy that say the same.
type FoundPolicies struct {
	Mode, policy *string
	Count        int64
	Live         int64   // have not ended
	Ended        int64   // have, and were made by people
	ofNobody     []int64 // ids of rows with a name, key or prefix that cannot be
	ids          []int64
}

// reason says why limiters cannot read the rows, or "".
func (f FoundPolicies) reason() string {
	switch {
	case f.Mode == nil || !slices.Contains([]string{policies.ModeEnforce, policies.ModeShadow, policies.ModeOff,
		policies.ModeDeny}, *f.Mode):
		return "a mode that this release does not know"
	case (f.policy != nil) != (*f.Mode == policies.ModeEnforce || *f.Mode == policies.ModeShadow):
		return "a policy where there is none, or none where there should be one"
	case f.policy != nil:
		if _, err := ratelimit.ParsePolicy(*f.policy); err != nil {
			return "a policy that this release cannot read"
		}
	}
	return ""
}

// checkPolicies looks for policies that limiters do not obey.
func (e *Examination) checkPolicies(ctx context.Context) (cli.Finding, error) {
	if !*e.Server.policies {
		return cli.OK("not looked at, because this role may not read the policies"), nil
	}
	var found []FoundPolicies
	var triggers []wrongTrigger
	err := e.App.Look(ctx, e.Pool, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, triggersSQL)
		if err != nil {
			return err
		}
		if triggers, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (t wrongTrigger, err error) {
			return t, row.Scan(&t.name, &t.enable, &t.always)
		}); err != nil {
			return err
		}
		if rows, err = tx.Query(ctx, policiesSQL); err != nil {
			return err
		}
		found, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (f FoundPolicies, err error) {
			return f, row.Scan(&f.Mode, &f.policy, &f.Count, &f.Live, &f.Ended, &f.ofNobody, &f.ids)
		})
		return err
	})
	f := e.Server.JudgePolicies(found, triggers)
	if err != nil || f.Level != cli.Fine || !e.Server.readable || e.Server.standby {
		return f, err
	}
	all, err := e.enforcedPolicies(ctx)
	if err != nil {
		return f, err
	}
	return e.Server.judgeKinds(f, all), nil
}

// enforcedPolicy is a policy that a limiter is to obey.
type enforcedPolicy struct {
	limiter, policy string
	ids             []int64 // of its rows
	kinds           int64   // of the limiter's rows, as rowKinds tells them
}

func (e *Examination) enforcedPolicies(ctx context.Context) (all []enforcedPolicy, err error) {
	err = e.App.Look(ctx, e.Pool, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, enforcedSQL)
		if err != nil {
			return err
		}
		if all, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (p enforcedPolicy, err error) {
			return p, row.Scan(&p.limiter, &p.policy, &p.ids)
		}); err != nil {
			return err
		}
		var names []string
		for _, p := range all {
			if len(names) == 0 || names[len(names)-1] != p.limiter {
				names = append(names, p.limiter)
			}
		}
		kinds, err := policies.RowKinds(ctx, tx, names)
		for i := range all {
			all[i].kinds = kinds.Either(all[i].limiter)
		}
		return err
	})
	return all, err
}

// judgeKinds returns a warning of policies that limiters seem to pass over, or f.
func (s Server) judgeKinds(f cli.Finding, all []enforcedPolicy) cli.Finding {
	var passed, ids []string
	for _, p := range all {
		if own, others := policies.OtherKinds(p.policy, p.kinds); others != "" {
			passed = append(passed, fmt.Sprintf(
				"policies of the kind %s for limiter %s, whose rows are of the kind %s (id %s)",
				own, cli.Printable(p.limiter), others, join(p.ids)))
			ids = append(ids, join(p.ids))
		}
	}
	if len(passed) == 0 {
		return f
	}
	return cli.Warning.Finding(fmt.Sprintf(
		"if that is the kind in the code too, set policies of that kind, or give the "+
			"limiter another name in the code, or `DELETE FROM %s WHERE id IN (%s)`",
		s.name("rate_limit_policy"), strings.Join(ids, ", ")),
		"limiters seem to pass over %s", strings.Join(passed, "; "))
}

func join(ids []int64) string {
	var numbers []string
	for _, id := range ids {
		numbers = append(numbers, strconv.FormatInt(id, 10))
	}
	return strings.Join(numbers, ", ")
}

// wrongTrigger is a trigger that does not run when people write, or also runs when replication does.
type wrongTrigger struct {
	name   string
	enable string // the statement that sets it right
	always bool   // it runs also when replication writes
}

// without says what is missing without the trigger.
func (t wrongTrigger) without() string {
	switch t.name {
	case checkTrigger:
		return "nobody checks what is written"
	case "rate_limit_policy_keep":
		return "TRUNCATE is not refused, of which no process learns at once"
	case "rate_limit_policy_turn":
		return "processes may miss changes that are made at the same time"
	case "rate_limit_policy_note":
		return "no process learns of changes at once, and the history has none of them"
	}
	return "what it does is not done"
}

// checkTrigger is the one trigger without which processes miss nothing.
const checkTrigger = "rate_limit_policy_check"

func (s Server) JudgePolicies(found []FoundPolicies, triggers []wrongTrigger) cli.Finding {
	var wrong, mend, ids []string
	var count, live, ended int64
	table := s.name("rate_limit_policy")
	note := func(reason string, of []int64) {
		wrong = append(wrong, fmt.Sprintf("rows with %s (id %s)", reason, join(of)))
		ids = append(ids, join(of))
	}
	for _, f := range found {
		count, live, ended = count+f.Count, live+f.Live, ended+f.Ended
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
	missed := false
	var enable []string
	for _, t := range triggers {
		enable = append(enable, "`"+t.enable+"`")
		if t.always {
			wrong = append(wrong, fmt.Sprintf("trigger %s also runs on what logical replication applies, which "+
				"stops at what the trigger refuses or writes itself", t.name))
			continue
		}
		wrong = append(wrong, fmt.Sprintf("trigger %s is turned off, so %s", t.name, t.without()))
		missed = missed || t.name != checkTrigger
	}
	if len(enable) > 0 {
		do := "have the triggers run when people write: " + strings.Join(enable, ", ")
		if missed {
			do += ", and have the history tell what it has missed: `UPDATE " + table + " SET comment = comment`"
		}
		mend = append(mend, do)
	}
	switch {
	case len(wrong) > 0:
		return cli.Problem.Finding(strings.Join(mend, "; then "), "limiters do not obey all: %s",
			strings.Join(wrong, "; "))
	case live > MostPolicies:
		return cli.Warning.Finding("use prefixes instead of single keys, or remove what nobody needs; what there is: "+
			"`SELECT name, mode, automatic, count(*) FROM "+table+" GROUP BY 1, 2, 3 ORDER BY 4 DESC`",
			"%d have not ended, and a process obeys %d at most, those that people have written first",
			live, MostPolicies)
	case ended > 0:
		return cli.OK("%d, and %d that have ended, which nobody needs any more", count-ended, ended)
	}
	return cli.OK("%d", count)
}
