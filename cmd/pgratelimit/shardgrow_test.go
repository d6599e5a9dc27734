package main

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/shards"
)

const growKeys = 6

// interrupted returns a proxy whose division stopped after a step. Some keys have used 2 of 3 units.
func interrupted(t *testing.T, after shards.Step, others ...*proxy) (p, more *proxy) {
	t.Helper()
	p, more = madeProxy(t, 2), newProxy(t, 2)
	for _, other := range others {
		other.user, other.connections = p.user, p.connections
		other.set(t).done(t)
	}
	require.Equal(t, growKeys, p.withOneLeft(t, "rate_limit_allow('login', 'key ' || i, 'fixed 3/1h', 2)"))
	connect := func(db *pgtest.DB) *pgx.Conn {
		conn, err := pgx.Connect(t.Context(), db.URL)
		require.NoError(t, err)
		return conn
	}
	failure := errors.New("it ends here")
	config := shards.GrowConfig{
		Schema: "public", Proxies: []*pgx.Conn{connect(p.DB)}, Connections: more.connections,
		Progress: func(_ int, step shards.Step) error {
			if step == after {
				return failure
			}
			return nil
		},
	}
	for _, other := range others {
		config.Proxies = append(config.Proxies, connect(other.DB))
	}
	for i := range p.shards {
		config.Old, config.New = append(config.Old, connect(p.shards[i])), append(config.New, connect(more.shards[i]))
	}
	require.ErrorIs(t, shards.Grow(t.Context(), config), failure)
	for _, all := range [][]*pgx.Conn{config.Proxies, config.Old, config.New} {
		for _, conn := range all {
			require.NoError(t, conn.Close(t.Context()))
		}
	}
	return p, more
}

// withOneLeft calls a function for each key in a new session, and counts the keys that have one unit left.
func (p *proxy) withOneLeft(t *testing.T, call string) int {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), p.URL)
	require.NoError(t, err)
	defer conn.Close(t.Context())
	return pgtest.Scalar[int](t, conn,
		"SELECT count(*) FROM generate_series(1, $1) AS i, LATERAL "+call+" AS key WHERE key.remaining = 1", growKeys)
}

// keepsCounts requires that each key has one of 3 units left.
func (p *proxy) keepsCounts(t *testing.T) {
	t.Helper()
	require.Equal(t, growKeys, p.withOneLeft(t, "rate_limit_peek('login', 'key ' || i, 'fixed 3/1h')"))
	o := invoke(t, p.URL, "limits", "--exact", "--json").done(t)
	require.Contains(t, strings.Join(strings.Fields(o), ""), fmt.Sprintf(`"rows":%d,`, growKeys), "each key counts once")
}

var commandLine = regexp.MustCompile("`pgratelimit ([^`]*)`")

// advice returns the command lines in a command's output. No command line may destroy anything.
func advice(t *testing.T, text string) (lines []string) {
	t.Helper()
	require.NotRegexp(t, `TRUNCATE|DROP|DELETE|migrate`, text)
	for _, found := range commandLine.FindAllStringSubmatch(text, -1) {
		lines = append(lines, found[1])
	}
	return lines
}

// invokeLine runs a command line that may have single quotes.
func (p *proxy) invokeLine(t *testing.T, line string) outcome {
	t.Helper()
	return invoke(t, p.URL, append(strings.Fields(strings.ReplaceAll(line, "'", "")), "--yes")...)
}

// After an interruption at any step, each command says how to continue, and whether the growth can be undone. Following
// the advice keeps all counts.
func TestInterruptedGrowth(t *testing.T) {
	t.Parallel()

	const grow, undo = "shard grow --schema 'public'", "shard grow --undo --schema 'public'"
	for _, test := range []struct {
		after shards.Step
		found string
		moved bool
	}{
		{shards.Begun, "is to be divided, and still has all its keys", false},
		{shards.Copied, "is to be divided, and still has all its keys", false},
		{shards.Stopped, "is to be divided, and still has all its keys", false},
		{shards.GaveUp, "has given up half of its keys, and nobody decides these", true},
		{shards.TookOver, "has given up half of its keys, and nobody decides these", true},
		{shards.Switched, "has given half of its keys to shard 2, and still has their rows", true},
		{shards.Deleted, "is to be divided, and still has all its keys", true},
	} {
		t.Run(string("after "+test.after), func(t *testing.T) {
			t.Parallel()

			p, more := interrupted(t, test.after)
			want := []string{grow}
			if !test.moved {
				want = append(want, undo)
			}
			states, wrong := p.listed(t)
			require.True(t, wrong)
			var found []string
			for _, s := range states {
				for _, f := range s.Wrong {
					require.Equal(t, "growth", f.Check)
					require.Equal(t, want, advice(t, f.Do))
					found = append(found, f.Found)
				}
			}
			require.Contains(t, strings.Join(found, "\n"), test.found)
			asked := false
			for check, f := range examined(t, p.URL) {
				if strings.HasPrefix(check, "shard ") || check == "map" || check == "functions" {
					lines := advice(t, f.Do)
					asked = asked || len(lines) > 0
					require.Subset(t, append(want, "shard list"), lines, "%s: %s", check, f.Do)
				}
			}
			require.True(t, asked)

			// 'shard set' refuses other shards, but can still repair the proxy.
			all := append(append([]string{}, p.connections...), more.connections...)
			for _, connections := range [][]string{p.connections, all, more.connections} {
				o := invoke(t, p.URL, append([]string{"shard", "set", "--yes", "--user", p.user}, connections...)...)
				o.complains(t, exitFailed, "are being divided")
				require.Equal(t, []string{grow, undo, "shard list"}, advice(t, o.stderr))
			}
			same := &proxy{DB: p.DB, user: p.user}
			for _, s := range states {
				same.connections = append(same.connections, s.Connection)
			}
			o := same.set(t)
			require.Equal(t, exitFailed, o.code)
			require.Contains(t, o.stderr, "something is wrong with ", "that it is not at its end")
			stranger := &proxy{DB: pgtest.Empty(t), user: p.user, connections: all}
			o = stranger.set(t)
			require.Equal(t, exitFailed, o.code)
			require.NotContains(t, o.stderr, "which forgets all counts")

			// Even with --yes, nobody can roll back the migrations of a database that may have the only counts of some keys.
			refusing := map[string]bool{p.URL: true, p.shards[0].URL: test.after != shards.Begun && test.after != shards.Deleted,
				more.shards[0].URL: test.after == shards.Copied || test.after == shards.Stopped || test.after == shards.GaveUp}
			for url, refuses := range refusing {
				if !refuses {
					continue
				}
				for _, to := range [][]string{nil, {"--to", "0"}} {
					o := invoke(t, url, append([]string{"migrate", "down", "--yes"}, to...)...)
					o.complains(t, exitFailed, "nothing was changed: shards are being divided")
					require.Contains(t, o.stderr, "`pgratelimit shard grow` goes on with that")
					require.Contains(t, o.stderr, "`pgratelimit shard grow --undo` takes it back")
				}
			}

			invoke(t, p.URL, "shard", "grow", "--yes", more.connections[1], more.connections[0]).
				complains(t, exitFailed, "by other databases than these")
			if test.moved {
				o := p.invokeLine(t, undo)
				o.complains(t, exitFailed, "half of its keys up, so this cannot be undone")
				require.Equal(t, []string{grow}, advice(t, o.stderr))
			} else {
				p.keepsCounts(t)
				p.invokeLine(t, undo).done(t)
				_, wrong := p.listed(t)
				require.False(t, wrong)
				p.keepsCounts(t)
				for _, db := range more.shards {
					require.Zero(t, pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM rate_limit_ephemeral"))
				}
				p.invokeLine(t, undo).complains(t, exitFailed, "nothing is to be undone")
				invoke(t, p.URL, "shard", "grow", "--yes").complains(t, exitUsage, "name as many new databases as there are shards: 2")
				invoke(t, p.URL, "shard", "grow", "--yes", more.connections[0], more.connections[1]).done(t)
			}
			p.invokeLine(t, grow)
			states, wrong = p.listed(t)
			require.False(t, wrong)
			require.Len(t, states, 4)
			p.keepsCounts(t)
		})
	}
}

// Another proxy of the same shards gives the same advice, whether --proxy named that proxy or not. The advice is not to
// repeat a command that still runs.
func TestInterruptedGrowthOfSeveralProxies(t *testing.T) {
	t.Parallel()

	other, unnamed := newProxy(t, 0), newProxy(t, 0)
	p, more := interrupted(t, shards.GaveUp, other)
	unnamed.user, unnamed.connections = p.user, p.connections
	const grow = "shard grow --schema 'public'"
	for _, proxy := range []*proxy{p, other} {
		states, _ := proxy.listed(t)
		for _, s := range states {
			for _, f := range s.Wrong {
				require.Equal(t, []string{grow}, advice(t, f.Do))
				require.Contains(t, f.Do, "with --proxy for 1 other proxy")
			}
		}
	}
	o := unnamed.set(t)
	o.complains(t, exitFailed, "is shard 0 of 4, and not shard 0 of 2", "was, for another proxy")
	require.Equal(t, []string{"shard list", "shard grow"}, advice(t, o.stderr))

	lock := pgtest.Connect(t, p.shards[0])
	pgtest.Exec(t, lock, fmt.Sprintf("SELECT pg_advisory_lock(%d)", shards.GrowLock))
	states, wrong := p.listed(t)
	require.True(t, wrong)
	require.Contains(t, states[0].Wrong[0].Do, fmt.Sprintf("wait for the end of `pgratelimit shard grow`, which works "+
		"now, as process %d of shard 0", lock.PgConn().PID()))
	p.invokeLine(t, grow+" --proxy "+other.URL).complains(t, exitFailed, "wait for the end of that")
	pgtest.Exec(t, lock, "SELECT pg_advisory_unlock_all()")

	// If such a shard has other damage, too, doctor's advice begins with a check of the growth.
	pgtest.Exec(t, p.shards[0].Pool, "ALTER TABLE rate_limit_durable DROP CONSTRAINT rate_limit_durable_pkey")
	do := examined(t, p.shards[0].URL)["objects"].Do
	require.Less(t, strings.Index(do, "first see that nothing is in progress"), strings.Index(do, "`ALTER")+len(do))
	require.Contains(t, do, "run `pgratelimit shard list` for its proxy")
	pgtest.Exec(t, p.shards[0].Pool, "ALTER TABLE rate_limit_durable ADD CONSTRAINT rate_limit_durable_pkey PRIMARY KEY (prefix, key)")

	out := p.invokeLine(t, grow)
	require.Contains(t, out.stderr, "warning: the growth began with 2 proxies, and you have named 1")
	p.keepsCounts(t)
	states, wrong = other.listed(t)
	require.True(t, wrong)
	require.Equal(t, []string{grow}, advice(t, states[1].Wrong[0].Do))
	other.invokeLine(t, grow+" --proxy "+p.URL).done(t)
	other.keepsCounts(t)

	// If a proxy was not named, 'shard grow' gives it the new shards that exist.
	stale := &proxy{DB: unnamed.DB, user: p.user, connections: append(append([]string{}, p.connections...), more.connections...)}
	stale.set(t).done(t)
	pgtest.Exec(t, stale.Pool, "ALTER SERVER rate_limit_shards OPTIONS (DROP p2, DROP p3)")
	states, wrong = stale.listed(t)
	require.True(t, wrong)
	require.Contains(t, states[0].Wrong[0].Do, "`pgratelimit shard grow` here with the same new shards")
	invoke(t, stale.URL, "shard", "grow", "--yes", more.connections[0], more.connections[1]).done(t)
	stale.keepsCounts(t)
}

// An undo does not need the new shards.
func TestUndoWithoutTheNewShards(t *testing.T) {
	t.Parallel()

	p, more := interrupted(t, shards.Copied)
	more.shards[0].Pool.Close()
	gone := more.shards[0].Pool.Config().ConnConfig.Database
	pgtest.Exec(t, p.Pool, "ALTER DATABASE "+gone+" ALLOW_CONNECTIONS false")
	invoke(t, p.URL, "shard", "grow", "--yes").complains(t, exitFailed, "shard 2 ("+gone+") cannot be reached")
	o := invoke(t, p.URL, "shard", "grow", "--undo", "--yes")
	require.Contains(t, o.stderr, "warning: shard 2 ("+gone+"): it cannot be reached, so copies of rows may stay there")
	require.Zero(t, o.code, o.stderr)
	p.keepsCounts(t)

	// The copies in the lost shard do not count, and the database can be used again.
	pgtest.Exec(t, p.Pool, "ALTER DATABASE "+gone+" ALLOW_CONNECTIONS true")
	alone := &proxy{DB: pgtest.Empty(t), user: p.user, connections: more.connections[:1]}
	o = alone.set(t)
	o.complains(t, exitFailed, "has rows of a shard that is being divided, perhaps the only ones of their keys", "only if that growth was undone")
	invoke(t, p.URL, "shard", "grow", "--yes", more.connections[0], more.connections[1]).done(t)
	p.keepsCounts(t)
}

// A repeated 'shard set' continues after an interruption at any step.
func TestInterruptedShardSet(t *testing.T) {
	t.Parallel()

	for owned := range 3 {
		p := newProxy(t, 2)
		for i, db := range p.shards {
			conn, err := pgx.Connect(t.Context(), db.URL)
			require.NoError(t, err)
			require.NoError(t, shards.Intend(t.Context(), conn, "public", "one set"))
			if i < owned {
				require.NoError(t, shards.Own(t.Context(), conn, "public", shards.Identity{Place: i, Shards: 2, Cluster: "one set"}))
			}
			require.NoError(t, conn.Close(t.Context()))
		}
		p.set(t).done(t)
		states, wrong := p.listed(t)
		require.False(t, wrong)
		require.Equal(t, states[0].Is.Cluster, states[1].Is.Cluster)
	}
}
