package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/shards"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/shard"
)

// setOption changes a shard's connection string on the proxy, without 'shard set'.
func (p *proxy) setOption(t *testing.T, place int, connection string) {
	t.Helper()
	pgtest.Exec(t, p.Pool, fmt.Sprintf("ALTER SERVER %s OPTIONS (SET p%d %s)", shards.Server, place,
		"'"+strings.ReplaceAll(connection, "'", "''")+"'"))
}

// listed returns the output of 'shard list', and whether it reports a problem.
func (p *proxy) listed(t *testing.T) (states []shard.State, wrong bool) {
	t.Helper()
	o := invoke(t, p.URL, "shard", "list", "--json")
	if o.code != 0 {
		require.Equal(t, exitFailed, o.code, o.stderr)
		require.Regexp(t, `^pgratelimit shard list: something is wrong with \d of \d shards\n$`, o.stderr)
	}
	require.NoError(t, json.Unmarshal([]byte(o.stdout), &states))
	return states, o.code != 0
}

func TestShardList(t *testing.T) {
	t.Parallel()

	p := madeProxy(t, 2)
	invoke(t, p.URL, "take", "login", "key", "--policy=fixed 1/1h").done(t)
	states, wrong := p.listed(t)
	require.False(t, wrong)
	cluster := states[0].Is.Cluster
	require.NotEmpty(t, cluster)
	require.Equal(t, []*shard.Identity{{Place: 0, Shards: 2, Cluster: cluster}, {Place: 1, Shards: 2, Cluster: cluster}}, []*shard.Identity{states[0].Is, states[1].Is})

	p.setOption(t, 1, "host=127.0.0.1 port=1 dbname=gone")
	states, wrong = p.listed(t)
	require.True(t, wrong)
	require.Empty(t, states[0].Wrong)
	require.Len(t, states[1].Wrong, 1)
	require.Contains(t, states[1].Wrong[0].Found, "cannot be reached")
	require.Contains(t, invoke(t, p.URL, "shard", "list").stdout, "shard 1 (gone) cannot be reached: ")

	p.setOption(t, 1, p.connections[0]) // a wrong order of the shards
	states, wrong = p.listed(t)
	require.True(t, wrong)
	require.Equal(t, "is shard 0 of 2, and not shard 1 of 2", states[1].Wrong[0].Found)

	p.set(t).done(t)
	pgtest.Exec(t, p.shards[1].Pool, "TRUNCATE rate_limit_shard")
	states, _ = p.listed(t)
	require.Nil(t, states[1].Is)
	require.Contains(t, states[1].Wrong[0].Found, "does not say which shard it is")
	_, insert, _ := strings.Cut(states[1].Wrong[0].Do, "counts, ")
	follow(t, p.shards[1], insert)
	_, wrong = p.listed(t)
	require.False(t, wrong)

	invoke(t, p.shards[0].URL, "shard", "list").complains(t, exitFailed, "is no proxy of shards")
}

// If two proxies disagree about a shard's place, doctor names the shard.
func TestDoctorOfProxiesWhoseMapsDiffer(t *testing.T) {
	t.Parallel()

	p, strangers := madeProxy(t, 2), newProxy(t, 2)
	other := &proxy{DB: strangers.DB, user: p.user, connections: slices.Clone(p.connections)}
	other.set(t).done(t)
	wrong := func(p *proxy) (found []string) {
		for check, f := range examined(t, p.URL) {
			if strings.HasSuffix(check, ": place") && f.Level == cli.Problem {
				found = append(found, check[:len("shard 0")]+" "+f.Found)
			}
		}
		slices.Sort(found)
		return found
	}
	require.Empty(t, wrong(p))
	require.Empty(t, wrong(other))

	other.setOption(t, 0, p.connections[1])
	other.setOption(t, 1, p.connections[0])
	require.Equal(t, []string{"shard 0 is shard 1 of 2, and not shard 0 of 2", "shard 1 is shard 0 of 2, and not shard 1 of 2"}, wrong(other))
	require.Empty(t, wrong(p))
	other.set(t).done(t)
	require.Empty(t, wrong(other))

	// An empty database becomes a shard beside other shards only if the proxy already has all other shards.
	stranger := &proxy{DB: pgtest.Empty(t), user: p.user, connections: []string{p.connections[0], strangers.connections[1]}}
	stranger.set(t).complains(t, exitFailed, "shard 1 (", " is no shard yet, and shard 0 (", "`pgratelimit shard list` of another proxy")
	require.Nil(t, pgtest.Scalar[*string](t, strangers.shards[1].Pool, "SELECT to_regclass('rate_limit_shard')::text"))

	// If another database has replaced a shard, but a proxy still has the old shard, 'shard list' on that proxy reports
	// the replacement.
	other.connections[1] = strangers.connections[1]
	out := other.set(t).done(t)
	require.Contains(t, out, "shard 1 ("+strangers.shards[1].Pool.Config().ConnConfig.Database+") takes the place of another "+
		"database: the counts that are there are forgotten.\n")
	require.NotContains(t, out, "shard 0 (")
	require.Empty(t, wrong(other))
	require.Equal(t, []string{"shard 1 belongs to another set of shards than the first shards here"}, wrong(p))
	states, _ := p.listed(t)
	require.NotEqual(t, states[0].Is.Cluster, states[1].Is.Cluster)
	p.set(t).complains(t, exitFailed, "belongs to another set of shards than the first shards here",
		"`pgratelimit shard list` of all proxies")
	p.connections[1] = strangers.connections[1]
	p.set(t).done(t)
	require.Empty(t, wrong(p))

	// A proxy cannot be a shard.
	host, _, _ := strings.Cut(p.connections[0], " dbname=")
	stranger.connections = []string{host + " dbname=" + p.Pool.Config().ConnConfig.Database}
	stranger.set(t).complains(t, exitFailed, "is a proxy of shards itself")
}

// doctor finds each of these problems of a proxy or a shard, and none if both are healthy.
func TestDoctorOfAProxy(t *testing.T) {
	t.Parallel()

	p := madeProxy(t, 2)
	for _, shard := range p.shards {
		pgtest.Exec(t, shard.Pool, "REVOKE CREATE ON SCHEMA public FROM PUBLIC") // Postgres 14 grants CREATE to PUBLIC
	}
	name := func(i int) string {
		return fmt.Sprintf("shard %d (%s): ", i, p.shards[i].Pool.Config().ConnConfig.Database)
	}
	all := examined(t, p.URL)
	require.Len(t, all, 6+2*(2+14+4*7))
	for check, f := range all {
		if !strings.HasSuffix(check, "long transactions") { // another test may have a long transaction
			require.Equal(t, cli.Fine, f.Level, f)
		}
	}
	require.Equal(t, "it answers", all[name(1)+"through the proxy"].Found)

	// The advice for a shard works on this shard.
	pgtest.Exec(t, p.shards[1].Pool, "ALTER TABLE rate_limit_durable SET (fillfactor = 90)")
	f := examined(t, p.URL)[name(1)+"rate_limit_durable: kind"]
	require.Equal(t, cli.Warning, f.Level)
	require.True(t, strings.HasPrefix(f.Do, "on "+strings.TrimSuffix(name(1), ": ")+": `ALTER TABLE"), f.Do)
	follow(t, p.shards[1], f.Do)
	require.Equal(t, cli.Fine, examined(t, p.URL)[name(1)+"rate_limit_durable: kind"].Level)

	// The additional objects of a division are no damage.
	pgtest.Exec(t, p.shards[1].Pool, "CREATE TRIGGER rate_limit_note_deleted AFTER DELETE ON rate_limit_durable "+
		"FOR EACH ROW EXECUTE FUNCTION _rate_limit_note_deleted()")
	require.Equal(t, cli.Fine, examined(t, p.URL)[name(1)+"objects"].Level)
	invoke(t, p.URL, "limits").done(t)
	pgtest.Exec(t, p.shards[1].Pool, "DROP TRIGGER rate_limit_note_deleted ON rate_limit_durable")

	for sql, test := range map[string]struct{ check, found string }{
		"DROP FUNCTION rate_limit_peek": {"functions", "rate_limit_peek is missing"},
		"ALTER FUNCTION rate_limit_peek SECURITY INVOKER": {
			"functions", "rate_limit_peek is plpgsql instead of plpgsql security definer"},
		"CREATE OR REPLACE FUNCTION rate_limit_version() RETURNS bigint LANGUAGE sql IMMUTABLE AS 'SELECT 3'": {
			"functions", "rate_limit_version has another body"},
		"CREATE OR REPLACE FUNCTION rate_limit_shards() RETURNS integer LANGUAGE sql IMMUTABLE AS ' SELECT 4 '": {
			"map", "the functions know 4 shards, and the foreign server has 2 connection strings"},
		"DO $$ BEGIN EXECUTE format('DROP USER MAPPING FOR %I SERVER rate_limit_shards', current_user); END $$": {
			"PL/Proxy", "PL/Proxy has no role with which to connect"},
		"GRANT EXECUTE ON FUNCTION rate_limit_sweep TO PUBLIC": {"rights", "every role may execute public.rate_limit_sweep("},
	} {
		pgtest.Exec(t, p.Pool, sql)
		f := examined(t, p.URL)[test.check]
		require.NotEqual(t, cli.Fine, f.Level, sql)
		require.Contains(t, f.Found, test.found)
		if strings.Contains(f.Do, "pgratelimit shard set") {
			p.set(t).done(t)
		} else {
			follow(t, p.DB, strings.Split(f.Do, ", and grant")[0])
		}
		require.Equal(t, cli.Fine, examined(t, p.URL)[test.check].Level, sql)
	}
	pgtest.Exec(t, p.Pool, "CREATE FUNCTION rate_limit_peek(n integer) RETURNS integer LANGUAGE sql AS 'SELECT 1'")
	require.Contains(t, examined(t, p.URL)["functions"].Found, "rate_limit_peek(integer) should not be there")
	pgtest.Exec(t, p.Pool, "DROP FUNCTION rate_limit_peek(integer)")

	p.setOption(t, 1, "host=127.0.0.1 port=1 dbname=gone")
	require.Equal(t, cli.Problem, examined(t, p.URL)["shard 1 (gone): connection"].Level)
	p.setOption(t, 1, p.connections[1])
	pgtest.Exec(t, p.shards[1].Pool, "UPDATE rate_limit_shard SET place = 0")
	all = examined(t, p.URL)
	require.Equal(t, cli.Problem, all[name(1)+"place"].Level)
	require.Contains(t, all[name(1)+"through the proxy"].Found, "this database is shard 0 of 2")
}

// doctor does not advise to migrate a future proxy, or a proxy that has lost its functions.
func TestDoctorOfWhatIsNoProxyYet(t *testing.T) {
	t.Parallel()

	p := newProxy(t, 1)
	require.Contains(t, examined(t, p.URL)["migrations"].Do, "if this is to be a proxy of shards, do not migrate it: 'pgratelimit shard set'")
	p.set(t).done(t)
	pgtest.Exec(t, p.Pool, "DROP FUNCTION rate_limit_shards()")
	f := examined(t, p.URL)["migrations"]
	require.Equal(t, "this is a proxy of shards, and its functions are missing", f.Found)
	require.Contains(t, f.Do, "run `pgratelimit shard set` with the connection strings that it has: '"+p.connections[0])
	p.set(t).done(t)
	_, wrong := p.listed(t)
	require.False(t, wrong)

	// If an empty database would replace shard 0, the command says what will be lost.
	other := newProxy(t, 1)
	p.connections = other.connections
	require.Contains(t, p.set(t).done(t), "the counts, and all policies and bans, that are there are forgotten.")
}

// When the shards grow, all keys keep their usage, and the new shards decide.
func TestShardGrow(t *testing.T) {
	t.Parallel()

	p, more := newProxy(t, 2), newProxy(t, 3)
	first := p.connections
	p.connections = first[:1]
	run := func(args ...string) outcome { return invoke(t, p.URL, args...) }
	const policy = "--policy=fixed 1/1h"
	for i := range 12 { // a database with counts becomes the only shard
		invoke(t, p.shards[0].URL, "take", "login", fmt.Sprint("key ", i), policy).done(t)
	}
	p.set(t).done(t)
	run("shard", "grow", "--yes", more.connections[0], more.connections[1]).complains(t, exitFailed, "a proxy of 1 shard, which takes")
	run("shard", "grow", "--yes", first[0]).complains(t, exitFailed, "is the same database as shard 0 (")

	other := &proxy{DB: more.DB, user: p.user, connections: p.connections} // another proxy of the same shards
	other.set(t).done(t)
	pgtest.Exec(t, more.shards[2].Pool, "INSERT INTO rate_limit_durable (prefix, key) VALUES ('a', 'b')")
	run("shard", "grow", "--yes", more.connections[2]).complains(t, exitFailed, "has counts already")
	out := run("shard", "grow", "--yes", "--proxy", other.URL, first[1]).done(t)
	require.Contains(t, out, ": took over\n")
	require.Contains(t, out, "shard 1 of 2")
	states := decode[[]shard.State](t, run("shard", "grow", "--yes", "--json", "--proxy", other.URL, first[1]))
	require.Len(t, states, 2) // finished steps are not repeated
	run("shard", "grow", "--yes", "--proxy", other.URL, more.connections[0], more.connections[1]).done(t)
	for _, url := range []string{p.URL, other.URL} {
		states := decode[[]shard.State](t, invoke(t, url, "shard", "list", "--json"))
		require.Len(t, states, 4)
		for i := range 12 {
			require.Equal(t, exitDenied, invoke(t, url, "take", "login", fmt.Sprint("key ", i), policy).code)
		}
	}
	rows := 0
	for _, db := range []*pgtest.DB{p.shards[0], p.shards[1], more.shards[0], more.shards[1]} {
		n := pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM rate_limit_ephemeral")
		require.Less(t, n, 12)
		rows += n
	}
	require.Equal(t, 12, rows)
}

// No log or view has PL/Proxy's password, even if the server records all statements. If a person has used the password
// in a statement, doctor finds the password.
func TestShardPasswordIsNotRecorded(t *testing.T) {
	t.Parallel()

	newProxy(t, 0) // skips the test if PL/Proxy is missing
	server := pgtest.Server(t, pgserver.Config{Settings: map[string]string{
		"shared_preload_libraries": "pg_stat_statements,auto_explain", "pg_stat_statements.track": "all",
		"log_statement": "all", "log_min_duration_statement": "0", "log_transaction_sample_rate": "1",
		"log_parameter_max_length_on_error": "-1", "auto_explain.log_min_duration": "0",
		"auto_explain.log_nested_statements": "on", "log_error_verbosity": "verbose",
	}})
	conn, err := pgx.Connect(t.Context(), server.URL())
	if err != nil && strings.Contains(err.Error(), "pg_stat_statements") {
		t.Skip("pg_stat_statements: install the contrib modules of the server")
	}
	require.NoError(t, err)
	defer conn.Close(t.Context())
	psql := func(sql string) {
		t.Helper()
		_, err := conn.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err)
	}
	const password = "hush, nobody's business"
	config := conn.Config()
	psql("CREATE DATABASE limits_0")
	psql("CREATE EXTENSION pg_stat_statements")
	connection := fmt.Sprintf("host=%s port=%d dbname=limits_0", cli.KeywordValue(config.Host), config.Port)
	invoke(t, connection+" user="+config.User, "migrate", "up").done(t)
	set := func() {
		t.Helper()
		invokeWith(t, []string{shard.PasswordVariable + "=" + password}, server.URL(), "shard", "set", "--yes", "--user", config.User,
			connection).done(t)
	}
	set()
	texts := func(where string) (n int) {
		t.Helper()
		require.NoError(t, conn.QueryRow(t.Context(), "SELECT count(*) FROM pg_stat_statements WHERE "+where).Scan(&n))
		return n
	}
	require.Positive(t, texts("query LIKE 'CREATE SERVER rate_limit_shards%'"))
	require.Zero(t, texts("query LIKE '%hush%business%' AND query NOT LIKE '%pg_stat_statements%'"))
	log, err := os.ReadFile(filepath.Join(filepath.Dir(server.DataDir()), "postgres.log"))
	require.NoError(t, err)
	require.Contains(t, string(log), "CREATE SERVER rate_limit_shards")
	require.NotContains(t, string(log), "hush, nobody")
	var mapped bool
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT $1 = ANY (umoptions) FROM pg_user_mappings", "password="+password).Scan(&mapped))
	require.True(t, mapped)
	require.Equal(t, cli.Fine, examined(t, server.URL())["PL/Proxy"].Level)

	psql(fmt.Sprintf("ALTER USER MAPPING FOR %s SERVER rate_limit_shards OPTIONS (SET password 'oops')", pgx.Identifier{config.User}.Sanitize()))
	f := examined(t, server.URL())["PL/Proxy"]
	require.Equal(t, cli.Problem, f.Level)
	require.Contains(t, f.Found, "pg_stat_statements has a password of the shards in 1 text:")
	require.NotContains(t, f.Found+f.Do, "oops")
	set()
	psql(strings.Split(f.Do, "`")[3])
	require.Equal(t, cli.Fine, examined(t, server.URL())["PL/Proxy"].Level)
}
