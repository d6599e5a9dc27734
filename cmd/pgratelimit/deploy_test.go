package main

import (
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func readDeploy(t *testing.T, name string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join("../../deploy", name))
	require.NoError(t, err)
	return string(content)
}

// The roles, as somebody sets them up by the comments of the files, each with a login of its own.
func TestRoles(t *testing.T) {
	t.Parallel()

	server := pgtest.Server(t, pgserver.Config{}) // roles belong to a whole server
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

	psql("CREATE ROLE boss LOGIN CREATEROLE; ALTER DATABASE postgres OWNER TO boss; GRANT pg_read_all_stats TO boss WITH ADMIN OPTION") // no superuser
	boss, err := pgx.Connect(t.Context(), as("boss", ""))
	require.NoError(t, err)
	defer boss.Close(t.Context())
	follow := func(name string) {
		_, err := boss.Exec(t.Context(), readDeploy(t, name), pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err, name)
	}
	follow("roles.sql")
	invoke(t, as("boss", "&role=rate_limit_owner"), "migrate", "up").done(t)
	follow("grants.sql")
	follow("grants.sql") // after the next migration, too

	psql(`
		CREATE ROLE app LOGIN IN ROLE rate_limit_app;
		CREATE ROLE sweeper LOGIN IN ROLE rate_limit_sweeper;
		CREATE ROLE reader LOGIN IN ROLE rate_limit_reader;
		CREATE ROLE on_call LOGIN IN ROLE rate_limit_reader, rate_limit_app;
		CREATE ROLE nobody LOGIN`)
	logins := []string{"app", "sweeper", "reader", "on_call", "nobody"}

	const policy = "--policy=sliding 100/1m"
	for _, test := range []struct {
		args    []string
		allowed string
	}{
		{[]string{"take", "login", "a", policy}, "app on_call"},
		{[]string{"take", "login", "a", policy, "--durable"}, "app on_call"},
		{[]string{"take", "login", "a", "--policy=fixed 100/1m"}, "app on_call"},
		{[]string{"take", "login", "a", "--policy=bucket 100 1/1s"}, "app on_call"},
		{[]string{"peek", "login", "a", policy}, "app on_call"},
		{[]string{"reset", "login", "a"}, "app on_call"},
		{[]string{"sweep"}, "sweeper"},
		{[]string{"limits"}, "reader on_call"},
		{[]string{"limits", "--policy=login=sliding 100/1m"}, "on_call"},
		{[]string{"migrate", "status"}, "app sweeper reader on_call"},
		{[]string{"top", "login", policy}, "on_call"},
		{[]string{"reset", "login", "--all", "--yes"}, "on_call"},
		{[]string{"migrate", "up"}, "app sweeper reader on_call"}, // to whom it says that there is nothing to do
		{[]string{"migrate", "down", "--yes"}, ""},
	} {
		if test.args[0] == "limits" { // there has to be something to count
			invoke(t, as("app", ""), "take", "login", "b", policy).done(t)
		}
		for _, login := range logins {
			o := invoke(t, as(login, ""), test.args...)
			if strings.Contains(" "+test.allowed+" ", " "+login+" ") {
				require.Zero(t, o.code, "%s %v: %s", login, test.args, o.stderr)
			} else if login == "nobody" { // who does not see the schema
				o.complains(t, exitFailed)
			} else {
				o.complains(t, exitFailed, "42501")
			}
		}
	}
	invoke(t, as("reader", ""), "doctor").done(t)
	require.NotContains(t, invoke(t, as("reader", ""), "doctor").stdout, "cannot be seen")
	require.NotContains(t, invoke(t, as("reader", ""), "doctor").stdout, "could not be looked at")

	// What the command does not try.
	for sql, allowed := range map[string]string{
		"INSERT INTO rate_limit_ephemeral (prefix, key) VALUES ('a', 'b')":                 "",
		"UPDATE rate_limit_durable SET count = 0":                                          "",
		"DELETE FROM rate_limit_durable":                                                   "",
		"TRUNCATE rate_limit_ephemeral":                                                    "",
		"SELECT FROM rate_limit_durable":                                                   "reader on_call",
		"SELECT FROM rate_limit_durable FOR UPDATE":                                        "",
		"SELECT FROM rate_limit_sweeper":                                                   "reader on_call",
		"UPDATE rate_limit_sweeper SET next_page = 0":                                      "",
		"SELECT rate_limit_late()":                                                         "",
		"SELECT rate_limit_all('{1}', '{a}', '{b}', '{f}', '{1}', '{1}', '{1}', '{0}')":    "app on_call",
		"SELECT rate_limit_sweep()":                                                        "sweeper",
		"SELECT rate_limit_fixed_window('a', '{b}', 1, 1)":                                 "app on_call",
		"CREATE TABLE more (a int)":                                                        "",
		"CREATE FUNCTION rate_limit_fixed_window() RETURNS int LANGUAGE sql AS 'SELECT 1'": "",
		"DROP TABLE rate_limit_ephemeral":                                                  "",
	} {
		for _, login := range logins {
			conn, err := pgx.Connect(t.Context(), as(login, ""))
			require.NoError(t, err)
			_, err = conn.Exec(t.Context(), sql)
			require.NoError(t, conn.Close(t.Context()))
			if strings.Contains(" "+allowed+" ", " "+login+" ") {
				require.NoError(t, err, "%s: %s", login, sql)
			} else {
				var pgErr *pgconn.PgError
				require.ErrorAs(t, err, &pgErr, "%s: %s", login, sql)
				if login != "nobody" { // who does not see the schema
					require.Equal(t, "42501", pgErr.Code, "%s: %s: %v", login, sql, err)
				}
			}
		}
	}
	invoke(t, as("boss", "&role=rate_limit_owner"), "migrate", "down", "--to", "0", "--yes").done(t)
}

func TestDeployRunsTheCommand(t *testing.T) {
	t.Parallel()

	// The crontab line, in the form of /etc/cron.d: five fields, a user, a command.
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

func TestReadmesCommandsMakeSense(t *testing.T) {
	t.Parallel()

	readme, err := os.ReadFile("../../README.md")
	require.NoError(t, err)
	seen := map[string]bool{}
	for line := range strings.Lines(string(readme)) {
		if strings.HasPrefix(line, "pgratelimit ") {
			for _, args := range examples(t, line) {
				requireAccepted(t, args)
				seen[args[0]] = true
			}
		}
	}
	for name := range commands(t) {
		first, _, _ := strings.Cut(name, " ")
		require.True(t, seen[first] || first == "demo", "%s is not in README.md", first)
	}
}

// systemd's own check, where there is systemd.
func TestSystemdUnits(t *testing.T) {
	t.Parallel()

	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Log("there is no systemd-analyze")
		return
	}
	dir := t.TempDir()
	self, err := os.Executable()
	require.NoError(t, err)
	verify := func(service string) ([]byte, error) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, "pgratelimit.service"), []byte(service), 0o600))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "pgratelimit.timer"), []byte(readDeploy(t, "pgratelimit.timer")), 0o600))
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
