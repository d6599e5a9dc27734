package doctor

import (
	"cmp"
	"context"
	_ "embed"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/pgratelimit/ratelimit"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/policies"
)

// MostPolicies is the largest number of policies that a process holds. The process ignores all further policies.
const MostPolicies = 200_000

var (
	//go:embed sql/policies.sql
	policiesSQL string
	//go:embed sql/triggers.sql
	triggersSQL string
	//go:embed sql/enforced.sql
	enforcedSQL string
)

// FoundPolicies is a row of policiesSQL. It describes all rows of rate_limit_policy that have one mode and policy.
type FoundPolicies struct {
	Mode, Policy       *string
	Count, Live, Ended int64   // numbers of all rows, of rows that have not ended, and of ended rows that people wrote
	OfNobody           []int64 // ids of rows with an invalid name, key or prefix
	IDs                []int64
}

// reason returns why limiters cannot read the rows, or "".
func (f FoundPolicies) reason() string {
	switch {
	case f.Mode == nil || !slices.Contains([]string{policies.ModeEnforce, policies.ModeShadow, policies.ModeOff,
		policies.ModeDeny}, *f.Mode):
		return "a mode that this release does not know"
	case (f.Policy != nil) != (*f.Mode == policies.ModeEnforce || *f.Mode == policies.ModeShadow):
		return "a policy that should not be there, or without the one that should be"
	case f.Policy != nil:
		if _, err := ratelimit.ParsePolicy(*f.Policy); err != nil {
			return "a policy that this release cannot read"
		}
		if *f.Mode == policies.ModeShadow && policies.HasSlots(*f.Policy) {
			return "a shadow with slots, which nobody would release"
		}
	}
	return ""
}

// checkPolicies looks for policies that limiters ignore.
func (e *Examination) checkPolicies(ctx context.Context) (cli.Finding, error) {
	if !*e.Server.Policies {
		return cli.OK("not looked at, because this role may not read the policies"), nil
	}
	triggers, err := lookAt[wrongTrigger](ctx, e, triggersSQL)
	if err != nil {
		return cli.Finding{}, err
	}
	found, err := lookAt[FoundPolicies](ctx, e, policiesSQL)
	f := e.Server.JudgePolicies(found, triggers)
	if err != nil || f.Level != cli.Fine || !e.Server.Readable || e.Server.Standby {
		return f, err
	}
	enforced, err := lookAt[enforcedPolicy](ctx, e, enforcedSQL)
	if err != nil || len(enforced) == 0 {
		return f, err
	}
	var names []string
	for _, p := range enforced {
		names = append(names, p.Limiter)
	}
	err = e.Look(ctx, func(tx cli.Tx) error {
		kinds, err := policies.RowKinds(ctx, tx, names)
		f = e.Server.judgeKinds(f, enforced, kinds)
		return err
	})
	return f, err
}

// enforcedPolicy is a row of enforcedSQL: a policy in force now or later, and the ids of its rows.
type enforcedPolicy struct {
	Limiter, Policy string
	IDs             []int64
}

// judgeKinds returns a warning if limiters seem to ignore policies. Otherwise it returns the finding f.
func (s Server) judgeKinds(f cli.Finding, all []enforcedPolicy, kinds policies.Kinds) cli.Finding {
	var passed, ids []string
	for _, p := range all {
		if own, others := policies.OtherKinds(p.Policy, kinds.Either(p.Limiter)); others != "" {
			passed = append(passed, fmt.Sprintf(
				"policies of the kind %s for limiter %s, whose rows are of the kind %s (id %s)",
				own, cli.Printable(p.Limiter), others, join(p.IDs)))
			ids = append(ids, join(p.IDs))
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

// wrongTrigger is a row of triggersSQL: a trigger that does not run when people write, or that also runs for replicated
// rows.
type wrongTrigger struct {
	Name   string
	Enable string // the statement that repairs the trigger
	Always bool   // whether the trigger also runs for replicated rows
}

// without maps a trigger's name to what does not work if the trigger is missing.
var without = map[string]string{
	checkTrigger:             "nothing checks what is written",
	"rate_limit_policy_keep": "TRUNCATE is not refused, and no process learns of it at once",
	"rate_limit_policy_turn": "processes may miss changes that are made at the same time",
	"rate_limit_policy_note": "no process learns of changes at once, and the history has none of them",
}

// checkTrigger checks policies. If one of the other triggers is missing, processes do not learn of all changes.
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
			note(reason, f.IDs)
		} else if len(f.OfNobody) > 0 {
			note("a name, key or prefix that no limiter can have", f.OfNobody)
		}
	}
	if len(ids) > 0 {
		mend = append(mend, fmt.Sprintf("upgrade to the release that wrote them, or correct them, or "+
			"`DELETE FROM %s WHERE id IN (%s)`", table, strings.Join(ids, ", ")))
	}
	missed := false
	var enable []string
	for _, t := range triggers {
		enable = append(enable, "`"+t.Enable+"`")
		if t.Always {
			wrong = append(wrong, fmt.Sprintf("trigger %s also runs when logical replication writes, and "+
				"stops the replication if it refuses or writes something", t.Name))
			continue
		}
		wrong = append(wrong, fmt.Sprintf("trigger %s is turned off, so %s", t.Name,
			cmp.Or(without[t.Name], "its work is not done")))
		missed = missed || t.Name != checkTrigger
	}
	if len(enable) > 0 {
		do := "let the triggers run when people write: " + strings.Join(enable, ", ")
		if missed {
			do += ", and let the history note what it missed: `UPDATE " + table + " SET comment = comment`"
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
			"%d have not ended, and a process obeys %d at most, first those that people wrote",
			live, MostPolicies)
	case ended > 0:
		return cli.OK("%d, and %d that have ended, so nobody needs them", count-ended, ended)
	}
	return cli.OK("%d", count)
}
