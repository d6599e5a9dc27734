package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/policytable"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/keys"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/shard"
)

// proxy is a database that becomes a proxy. The shards are other databases on the same server.
type proxy struct {
	*pgtest.DB

	shards      []*pgtest.DB
	connections []string
	user        string
}

// newProxy creates the databases. If PL/Proxy is missing, the test is skipped, or fails if RATELIMIT_TEST_PLPROXY is
// set.
func newProxy(t *testing.T, n int) *proxy {
	t.Helper()
	require.Regexp(t, "Prox|Shard|Grow", t.Name(), "make test/shards only runs tests with these names")
	pgtest.NeedsProxy(t)
	p := &proxy{DB: pgtest.Empty(t)}
	available := pgtest.Scalar[bool](t, p.Pool, `SELECT rolsuper AND EXISTS (
		SELECT FROM pg_available_extensions WHERE name = 'plproxy') FROM pg_roles WHERE rolname = current_user`)
	if !available && os.Getenv("RATELIMIT_TEST_PLPROXY") == "" {
		t.Skip("PL/Proxy: install it (Debian: postgresql-15-plproxy), and test as a superuser, or set RATELIMIT_TEST_PLPROXY")
	}
	to := p.Pool.Config().ConnConfig
	p.user = to.User
	for range n {
		shard := pgtest.New(t)
		p.shards = append(p.shards, shard)
		p.connections = append(p.connections, fmt.Sprintf("host=%s port=%d dbname=%s",
			cli.KeywordValue(to.Host), to.Port, shard.Pool.Config().ConnConfig.Database))
	}
	return p
}

// set runs 'shard set', which turns the database into a proxy.
func (p *proxy) set(t *testing.T, args ...string) outcome {
	t.Helper()
	cmd := append([]string{"shard", "set", "--yes", "--user", p.user}, args...)
	return invokeWith(t, []string{shard.PasswordVariable + "=" + p.Pool.Config().ConnConfig.Password}, p.URL,
		append(cmd, p.connections...)...)
}

// madeProxy returns a working proxy.
func madeProxy(t *testing.T, n int) *proxy {
	t.Helper()
	p := newProxy(t, n)
	p.set(t).done(t)
	return p
}

func TestShardSet(t *testing.T) {
	t.Parallel()

	p := newProxy(t, 4)
	states := decode[[]shard.State](t, p.set(t, "--json"))
	require.Len(t, states, 4)
	for i, s := range states {
		require.Equal(t, i, s.Place)
		require.Equal(t, &shard.Identity{Place: i, Shards: 4, Cluster: states[0].Is.Cluster}, s.Is)
		require.Equal(t, p.connections[i], s.Connection)
		require.Empty(t, s.Wrong)
	}
}

// 'shard set' reports problems before it changes anything, and names the shard.
func TestShardSetRefuses(t *testing.T) {
	t.Parallel()

	p := newProxy(t, 2)
	name := func(i int) string {
		return fmt.Sprintf("shard %d (%s) ", i, p.shards[i].Pool.Config().ConnConfig.Database)
	}
	refused := func(words ...string) {
		t.Helper()
		p.set(t).complains(t, exitFailed, words...)
		require.False(t, pgtest.Scalar[bool](t, p.Pool, "SELECT EXISTS (SELECT FROM pg_proc WHERE proname LIKE 'rate_limit%')"))
	}
	right := slices.Clone(p.connections)

	p.connections[1] = right[0] + " application_name=other"
	refused("is the same database as shard 0 (")
	p.connections[1] = strings.ReplaceAll(right[1], "dbname=", "dbname=no_")
	refused("shard 1 (no_", "cannot be reached", "does not exist")
	p.connections = slices.Clone(right)

	pgtest.Exec(t, p.shards[1].Pool, "INSERT INTO rate_limit_durable (prefix, key) VALUES ('a', 'b')")
	refused(name(1)+"has counts already", "make it the only shard")
	pgtest.Exec(t, p.shards[1].Pool, "TRUNCATE rate_limit_durable")
	pgtest.Exec(t, p.shards[1].Pool, "INSERT INTO rate_limit_policy (name, mode, comment) VALUES ('a', 'off', 'why')")
	refused(name(1)+"has policies", "only those of shard 0 are obeyed")
	pgtest.Exec(t, p.shards[1].Pool, "DELETE FROM rate_limit_policy")

	read := "ALTER DATABASE " + p.shards[1].Pool.Config().ConnConfig.Database
	pgtest.Exec(t, p.Pool, read+" SET default_transaction_read_only = on")
	refused(name(1) + "can only be read")
	pgtest.Exec(t, p.Pool, read+" RESET default_transaction_read_only")

	invoke(t, p.shards[0].URL, "migrate", "down", "--yes").done(t)
	refused(name(0)+"is at version", "pgratelimit migrate up")
	invoke(t, p.shards[0].URL, "migrate", "down", "--to", "0", "--yes").done(t)
	refused(name(0)+"is not migrated in schema public", "pgratelimit migrate up")
	invoke(t, p.shards[0].URL, "migrate", "up").done(t)

	// Problems of PL/Proxy show in the transaction that makes the proxy.
	user := p.user
	p.user = "nobody_" + strings.ToLower(rand.Text())
	refused("the proxy stays as it was", "PL/Proxy cannot use it")
	pgtest.Exec(t, p.Pool, "CREATE ROLE "+p.user+" LOGIN")
	role := p.user
	t.Cleanup(func() {
		_, err := p.Pool.Exec(context.WithoutCancel(t.Context()), "DROP ROLE "+role)
		require.NoError(t, err)
	})
	refused("the proxy stays as it was", "role "+role+" may not execute rate_limit_acquire, rate_limit_all", "deploy/grants.sql")
	p.user = user

	pgtest.Exec(t, p.Pool, "CREATE TABLE rate_limit_ephemeral (n int)")
	refused("the database has limits itself: rate_limit_ephemeral", "use another database")
	pgtest.Exec(t, p.Pool, "DROP TABLE rate_limit_ephemeral")

	p.set(t).done(t)
	p.set(t).done(t) // repeating the command changes nothing
	p.connections = []string{right[1], right[0]}
	p.set(t).complains(t, exitFailed, "is shard 1 of 2, and not shard 0 of 2", "in the order of the shards' places")
	p.connections = right[:1]
	p.set(t).complains(t, exitFailed, "the proxy has 2 shards", "shard grow")
}

func TestShardConnectionsThatMakeNoSense(t *testing.T) {
	t.Parallel()

	for connection, want := range map[string]string{
		"postgres://me@h/limits_0":                    "PL/Proxy needs keywords",
		"host=h dbname=limits_0 user=me":              "--user names the role",
		"host=h dbname=limits_0 password='it\\'s it'": shard.PasswordVariable,
		"host=h password = x dbname=limits_0":         shard.PasswordVariable,
		"host=h":                                      "dbname is missing",
		"host=h dbname='limits_0":                     "it has to look like",
		"limits_0":                                    "it has to look like",
		"host=h dbname=limits_0 port=many":            "port",
	} {
		for _, command := range []string{"set", "grow"} {
			o := invoke(t, "", "shard", command, "--yes", "host=h dbname=limits_0", connection)
			o.complains(t, exitUsage, "connection string of shard 1: ", want)
		}
	}
	for _, n := range []int{0, 3, 6} {
		invoke(t, "", append([]string{"shard", "set", "--yes"}, slices.Repeat([]string{"dbname=a"}, n)...)...).
			complains(t, exitUsage, fmt.Sprintf("the number of shards is %d, and must be a power of two", n))
	}
	invokeWith(t, []string{shard.PasswordVariable + "=x"}, "", "shard", "set", "--yes", "dbname=a").
		complains(t, exitUsage, "the password of --user, which is missing")
	invoke(t, "postgres://h/app", "shard", "set", "dbname=a").complains(t, exitFailed)
}

// The commands work on a proxy as on a database with limits.
func TestCommandsOnAProxy(t *testing.T) {
	t.Parallel()

	p := madeProxy(t, 2)
	run := func(args ...string) outcome { return invoke(t, p.URL, args...) }
	const policy = "--policy=fixed 2/1h"
	for i := range 20 {
		run("take", "login", fmt.Sprint("key ", i), policy).done(t)
	}
	for _, shard := range p.shards {
		require.NotZero(t, pgtest.Scalar[int](t, shard.Pool, "SELECT count(*) FROM rate_limit_ephemeral"))
	}
	run("take", "login", "key 3", policy).done(t)
	require.Equal(t, exitDenied, run("take", "login", "key 3", policy).code)
	require.Contains(t, run("peek", "login", "key 3", policy).stdout, "denied: 0 of 2 remaining")

	limits := decode[struct {
		Tables   []cli.TableSize    `json:"tables"`
		Limiters []keys.LimiterRows `json:"limiters"`
	}](t, run("limits", "--json", "--exact", "--policy=login=fixed 2/1h"))
	require.Len(t, limits.Tables, 2)
	require.Len(t, limits.Limiters, 1)
	require.EqualValues(t, 20, limits.Limiters[0].Rows)
	require.Equal(t, &keys.DeniedNow{Keys: 1, Complete: true}, limits.Limiters[0].DeniedNow)

	top := decode[keys.TopResult](t, run("top", "login", policy, "--json", "-n", "12"))
	require.EqualValues(t, 20, top.Looked)
	require.True(t, top.Complete)
	require.Len(t, top.Keys, 12)
	require.Equal(t, "key 3", top.Keys[0].Key)
	require.True(t, slices.IsSortedFunc(top.Keys, keys.Closest))

	receipt := filepath.Join(t.TempDir(), "receipt")
	run("take", "login", "key 4", policy, "--receipt", receipt).done(t)
	run("refund", receipt).done(t)
	require.Contains(t, run("peek", "login", "key 4", policy).done(t), "1 of 2 remaining")
	run("grant", "login", "key 3", policy, "--cost=1").done(t)
	run("take", "login", "key 3", policy).done(t)

	for i := range 6 { // the keys are on both shards
		hold := strings.TrimSpace(run("hold", "tokens", fmt.Sprint("key ", i), policy, "--cost=2", "--for=1h").done(t))
		require.Equal(t, exitDenied, run("take", "tokens", fmt.Sprint("key ", i), policy).code)
		run("extend", hold, "--for=2h").done(t)
		run("settle", hold, "--used=23").complains(t, exitFailed, "a settlement of 23 is too large", "The hold is as before")
		require.Contains(t, run("settle", hold, "--used=1").done(t), ": 1 counted\n")
		require.Contains(t, run("cancel", hold).done(t), ": 1 counted\n")
		run("extend", hold, "--for=2h").complains(t, exitFailed, "the hold has ended")
		require.Contains(t, run("peek", "tokens", fmt.Sprint("key ", i), policy).done(t), "1 of 2 remaining")
	}
	run("cancel", "key 3").complains(t, exitUsage, "the hold cannot be read")
	run("reset", "tokens", "--all", "--yes").done(t)

	var held []string
	for i := range 10 { // the keys are on both shards
		held = append(held, acquire(t, p.Pool, "imports", fmt.Sprint("key ", i), "concurrent 2", 2, false, "worker-7 4242"))
	}
	waiting := acquire(t, p.Pool, "imports", "key 0", "concurrent 2", 1, false, "worker-8 1")
	slots := listSlots(t, p.URL, "imports").Tables[0]
	require.Equal(t, slices.Insert(slices.Clone(held), 1, waiting), ids(slots.Listed)) // in the order of the keys
	require.Equal(t, []int64{10, 20, 1, 1}, []int64{slots.Slots, slots.Units, slots.Waiting, slots.WaitingUnits})
	few := listSlots(t, p.URL, "imports", "-n", "2").Tables[0]
	require.Equal(t, []string{held[0], waiting}, ids(few.Listed))
	require.EqualValues(t, 10, few.Slots)
	require.Equal(t, []string{held[3]}, ids(listSlots(t, p.URL, "imports", "key 3").Tables[0].Listed))
	for _, slot := range held {
		require.Contains(t, run("slots", "release", slot).done(t), ", which worker-7 4242 had asked for at ")
		run("slots", "release", slot).complains(t, exitFailed, "there is no such slot")
	}
	require.Equal(t, []string{waiting}, ids(listSlots(t, p.URL, "imports").Tables[0].Listed))
	require.False(t, listSlots(t, p.URL, "imports").Tables[0].Listed[0].Waiting)
	run("reset", "imports", "--all", "--yes").done(t)

	run("policy", "set", "login", "fixed 1/1h", "--everybody", "--comment=why", "--force").done(t)
	run("ban", "login", "key 5", "--for=1h", "--comment=why").done(t)
	require.Contains(t, run("policy", "list").done(t), "key key 5")
	require.Contains(t, run("policy", "get", "login", "key 5").done(t), "in force")
	require.Contains(t, run("policy", "history").done(t), "key key 5")
	require.Equal(t, 2, pgtest.Scalar[int](t, p.shards[0].Pool, "SELECT count(*) FROM rate_limit_policy"))
	require.Zero(t, pgtest.Scalar[int](t, p.shards[1].Pool, "SELECT count(*) FROM rate_limit_policy"))
	require.Equal(t, 2, pgtest.Scalar[int](t, p.Pool, "SELECT count(*) FROM rate_limit_policies(NULL)"))
	for i := range 4 { // the keys are on both shards
		require.Contains(t, run("explain", "login", fmt.Sprint("key ", i), policy).done(t), " 0 under fixed 1/1h in rate_limit_ephemeral, free after ")
	}
	run("unban", "login", "key 5").done(t)
	run("policy", "unset", "login", "--everybody").done(t)

	require.Equal(t, "reset 1 in rate_limit_ephemeral\n", run("reset", "login", "key 3").done(t))
	listening := pgtest.Connect(t, p.DB)
	pgtest.Exec(t, listening, "LISTEN "+policytable.Channel)
	require.Equal(t, "reset 19 in rate_limit_ephemeral\n", run("reset", "login", "--all", "--yes").done(t))
	pgtest.Exec(t, p.Pool, "SELECT pg_notify($1, 'end')", policytable.Channel)
	told := 0
	for note := (*pgconn.Notification)(nil); note == nil || note.Payload != "end"; told++ {
		var err error
		note, err = listening.WaitForNotification(t.Context())
		require.NoError(t, err)
	}
	require.Equal(t, len(p.shards)+1, told) // each shard has announced its reset keys
	for _, shard := range p.shards {
		pgtest.Exec(t, shard.Pool, "INSERT INTO rate_limit_ephemeral (prefix, key) SELECT 'old', i::text FROM generate_series(1, 2000) AS i")
	}
	require.Contains(t, run("sweep").done(t), "deleted 4000 rows")

	for _, args := range [][]string{{"up"}, {"down", "--yes"}, {"down", "--to=0", "--yes"}, {"status"}} {
		run(append([]string{"migrate"}, args...)...).complains(t, exitFailed, "migrate each of the shards", "pgratelimit shard set")
	}
	pgtest.Exec(t, p.Pool, "CREATE SCHEMA other")
	run("migrate", "up", "--schema=other").complains(t, exitFailed, "migrate each of the shards")
	run("shard", "list", "--schema=other").complains(t, exitFailed, "is no proxy of shards")
}

// Set up the shards as docs/operating.md says: with a schema, and roles that have only the necessary rights.
func TestShardsWithRoles(t *testing.T) {
	t.Parallel()

	newProxy(t, 0)                                // skips the test if PL/Proxy is missing
	server := pgtest.Server(t, pgserver.Config{}) // roles belong to the whole server
	config, err := pgx.ParseConfig(server.URL())
	require.NoError(t, err)
	as := func(user, database string) string {
		return fmt.Sprintf("host=%s port=%d user=%s dbname=%s search_path=rate_limit", cli.KeywordValue(config.Host), config.Port,
			user, database)
	}
	psql := func(database, sql string) {
		t.Helper()
		conn, err := pgx.Connect(t.Context(), as(config.User, database))
		require.NoError(t, err)
		defer conn.Close(t.Context())
		_, err = conn.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err)
	}
	databases := []string{"limits_0", "limits_1", "limits"}
	for i, database := range databases {
		psql(config.Database, "CREATE DATABASE "+database)
		psql(database, readDeploy(t, "roles.sql"))
		if i < 2 {
			invoke(t, as(config.User, database)+" role=rate_limit_owner", "migrate", "up").done(t)
			psql(database, readDeploy(t, "grants.sql"))
		}
	}
	psql("limits", `
		CREATE ROLE limits_proxy LOGIN;
		CREATE ROLE app LOGIN IN ROLE rate_limit_app;
		CREATE ROLE sweeper LOGIN IN ROLE rate_limit_sweeper;
		CREATE ROLE reader LOGIN IN ROLE rate_limit_reader;
		CREATE ROLE nobody LOGIN`)
	set := []string{"shard", "set", "--yes", "--user=limits_proxy"}
	for _, database := range databases[:2] {
		set = append(set, fmt.Sprintf("host=%s port=%d dbname=%s", cli.KeywordValue(config.Host), config.Port, database))
	}
	invoke(t, as("app", "limits"), set...).complains(t, exitFailed, "role app is no superuser")
	boss := as(config.User, "limits")
	invoke(t, boss, set...).complains(t, exitFailed, "the proxy stays as it was: shard 0 (limits_0): ", "deploy/grants.sql",
		"GRANT rate_limit_app, rate_limit_sweeper TO")
	psql("limits_0", "GRANT rate_limit_app, rate_limit_sweeper TO limits_proxy")
	invoke(t, boss, set...).done(t)
	psql("limits_0", "GRANT rate_limit_app TO reader") // people on call may also read keys

	const policy = "--policy=fixed 1/1h"
	for _, test := range []struct {
		args    []string
		allowed string
	}{
		{[]string{"take", "login", "a", policy}, "app"},
		{[]string{"reset", "login", "a"}, "app reader"},
		{[]string{"sweep"}, "sweeper"},
		{[]string{"limits"}, "reader"},
		{[]string{"top", "login", policy}, "reader"},
		{[]string{"slots", "login"}, "reader"},
		{[]string{"shard", "list"}, "app sweeper reader"},
		{[]string{"policy", "list"}, "reader"},
	} {
		for _, login := range []string{"app", "sweeper", "reader", "nobody"} {
			o := invoke(t, as(login, "limits"), test.args...)
			require.Equal(t, slices.Contains(strings.Fields(test.allowed), login), o.code == 0, "%s: %v: %s", login, test.args, o.stderr)
		}
	}
	for check, f := range examined(t, boss) {
		require.NotEqual(t, cli.Problem, f.Level, "%s: %v", check, f)
	}
	examined(t, as("app", "limits"))
}

// The connection strings of the shards may lead to a PgBouncer in transaction mode.
func TestShardsBehindPgBouncer(t *testing.T) {
	t.Parallel()

	p := newProxy(t, 2)
	for i, shard := range p.shards {
		p.connections[i], _, _ = strings.Cut(pgtest.PgBouncer(t, shard, "transaction", 4), " user=")
		p.connections[i] += " dbname=" + shard.Pool.Config().ConnConfig.Database
		pgtest.Exec(t, shard.Pool, "REVOKE CREATE ON SCHEMA public FROM PUBLIC") // Postgres 14 grants CREATE to PUBLIC
	}
	p.set(t).done(t)
	invoke(t, p.URL, "take", "login", "key", "--policy=fixed 1/1h").done(t)
	invoke(t, p.URL, "limits").done(t)
	invoke(t, p.URL, "reset", "login", "--all", "--yes").done(t)
	for check, f := range examined(t, p.URL) {
		if !strings.HasSuffix(check, "long transactions") { // another test may have a long transaction
			require.Equal(t, cli.Fine, f.Level, "%s: %v", check, f)
		}
	}
}
