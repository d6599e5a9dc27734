package main

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/keys"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/policies"
)

// why is a flag. All commands that change policies require it.
const why = "--comment=why"

// changed runs a command that changes policies, and returns its JSON output.
func changed(t *testing.T, url string, args ...string) policies.PolicyChange {
	t.Helper()
	return decode[policies.PolicyChange](t, invoke(t, url, append(args, "--json")...))
}

// gets returns the policies for a key, or for all keys, as "state mode policy".
func gets(t *testing.T, url string, args ...string) (all []string) {
	t.Helper()
	for _, r := range decode[[]policies.PolicyRow](t, invoke(t, url, append([]string{"policy", "get", "api", "--json"}, args...)...)) {
		all = append(all, fmt.Sprintf("%s %s %s", r.State, r.Mode, r.Decides()))
	}
	return all
}

func TestPolicySetReplacesWhatIsInForce(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	first := changed(t, db.URL, "policy", "set", "api", "--key", "a", "sliding 100/1m", why)
	require.Empty(t, first.Removed)
	require.False(t, first.Lowers || first.DryRun)
	require.Equal(t, "sliding 100/1m", *first.Added.Policy)
	require.Equal(t, "why", first.Added.Comment)
	require.Equal(t, "postgres", first.Added.ChangedBy)
	require.Nil(t, first.Added.ValidUntil)

	second := changed(t, db.URL, "policy", "set", "api", "--key", "a", "sliding 200/1m", why)
	require.Len(t, second.Removed, 1)
	require.Equal(t, first.Added.ID, second.Removed[0].ID)

	// Other rows remain: those for prefixes, for all keys, of other limiters, and of the mode shadow.
	pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, key, key_prefix, mode, policy, comment) VALUES
		('api', NULL, 'a', 'enforce', 'sliding 300/1m', 'why'), ('api', NULL, NULL, 'enforce', 'sliding 10/1m', 'why'),
		('api', 'a', NULL, 'shadow', 'sliding 1/1m', 'why'), ('login', 'a', NULL, 'enforce', 'sliding 1/1m', 'why')`)
	shadow := changed(t, db.URL, "policy", "set", "api", "--key", "a", "sliding 2/1m", "--mode=shadow", why)
	require.Equal(t, "sliding 1/1m", *shadow.Removed[0].Policy)
	require.Len(t, shadow.Removed, 1)
	off := changed(t, db.URL, "policy", "set", "api", "--key", "a", "--off", why)
	require.Equal(t, "sliding 200/1m", *off.Removed[0].Policy)
	require.Equal(t, []string{
		"in force off off", "in force shadow sliding 2/1m", "overridden enforce sliding 300/1m", "overridden enforce sliding 10/1m",
	}, gets(t, db.URL, "a"))
	require.Equal(t, []string{"in force enforce sliding 10/1m"}, gets(t, db.URL))
	require.Equal(t, 1, pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM rate_limit_policy WHERE name = 'login'"))
	changed(t, db.URL, "policy", "set", "api", "--prefix", "ab", "sliding 400/1m", why)
	require.Equal(t, []string{
		"in force enforce sliding 400/1m", "overridden enforce sliding 300/1m", "overridden enforce sliding 10/1m",
	}, gets(t, db.URL, "abc"))
}

// A row with an end overrides the existing row. When the new row ends, the existing row is in force again.
func TestPolicySetForAWhile(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	changed(t, db.URL, "policy", "set", "api", "--key", "a", "sliding 100/1m", why)
	c := changed(t, db.URL, "policy", "set", "api", "--key", "a", "sliding 200/1m", why, "--until", "1d2h")
	require.Empty(t, c.Removed)
	require.Equal(t, "sliding 100/1m", *c.Overrides.Policy)
	require.Equal(t, 26*time.Hour, c.Added.ValidUntil.Sub(*c.Added.ValidFrom))
	require.WithinDuration(t, pgtest.Scalar[time.Time](t, db.Pool, "SELECT now()"), *c.Added.ValidFrom, time.Hour)

	c = changed(t, db.URL, "policy", "set", "api", "--key", "a", "--off", why,
		"--from", "2100-01-02", "--until", "2100-01-02T18:00:00+01:00")
	require.Equal(t, time.Date(2100, 1, 2, 0, 0, 0, 0, time.UTC), *c.Added.ValidFrom)
	require.Equal(t, 17*time.Hour, c.Added.ValidUntil.Sub(*c.Added.ValidFrom))
	c = changed(t, db.URL, "policy", "set", "api", "--key", "a", "sliding 300/1m", why, "--from", "1d", "--until", "2h")
	require.Equal(t, 2*time.Hour, c.Added.ValidUntil.Sub(*c.Added.ValidFrom)) // two hours after the beginning
	require.Equal(t, "sliding 200/1m", *c.Overrides.Policy)                   // this row is in force again after the added row
	set := []string{"policy", "set", "api", "--key", "a", "sliding 400/1m", why, "--from", "2d"}
	require.Contains(t, invoke(t, db.URL, append(set, "--dry-run")...).done(t),
		"would be overridden  api      key a  enforce  sliding 100/1m")
	c = changed(t, db.URL, set...)
	require.Nil(t, c.Added.ValidUntil)
	require.Equal(t, []string{
		"not yet off off", "not yet enforce sliding 400/1m", "not yet enforce sliding 300/1m",
		"in force enforce sliding 200/1m", "overridden enforce sliding 100/1m",
	}, gets(t, db.URL, "a"))

	// A row without an end replaces the row that has begun. Rows that begin later remain.
	c = changed(t, db.URL, "policy", "set", "api", "--key", "a", "sliding 500/1m", why)
	require.Len(t, c.Removed, 2)
	require.Nil(t, c.Overrides)

	// TestWhenARowIsInForce has more wrong times.
	set = []string{"policy", "set", "api", "--key", "a", "sliding 1000/1m", why}
	invoke(t, db.URL, append(set, "--from=2001-01-01")...).complains(t, exitUsage, "--from, 2001-01-01 00:00:00Z, is not later than now")
	invoke(t, db.URL, append(set, "--until=2001-01-01")...).complains(t, exitUsage, "--until, 2001-01-01 00:00:00Z, is not later than")
	for _, flag := range []string{"--until", "--from"} {
		invoke(t, db.URL, append(set, flag, "9999-12-31")...).complains(t, exitFailed, "before 9999-12-31 (UTC)")
	}
	require.Len(t, gets(t, db.URL, "a"), 4)
}

// Without --force, 'policy set' does not lower a limit at once or in the long run. The command compares the new policy
// with the row that it replaces. If it replaces none, the command compares it with the row that is in force without it.
func TestThoroughPolicySetLowersOnlyByForce(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		was, now string
		lowers   bool
	}{
		{"sliding 100/1m", "sliding 100/1m", false},
		{"sliding 100/1m", "fixed 101/1m", false},
		{"sliding 100/1m", "log 99/1m", true},
		{"sliding 100/1m", "sliding 1000/1h", true}, // lower in the long run
		{"sliding 100/1m", "sliding 2/1s", true},    // lower at once
		{"sliding 100/1m", "bucket 100 2/1s", false},
		{"bucket 20 5/10s", "bucket 20 4/10s", true},
		{"bucket 20 5/10s", "bucket 19 5/10s", true},
		{"bucket 20 5/10s", "sliding 20/40s", false},
		{"sliding 10/1s, sliding 100/1m", "sliding 100/1m", false},
		{"sliding 100/1m", "sliding 10/1s, sliding 100/1m", true},
		{"sliding 100/1m", "--off", false},
		{"--off", "sliding 100/1m", true},
		{"--off", "--off", false},
	} {
		t.Run(test.was+" to "+test.now, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			changed(t, db.URL, "policy", "set", "api", "--key", "a", test.was, why)
			set := []string{"policy", "set", "api", "--key", "a", test.now, why}
			for _, more := range [][]string{{}, {"--until", "1h"}, {"--from", "1h"}} {
				dry := changed(t, db.URL, append(append(set, more...), "--dry-run")...)
				require.Equal(t, test.lowers, dry.Lowers)
				if test.lowers {
					invoke(t, db.URL, append(set, more...)...).complains(t, exitFailed,
						"nothing was done", "lowers the limit", "from "+strings.Trim(test.was, "-"), "--force")
				}
			}
			if test.now != "--off" {
				require.False(t, changed(t, db.URL, append(set, "--dry-run", "--mode=shadow")...).Lowers)
			}
			require.Len(t, gets(t, db.URL, "a"), 1) // nothing has changed so far
			require.Equal(t, test.lowers, changed(t, db.URL, append(set, "--force")...).Lowers)
		})
	}

	// The new policy is also compared with rows in force for a shorter prefix or for all keys. Rows for other keys and
	// the policy in the code do not matter.
	db := pgtest.New(t)
	changed(t, db.URL, "policy", "set", "api", "--everybody", "sliding 50/1m", why)
	changed(t, db.URL, "policy", "set", "api", "--prefix", "a:", "sliding 100/1m", why)
	for target, lowers := range map[string]bool{
		"--key=a:b": true, "--prefix=a:b": true, "--prefix=a": false, "--prefix=b:": false, "--key=b": false, "--everybody": false,
	} {
		require.Equal(t, lowers, changed(t, db.URL, "policy", "set", "api", target, "sliding 60/1m", why, "--dry-run").Lowers, target)
	}
	// If a ban is replaced, the new policy is compared with what the ban overrides. No policy is lower than a ban.
	changed(t, db.URL, "policy", "set", "api", "--key", "c", "sliding 100/1m", why)
	changed(t, db.URL, "ban", "api", "c", "--for", "1h", why)
	changed(t, db.URL, "ban", "api", "d", "--for", "1h", why)
	require.True(t, changed(t, db.URL, "policy", "set", "api", "--key", "c", "sliding 99/1m", why, "--dry-run").Lowers)
	require.False(t, changed(t, db.URL, "policy", "set", "api", "--key", "d", "sliding 1/1m", why, "--dry-run").Lowers)
	// A policy that cannot be parsed cannot be compared.
	pgtest.Exec(t, db.Pool, `SET session_replication_role = replica;
		UPDATE rate_limit_policy SET policy = 'leap 1/1m' WHERE key = 'c'; RESET session_replication_role`)
	invoke(t, db.URL, "policy", "set", "api", "--key", "c", "sliding 999/1m", why).
		complains(t, exitFailed, "replaces leap 1/1m, which this release cannot read", "--force")
	require.Contains(t, invoke(t, db.URL, "policy", "set", "api", "--key", "c", "sliding 999/1m", why, "--dry-run").done(t),
		"this replaces leap 1/1m, which this release cannot read, and needs --force")
	require.False(t, changed(t, db.URL, "policy", "set", "api", "--key", "c", "--off", why, "--dry-run").Lowers)
}

// 'policy set' prints a warning if the policy is of another kind than all rows of the limiter.
func TestPolicySetOfAnotherKind(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	set := func(args ...string) string {
		o := invoke(t, db.URL, append([]string{"policy", "set", "api", "--everybody", why}, args...)...)
		require.Zero(t, o.code)
		return o.stderr
	}
	const warned = "warning: this policy is of the kind sliding, and the rows of api are of the kind fixed, bucket: " +
		"if the policy in the code is of that kind too, limiters pass over this one\n"
	pgtest.Exec(t, db.Pool, "SELECT rate_limit_allow('api', 'expired', 'sliding 1/1us')")
	require.Empty(t, set("fixed 10/1m")) // there are no rows
	pgtest.Exec(t, db.Pool, "SELECT rate_limit_allow('api', 'a', 'bucket 10 1/1d'), rate_limit_allow('api', 'b', 'fixed 10/1d', durable => true)")
	require.Equal(t, warned, set("sliding 10/1m"))
	require.Equal(t, warned, set("sliding 10/1m, fixed 10/1d", "--dry-run"))
	require.Empty(t, set("sliding 10/1m", "--mode=shadow"))
	require.Empty(t, set("--off"))
	require.Empty(t, set("bucket 10 10/1m, log 10/1h", "--force"))
	pgtest.Exec(t, db.Pool, "SELECT rate_limit_allow('api', 'c', 'sliding 10/1d')")
	require.Empty(t, set("sliding 10/1m", "--force"))
	pgtest.Exec(t, db.Pool, "SELECT rate_limit_acquire('api', 'd', 'fixed 10/1d, concurrent 5')")
	require.Equal(t, "warning: limiter api seems to have a policy with slots: such a limiter decides no shadows\n",
		set("sliding 10/1m", "--mode=shadow"))

	// A role that may not read the tables gets no warning.
	pgtest.Exec(t, db.Pool, "GRANT SELECT, INSERT, UPDATE, DELETE ON rate_limit_policy TO pg_monitor")
	o := invoke(t, urlWith(t, db, "role=pg_monitor"), "policy", "set", "api", "--key=a", "log 10/1m", "--force", why)
	require.Zero(t, o.code)
	require.Empty(t, o.stderr)
}

// A dry run prints what the command would print, and changes nothing. A dry run needs no right to change the table.
func TestPolicyDryRun(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	changed(t, db.URL, "policy", "set", "api", "--key", "a", "sliding 100/1m", why)
	pgtest.Exec(t, db.Pool, "GRANT SELECT ON rate_limit_policy TO pg_monitor")
	reader := urlWith(t, db, "role=pg_monitor")
	for _, args := range [][]string{
		{"policy", "set", "api", "--key", "a", "sliding 50/1m", why}, {"policy", "unset", "api", "--key", "a"},
	} {
		dry := changed(t, reader, append(args, "--dry-run")...)
		require.True(t, dry.DryRun)
		out := invoke(t, reader, append(args, "--dry-run")...).done(t)
		require.Contains(t, out, "would be re")
		if args[1] == "set" {
			require.Contains(t, out, "this lowers the limit, from sliding 100/1m to sliding 50/1m, and needs --force\n")
			args = append(args, "--force")
		}
		invoke(t, reader, args...).complains(t, exitFailed, "42501", "rate_limit_policy_admin")
	}
	require.Equal(t, 1, pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM rate_limit_policy_history"))
}

func TestPolicyUnset(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, key, key_prefix, mode, policy, valid_from, comment) VALUES
		('api', 'a', NULL, 'enforce', 'sliding 1/1m', now(), 'why'), ('api', 'a', NULL, 'enforce', 'sliding 2/1m', '2100-01-01', 'why'),
		('api', 'a', NULL, 'shadow', 'sliding 3/1m', now(), 'why'), ('api', NULL, 'a', 'enforce', 'sliding 4/1m', now(), 'why'),
		('api', NULL, NULL, 'off', NULL, now(), 'why')`)
	pgtest.Exec(t, db.Pool, "SELECT rate_limit_ban('api', 'a', '1h', '1h', '1h', 'too many')")
	require.Len(t, changed(t, db.URL, "policy", "unset", "api", "--key=a").Removed, 2)
	require.Equal(t, []string{
		"in force deny deny", "in force shadow sliding 3/1m", "overridden enforce sliding 4/1m", "overridden off off",
	}, gets(t, db.URL, "a"))
	require.Len(t, changed(t, db.URL, "policy", "unset", "api", "--key=a", "--mode=shadow").Removed, 1)
	require.Len(t, changed(t, db.URL, "policy", "unset", "api", "--prefix=a").Removed, 1)
	require.Len(t, changed(t, db.URL, "policy", "unset", "api", "--everybody").Removed, 1)
	require.Equal(t, []string{"in force deny deny"}, gets(t, db.URL, "a"))
	require.Equal(t, "there is nothing to remove\n", invoke(t, db.URL, "policy", "unset", "api", "--everybody").done(t))
}

// This test checks the outputs for people.
func TestPoliciesAreListed(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	require.Equal(t, "there is none\n", invoke(t, db.URL, "policy", "list").done(t))
	require.Equal(t, "there is none, so the policy in the code is in force\n", invoke(t, db.URL, "policy", "get", "api", "a").done(t))
	require.Equal(t, "there is none\n", invoke(t, db.URL, "policy", "history").done(t))
	changed(t, db.URL, "policy", "set", "api", "--key", "line\nbreak", "sliding 100/1m", "--comment", "bell\a, 2 lines\nof text")
	pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, key, key_prefix, mode, policy, valid_from, valid_until, comment) VALUES
		('api', E'line\nbreak', NULL, 'enforce', 'sliding 200/1m', now(), '2100-01-01 00:00:00Z', 'why'),
		('login', NULL, NULL, 'off', NULL, '2100-01-01 00:00:00Z', 'infinity', 'why'),
		('api', NULL, 'p', 'deny', NULL, '-infinity', 'infinity', 'why'),
		('api', NULL, 'ended', 'deny', NULL, '2000-01-01', '2001-01-01', 'why');
		SELECT rate_limit_ban('api', 'b', '1h', '1h', '1h', 'too many')`)
	out := invoke(t, db.URL, "policy", "list").done(t)
	lines := strings.Split(out, "\n")
	require.Regexp(t, `^STATE +LIMITER +FOR +MODE +POLICY +FROM +UNTIL +BY +COMMENT$`, lines[0])
	require.Regexp(t, `^in force +api +key "line\\nbreak" +enforce +sliding 200/1m +20\S+ \S+Z +2100-01-01 00:00:00Z +postgres +why$`, lines[1])
	require.Regexp(t, `^overridden +api +key "line\\nbreak" +enforce +sliding 100/1m +20\S+ \S+Z +postgres +"bell\\a, 2 lines\\nof text"$`, lines[2])
	require.Regexp(t, `^in force +api +prefix p +deny +always +postgres +why$`, lines[3])
	require.Regexp(t, `^not yet +login +everybody +off +2100-01-01 00:00:00Z +postgres +why$`, lines[4])
	require.Equal(t, []string{"", "limiters made 1 ban; --bans lists them", ""}, lines[5:])
	require.Regexp(t, `(?m)^in force +api +key b +deny +20\S+ \S+Z +20\S+ \S+Z +postgres \(limiter\) +too many$`,
		invoke(t, db.URL, "policy", "list", "--bans").done(t))
	require.NotContains(t, invoke(t, db.URL, "policy", "list", "login").done(t), "api")
	listed := decode[struct {
		Policies []policies.PolicyRow `json:"policies"`
		Bans     int64                `json:"automatic_bans"`
	}](t, invoke(t, db.URL, "policy", "list", "api", "--json"))
	require.Len(t, listed.Policies, 3)
	require.EqualValues(t, 1, listed.Bans)
	require.Equal(t, "line\nbreak", *listed.Policies[0].Key)
	require.Equal(t, policies.InForce, listed.Policies[2].State)
	require.Nil(t, listed.Policies[2].ValidFrom)
}

func TestPolicyHistory(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	changed(t, db.URL, "policy", "set", "api", "--key", "a", "sliding 100/1m", why)
	changed(t, db.URL, "policy", "set", "api", "--key", "a", "sliding 200/1m", "--comment=more")
	pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, key_prefix, policy, comment) VALUES
		('api', 'a', 'sliding 1/1m', 'why'), ('api', NULL, 'sliding 2/1m', 'why')`)
	pgtest.Exec(t, db.Pool, "UPDATE rate_limit_policy SET name = 'login', valid_until = '2100-01-01' WHERE key_prefix = 'a'")
	history := func(args ...string) []policies.PolicyEvent {
		return decode[[]policies.PolicyEvent](t, invoke(t, db.URL, append([]string{"policy", "history", "--json"}, args...)...))
	}
	all := history()
	require.Len(t, all, 6)
	for i, action := range []string{"update", "insert", "insert", "insert", "delete", "insert"} {
		require.Equal(t, action, all[i].Action)
		require.Equal(t, "postgres", all[i].By)
		require.Equal(t, action == "insert", all[i].Before == nil)
		require.Equal(t, action == "delete", all[i].After == nil)
	}
	require.Equal(t, "api", all[0].Before.Limiter)
	require.Equal(t, "login", all[0].After.Limiter)
	require.Equal(t, 2100, all[0].After.ValidUntil.Year())
	require.Equal(t, all[5].After, all[4].Before)
	require.Equal(t, "more", all[3].After.Comment)
	require.Len(t, history("-n", "2"), 2)
	require.Len(t, history("login"), 1)
	require.Len(t, history("api", "--key", "a"), 3)
	require.Len(t, history("--prefix", "a"), 2)
	require.Len(t, history("--everybody"), 1)
	out := invoke(t, db.URL, "policy", "history").done(t)
	require.Regexp(t, `(?m)^20\S+ \S+Z +postgres +update of +api +prefix a +enforce +sliding 1/1m`, out)
	require.Regexp(t, `(?m)^ +to +login +prefix a +enforce +sliding 1/1m .* 2100-01-01 00:00:00Z +postgres +why$`, out)
	require.Regexp(t, `(?m)^20\S+ \S+Z +postgres +delete +api +key a +enforce +sliding 100/1m`, out)
}

// If two people change a key's policy at once, the second person's command waits, and sees the first person's change.
func TestOperatorsTakeTurns(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	other := pgtest.Begin(t, db)
	pgtest.Exec(t, other, "INSERT INTO rate_limit_policy (name, key, policy, comment) VALUES ('api', 'a', 'sliding 100/1m', 'why')")
	later := func(policy string) func() (outcome, error) {
		return testkit.Later(func() (outcome, error) {
			return invoke(t, db.URL, "policy", "set", "api", "--key", "a", policy, why, "--json",
				"--timeout", patience.String()), nil
		})
	}
	set, lower := later("sliding 200/1m"), later("sliding 50/1m")
	pgtest.WaitUntilBlocked(t, db.Pool, 2)
	invoke(t, db.URL, "policy", "set", "api", "--key", "a", "sliding 200/1m", why, "--timeout", "20ms").
		complains(t, exitFailed, "57014", "--timeout allows")
	require.NoError(t, other.Commit(t.Context()))
	o, err := set()
	require.NoError(t, err)
	require.Len(t, decode[policies.PolicyChange](t, o.afterWaiting()).Removed, 1)
	o, err = lower()
	require.NoError(t, err)
	o.afterWaiting().complains(t, exitFailed, "lowers the limit")
	require.Equal(t, []string{"in force enforce sliding 200/1m"}, gets(t, db.URL, "a"))
}

// If the table or a right is missing, the command gives advice. The advice does not contain the key.
func TestPoliciesThatCannotBeChanged(t *testing.T) {
	t.Parallel()
	testUnchangeable(t, [][]string{
		{"explain", "api", "secret"}, {"policy", "set", "api", "--key", "secret", "sliding 1/1m", why},
	})
}

func TestThoroughPoliciesThatCannotBeChanged(t *testing.T) {
	t.Parallel()
	testUnchangeable(t, [][]string{
		{"policy", "list"}, {"policy", "get", "api", "secret"}, {"policy", "history"}, {"unban", "api", "secret"},
		{"policy", "unset", "api", "--key", "secret"}, {"ban", "api", "secret", "--for", "1h", why},
	})
}

func testUnchangeable(t *testing.T, commands [][]string) {
	t.Helper()
	db := pgtest.New(t)
	stranger := urlWith(t, db, "role=pg_monitor")
	for _, args := range commands {
		o := invoke(t, stranger, args...)
		o.complains(t, exitFailed, "42501", "rate_limit_policy_admin", "rate_limit_reader", "deploy/grants.sql")
		require.NotContains(t, o.stderr, "secret")
	}
	for _, args := range [][]string{
		{"policy", "get", "api", "secret\xff"}, {"policy", "set", "api", "--prefix=secret\xff", "--off", why},
	} {
		o := invoke(t, db.URL, args...)
		o.complains(t, exitUsage, "encoding")
		require.NotContains(t, o.stderr, "secret")
	}
	pgtest.Exec(t, db.Pool, "DROP TABLE rate_limit_policy, rate_limit_policy_history")
	for _, args := range commands {
		invoke(t, db.URL, args...).complains(t, exitFailed, "42P01", "pgratelimit migrate up", "pgratelimit doctor")
	}
}

// --schema may name any schema.
func TestPoliciesInASchema(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	const schema = `rate_limit_ "of" 'ours'`
	pgtest.Exec(t, db.Pool, "CREATE SCHEMA "+pgx.Identifier{schema}.Sanitize())
	run := func(args ...string) outcome { return invoke(t, db.URL, append(args, "--schema", schema)...) }
	run("migrate", "up").done(t)
	for _, args := range [][]string{
		{"policy", "set", "api", "--key", "a", "sliding 100/1m", why}, {"ban", "api", "a", "--for", "1h", why}, {"policy", "list"},
		{"policy", "history"}, {"explain", "api", "a"}, {"unban", "api", "a"}, {"policy", "unset", "api", "--key", "a"},
	} {
		require.Contains(t, run(args...).done(t), "why", args)
	}

	slot := pgtest.Scalar[string](t, db.Pool,
		"SELECT slot::text FROM "+pgx.Identifier{schema, "rate_limit_acquire"}.Sanitize()+"('imports', 'a', 'concurrent 5', 1, '1 hour')")
	run("slots", "release", slot).done(t)
}

// The commands do not run triggers and functions of other roles.
func TestForeignTriggersOfPoliciesAreNotRun(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	opened := open(t, db.URL)
	nothing := func(cli.Tx) error { return nil }
	const grant, revoke = "GRANT CREATE ON SCHEMA public TO pg_monitor; ", "; REVOKE CREATE ON SCHEMA public FROM pg_monitor"
	for i, test := range []struct{ sql, undo string }{
		{`CREATE FUNCTION pwned() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''it was run''; END';
			CREATE TRIGGER t BEFORE DELETE ON rate_limit_policy FOR EACH STATEMENT EXECUTE FUNCTION pwned()`, "DROP FUNCTION pwned CASCADE"},
		{"ALTER FUNCTION _rate_limit_note_policy SECURITY INVOKER", "ALTER FUNCTION _rate_limit_note_policy SECURITY DEFINER"},
		{grant + "ALTER FUNCTION _rate_limit_check_policy OWNER TO pg_monitor",
			"ALTER FUNCTION _rate_limit_check_policy OWNER TO CURRENT_USER" + revoke},
		{"CREATE RULE r AS ON DELETE TO rate_limit_policy DO INSTEAD NOTHING", "DROP RULE r ON rate_limit_policy"},
		{"ALTER TABLE rate_limit_policy ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON rate_limit_policy USING (true)",
			"DROP POLICY p ON rate_limit_policy; ALTER TABLE rate_limit_policy DISABLE ROW LEVEL SECURITY"},
		{"ALTER TABLE rate_limit_policy FORCE ROW LEVEL SECURITY", "ALTER TABLE rate_limit_policy NO FORCE ROW LEVEL SECURITY"},
		{`CREATE SCHEMA audit; GRANT CREATE ON SCHEMA public, audit TO pg_monitor; SET ROLE pg_monitor;
			CREATE FUNCTION audit.pwned() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS 'BEGIN RAISE EXCEPTION ''it was run''; END';
			RESET ROLE; CREATE TRIGGER t AFTER DELETE ON rate_limit_policy FOR EACH STATEMENT EXECUTE FUNCTION audit.pwned()`,
			"DROP SCHEMA audit CASCADE" + revoke},
		{`CREATE FUNCTION pwned() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
			CREATE TRIGGER t BEFORE INSERT ON rate_limit_policy_history FOR EACH ROW EXECUTE FUNCTION pwned()`, "DROP FUNCTION pwned CASCADE"},
	} {
		pgtest.Exec(t, db.Pool, test.sql)
		err := opened.Write(t.Context(), nothing) // the commands write in this way
		require.ErrorContains(t, err, "table public.rate_limit_policy")
		require.ErrorContains(t, err, "is not what the migrations make")
		if i == 0 {
			invoke(t, db.URL, "policy", "unset", "api", "--everybody").
				complains(t, exitFailed, "table public.rate_limit_policy", "is not what the migrations make")
		}
		pgtest.Exec(t, db.Pool, test.undo)
		require.NoError(t, opened.Write(t.Context(), nothing))
	}
	for _, table := range []string{"rate_limit_policy", "rate_limit_policy_history"} {
		pgtest.Exec(t, db.Pool, grant+"ALTER TABLE "+table+" OWNER TO pg_monitor")
		invoke(t, db.URL, "policy", "list").complains(t, exitFailed, "table public."+table, "belongs to pg_monitor")
		pgtest.Exec(t, db.Pool, "ALTER TABLE "+table+" OWNER TO CURRENT_USER"+revoke)
	}
}

// Rows that were written without the triggers may have times that JSON cannot represent. All commands work with them.
func TestTimesOfPoliciesThatJSONCannotHave(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	tx := pgtest.Begin(t, db)
	// Replication copies the rows of the history, too.
	pgtest.Exec(t, tx, `SET LOCAL session_replication_role = replica;
		INSERT INTO rate_limit_policy (name, key, mode, policy, valid_from, valid_until, comment, changed_at)
		SELECT 'api', 'a', mode, CASE mode WHEN 'shadow' THEN 'fixed 1/1h' END, first, last, 'why', first
		FROM unnest('{deny,shadow}'::text[]) AS mode,
			unnest('{-infinity,0044-03-15 BC,2001-01-01,9999-12-31 23:59:59Z,10000-01-01,infinity}'::timestamptz[]) AS first,
			unnest('{-infinity,0044-03-15 BC,9999-12-31 23:59:59Z,10000-01-01,infinity}'::timestamptz[]) AS last;
		INSERT INTO rate_limit_policy_history (at, by, action, policy_id, before, after)
		SELECT p.changed_at, 'who', 'update', p.id, to_jsonb(p), to_jsonb(p) FROM rate_limit_policy AS p`)
	require.NoError(t, tx.Commit(t.Context()))
	for _, args := range [][]string{
		{"policy", "list"}, {"policy", "history"}, {"policy", "get", "api", "a", "--json"}, {"policy", "history", "-n", "100", "--json"},
		{"policy", "compare", "api", "--json"}, {"explain", "api", "a", "--json"}, {"doctor", "--json"},
		{"policy", "set", "api", "--key", "a", "sliding 9/1h", why, "--dry-run", "--json"},
		{"ban", "api", "a", "--for", "1h", why, "--json"}, {"unban", "api", "a", "--json"},
	} {
		o := invoke(t, db.URL, args...)
		require.NotContains(t, o.stderr+o.stdout, "outside of range", args)
		if args[0] != "doctor" {
			o.done(t)
		}
	}
	require.NotContains(t, gets(t, db.URL, "a"), "in force deny deny")
}

func TestBanAndUnban(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	c := changed(t, db.URL, "ban", "api", "a", "--for", "1h", "--comment", "tries passwords")
	require.Equal(t, policies.ModeDeny, c.Added.Mode)
	require.Equal(t, time.Hour, c.Added.ValidUntil.Sub(*c.Added.ValidFrom))
	require.False(t, c.Added.Automatic)
	// A shorter ban changes nothing. A longer ban replaces the person's ban, and a limiter's ban remains.
	require.Regexp(t, "^the key is already banned, until 20.*Z\n$", invoke(t, db.URL, "ban", "api", "a", "--for", "59m", why).done(t))
	c = changed(t, db.URL, "ban", "api", "a", "--for", "7d", why)
	require.Len(t, c.Removed, 1)
	pgtest.Exec(t, db.Pool, "SELECT rate_limit_ban('api', 'b', '1h', '1h', '1h', 'too many')")
	require.Empty(t, changed(t, db.URL, "ban", "api", "b", "--for", "2h", why).Removed)
	pgtest.Exec(t, db.Pool, "INSERT INTO rate_limit_policy (name, key, mode, comment) VALUES ('api', 'c', 'deny', 'for ever')")
	require.Equal(t, "the key is already banned, without an end\n", invoke(t, db.URL, "ban", "api", "c", "--for", "9d", why).done(t))

	// A ban that another row overrides does not count.
	pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, key, mode, valid_until, comment)
		VALUES ('api', 'e', 'deny', now() + interval '100 days', 'why')`)
	pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, key, policy, valid_until, comment)
		VALUES ('api', 'e', 'sliding 1/1m', now() + interval '1 hour', 'why'), ('api', 'b', 'sliding 1/1m', now() + interval '1 hour', 'why')`)
	c = changed(t, db.URL, "ban", "api", "e", "--for", "2h", why)
	require.Len(t, c.Removed, 1)
	require.Equal(t, []string{"in force deny deny", "overridden enforce sliding 1/1m"}, gets(t, db.URL, "e"))

	require.Len(t, changed(t, db.URL, "unban", "api", "b").Removed, 2)
	require.Equal(t, []string{"in force enforce sliding 1/1m"}, gets(t, db.URL, "b"))
	require.Contains(t, invoke(t, db.URL, "unban", "api", "a").done(t), "removed  api      key a  deny")
	require.Equal(t, "the key is not banned\n", invoke(t, db.URL, "unban", "api", "a").done(t))
	// After unban, the next ban of a key is as long as a first ban.
	pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, key, mode, valid_from, valid_until, comment, automatic)
		VALUES ('api', 'd', 'deny', now() - interval '2 hours', now() - interval '1 hour', 'why', true)`)
	require.Len(t, changed(t, db.URL, "unban", "api", "d").Removed, 1)
	// 'policy set' replaces a ban, and prints the ban.
	require.Equal(t, policies.ModeDeny, changed(t, db.URL, "policy", "set", "api", "--key", "c", "sliding 1/1m", why).Removed[0].Mode)
}

func TestExplain(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	explain := func(args ...string) keys.Explanation {
		return decode[keys.Explanation](t, invoke(t, db.URL, append([]string{"explain", "api", "a:1", "--json"}, args...)...))
	}
	e := explain()
	require.Equal(t, "code", e.Source)
	require.Nil(t, e.Decides)
	require.Contains(t, e.Unknown, "--policy")
	require.Contains(t, invoke(t, db.URL, "explain", "api", "a:1", "--policy", "sliding 10/1m").done(t),
		"in force  the policy in the code, which is sliding 10/1m if --policy is right\n"+
			"left      10 under sliding 10/1m in rate_limit_ephemeral, untouched\n")
	out := invoke(t, db.URL, "explain", "api", "a:1").done(t)
	require.Contains(t, out, "in force  the policy in the code, which this command cannot know\n")
	require.Contains(t, out, "left      not known: it depends on the policy in the code: give it with --policy\n")

	pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, key_prefix, mode, policy, comment) VALUES
		('api', NULL, 'enforce', 'sliding 100/1h, sliding 1000/1d', 'why'), ('api', 'a', 'shadow', 'sliding 5/1h', 'why')`)
	pgtest.Exec(t, db.Pool, "SELECT rate_limit_allow('api', 'a:1', 'sliding 100/1h, sliding 1000/1d', 40)")
	e = explain("--policy", "sliding 1/1s")
	require.Equal(t, "everybody", e.Source)
	require.Equal(t, "sliding 5/1h", *e.Shadow.Policy)
	require.Len(t, e.State, 2)
	require.EqualValues(t, 60, e.State[0].Remaining)
	require.EqualValues(t, 960, e.State[1].Remaining)
	require.EqualValues(t, 100, explain("--durable").State[0].Remaining)
	// A limiter with another kind of policy ignores the row.
	out = invoke(t, db.URL, "explain", "api", "a:1", "--policy", "fixed 7/1h").done(t)
	require.Contains(t, out, "in force     the policy in the code, which is fixed 7/1h if --policy is right\n")
	require.Regexp(t, `(?m)^passed over +sliding 100/1h, sliding 1000/1d, by the row \d+ for everybody`, out)
	require.Regexp(t, `(?m)^left +7 under fixed 7/1h in `, out)
	// All limiters ignore rows that they cannot read, such as rows of a newer release.
	tx := pgtest.Begin(t, db)
	pgtest.Exec(t, tx, `ALTER TABLE rate_limit_policy DISABLE TRIGGER USER;
		INSERT INTO rate_limit_policy (name, key, mode, policy, comment) VALUES ('api', 'a:1', 'enforce', NULL, 'none'),
			('api', 'a:1', 'enforce', 'leap 1/1h', 'leap'), ('api', 'a:1', 'throttle', 'fixed 1/1h', 'throttle'),
			('api', 'a:1', 'shadow', NULL, 'none'), ('api', 'a:1', 'shadow', 'leap 1/1h', 'leap'),
			('api', 'a:1', 'shadow', 'concurrent 5', 'slots');
		ALTER TABLE rate_limit_policy ENABLE TRIGGER USER`)
	require.NoError(t, tx.Commit(t.Context()))
	e = explain()
	require.Equal(t, "everybody", e.Source)
	require.Equal(t, "sliding 5/1h", *e.Shadow.Policy)
	require.Len(t, e.PassedOver, 6)
	shown := gets(t, db.URL, "a:1")
	for _, s := range shown[:6] {
		require.Regexp(t, "^passed over ", s)
	}
	require.Equal(t, []string{"in force shadow sliding 5/1h", "in force enforce sliding 100/1h, sliding 1000/1d"}, shown[6:])
	require.Equal(t, 6, strings.Count(invoke(t, db.URL, "policy", "list").done(t), policies.PassedOver))
	// A limiter with slots decides no shadow, and obeys only policies with slots.
	slots := explain("--policy", "sliding 9/1h, sliding 9/1d, concurrent 5")
	require.Nil(t, slots.Shadow)
	require.Nil(t, slots.Decides)
	// A new policy is compared with the policy in force.
	set := []string{"policy", "set", "api", "--key", "a:1", "--until=1h", "--dry-run", why}
	require.False(t, changed(t, db.URL, append(set, "sliding 100/1h, sliding 1000/1d")...).Lowers)
	lower := changed(t, db.URL, append(set, "sliding 99/1h")...)
	require.True(t, lower.Lowers)
	require.Nil(t, lower.Overrides)
	pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_policy WHERE key = 'a:1'")
	out = invoke(t, db.URL, "explain", "api", "a:1").done(t)
	require.Regexp(t, `(?m)^in force +sliding 100/1h, sliding 1000/1d, by the row \d+ for everybody, of postgres: why$`, out)
	require.Regexp(t, `(?m)^shadow +sliding 5/1h, by the row \d+ for prefix a, of postgres: why$`, out)
	require.Regexp(t, `(?m)^left +960 under sliding 1000/1d in rate_limit_ephemeral, free now, as good as new after`, out)
	require.True(t, pgtest.Scalar[bool](t, db.Pool, "SELECT sum(count) = 80 FROM rate_limit_ephemeral")) // explain took nothing

	pgtest.Exec(t, db.Pool, "INSERT INTO rate_limit_policy (name, key_prefix, mode, comment) VALUES ('api', 'a:', 'deny', 'attack')")
	require.Equal(t, "prefix", explain().Source)
	pgtest.Exec(t, db.Pool, "SELECT rate_limit_ban('api', 'a:1', '1h', '1h', '1h', 'too many')")
	e = explain()
	require.Equal(t, "key", e.Source)
	require.Len(t, e.Bans, 2)
	require.Equal(t, policies.ModeDeny, e.Decides.Mode)
	out = invoke(t, db.URL, "explain", "api", "a:1").done(t)
	require.Regexp(t, `(?m)^banned +until 20\S+ \S+Z, by a limiter, for key a:1: too many$`, out)
	require.Regexp(t, `(?m)^banned +without an end, by postgres, for prefix a:: attack$`, out)
	require.Contains(t, out, "left      not known: nothing is counted while this row is in force\n")

	// explain works for a role that may read policies, but may not call rate_limit_peek.
	pgtest.Exec(t, db.Pool, "GRANT SELECT ON rate_limit_policy TO pg_monitor")
	out = invoke(t, urlWith(t, db, "role=pg_monitor"), "explain", "api", "b").done(t)
	require.Contains(t, out, "for everybody")
	require.Contains(t, out, "left      not known: this role may not ask")
}

// No statement of the commands scans a large table, whatever the planner estimates.
func TestPolicyCommandsUseTheIndex(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	conn := pgtest.Connect(t, db)
	scans := pgtest.ScansOfAGrownTable(t, conn, "rate_limit_policy", "force_custom_plan", func() {}, func() {
		pgtest.Exec(t, conn, `INSERT INTO rate_limit_policy (name, key, mode, comment)
			SELECT 'api', 'key ' || n, 'deny', 'why' FROM generate_series(1, 2000) AS n`)
		pgtest.Exec(t, conn, "ANALYZE rate_limit_policy")
	}, func() {
		key := "key 7"
		rows, _, err := policies.ApplyingPolicies(t.Context(), anyTx{conn: conn}, "api", policies.PolicyTarget{Key: &key}, false)
		require.NoError(t, err)
		require.Len(t, rows, 1)
	})
	require.Zero(t, scans.Sequential)
	require.Less(t, scans.IndexRows, int64(100))
}

// anyTx is a connection that can be used as a transaction.
type anyTx struct {
	pgx.Tx
	conn *pgx.Conn
}

func (a anyTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return a.conn.Query(ctx, sql, append([]any{pgx.QueryExecModeExec}, args...)...)
}

func (a anyTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return a.conn.QueryRow(ctx, sql, args...)
}
