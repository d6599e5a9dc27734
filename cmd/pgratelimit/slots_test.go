package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/keys"
)

// acquire acquires a slot for an hour, or a place in the line, and returns its id.
func acquire(t *testing.T, db pgtest.Querier, name, key, policy string, cost int, durable bool, holder any) string {
	t.Helper()
	wait := !strings.Contains(policy, ",") // a place in a line needs a policy with one part
	return pgtest.Scalar[string](t, db, `
		SELECT slot::text FROM rate_limit_acquire($1, $2, $3, $4, '1 hour', $5, $6, wait => $7)`,
		name, key, policy, cost, durable, holder, wait)
}

func listSlots(t *testing.T, url string, args ...string) keys.SlotList {
	t.Helper()
	return decode[keys.SlotList](t, invoke(t, url, append([]string{"slots", "--json"}, args...)...))
}

// ids returns the ids of a list, in its order.
func ids(list []keys.Slot) []string {
	all := []string{}
	for _, s := range list {
		all = append(all, s.Slot)
	}
	return all
}

func TestSlots(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	const policy = "concurrent 5"
	require.Regexp(t, `^nobody holds a slot of limiter imports or waits for one, at \S+ \S+Z\n$`,
		invoke(t, db.URL, "slots", "imports").done(t))
	require.Equal(t, []keys.SlotTable{
		{Table: "rate_limit_ephemeral", Listed: []keys.Slot{}}, {Table: "rate_limit_durable", Listed: []keys.Slot{}},
	}, listSlots(t, db.URL, "imports").Tables)

	b := acquire(t, db.Pool, "imports", "b", policy, 1, false, nil)
	first := acquire(t, db.Pool, "imports", "a", policy, 3, false, "worker-7 4242")
	second := acquire(t, db.Pool, "imports", "a", policy, 1, false, "worker-8 1")
	pgtest.Exec(t, db.Pool, `UPDATE rate_limit_ephemeral_hold SET line_group = 'tenant:1', weight = 2 WHERE id = $1`, second)
	third := acquire(t, db.Pool, "imports", "a", policy, 2, false, "worker-9 1")
	fourth := acquire(t, db.Pool, "imports", "a", policy, 1, false, "a\u202eb")
	durable := acquire(t, db.Pool, "imports", "a", policy, 4, true, "worker-1 1")
	acquire(t, db.Pool, "exports", "a", policy, 1, false, "another limiter")
	pgtest.Exec(t, db.Pool, `SELECT rate_limit_hold('imports', 'a', 'fixed 5/1m', 1, '1 hour')`) // no slot

	list := listSlots(t, db.URL, "imports")
	require.Equal(t, []string{first, second, third, fourth, b}, ids(list.Tables[0].Listed))
	require.Equal(t, []string{durable}, ids(list.Tables[1].Listed))
	now := list.At
	for _, table := range list.Tables {
		for i := range table.Listed {
			s := &table.Listed[i]
			require.WithinDuration(t, now, s.MadeAt, time.Minute)
			require.Equal(t, time.Hour, s.EndsAt.Sub(s.MadeAt))
			s.MadeAt, s.EndsAt = time.Time{}, time.Time{}
		}
	}
	require.Equal(t, []keys.SlotTable{
		{Table: "rate_limit_ephemeral", Slots: 3, Units: 5, Waiting: 2, WaitingUnits: 3, Listed: []keys.Slot{
			{Slot: first, Key: "a", Units: 3, Holder: "worker-7 4242", Weight: 1, Fence: 2},
			{Slot: second, Key: "a", Units: 1, Holder: "worker-8 1", Group: "tenant:1", Weight: 2, Fence: 3},
			{Slot: third, Key: "a", Units: 2, Holder: "worker-9 1", Weight: 1, Waiting: true, Place: 1},
			{Slot: fourth, Key: "a", Units: 1, Holder: "a\u202eb", Weight: 1, Waiting: true, Place: 2},
			{Slot: b, Key: "b", Units: 1, Weight: 1, Fence: 1},
		}},
		{Table: "rate_limit_durable", Slots: 1, Units: 4, Listed: []keys.Slot{
			{Slot: durable, Key: "a", Units: 4, Holder: "worker-1 1", Weight: 1, Fence: 6},
		}},
	}, list.Tables)

	const at = `\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ`
	out := invoke(t, db.URL, "slots", "imports", "a").done(t)
	require.Regexp(t, `(?m)^KEY +STATE +UNITS +HOLDER +GROUP +SINCE +ENDS AFTER +FENCE +SLOT$`, out)
	require.Regexp(t, `(?m)^a +held +3 +worker-7 4242 +`+at+` +(1h|59m\S+) +2 +`+first+`$`, out)
	require.Regexp(t, `(?m)^a +held +1 +worker-8 1 +tenant:1 \(weight 2\) +`+at+` +(1h|59m\S+) +3 +`+second+`$`, out)
	require.Regexp(t, `(?m)^a +waits, place 1 +2 +worker-9 1 +`+at+` +(1h|59m\S+) +`+third+`$`, out)
	require.Contains(t, out, `"a\u202eb"`)
	require.Regexp(t, `(?m)^4 units held in 2 slots, and 2 in line for 3 units, of limiter imports in `+
		`rate_limit_ephemeral, at `+at+`$`, out)
	require.Regexp(t, `(?m)^4 units held in 1 slot, of limiter imports in rate_limit_durable, at `+at+`$`, out)
	require.NotContains(t, out, b)
	require.NotContains(t, out, "another limiter")

	few := listSlots(t, db.URL, "imports", "-n", "3")
	require.Equal(t, []string{first, second, third}, ids(few.Tables[0].Listed))
	require.Equal(t, []int64{3, 5, 2, 3}, []int64{
		few.Tables[0].Slots, few.Tables[0].Units, few.Tables[0].Waiting, few.Tables[0].WaitingUnits})
	require.Contains(t, invoke(t, db.URL, "slots", "imports", "-n", "3").done(t), "; 2 are not listed: see --number\n")

	// What has ended is not listed, and neither are the slots of a row that somebody has deleted.
	pgtest.Exec(t, db.Pool, `UPDATE rate_limit_ephemeral_hold SET ends_at = made_at WHERE id IN ($1, $2)`, first, third)
	require.Equal(t, []string{second, fourth, b}, ids(listSlots(t, db.URL, "imports").Tables[0].Listed))
	pgtest.Exec(t, db.Pool, `UPDATE rate_limit_ephemeral SET held = NULL, held_next = NULL, held_until = NULL
		WHERE key = 'a' AND prefix = 'imports'`)
	pgtest.Exec(t, db.Pool, `DELETE FROM rate_limit_ephemeral WHERE key = 'b'`)
	left := listSlots(t, db.URL, "imports").Tables[0]
	require.Equal(t, []string{fourth}, ids(left.Listed))
	require.EqualValues(t, 1, left.Listed[0].Place)

	// The slots of a later part of a policy belong to the limiter too. A limiter may have the name of a subcommand.
	both := acquire(t, db.Pool, "release", "a", "fixed 10/1m, concurrent 5", 1, false, nil)
	require.Equal(t, []string{both}, ids(listSlots(t, db.URL, "--", "release").Tables[0].Listed))
}

func TestReleaseSlots(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	const policy = "concurrent 5"
	const unknown = "there is no such slot: it has ended, was released, or is in another database or schema"
	release := func(slot string, more ...string) outcome {
		return invoke(t, db.URL, append([]string{"slots", "release", slot}, more...)...)
	}
	for _, durable := range []bool{false, true} {
		table := cli.Table(durable)
		first := acquire(t, db.Pool, "imports", "alice", policy, 3, durable, "worker-7 4242")
		second := acquire(t, db.Pool, "imports", "alice", policy, 2, durable, nil)
		third := acquire(t, db.Pool, "imports", "alice", policy, 2, durable, "worker-9 1")
		fourth := acquire(t, db.Pool, "imports", "alice", policy, 2, durable, "worker-6 1")

		// The next one in line gets the units. A slot is released once.
		require.Regexp(t, `^released 3 units of key alice of limiter imports in `+table+
			`, which worker-7 4242 had asked for at \S+ \S+Z\n$`, release(first).done(t))
		require.True(t, pgtest.Scalar[bool](t, db.Pool, `SELECT allowed FROM rate_limit_renew($1, '1 hour')`, third))
		require.Regexp(t, `^removed worker-6 1 from the line of key alice of limiter imports in `+table+
			`: it had asked for 2 units at \S+ \S+Z\n$`, release(fourth).done(t))
		if durable {
			continue
		}
		release(first).complains(t, exitFailed, unknown, "'pgratelimit slots NAME' lists those that are left")
		gone := decode[keys.Released](t, release(second, "--json"))
		require.Equal(t, "imports", gone.Limiter)
		require.Equal(t, table, gone.Table)
		require.Equal(t, second, gone.Slot.Slot)
		require.Empty(t, gone.Holder)
		pgtest.Exec(t, db.Pool, `UPDATE `+table+`_hold SET ends_at = made_at WHERE id = $1`, third)
		release(third).complains(t, exitFailed, unknown)
	}

	// A text that is no slot changes nothing, and no message has the key.
	slot := acquire(t, db.Pool, "imports", "alice", policy, 3, false, nil)
	other := "0" + slot[1:]
	if other == slot {
		other = "1" + slot[1:]
	}
	for _, text := range []string{
		"", "alice", slot[:35], slot[1:], slot + "0", slot + slot, strings.ToUpper(slot), " " + slot, "{" + slot + "}",
		strings.ReplaceAll(slot, "-", ""), slot + ".e",
	} {
		o := release(text)
		o.complains(t, exitUsage, "the slot cannot be read: pass the whole text in the column SLOT")
		require.NotContains(t, o.stderr, "alice'")
	}
	hold := pgtest.Scalar[string](t, db.Pool, `SELECT left(hold, 36) FROM rate_limit_hold('a', 'b', 'fixed 5/1m', 1, '1 h')`)
	for _, id := range []string{other, hold} {
		o := release(id)
		o.complains(t, exitFailed, unknown)
		require.NotContains(t, o.stderr, "alice")
	}

	// A role without rights is told which it needs.
	for _, args := range [][]string{{"slots", "imports"}, {"slots", "release", slot}} {
		invoke(t, urlWith(t, db, "role=pg_monitor"), args...).complains(t, exitFailed, "42501", "deploy/grants.sql")
	}
	pgtest.Exec(t, db.Pool, `GRANT SELECT ON ALL TABLES IN SCHEMA public TO pg_monitor`)
	reader := urlWith(t, db, "role=pg_monitor")
	require.Len(t, listSlots(t, reader, "imports").Tables[0].Listed, 1)
	invoke(t, reader, "slots", "release", slot).complains(t, exitFailed, "42501", "rate_limit_app", "grants.sql")
	require.Len(t, listSlots(t, db.URL, "imports").Tables[0].Listed, 1)
}

func TestWatchSlots(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	acquire(t, db.Pool, "imports", "a", "concurrent 5", 1, false, "worker-7 4242")
	p := onTerminal(t, command(t, db.URL, "slots", "imports", "--watch"))
	p.waitFor("worker-7 4242")
	acquire(t, db.Pool, "imports", "a", "concurrent 5", 1, false, "worker-8 4242")
	p.waitFor("worker-8 4242")
	p.typeIn("\x03")
	code, shown := p.wait()
	require.Zero(t, code, shown)
	require.Contains(t, shown, "\x1b[H\x1b[J")
	require.NotContains(t, shown, "interrupted")
}

// The commands that show limits and policies also make sense for slots.
func TestSlotsInOtherCommands(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	const policy, two = "--policy=concurrent 5", "--policy=concurrent 5, fixed 10/1d"
	run := func(args ...string) outcome { return invoke(t, db.URL, args...) }
	first := acquire(t, db.Pool, "imports", "a", "concurrent 5", 4, false, nil)
	const ends = `(1h|59m\S+) if no holder renews or releases its slot`

	require.Regexp(t, `^allowed: 1 of 5 free, 4 held, all free after `+ends+`\n$`, run("peek", "imports", "a", policy).done(t))
	require.Regexp(t, `\nleft +1 free under concurrent 5 in rate_limit_ephemeral, 4 held, all free after `+ends+`\n$`,
		run("explain", "imports", "a", policy).done(t))
	require.Regexp(t, `\nleft +5 free under concurrent 5 in rate_limit_ephemeral, none held\n`,
		run("explain", "imports", "b", policy).stdout)
	second := acquire(t, db.Pool, "imports", "a", "concurrent 5", 1, false, nil)
	require.Regexp(t, `^denied: 0 of 5 free, 5 held, one free after (1h|59m\S+) and all after `+ends+`\n$`,
		run("peek", "imports", "a", policy).done(t))
	out := run("top", "imports", policy).done(t)
	require.Regexp(t, `^KEY +FREE +HELD +ONE FREE AFTER +ALL FREE AFTER\na +0 +5 +(1h|59m\S+) +(1h|59m\S+)\n`, out)
	require.Contains(t, out, "slots are free after these times if no holder renews or releases its slot; ")

	limits := func(args ...string) keys.LimiterRows {
		out := decode[limitsOutput](t, run(append([]string{"limits", "--json"}, args...)...))
		require.Len(t, out.Limiters, 1)
		return out.Limiters[0]
	}
	row := limits("--policy", "imports=concurrent 5")
	require.Equal(t, []string{"concurrent"}, row.Algorithms)
	require.EqualValues(t, 5, row.Held)
	require.EqualValues(t, 1, row.Live)
	require.Equal(t, &keys.DeniedNow{Keys: 1, Complete: true}, row.DeniedNow)
	require.Empty(t, row.Warning)
	require.True(t, row.OldestExpiry.After(time.Now()))
	require.Contains(t, limits("--policy", "imports=fixed 5/1m").Warning, "the rows of imports are of the kind concurrent")
	pgtest.Exec(t, db.Pool, "SELECT rate_limit_release($1), rate_limit_release($2)", first, second)
	require.NotContains(t, run("limits").done(t), "1970")
	o := run("limits", "--json")
	require.NotContains(t, o.stdout, "oldest_expiry")
	row = decode[limitsOutput](t, o).Limiters[0]
	require.Zero(t, row.Live+row.Held)
	acquire(t, db.Pool, "imports", "c", "concurrent 5", 1, false, nil)

	// Nothing can be taken of slots, and the commands do not take slots for something else.
	for _, verb := range [][]string{{"take"}, {"charge", "--cost=1"}, {"hold", "--cost=1", "--for=1m"}, {"grant", "--cost=1"}} {
		run(append(verb, "imports", "a", policy)...).complains(t, exitUsage, "has slots, of which nothing can be taken")
	}
	acquire(t, db.Pool, "imports", "a", "concurrent 5", 1, false, nil)
	run("take", "imports", "b", "--policy=fixed 5/1d").complains(t, exitFailed,
		"this policy is of the kind fixed, and the rows of imports are of the kind concurrent")

	acquire(t, db.Pool, "mixed", "a", "concurrent 5", 1, false, nil)
	pgtest.Exec(t, db.Pool, "SELECT rate_limit_allow('mixed', 'b', 'fixed 5/1d')")
	run("take", "mixed", "b", "--policy=fixed 5/1d").done(t)
	run("take", "mixed", "a", "--policy=fixed 5/1d").complains(t, exitFailed, "the rows of mixed are of the kind concurrent")

	// A policy with several parts.
	acquire(t, db.Pool, "both", "a", "concurrent 5, fixed 10/1d", 2, true, nil)
	require.Regexp(t, `^allowed: 3 of 5 remaining, 2 held, as good as new after \S+\n$`,
		run("peek", "both", "a", two, "--durable").done(t))
	out = run("explain", "both", "a", two, "--durable").done(t)
	require.Regexp(t, `(?m)^left +3 free under concurrent 5 in rate_limit_durable, 2 held, all free after `+ends+`$`, out)
	require.Regexp(t, `(?m)^left +8 under fixed 10/1d in rate_limit_durable, free now, as good as new after \S+$`, out)
	run("top", "both", two, "--durable").complains(t, exitFailed, "give one policy instead of", "limiter both/2")
	out = run("limits").done(t)
	require.Regexp(t, `(?m)^both +rate_limit_durable +concurrent +1 +1 +2 `, out)
	require.Regexp(t, `(?m)^both/2 +rate_limit_durable +fixed +1 +1 +0 `, out)

	// policy set compares slots with slots.
	set := func(policy string) outcome {
		return run("policy", "set", "both", policy, "--everybody", "--comment=why")
	}
	set("concurrent 3, fixed 10/1d").done(t)
	require.Regexp(t, `\nleft +1 free under concurrent 3 in`, run("explain", "both", "a", two, "--durable").done(t))
	set("concurrent 6, fixed 20/1d").done(t)
	for lower, from := range map[string]string{
		"concurrent 5, fixed 20/1d": "concurrent 6, fixed 20/1d", "concurrent 6, fixed 19/1d": "concurrent 6, fixed 20/1d",
	} {
		set(lower).complains(t, exitFailed, fmt.Sprintf("this lowers the limit, from %s to %s; --force", from, lower))
	}
	run("policy", "set", "imports", "concurrent 4", "--everybody", "--comment=why").done(t)
	o = run("policy", "set", "imports", "fixed 100/1s", "--everybody", "--comment=why", "--force")
	require.Contains(t, o.stderr, "the rows of imports are of the kind concurrent")
	found := examined(t, db.URL)["policies"].Found
	require.Contains(t, found, "for limiter imports, whose rows are of the kind concurrent")
	require.NotContains(t, found, "limiter both")
}

// doctor warns if a key is full of slots that last for long, and that may have no living holders.
func TestDoctorOfSlots(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	check := func() cli.Finding { return examined(t, db.URL)["slots"] }
	healthy := func() {
		t.Helper()
		f := check()
		require.Equal(t, cli.Fine, f.Level, f)
		require.Equal(t, "no key is full of slots that last for another 5m0s or more, and are past half of their time", f.Found)
	}
	age := func(table, micros string) {
		t.Helper()
		pgtest.Exec(t, db.Pool, `UPDATE `+table+`_hold SET made_at = made_at - `+micros+`::bigint`)
	}
	acquire(t, db.Pool, "imports", "alice", "concurrent 5", 4, false, nil)
	acquire(t, db.Pool, "imports", "bob", "concurrent 5", 4, false, nil)
	age("rate_limit_ephemeral", "3610000000")
	acquire(t, db.Pool, "imports", "alice", "concurrent 5", 1, false, nil)
	healthy() // bob is not full, and alice's second slot is new
	age("rate_limit_ephemeral", "3610000000")

	// Somebody waits for more units than are free.
	acquire(t, db.Pool, "imports", "bob", "concurrent 5", 2, false, nil)
	acquire(t, db.Pool, "exports", "alice", "concurrent 1", 1, true, nil)
	age("rate_limit_durable", "3610000000")
	f := check()
	require.Equal(t, cli.Warning, f.Level)
	require.Regexp(t, `limiter imports has 2 full keys, where 1 wait, and the first slot ends in (59m\d+s|1h0m0s), unless`, f.Found)
	require.Contains(t, f.Found, "limiter exports has 1 full key, where 0 wait, ")
	require.NotContains(t, f.Found+f.Do, "alice")
	require.Contains(t, f.Do, "'pgratelimit slots release SLOT'")

	// One slot that ends soon is enough. If somebody has deleted a key's row, its slots have ended.
	for _, table := range []string{"rate_limit_ephemeral", "rate_limit_durable"} {
		pgtest.Exec(t, db.Pool, `UPDATE `+table+`_hold SET ends_at = ends_at - 3310000000
			WHERE key = 'alice' AND (units = 4 OR prefix = 'exports')`)
	}
	require.Contains(t, check().Found, "limiter imports has 1 full key, where 1 wait, ")
	pgtest.Exec(t, db.Pool, `UPDATE rate_limit_ephemeral SET held = NULL, held_next = NULL, held_until = NULL`)
	healthy()
}

// doctor examines the tables of holds as those of keys, except that their updates need not be HOT.
func TestThoroughDoctorOfTablesOfHolds(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	tables := []string{cli.Table(false) + "_hold", cli.Table(true) + "_hold"}
	check := func(what string, level cli.Level, found string) (advice []string) {
		t.Helper()
		all := examined(t, db.URL)
		for _, table := range tables {
			f := all[table+": "+what]
			require.Equal(t, level, f.Level, f)
			require.Regexp(t, found, f.Found)
			advice = append(advice, f.Do)
		}
		return advice
	}
	each := func(sql string) {
		t.Helper()
		for _, table := range tables {
			pgtest.Exec(t, db.Pool, strings.ReplaceAll(sql, "$table", table))
		}
	}
	followAll := func(advice []string) {
		t.Helper()
		for _, do := range advice {
			follow(t, db, do)
		}
	}
	each(`ALTER TABLE $table SET (autovacuum_enabled = off)`)
	check("autovacuum", cli.Problem, "^it is turned off for this table")
	each(`INSERT INTO $table (id, prefix, key, units, ends_at, status, used, settled_at, algorithm,
			max_count, span_us, refill, fence)
		SELECT gen_random_uuid(), 'tokens', 'key ' || i, 1, 9e15, 2, 1, 9e15, 1, 10, 60000000, 0, 0
		FROM generate_series(1, 100000) AS i`)
	check("sweeping", cli.Fine, "^0 % of the rows have expired$")
	check("bloat", cli.Fine, `^1\d\.\d MB, of which its rows need (9\d|100) %$`)
	each(`UPDATE $table SET settled_at = 1, ends_at = 1 WHERE abs(hashtext(key)) % 50 > 0`)
	advice := check("sweeping", cli.Warning, "^98 % of the rows have expired$")
	followAll(advice)
	followAll(advice) // a sweep has at most 50,000 rows
	check("sweeping", cli.Fine, "^0 % of the rows have expired$")
	each(`VACUUM $table`)
	followAll(check("bloat", cli.Warning, `of which its rows need \d %$`))
	check("bloat", cli.Fine, "")
	check("HOT updates", cli.Fine, `updates; renewals and ends change an index, so they are not HOT$`)
	each(`CREATE INDEX more_$table ON $table (ends_at)`)
	for _, do := range check("kind", cli.Warning, "^it has an index besides those of the migrations") {
		pgtest.Exec(t, db.Pool, strings.Split(do, "`")[1], pgx.QueryExecModeSimpleProtocol)
	}
	check("kind", cli.Fine, "logged, with no other index than those of the migrations$")

	// A row is no expired row while something of its key is held.
	acquire(t, db.Pool, "imports", "a", "concurrent 5", 1, false, nil)
	require.Equal(t, "0 % of the rows have expired", examined(t, db.URL)["rate_limit_ephemeral: sweeping"].Found)
}
