package main

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/keys"
)

// holder runs commands for the key alice.
type holder struct {
	*testing.T

	db     *pgtest.DB
	policy string
	table  []string // "--durable", or nothing
	schema []string // "--schema" and its value, or nothing
}

func (h holder) ask(verb string, args ...string) outcome {
	args = append([]string{verb, "tokens", "alice", "--policy", h.policy}, args...)
	return invoke(h.T, h.db.URL, append(append(args, h.table...), h.schema...)...)
}

// end runs a command that needs only the hold.
func (h holder) end(verb string, args ...string) outcome {
	return invoke(h.T, h.db.URL, append(append([]string{verb}, args...), h.schema...)...)
}

func (h holder) hold(cost string) string {
	h.Helper()
	out := h.ask("hold", "--cost", cost, "--for", "1h").done(h.T)
	require.Regexp(h, `^[0-9a-f-]{36}\.[ed]\n$`, out)
	require.NotContains(h, out, "alice")
	return strings.TrimSpace(out)
}

func (h holder) remaining() int64 {
	h.Helper()
	return decode[keys.Answer](h.T, h.ask("peek", "--json")).Remaining
}

// endHolds makes all holds end a second ago.
func (h holder) endHolds() {
	h.Helper()
	prefix := ""
	if h.schema != nil {
		prefix = `"my limits".`
	}
	for _, table := range []string{"rate_limit_ephemeral", "rate_limit_durable"} {
		pgtest.Exec(h, h.db.Pool, `UPDATE `+prefix+table+`_hold SET ends_at = ends_at - 3601000000`)
		pgtest.Exec(h, h.db.Pool, `UPDATE `+prefix+table+`
			SET held_next = held_next - 3601000000, held_until = held_until - 3601000000`)
	}
}

func TestThoroughHolds(t *testing.T) {
	t.Parallel()

	for _, policy := range []string{
		"fixed 9/365d", "sliding 9/365d", "log 9/365d", "bucket 9 1/30d", "fixed 9/365d, log 10/365d, bucket 11 1/30d",
		"fixed 9/365d, every 9/month Europe/Berlin",
	} {
		for _, more := range [][]string{nil, {"--durable"}, {"--schema", "my limits"}} {
			if more != nil && !strings.Contains(policy, "log") {
				continue // most policies work with both tables
			}
			t.Run(policy+strings.Join(more, " "), func(t *testing.T) {
				t.Parallel()
				h := holder{T: t, db: pgtest.New(t), policy: policy}
				switch len(more) {
				case 1:
					h.table = more
				case 2:
					h.schema = more
					pgtest.Exec(t, h.db.Pool, `CREATE SCHEMA "my limits"`)
					invoke(t, h.db.URL, append([]string{"migrate", "up"}, more...)...).done(t)
				}
				testHolds(h)
			})
		}
	}
}

func testHolds(h holder) {
	t := h.T

	// A denial prints nothing on standard output, and the time until the hold ends.
	first := h.hold("6")
	require.EqualValues(t, 3, h.remaining())
	denied := h.ask("hold", "--cost", "4", "--for", "1h")
	require.Equal(t, exitDenied, denied.code)
	require.Empty(t, denied.stdout)
	require.Regexp(t, `^denied: 3 remaining, retry after (1h|59m\S+), as good as new after \S+\n$`, denied.stderr)
	denied = h.ask("hold", "--cost", "4", "--for", "1h", "--json")
	require.Equal(t, exitDenied, denied.code)
	require.Empty(t, denied.stderr)
	denied.code = 0
	answer := decode[keys.Answer](t, denied)
	require.False(t, answer.Allowed)
	require.Empty(t, answer.Hold)
	require.EqualValues(t, 3, answer.Remaining)
	require.InDelta(t, time.Hour.Microseconds(), answer.RetryAfterUS, float64(time.Minute.Microseconds()))

	// A settlement counts once.
	require.Regexp(t, `^settled at \S+ \S+Z: 2 counted\n$`, h.end("settle", first, "--used", "2").done(t))
	require.EqualValues(t, 7, h.remaining())
	settled := decode[keys.Settlement](t, h.end("settle", first, "--used", "5", "--json"))
	require.NotNil(t, settled.SettledAt)
	require.Equal(t, keys.Settlement{Counted: 2, SettledAt: settled.SettledAt}, settled)
	require.Equal(t, settled, decode[keys.Settlement](t, h.end("cancel", first, "--json")))
	require.EqualValues(t, 7, h.remaining())
	h.end("extend", first, "--for", "1h").complains(t, exitFailed, "RLS07", "the hold has ended", "Settle it all the same")

	// A cancellation counts nothing.
	allowed := decode[keys.Answer](t, h.ask("hold", "--cost", "7", "--for", "1h", "--json"))
	require.True(t, allowed.Allowed)
	require.Zero(t, allowed.Remaining)
	require.Regexp(t, `^settled at \S+ \S+Z: 0 counted\n$`, h.end("cancel", allowed.Hold).done(t))
	require.EqualValues(t, 7, h.remaining())

	// An extension never shortens a hold.
	second := h.hold("1")
	require.Regexp(t, `^held until \d{4}-\d\d-\d\d \S+Z\n$`, h.end("extend", second, "--for", "2h").done(t))
	long := decode[keys.Extension](t, h.end("extend", second, "--for", "24h", "--json"))
	require.Equal(t, long, decode[keys.Extension](t, h.end("extend", second, "--for", "1ms", "--json")))
	h.end("cancel", second).done(t)

	// A settlement after the end is late. It may be above what was held, but not above what a key can owe.
	late := h.hold("1")
	h.endHolds()
	require.EqualValues(t, 7, h.remaining())
	h.end("extend", late, "--for", "1h").complains(t, exitFailed, "RLS07")
	h.end("settle", late, "--used", "98").complains(t, exitFailed, "RLS05", "97 would be accepted", "The hold is as before")
	require.Regexp(t, `^settled at \S+ \S+Z: 97 counted, although the hold had ended\n$`,
		h.end("settle", late, "--used", "97").done(t))
	require.True(t, decode[keys.Settlement](t, h.end("settle", late, "--used", "97", "--json")).Late)
	require.Zero(t, h.remaining())
}

// A text that is no hold, and a hold of another database or schema, change nothing, and no message has the key.
func TestTextsThatAreNoHolds(t *testing.T) {
	t.Parallel()

	h := holder{T: t, db: pgtest.New(t), policy: "fixed 9/365d"}
	hold := h.hold("6")
	other := "0" + hold[1:]
	if other == hold {
		other = "1" + hold[1:]
	}
	ends := [][]string{{"settle", "--used=1"}, {"cancel"}, {"extend", "--for=1h"}}
	for i, text := range []string{
		"alice", hold[:37], hold[1:], hold + "x", hold + hold, strings.ToUpper(hold), " " + hold, hold[:36] + ".x",
	} {
		args := ends[i%len(ends)] // all commands read a hold with the same function
		o := h.end(args[0], append([]string{text}, args[1:]...)...)
		o.complains(t, exitUsage, "the hold cannot be read")
		require.NotContains(t, o.stderr, "alice")
	}
	for _, args := range ends {
		o := h.end(args[0], append([]string{other}, args[1:]...)...)
		o.complains(t, exitFailed, "RLS06", "there is no such hold", "another database or schema")
		require.NotContains(t, o.stderr, "alice")
	}
	h.end("cancel", hold[:36]+".d").complains(t, exitFailed, "RLS06", "there is no such hold")
	pgtest.Exec(t, h.db.Pool, `CREATE SCHEMA "my limits"`)
	invoke(t, h.db.URL, "migrate", "up", "--schema", "my limits").done(t)
	invoke(t, h.db.URL, "settle", hold, "--used=1", "--schema", "my limits").complains(t, exitFailed, "there is no such hold")

	// A policy with the mode off holds nothing. Its hold is empty, and work goes on.
	require.Equal(t, "nothing was held, so nothing is counted\n", h.end("settle", "", "--used", "5").done(t))
	require.Equal(t, "nothing is held\n", h.end("extend", "", "--for", "1h").done(t))
	require.Nil(t, decode[keys.Extension](t, h.end("extend", "", "--for", "1h", "--json")).EndsAt)
	require.EqualValues(t, 3, h.remaining())
}

// If the algorithm of the key has changed after the hold, settle needs the new policy.
func TestSettlementByAnotherPolicy(t *testing.T) {
	t.Parallel()

	h := holder{T: t, db: pgtest.New(t), policy: "fixed 9/365d"}
	hold := h.hold("6")
	h.policy = "sliding 20/365d"
	h.ask("take", "--cost=5", "--force").done(t)
	h.end("settle", hold, "--used", "4").complains(t, exitFailed, "RLS08", "policy that is in force")
	h.end("settle", hold, "--used", "4", "--policy", "fixed 9/1h, log 9/1h").complains(t, exitFailed,
		"policy has 2 parts, and the hold has 1")
	require.EqualValues(t, 9, h.remaining())
	require.Contains(t, h.end("settle", hold, "--used", "4", "--policy", h.policy).done(t), ": 4 counted\n")
	require.EqualValues(t, 11, h.remaining())

	// A warning does not get into a shell's variable.
	h.policy = "fixed 9/365d"
	o := h.ask("hold", "--cost=1", "--for=1h", "--force")
	require.Zero(t, o.code)
	require.Regexp(t, `^[0-9a-f-]{36}\.e\n$`, o.stdout)
	require.Regexp(t, `^warning: .*sliding.*\n$`, o.stderr)
}

// A role that may not call the functions is told which rights it needs, and the message has no key.
func TestHoldsWithoutRights(t *testing.T) {
	t.Parallel()

	h := holder{T: t, db: pgtest.New(t), policy: "fixed 9/365d"}
	hold := h.hold("6")
	url := urlWith(t, h.db, "role=pg_monitor")
	for _, args := range [][]string{
		{"hold", "tokens", "alice", "--policy", h.policy, "--cost=1", "--for=1h"},
		{"settle", hold, "--used=1"}, {"cancel", hold}, {"extend", hold, "--for=1h"},
	} {
		o := invoke(t, url, args...)
		o.complains(t, exitFailed, "42501", "rate_limit_app", "grants.sql")
		require.NotContains(t, o.stderr, "alice")
	}
	require.EqualValues(t, 3, h.remaining())
}

// The commands that show keys show what is held.
func TestHeldUnitsAreShown(t *testing.T) {
	t.Parallel()

	h := holder{T: t, db: pgtest.New(t), policy: "fixed 9/365d"}
	hold := h.hold("6")
	pgtest.Exec(t, h.db.Pool, "SELECT rate_limit_allow('tokens', 'bob', $1)", h.policy)

	top := decode[keys.TopResult](t, invoke(t, h.db.URL, "top", "tokens", "--policy", h.policy, "--json"))
	require.Len(t, top.Keys, 2)
	require.Equal(t, "alice", top.Keys[0].Key)
	require.Equal(t, []int64{6, 0}, []int64{top.Keys[0].Held, top.Keys[1].Held})
	out := invoke(t, h.db.URL, "top", "tokens", "--policy", h.policy).done(t)
	require.Regexp(t, `(?m)^alice +3 +6 +now +(1h|59m\S+)$`, out)

	require.Contains(t, h.ask("peek").done(t), "3 of 9 remaining, 6 held, as good as new after ")
	require.Contains(t, h.ask("explain").done(t), "3 under fixed 9/365d in rate_limit_ephemeral, 6 held, free now, as good as new after ")
	require.EqualValues(t, 6, decode[keys.Explanation](t, h.ask("explain", "--json")).State[0].Held)

	limits := func() keys.LimiterRows {
		out := decode[limitsOutput](t, invoke(t, h.db.URL, "limits", "--json"))
		require.Len(t, out.Limiters, 1)
		return out.Limiters[0]
	}
	tokens := limits()
	require.EqualValues(t, 6, tokens.Held)
	require.EqualValues(t, 2, tokens.Live)
	require.True(t, tokens.OldestExpiry.After(time.Now()))
	require.Regexp(t, `(?m)^tokens +rate_limit_ephemeral +fixed +2 +2 +6 `, invoke(t, h.db.URL, "limits").done(t))
	h.endHolds()
	require.Zero(t, limits().Held)
	h.end("settle", hold, "--used", "9").done(t)
	require.Regexp(t, `(?m)^alice +0 +0 +\S+ +\S+$`, invoke(t, h.db.URL, "top", "tokens", "--policy", h.policy).done(t))
}
