package main

import (
	"context"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/policies"
)

func readDeploy(t *testing.T, name string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join("../../deploy", name))
	require.NoError(t, err)
	return string(content)
}

// The test sets up the roles as the comments in the files say. Each role has a login.
func TestThoroughRoles(t *testing.T) {
	t.Parallel()

	server := pgtest.Server(t, pgserver.Config{}) // roles belong to the whole server
	conn, err := pgx.Connect(t.Context(), server.URL())
	require.NoError(t, err)
	defer conn.Close(t.Context())
	psql := func(sql string) {
		_, err := conn.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err)
	}
	as := func(user, parameters string) string {
		parsed, err := url.Parse(server.URL())
		require.NoError(t, err)
		parsed.User = url.User(user)
		parsed.RawQuery += "&search_path=rate_limit" + parameters
		return parsed.String()
	}

	psql(
		"CREATE ROLE boss LOGIN CREATEROLE; ALTER DATABASE postgres OWNER TO boss; GRANT pg_read_all_stats TO boss WITH ADMIN OPTION",
	) // these roles are not superusers
	boss, err := pgx.Connect(t.Context(), as("boss", ""))
	require.NoError(t, err)
	defer boss.Close(t.Context())
	follow := func(name string) {
		_, err := boss.Exec(t.Context(), readDeploy(t, name), pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err, name)
	}
	follow("roles.sql")
	require.Contains(t, invoke(t, as("boss", ""), "doctor", "--schema", "rate_limit").stdout,
		"run `PGOPTIONS='-c role=rate_limit_owner' pgratelimit migrate up --schema 'rate_limit'`")
	// If PGOPTIONS does not name the role, the command prints a warning.
	o := invoke(t, as("boss", ""), "migrate", "up")
	require.Zero(t, o.code)
	require.Equal(t, "warning: the new tables and functions belong to boss, and the functions run with the rights of boss. "+
		"Schema rate_limit belongs to rate_limit_owner. To give everything to rate_limit_owner, "+
		"run `pgratelimit migrate down --to 0`, `DROP TABLE rate_limit.rate_limit_goose_version`, then `PGOPTIONS='-c role=rate_limit_owner' pgratelimit migrate up`. "+
		"That loses all counts, policies and bans made meanwhile\n", o.stderr)
	invoke(t, as("boss", ""), "migrate", "up").done(t)
	// If a user missed the warning, doctor gives advice that keeps the counts.
	invoke(t, as("boss", ""), "take", "login", "a", "--policy=sliding 100/365d").done(t)
	o = invoke(t, as("boss", ""), "doctor", "--json")
	o.code, o.stderr = 0, ""
	for _, f := range decode[[]cli.Finding](t, o) {
		if f.Check == "schema" {
			psql("SET search_path = rate_limit; " + strings.Split(f.Do, "`")[1] + "; RESET search_path")
		}
	}
	require.NotContains(t, invoke(t, as("boss", ""), "doctor").stdout, "belongs to")
	invoke(t, as("boss", "&role=rate_limit_owner"), "migrate", "up").done(t)
	require.Contains(t, invoke(t, as("boss", "&role=rate_limit_owner"), "peek", "login", "a", "--policy=sliding 100/365d").done(t), "99 of 100")
	invoke(t, as("boss", "&role=rate_limit_owner"), "migrate", "down", "--to", "0", "--yes").done(t)
	psql("DROP TABLE rate_limit.rate_limit_goose_version")
	invoke(t, as("boss", "&role=rate_limit_owner"), "migrate", "up").done(t)
	// The advice says who must run the command.
	psql("DROP FUNCTION rate_limit.rate_limit_sweep")
	require.Contains(t, invoke(t, as("boss", ""), "doctor").stdout, "as rate_limit_owner: `pgratelimit doctor --fix`")
	require.Contains(t, invoke(t, as("boss", ""), "doctor", "--fix").stdout, "repaired: ")
	// The recreated function belongs to the owner.
	require.NotRegexp(t, "(?m)^problem +(objects|schema) ", invoke(t, as("boss", ""), "doctor").stdout)
	invoke(t, as("boss", "&role=rate_limit_owner"), "migrate", "down", "--to", "1", "--yes").done(t)
	invoke(t, as("boss", "&role=rate_limit_owner"), "migrate", "up").done(t)
	const forgotten = "only their owner may execute rate_limit_all"
	require.Contains(t, invoke(t, as("boss", ""), "doctor").stdout, forgotten)
	follow("grants.sql")
	follow("grants.sql") // grants.sql must run again after the next migration
	require.NotContains(t, invoke(t, as("boss", ""), "doctor").stdout, forgotten)

	psql(`
		CREATE ROLE app LOGIN IN ROLE rate_limit_app;
		CREATE ROLE sweeper LOGIN IN ROLE rate_limit_sweeper;
		CREATE ROLE reader LOGIN IN ROLE rate_limit_reader;
		CREATE ROLE on_call LOGIN IN ROLE rate_limit_reader, rate_limit_app;
		CREATE ROLE admin LOGIN IN ROLE rate_limit_policy_admin;
		CREATE ROLE nobody LOGIN`)
	logins := []string{"app", "sweeper", "reader", "on_call", "admin", "nobody"}

	const policy = "--policy=sliding 100/365d"
	for _, test := range []struct {
		args    []string
		allowed string
	}{
		{[]string{"take", "login", "a", policy}, "app on_call"},
		{[]string{"take", "login", "a", policy, "--durable"}, "app on_call"},
		{[]string{"take", "login", "a", "--policy=fixed 100/365d"}, "app on_call"},
		{[]string{"take", "login", "a", "--policy=bucket 100 1/1h"}, "app on_call"},
		{[]string{"hold", "login", "a", "--policy=bucket 100 1/1h", "--cost=1", "--for=1ms"}, "app on_call"},
		{[]string{"settle", "", "--used=1"}, "app on_call"},
		{[]string{"cancel", ""}, "app on_call"},
		{[]string{"extend", "", "--for=1m"}, "app on_call"},
		{[]string{"peek", "login", "a", policy}, "app on_call"},
		{[]string{"reset", "login", "a"}, "app on_call"},
		{[]string{"sweep"}, "sweeper"},
		{[]string{"limits"}, "reader on_call"},
		{[]string{"limits", "--policy=login=sliding 100/365d"}, "on_call"},
		{[]string{"migrate", "status"}, "app sweeper reader on_call admin"},
		{[]string{"top", "login", policy}, "on_call"},
		{[]string{"reset", "login", "--all", "--yes"}, "on_call"},
		{[]string{"migrate", "up"}, "app sweeper reader on_call admin"}, // nothing is left to migrate
		{[]string{"migrate", "down", "--yes"}, ""},
		{[]string{"policy", "set", "login", "--key=a", "sliding 100/365d", why}, "admin"},
		{[]string{"policy", "set", "login", "--key=a", "sliding 100/365d", why, "--dry-run"}, "reader on_call admin"},
		{[]string{"policy", "list"}, "reader on_call admin"},
		{[]string{"policy", "get", "login", "a"}, "reader on_call admin"},
		{[]string{"policy", "history"}, "reader on_call admin"},
		{[]string{"explain", "login", "a"}, "reader on_call admin"},
		{[]string{"ban", "login", "a", "--for=1h", why}, "admin"},
		{[]string{"unban", "login", "a"}, "admin"},
		{[]string{"policy", "unset", "login", "--key=a"}, "admin"},
	} {
		if test.args[0] == "limits" { // limits needs a row to count
			invoke(t, as("app", ""), "take", "login", "b", policy).done(t)
		}
		for _, login := range logins {
			if test.args[0] == "reset" { // reset needs a row, because the other table has rows
				invoke(t, as("app", ""), "take", "login", "a", policy).done(t)
			}
			o := invoke(t, as(login, ""), test.args...)
			if strings.Contains(" "+test.allowed+" ", " "+login+" ") {
				require.Zero(t, o.code, "%s %v: %s", login, test.args, o.stderr)
			} else if login == "nobody" { // this role cannot see the schema
				o.complains(t, exitFailed)
			} else {
				o.complains(t, exitFailed, "42501")
			}
		}
	}
	invoke(t, as("reader", ""), "doctor").done(t)
	require.NotContains(t, invoke(t, as("reader", ""), "doctor").stdout, "cannot be seen")
	require.NotContains(t, invoke(t, as("reader", ""), "doctor").stdout, "could not be looked at")

	invoke(t, as("admin", ""), "doctor").done(t)
	require.Contains(t, invoke(t, as("on_call", ""), "explain", "login", "a", policy).done(t), "under sliding 100/365d")
	// The history shows the role that logged in, and not the role that the session switched to.
	require.Equal(t, "admin", decode[[]policies.PolicyEvent](t, invoke(t, as("reader", ""), "policy", "history", "--json"))[0].By)
	require.Equal(t, "admin", changed(t, as("admin", "&role=rate_limit_policy_admin"), "ban", "login", "a", "--for=1h", why).Added.ChangedBy)

	// These statements are not part of any command.
	sessions := map[string]*pgx.Conn{}
	for _, login := range logins {
		conn, err := pgx.Connect(t.Context(), as(login, ""))
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
		sessions[login] = conn
	}
	for sql, allowed := range map[string]string{
		"INSERT INTO rate_limit_ephemeral (prefix, key) VALUES ('a', 'b')":                        "",
		"UPDATE rate_limit_durable SET count = 0":                                                 "",
		"DELETE FROM rate_limit_durable":                                                          "",
		"TRUNCATE rate_limit_ephemeral":                                                           "",
		"SELECT FROM rate_limit_durable":                                                          "reader on_call",
		"SELECT FROM rate_limit_durable_hold":                                                     "reader on_call",
		"UPDATE rate_limit_ephemeral_hold SET units = 0":                                          "",
		"SELECT FROM rate_limit_durable FOR UPDATE":                                               "",
		"SELECT FROM rate_limit_sweeper":                                                          "app reader on_call",
		"UPDATE rate_limit_sweeper SET next_page = 0":                                             "",
		"SELECT _rate_limit_late()":                                                               "",
		"SELECT rate_limit_all('{1}', '{a}', '{b}', '{f}', '{1}', '{1}', '{1}', '{0}')":           "app on_call",
		"SELECT rate_limit_policies()":                                                            "app on_call",
		"SELECT rate_limit_ban('login', 'c', '1h', '1h', '1h', 'why')":                            "app on_call",
		"SELECT FROM rate_limit_policy":                                                           "reader on_call admin",
		"UPDATE rate_limit_policy SET comment = 'why'":                                            "admin",
		"TRUNCATE rate_limit_policy":                                                              "",
		"SELECT FROM rate_limit_policy_history":                                                   "reader on_call admin",
		"UPDATE rate_limit_policy_history SET by = 'nobody'":                                      "",
		"DELETE FROM rate_limit_policy_history":                                                   "",
		"DO $$ BEGIN LOCK TABLE rate_limit_policy_history IN SHARE UPDATE EXCLUSIVE MODE; END $$": "",
		"SELECT rate_limit_sweep()":                                                               "sweeper",
		"SELECT rate_limit_allow('a', 'b', 'log 1/1m')":                                           "app on_call",
		"SELECT rate_limit_charge('a', 'b', 'log 1/1m')":                                          "app on_call",
		"SELECT rate_limit_reserve('a', 'b', 'bucket 1 1/1m')":                                    "app on_call",
		"SELECT rate_limit_peek('a', 'b', 'log 1/1m')":                                            "app on_call",
		"SELECT rate_limit_cancel(hold) FROM rate_limit_hold('a', 'c', 'log 1/1m')":               "app on_call",
		"SELECT rate_limit_extend('', '1m'), rate_limit_find_hold(''), rate_limit_settle('', 1)":  "app on_call",
		"SELECT _rate_limit_window_end(1, 60000000, 'UTC')":                                       "",
		"SELECT rate_limit_report('{1}', '{1}', '{a}', '{1}', '{1}', '{1}')":                      "app on_call",
		"SELECT FROM rate_limit_shadow":                                                           "reader on_call admin",
		"DELETE FROM rate_limit_shadow":                                                           "",
		"SELECT _rate_limit_ask('a', 'b', 'log 1/1m', 1, false, false, NULL, NULL, NULL, NULL)":   "",
		"SELECT _rate_limit_read_policy('log 1/1m'::text)":                                        "",
		"SELECT rate_limit_take_fixed_window('a', '{b}', 1, 1)":                                   "app on_call",
		"CREATE TABLE more (a int)":                                                               "",
		"CREATE FUNCTION rate_limit_take_fixed_window() RETURNS int LANGUAGE sql AS 'SELECT 1'":   "",
		"DROP TABLE rate_limit_ephemeral":                                                         "",
	} {
		for _, login := range logins {
			_, err := sessions[login].Exec(t.Context(), sql)
			if strings.Contains(" "+allowed+" ", " "+login+" ") {
				require.NoError(t, err, "%s: %s", login, sql)
			} else {
				var pgErr *pgconn.PgError
				require.ErrorAs(t, err, &pgErr, "%s: %s", login, sql)
				if login != "nobody" { // this role cannot see the schema
					require.Equal(t, "42501", pgErr.Code, "%s: %s: %v", login, sql, err)
				}
			}
		}
	}
	invoke(t, as("boss", "&role=rate_limit_owner"), "migrate", "down", "--to", "0", "--yes").done(t)
}

// A person can type the command lines in roles.sql as they are, in two databases, with each form of a connection
// string.
func TestRolesInEveryDatabaseOfAServer(t *testing.T) {
	t.Parallel()
	testRolesIn(t, "postgres://boss@/one", "dbname=two user=boss")
}

func TestThoroughRolesInEveryDatabaseOfAServer(t *testing.T) {
	t.Parallel()
	testRolesIn(t, "postgres:///one?user=boss", "postgres:///two?user=boss")
}

func testRolesIn(t *testing.T, databaseURLs ...string) {
	t.Helper()
	psql, err := exec.LookPath("psql")
	if err != nil {
		t.Skip("there is no psql")
	}
	server := pgtest.Server(t, pgserver.Config{})
	admin, err := pgx.Connect(t.Context(), server.URL())
	require.NoError(t, err)
	defer admin.Close(t.Context())
	for _, sql := range []string{
		"CREATE ROLE boss LOGIN CREATEROLE", "GRANT pg_read_all_stats TO boss WITH ADMIN OPTION",
		"CREATE DATABASE one OWNER boss", "CREATE DATABASE two OWNER boss",
	} {
		_, err := admin.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	self, err := os.Executable()
	require.NoError(t, err)
	bin := t.TempDir()
	require.NoError(t, os.Symlink(self, filepath.Join(bin, "pgratelimit")))
	lines := regexp.MustCompile(`(?m)^--   (.*(?:psql|pgratelimit) .*)$`).FindAllStringSubmatch(readDeploy(t, "roles.sql"), -1)
	require.Len(t, lines, 3)

	config := admin.Config()
	for _, databaseURL := range databaseURLs {
		for _, line := range lines {
			cmd := exec.CommandContext(t.Context(), "sh", "-c", line[1])
			cmd.Dir = "../.."
			cmd.Env = append(os.Environ(), "PATH="+bin+":"+filepath.Dir(psql)+":"+os.Getenv("PATH"), commandVariable+"=yes",
				"DATABASE_URL="+databaseURL, "PGHOST="+config.Host, "PGPORT="+strconv.Itoa(int(config.Port)))
			output, err := cmd.CombinedOutput()
			require.NoError(t, err, "%s: %s: %s", databaseURL, line[1], output)
		}
		config := config.Copy()
		named, err := pgx.ParseConfig(databaseURL)
		require.NoError(t, err)
		config.Database = named.Database
		conn, err := pgx.ConnectConfig(t.Context(), config)
		require.NoError(t, err)
		var owners []string
		require.NoError(t, conn.QueryRow(t.Context(), `
			SELECT array_agg(DISTINCT pg_get_userbyid(relowner)::text) FROM pg_class
			WHERE relnamespace = 'rate_limit'::regnamespace`).Scan(&owners))
		require.Equal(t, []string{"rate_limit_owner"}, owners)
		require.NoError(t, conn.Close(t.Context()))
	}
}

func TestDeployRunsTheCommand(t *testing.T) {
	t.Parallel()

	// A line of /etc/cron.d has five fields for the time, a user, and a command.
	lines := 0
	for line := range strings.Lines(readDeploy(t, "pgratelimit.cron")) {
		if fields := strings.Fields(line); len(fields) > 6 && fields[0] != "#" {
			lines++
			require.Equal(t, []string{"*/5", "*", "*", "*", "*", "nobody", "/usr/local/bin/pgratelimit"}, fields[:7])
			requireAccepted(t, fields[7:len(fields)-2]) // without the redirection
		}
	}
	require.Equal(t, 1, lines)

	unit := readDeploy(t, "pgratelimit.service")
	requireAccepted(t, strings.Fields(find(t, `(?m)^ExecStart=/usr/local/bin/pgratelimit (.+)$`, unit)))

	var job struct {
		Kind string
		Spec struct {
			JobTemplate struct {
				Spec struct {
					Template struct {
						Spec struct {
							Containers []struct {
								Args []string
								Env  []struct{ Name string }
							}
						}
					}
				}
			} `yaml:"jobTemplate"`
		}
	}
	require.NoError(t, yaml.Unmarshal([]byte(readDeploy(t, "cronjob.yaml")), &job))
	require.Equal(t, "CronJob", job.Kind)
	container := job.Spec.JobTemplate.Spec.Template.Spec.Containers[0]
	requireAccepted(t, container.Args)
	require.Equal(t, "DATABASE_URL", container.Env[0].Name)

	for _, file := range []string{"Dockerfile", "roles.sql", "grants.sql"} {
		if text := readDeploy(t, file); strings.Contains(text, "  pgratelimit ") {
			for _, args := range examples(t, text) {
				requireAccepted(t, args)
			}
		}
	}
}

func TestDocumentedCommandsMakeSense(t *testing.T) {
	t.Parallel()

	document, err := os.ReadFile("../../docs/operating.md")
	require.NoError(t, err)
	seen := map[string]bool{}
	for line := range strings.Lines(string(document)) {
		if strings.HasPrefix(line, "pgratelimit ") || substitution.MatchString(line) {
			for _, args := range examples(t, line) {
				requireAccepted(t, args)
				seen[args[0]] = true
			}
		}
	}
	for name := range commands(t) {
		first, _, _ := strings.Cut(name, " ")
		require.True(t, seen[first] || first == "demo", "%s is not in docs/operating.md", first)
	}
}

// systemd-analyze checks the units, if it is installed.
func TestSystemdUnits(t *testing.T) {
	t.Parallel()

	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("systemd: install it (Debian: systemd)")
	}
	dir := t.TempDir()
	self, err := os.Executable()
	require.NoError(t, err)
	verify := func(service string) ([]byte, error) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, "pgratelimit.service"), []byte(service), 0o600))
		require.NoError(
			t,
			os.WriteFile(filepath.Join(dir, "pgratelimit.timer"), []byte(readDeploy(t, "pgratelimit.timer")), 0o600),
		)
		return exec.CommandContext(t.Context(), analyze, "verify", "--man=no",
			filepath.Join(dir, "pgratelimit.service"), filepath.Join(dir, "pgratelimit.timer")).CombinedOutput()
	}
	service := strings.ReplaceAll(readDeploy(t, "pgratelimit.service"), "/usr/local/bin/pgratelimit", self)
	output, err := verify(service)
	require.NoError(t, err, string(output))
	require.Empty(t, string(output))
	output, _ = verify(strings.Replace(service, "DynamicUser=yes", "DynamicUsr=yes", 1))
	require.Contains(t, string(output), "DynamicUsr", "the check sees nothing")
}
