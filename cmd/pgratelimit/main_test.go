package main

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/deadline"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

// commandVariable is set if this test binary should run the command instead of the tests.
const commandVariable = "PGRATELIMIT_TEST_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(commandVariable) != "" {
		deadline.Default = testkit.Amply // the machine may be busy
		main()
	}
	slog.SetDefault(slog.New(slog.DiscardHandler))
	pgtest.Main(m)
}

// Tests and their commands do not use a DATABASE_URL of the environment.
func TestNobodysDatabaseIsUsed(t *testing.T) {
	t.Parallel()

	const variable = "RATELIMIT_TEST_SEES"
	if os.Getenv(variable) != "" {
		require.Empty(t, os.Getenv("DATABASE_URL"))
		return
	}
	path, err := os.Executable()
	require.NoError(t, err)
	again := exec.CommandContext(t.Context(), path, "-test.run=^TestNobodysDatabaseIsUsed$")
	again.Env = append(os.Environ(), variable+"=yes", "DATABASE_URL=postgres://shared.invalid/app")
	output, err := again.CombinedOutput()
	require.NoError(t, err, string(output))
}

// command returns a process that will run the command.
func command(t *testing.T, databaseURL string, args ...string) *exec.Cmd {
	t.Helper()
	path, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), path, args...)
	cmd.Args[0] = "pgratelimit"
	cmd.Env = append(os.Environ(), commandVariable+"=yes", "DATABASE_URL="+databaseURL)
	return cmd
}

// outcome is the visible result of a command.
type outcome struct {
	code           int
	stdout, stderr string
}

// invoke runs the command in this process, because starting a process takes longer than most commands.
func invoke(t *testing.T, databaseURL string, args ...string) outcome {
	t.Helper()
	var stdout, stderr bytes.Buffer
	code := run(t.Context(), append([]string{"--database-url=" + databaseURL}, args...),
		&cli.App{Stdin: strings.NewReader(""), Stdout: &stdout, Stderr: &stderr})
	return outcome{code, stdout.String(), stderr.String()}
}

// invokeWith runs the command in a new process, with pipes and with additional environment variables.
func invokeWith(t *testing.T, environment []string, databaseURL string, args ...string) outcome {
	t.Helper()
	cmd := command(t, databaseURL, args...)
	cmd.Env = append(cmd.Env, environment...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		require.ErrorAs(t, err, new(*exec.ExitError))
	}
	return outcome{cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()}
}

// done requires success and an empty standard error, and returns the output.
func (o outcome) done(t *testing.T) string {
	t.Helper()
	require.Zero(t, o.code, o.stderr)
	require.Empty(t, o.stderr)
	return o.stdout
}

// afterWaiting returns the outcome without the lines that name the holder of a lock. The command prints such lines if
// it waits for seconds, as happens on a busy machine.
func (o outcome) afterWaiting() outcome {
	o.stderr = regexp.MustCompile(`(?m)^pgratelimit: waiting for a lock of .*\n`).ReplaceAllString(o.stderr, "")
	return o
}

// complains requires the exit code, no output, and one line with all of these texts on standard error.
func (o outcome) complains(t *testing.T, code int, words ...string) {
	t.Helper()
	require.Equal(t, code, o.code, o.stderr)
	require.Empty(t, o.stdout)
	require.Equal(t, 1, strings.Count(o.stderr, "\n"), o.stderr)
	require.True(t, strings.HasPrefix(o.stderr, "pgratelimit"), o.stderr)
	for _, word := range words {
		require.Contains(t, o.stderr, word)
	}
}

// decode parses the JSON output of a successful command.
func decode[T any](t *testing.T, o outcome) T {
	t.Helper()
	var value T
	decoder := json.NewDecoder(strings.NewReader(o.done(t)))
	decoder.DisallowUnknownFields()
	require.NoError(t, decoder.Decode(&value))
	return value
}

// urlWith returns the database's connection string with an additional parameter.
func urlWith(t *testing.T, db *pgtest.DB, parameter string) string {
	t.Helper()
	parsed, err := url.Parse(db.URL)
	require.NoError(t, err)
	if parsed.RawQuery != "" {
		parsed.RawQuery += "&"
	}
	parsed.RawQuery += parameter
	return parsed.String()
}

// commands returns all commands that do something, by their names: those without subcommands, and slots. It leaves out
// hidden commands.
func commands(t *testing.T) map[string]*cobra.Command {
	t.Helper()
	all := map[string]*cobra.Command{}
	var visit func(cmd *cobra.Command)
	visit = func(cmd *cobra.Command) {
		if cmd.Hidden {
			return
		}
		if !cmd.HasSubCommands() || cmd.Flags().Lookup("json") != nil {
			all[strings.TrimPrefix(cmd.CommandPath(), "pgratelimit ")] = cmd
		}
		for _, sub := range cmd.Commands() {
			visit(sub)
		}
	}
	visit(rootCommand(new(cli.App)))
	require.Contains(t, all, "migrate up")
	return all
}

func TestHelp(t *testing.T) {
	t.Parallel()

	for _, args := range [][]string{{"--help"}, {"-h"}, {"help"}} {
		out := invoke(t, "postgres://me:secret@localhost/app", args...).done(t)
		require.NotContains(t, out, "secret")
		for name := range commands(t) {
			first, _, _ := strings.Cut(name, " ")
			require.Contains(t, out, "\n  "+first+" ")
		}
	}
	for name, cmd := range commands(t) {
		out := invoke(t, "", append(strings.Fields(name), "--help")...).done(t)
		require.Contains(t, out, "\nUsage:\n  "+cmd.UseLine()+"\n", name)
		if name != "migrate status" {
			require.Contains(t, out, "\nExamples:\n  pgratelimit "+name, name)
		}
		require.Equal(t, name != "demo" && name != "serve", cmd.Flags().Lookup("json") != nil, name)
	}
	require.Regexp(t, `^pgratelimit version devel\b.*\n$`, invoke(t, "", "--version").done(t))
	require.Contains(t, invoke(t, "", "completion", "bash").done(t), "bash completion")
	require.Contains(t, invoke(t, "", "__complete", "peek", "login", "key", "--policy", "").stdout, "sliding 100/1m")
}

func TestManualPages(t *testing.T) {
	t.Parallel()

	folder := filepath.Join(t.TempDir(), "man1")
	require.Empty(t, invoke(t, "postgres://me:hunter2@localhost/app", "man", folder).done(t))
	for name, cmd := range commands(t) {
		page, err := os.ReadFile(filepath.Join(folder, strings.ReplaceAll("pgratelimit "+name, " ", "-")+".1"))
		require.NoError(t, err)
		require.Contains(t, string(page), ".SH SYNOPSIS")
		require.Contains(t, string(page), cmd.Short)
		require.NotContains(t, string(page), "hunter2")
	}
	require.NoFileExists(t, filepath.Join(folder, "pgratelimit-man.1"))
	require.FileExists(t, filepath.Join(folder, "pgratelimit-completion-bash.1"))
}

// substitution matches a command line whose output becomes the value of a variable.
var substitution = regexp.MustCompile(`\w+=\$\((pgratelimit [^)]*)\)`)

// examples returns the command lines in a document: the rest of each line of shell after the word pgratelimit.
func examples(t *testing.T, text string) [][]string {
	t.Helper()
	var all [][]string
	text = substitution.ReplaceAllString(strings.ReplaceAll(text, "\\\n", ""), "$1")
	for line := range strings.Lines(text) {
		_, line, ok := strings.Cut(" "+strings.TrimSpace(line), " pgratelimit ")
		if !ok {
			continue
		}
		for _, end := range []string{" | ", " > ", " >> ", " && ", " # ", "  #", "`"} {
			line, _, _ = strings.Cut(line, end)
		}
		words, err := exec.CommandContext(t.Context(), "sh", "-c", `set -- `+line+`; printf '%s\0' "$@"`).Output()
		require.NoError(t, err, line)
		all = append(all, strings.Split(strings.TrimSuffix(string(words), "\x00"), "\x00"))
	}
	require.NotEmpty(t, all)
	return all
}

// requireAccepted requires that a command line is valid.
func requireAccepted(t *testing.T, args []string) {
	t.Helper()
	cmd, rest, err := rootCommand(new(cli.App)).Find(args)
	require.NoError(t, err, args)
	require.False(t, cmd.HasSubCommands() && cmd.Flags().Lookup("json") == nil, args)
	require.NoError(t, cmd.ParseFlags(rest), args)
	require.NoError(t, cmd.ValidateArgs(cmd.Flags().Args()), args)
	require.NoError(t, cmd.ValidateRequiredFlags(), args)
}

func TestExamplesMakeSense(t *testing.T) {
	t.Parallel()

	for _, cmd := range commands(t) {
		if cmd.Example != "" {
			for _, args := range examples(t, cmd.Example) {
				requireAccepted(t, args)
			}
		}
	}
}

func TestCommandLinesThatMakeNoSense(t *testing.T) {
	t.Parallel()

	const policy = "--policy=fixed 1/1m"
	for _, test := range []struct {
		args []string
		want string
	}{
		{nil, "a command is missing"},
		{[]string{"dome"}, `unknown command "dome"`},
		{[]string{"--serve", "demo"}, "--serve"},
		{[]string{"demo", "--verbose"}, "--verbose"},
		{[]string{"demo", "--serve=perhaps"}, "perhaps"},
		{[]string{"demo", "now"}, `"now"`},
		{[]string{"migrate"}, "a command is missing"},
		{[]string{"migrate", "sideways"}, `unknown command "sideways"`},
		{[]string{"migrate", "up", "2"}, `"2"`},
		{[]string{"migrate", "print", "9000"}, `there is no migration "9000"`},
		{[]string{"migrate", "print", "first"}, `there is no migration "first"`},
		{[]string{"migrate", "down"}, "--yes"},
		{[]string{"limits", "--policy", "sliding 1/1m"}, "login=sliding 100/1m"},
		{[]string{"limits", "--policy", "login=sliding"}, `"bucket 20 5/10s"`},
		{[]string{"limits", "--max-rows", "0"}, "--max-rows"},
		{[]string{"top", policy}, "accepts 1 arg(s), received 0"},
		{[]string{"top", "login"}, `required flag(s) "policy"`},
		{[]string{"top", "login", policy, "-n", "0"}, "--number"},
		{[]string{"top", "login", policy, "--timeout", "0"}, "--timeout"},
		{[]string{"top", "login", policy, "--timeout", "soon"}, "--timeout"},
		{[]string{"peek", "login", policy}, "accepts 2 arg(s), received 1"},
		{[]string{"peek", "login", "key"}, `required flag(s) "policy"`},
		{[]string{"peek", "login", "key", "--policy", "slow 1/1m"}, `"bucket 20 5/10s"`},
		{[]string{"peek", "", "key", policy}, "Config.Name"},
		{[]string{"take", "login", "", policy}, "invalid key"},
		{[]string{"take", "login", "key", policy, "--cost", "0"}, "--cost"},
		{[]string{"take", "login", "key", policy, "--cost", "2"}, "cost exceeds the limit"},
		{[]string{"take", "login", "key", "--policy", "fixed 0/1m"}, "at least 1"},
		{[]string{"hold", "login", "key", policy, "--for=1m"}, `required flag(s) "cost"`},
		{[]string{"hold", "login", "key", policy, "--cost=1"}, `required flag(s) "for"`},
		{[]string{"hold", "login", "key", policy, "--cost=0", "--for=1m"}, "--cost"},
		{[]string{"hold", "login", "key", policy, "--cost=2", "--for=1m"}, "cost exceeds the limit"},
		{[]string{"hold", "login", "key", policy, "--cost=1", "--for=0s"}, "from 1ms to 24h"},
		{[]string{"hold", "login", "key", policy, "--cost=1", "--for=-1m"}, "from 1ms to 24h"},
		{[]string{"hold", "login", "key", policy, "--cost=1", "--for=876000h"}, "from 1ms to 24h"},
		{[]string{"hold", "login", "", policy, "--cost=1", "--for=1m"}, "invalid key"},
		{[]string{"settle", "hold"}, `required flag(s) "used"`},
		{[]string{"settle", "hold", "--used=-1"}, "from 0 to 2^62"},
		{[]string{"settle", "hold", "--used=4611686018427387905"}, "from 0 to 2^62"},
		{[]string{"settle", "hold", "--used=9223372036854775808"}, "value out of range"},
		{[]string{"settle", "hold", "--used=1", "--policy=often"}, `"bucket 20 5/10s"`},
		{[]string{"settle", "--used=1"}, "accepts 1 arg(s), received 0"},
		{[]string{"extend", "hold", "--for=876000h"}, "from 1ms to 24h"},
		{[]string{"cancel"}, "accepts 1 arg(s), received 0"},
		{[]string{"slots"}, "accepts between 1 and 2 arg(s), received 0"},
		{[]string{"slots", "imports", "key", "more"}, "accepts between 1 and 2 arg(s), received 3"},
		{[]string{"slots", "imports", "-n", "0"}, "--number"},
		{[]string{"slots", ""}, "name of a limiter"},
		{[]string{"slots", "imports", ""}, "a key has"},
		{[]string{"slots", "release"}, "accepts 1 arg(s), received 0"},
		{[]string{"slots", "release", "imports"}, "the slot cannot be read"},
		{[]string{"reset", "login"}, "accepts 2 arg(s), received 1"},
		{[]string{"reset", "login", "key", "--all"}, "accepts 1 arg(s), received 2"},
		{[]string{"reset", "login", "--all"}, "--yes"},
		{[]string{"reset", "login", ""}, "a key has"},
		{[]string{"reset", "", "key"}, "name of a limiter"},
		{[]string{"reset", "", "--all", "--yes"}, "name of a limiter"},
		{[]string{"reset", strings.Repeat("a", 129), "--all", "--yes"}, "name of a limiter"},
		{[]string{"top", "", policy}, "name of a limiter"},
		{[]string{"sweep", "now"}, `"now"`},
		{[]string{"sweep", "--every", "1"}, "--every"},
		{[]string{"sweep", "--every", "1ms"}, "at least 1s"},
		{[]string{"sweep", "--every", "0s"}, "at least 1s"},
		{[]string{"sweep", "--share", "2"}, "at most 1"},
		{[]string{"sweep", "--share", "0"}, "above 0"},
		{[]string{"sweep", "--existing", ""}, "not empty"},
		{[]string{"doctor", "who"}, `"who"`},
		{[]string{"policy"}, "a command is missing"},
		{[]string{"policy", "set", "api", "fixed 1/1m", "--comment=why"}, "at least one of the flags in the group [key prefix everybody] is required"},
		{[]string{"policy", "set", "api", "fixed 1/1m", "--comment=why", "--key=a", "--prefix=b"}, "[key prefix] were all set"},
		{[]string{"policy", "set", "api", "fixed 1/1m", "--comment=why", "--key="}, "a key has 1 to 512 bytes"},
		{[]string{"policy", "set", "api", "fixed 1/1m", "--comment=why", "--prefix="}, "--everybody is for all keys"},
		{[]string{"policy", "set", "", "fixed 1/1m", "--comment=why", "--everybody"}, "name of a limiter"},
		{[]string{"policy", "set", "api", "fixed 1/1m", "--everybody"}, `required flag(s) "comment"`},
		{[]string{"policy", "set", "api", "fixed 1/1m", "--everybody", "--comment= "}, "--comment is empty"},
		{[]string{"policy", "set", "api", "fixed 1", "--everybody", "--comment=why"}, `"bucket 20 5/10s"`},
		{[]string{"policy", "set", "api", "--everybody", "--comment=why"}, "accepts 2 arg(s), received 1"},
		{[]string{"policy", "set", "api", "fixed 1/1m", "--off", "--everybody", "--comment=why"}, "accepts 1 arg(s), received 2"},
		{[]string{"policy", "set", "api", "fixed 1/1m", "--mode=deny", "--everybody", "--comment=why"}, "pgratelimit ban"},
		{[]string{"policy", "set", "api", "fixed 1/1m, concurrent 5", "--mode=shadow", "--everybody", "--comment=why"}, "nobody would release"},
		{[]string{"policy", "set", "api", "--off", "--mode=shadow", "--everybody", "--comment=why"}, "--off is no shadow"},
		{[]string{"policy", "set", "api", "fixed 1/1m", "--until=soon", "--everybody", "--comment=why"}, "a duration, like 90m or 7d, or a time"},
		{[]string{"policy", "set", "api", "fixed 1/1m", "--until=-1h", "--everybody", "--comment=why"}, "a duration, like 90m or 7d, or a time"},
		{[]string{"policy", "unset", "api"}, "[key prefix everybody]"},
		{[]string{"policy", "unset", "api", "--everybody", "--mode=off"}, "enforce or shadow"},
		{[]string{"policy", "history", "-n", "0"}, "--number"},
		{[]string{"policy", "get"}, "accepts between 1 and 2 arg(s)"},
		{[]string{"policy", "get", "api", ""}, "a key has"},
		{[]string{"ban", "api", "a", "--comment=why"}, `required flag(s) "for"`},
		{[]string{"ban", "api", "a", "--for=0s", "--comment=why"}, "a duration, like 90m or 7d"},
		{[]string{"ban", "api", strings.Repeat("a", 513), "--for=1h", "--comment=why"}, "a key has"},
		{[]string{"unban", "api"}, "accepts 2 arg(s), received 1"},
		{[]string{"explain", "api", ""}, "a key has"},
		{[]string{"doctor", "--database-url", "postgres://me:secret@localhost:port/app"}, "cannot parse"},
	} {
		o := invoke(t, "", test.args...)
		o.complains(t, exitUsage, test.want, "--help'")
		require.NotContains(t, o.stderr, "secret")
	}
}

// asking returns a valid command line for each command that uses the database.
func asking() [][]string {
	const policy = "--policy=sliding 10/1m"
	return [][]string{
		{"migrate", "up"},
		{"migrate", "down", "--yes"},
		{"migrate", "status"},
		{"limits"},
		{"top", "login", policy},
		{"peek", "login", "user:123", policy},
		{"take", "login", "user:123", policy},
		{"hold", "login", "user:123", policy, "--cost=1", "--for=1ms"},
		{"settle", "", "--used=1"},
		{"cancel", ""},
		{"extend", "", "--for=1m"},
		{"reset", "login", "user:123"},
		{"reset", "login", "--all", "--yes"},
		{"sweep"},
		{"policy", "list"},
		{"policy", "get", "login", "user:123"},
		{"policy", "set", "login", "--key=user:123", "sliding 10/1m", why},
		{"policy", "unset", "login", "--key=user:123"},
		{"policy", "history"},
		{"ban", "login", "user:123", "--for=1h", why},
		{"unban", "login", "user:123"},
		{"explain", "login", "user:123", policy},
		{"slots", "login"},
		{"slots", "release", "9b6589b3-2c61-4774-9439-b17871d7b4d4"},
		{"doctor"},
	}
}

// kinds returns one command for each way to use the database: to read its tables, to ask a limiter, to call a function,
// to sweep, and to change rows. TestThoroughEveryCommandRefuses tries all commands.
func kinds() [][]string {
	return [][]string{
		{"limits"},
		{"take", "login", "user:123", "--policy=sliding 10/1m"},
		{"reset", "login", "user:123"},
		{"sweep"},
		{"policy", "set", "login", "--key=user:123", "sliding 10/1m", why},
	}
}

// releases returns whether a command of asking releases a slot. There is no slot to release.
func releases(args []string) bool { return args[0] == "slots" && args[1] == "release" }

func TestNoDatabase(t *testing.T) {
	t.Parallel()

	address := testkit.FreeAddress(t)
	for _, args := range asking() {
		o := invoke(t, "postgres://me:secret@"+address+"/app", args...)
		o.complains(t, exitFailed, "refused", "DATABASE_URL")
		require.NotContains(t, o.stderr, "the pool's connection string")
		require.NotContains(t, o.stderr, "secret")
		require.NotContains(t, o.stderr, "user:123")
	}

	// Without a connection string, the command uses the PG* variables, as psql does.
	host, port, err := net.SplitHostPort(address)
	require.NoError(t, err)
	cmd := command(t, "", "limits")
	cmd.Env = append(cmd.Env, "PGHOST="+host, "PGPORT="+port, "PGUSER=alice", "PGDATABASE=wonderland")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	require.Error(t, cmd.Run())
	require.Contains(t, stderr.String(), "user=alice database=wonderland")
	require.Contains(t, stderr.String(), address)
}

func TestDatabaseThatIsNotMigrated(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	before := pgtest.Objects(t, db.Pool)
	for _, args := range kinds() {
		o := invoke(t, db.URL, args...)
		o.needsMigrations(t)
		if args[0] == "limits" {
			require.Contains(t, o.stderr, `relation "rate_limit_ephemeral" does not exist`)
		}
	}
	o := invoke(t, db.URL, "doctor")
	require.Equal(t, exitFailed, o.code)
	require.Contains(t, o.stdout, "the tables are not there\n")
	require.Contains(t, o.stdout, "pgratelimit migrate up")
	require.Empty(t, o.stderr)
	require.True(t, strings.HasSuffix(o.stdout, "\n1 problem, 0 warnings\n"), o.stdout)
	require.Equal(t, before, pgtest.Objects(t, db.Pool))
}

// needsMigrations requires that the command failed because there are no tables.
func (o outcome) needsMigrations(t *testing.T) {
	t.Helper()
	o.complains(t, exitFailed, "SQLSTATE 42", "pgratelimit migrate up", "--schema")
	require.NotContains(t, o.stderr, "user:123")
}

// needsRights requires that the command failed because the role has no rights.
func (o outcome) needsRights(t *testing.T) {
	t.Helper()
	o.complains(t, exitFailed, "permission denied", "SQLSTATE 42501", "deploy/grants.sql")
	require.NotContains(t, o.stderr, "user:123")
}

// fakeViews creates views with the names of the limiter's tables. The views run a function.
const fakeViews = `CREATE FUNCTION pwned() RETURNS bigint LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''it was run''; END';
	CREATE VIEW rate_limit_ephemeral AS SELECT ''::text AS prefix, ''::text AS key, pwned() AS expires_at;
	CREATE VIEW rate_limit_durable AS SELECT * FROM rate_limit_ephemeral`

// fakeTrigger creates a trigger on one of the limiter's tables.
const fakeTrigger = `CREATE FUNCTION pwned() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''it was run''; END';
	CREATE TRIGGER t BEFORE DELETE ON rate_limit_ephemeral FOR EACH ROW EXECUTE FUNCTION pwned()`

// The commands never run another role's objects with the operator's rights, even if the objects have the names of the
// limiter's tables and functions.
func TestForeignObjectsAreNotRun(t *testing.T) {
	t.Parallel()

	const odd = "is not what the migrations make"
	views := pgtest.Empty(t)
	pgtest.Exec(t, views.Pool, fakeViews)
	for _, args := range kinds() {
		invoke(t, views.URL, args...).complains(t, exitFailed, "view ", odd)
	}

	db := pgtest.New(t)
	invoke(t, urlWith(t, db, "search_path=public,pg_catalog"), "limits").complains(t, exitFailed, "leave pg_catalog out")
	opened := open(t, db.URL)
	for _, function := range []string{
		"take_fixed_window", "take_sliding_window", "take_token_bucket", "take_sliding_log", "take_calendar_window", "take_all",
		"all", "reset", "sweep",
	} {
		pgtest.Exec(t, db.Pool, "ALTER FUNCTION rate_limit_"+function+" SECURITY INVOKER")
		err := opened.Read(t.Context(), func(cli.Tx) error { return nil })
		require.ErrorContains(t, err, "function public.rate_limit_"+function+"(")
		require.ErrorContains(t, err, odd)
		if function == "sweep" {
			invoke(t, db.URL, "limits").complains(t, exitFailed, "function public.rate_limit_sweep(", odd)
		}
		pgtest.Exec(t, db.Pool, "ALTER FUNCTION rate_limit_"+function+" SECURITY DEFINER")
	}
	pgtest.Exec(t, db.Pool, fakeTrigger)
	for _, args := range kinds() {
		invoke(t, db.URL, args...).complains(t, exitFailed, "table ", odd)
	}
}

// open returns a database as a command uses it, with one session for several checks.
func open(t *testing.T, databaseURL string) cli.DB {
	t.Helper()
	a := &cli.App{DatabaseURL: databaseURL, Timeout: patience}
	pool, err := a.Open(t.Context())
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return cli.DB{App: a, Pool: pool}
}

// Every command refuses what the tests above and TestRoleWithoutRights show for one command of each kind.
func TestThoroughEveryCommandRefuses(t *testing.T) {
	t.Parallel()

	empty, views, triggers, db := pgtest.Empty(t), pgtest.Empty(t), pgtest.New(t), pgtest.New(t)
	pgtest.Exec(t, views.Pool, fakeViews)
	pgtest.Exec(t, triggers.Pool, fakeTrigger)
	pgtest.Exec(t, db.Pool, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
	for _, args := range asking()[3:] { // the first three commands migrate
		invoke(t, views.URL, args...).complains(t, exitFailed, "view ", "is not what the migrations make")
		invoke(t, triggers.URL, args...).complains(t, exitFailed, "table ", "is not what the migrations make")
		if args[0] != "doctor" { // doctor reports all that is missing
			invoke(t, empty.URL, args...).needsMigrations(t)
			invoke(t, urlWith(t, db, "role=pg_monitor"), args...).needsRights(t)
		}
	}
}

// If another role owns one of these objects, no command uses it, because that role could change it after the check.
func TestThoroughObjectsOfStrangersAreNotUsed(t *testing.T) {
	t.Parallel()

	for _, owned := range []string{"TABLE rate_limit_ephemeral", "TABLE rate_limit_durable", "FUNCTION rate_limit_sweep", "FUNCTION rate_limit_all"} {
		db := pgtest.New(t)
		pgtest.Exec(t, db.Pool, "GRANT CREATE ON SCHEMA public TO pg_monitor; ALTER "+owned+" OWNER TO pg_monitor")
		for _, args := range asking()[3:] { // the first three commands migrate
			if args[0] != "doctor" {
				invoke(
					t,
					db.URL,
					args...).complains(t, 1, "belongs to pg_monitor, who owns neither the schema nor the database")
			}
		}
		// The command trusts the database's owner, who can create anything in the database.
		pgtest.Exec(t, db.Pool,
			`DO $$ BEGIN EXECUTE format('ALTER DATABASE %I OWNER TO pg_monitor', current_database()); END $$`)
		invoke(t, db.URL, "limits").done(t)
	}
}

// doctor reads tables of another role. The owner cannot change a table so that doctor runs the owner's code.
func TestDoctorRunsNothingThatAppearsMeanwhile(t *testing.T) {
	t.Parallel()
	testMeanwhile(t, "rate_limit_ephemeral")
}

func TestThoroughDoctorRunsNothingThatAppearsMeanwhile(t *testing.T) {
	t.Parallel()
	testMeanwhile(t, "rate_limit_ephemeral_hold")
}

func testMeanwhile(t *testing.T, table string) {
	t.Helper()
	db := pgtest.New(t)
	pgtest.Exec(
		t,
		db.Pool,
		`DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_isolation = %L', current_database(), 'repeatable read'); END $$;
		GRANT CREATE ON SCHEMA public TO pg_monitor; SELECT rate_limit_hold('login', 'user:123', 'fixed 5/1m', 1, '1 hour');
		ALTER TABLE `+table+` OWNER TO pg_monitor;
		CREATE FUNCTION attack() RETURNS boolean LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION $$it was run$$; END'`,
	)
	begin := func() pgx.Tx {
		tx, err := db.Pool.Begin(t.Context())
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), "SET LOCAL ROLE pg_monitor")
		require.NoError(t, err)
		return tx
	}
	waiting := func(want int) {
		testkit.WaitUntil(t, func() bool {
			return want == pgtest.Scalar[int](
				t,
				db.Pool,
				"SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
			)
		})
	}
	// doctor has checked the table, and waits for the lock of the first transaction. The second transaction changes the
	// table before doctor uses it again.
	first, second := begin(), begin()
	_, err := first.Exec(t.Context(), "LOCK TABLE "+table)
	require.NoError(t, err)
	doctor := command(t, urlWith(t, db, "role=pg_read_all_data"), "doctor")
	var out bytes.Buffer
	doctor.Stdout, doctor.Stderr = &out, &out
	require.NoError(t, doctor.Start())
	waiting(1)
	attached := make(chan error, 1)
	go func() {
		_, err := second.Exec(
			t.Context(),
			`LOCK TABLE `+table+`; CREATE POLICY attack ON `+table+` USING (attack());
			ALTER TABLE `+table+` ENABLE ROW LEVEL SECURITY`,
		)
		attached <- err
	}()
	waiting(2)
	require.NoError(t, first.Commit(t.Context()))
	require.NoError(t, <-attached)
	waiting(1)
	require.NoError(t, second.Commit(t.Context()))
	require.Error(t, doctor.Wait())
	require.NotContains(t, out.String(), "it was run")
	require.Contains(t, out.String(), "table public."+table+" is not what the migrations make")
}

func TestRoleWithoutRights(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
	pgtest.Exec(t, db.Pool,
		"INSERT INTO rate_limit_ephemeral (prefix, key, expires_at) VALUES ('login', 'user:123', 9e15)")
	before := pgtest.Objects(t, db.Pool)
	monitor := urlWith(t, db, "role=pg_monitor")
	for _, args := range kinds() {
		invoke(t, monitor, args...).needsRights(t)
	}
	invoke(t, monitor, "migrate", "down", "--yes").complains(t, exitFailed, "42501")
	empty := pgtest.Empty(t)
	pgtest.Exec(t, empty.Pool, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
	invoke(
		t,
		urlWith(t, empty, "role=pg_monitor"),
		"migrate",
		"up",
	).complains(t, exitFailed, "not applied: 1 create_tables", "CREATE on the schema")

	o := invoke(t, monitor, "doctor")
	require.Equal(t, exitFailed, o.code)
	require.Contains(t, o.stdout, "this role may neither execute the functions nor read the tables")
	require.Contains(t, o.stdout, "not looked at, because this role may not read the tables")
	require.Equal(t, before, pgtest.Objects(t, db.Pool))
	require.Equal(t, 1, pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM rate_limit_ephemeral"))
}

// patience is how long a test waits for an event before it fails.
const patience = time.Minute

// If enable_nestloop is off, JIT would compile catalog queries for seconds. In this test, compilation fails, because
// the JIT provider is plpgsql.
func TestCommandsAreNotCompiled(t *testing.T) {
	t.Parallel()

	const policy = "--policy=sliding 10/1h"
	testNotCompiled(t, [][]string{
		{"migrate", "up"},
		{"take", "login", "a", policy, "--receipt", filepath.Join(t.TempDir(), "receipt.json")},
		{"hold", "login", "a", policy, "--cost", "5", "--for", "1m"},
		{"grant", "login", "a", policy, "--cost", "5"},
		{"limits", "--policy=login=sliding 10/1h"},
		{"reset", "login", "--all", "--yes"},
		{"sweep"},
		{"policy", "set", "login", "--key=a", "sliding 10/1h", why},
		{"explain", "login", "a"},
		{"migrate", "down", "--yes"},
		{"migrate", "up"},
	})
}

func TestThoroughCommandsAreNotCompiled(t *testing.T) {
	t.Parallel()

	const policy = "--policy=sliding 10/1h"
	receipt := filepath.Join(t.TempDir(), "receipt.json")
	testNotCompiled(t, [][]string{
		{"migrate", "up"},
		{"migrate", "status"},
		{"take", "login", "a", policy, "--receipt", receipt},
		{"refund", receipt},
		{"charge", "login", "a", policy, "--cost", "5"},
		{"settle", "", "--used", "5"},
		{"cancel", ""},
		{"extend", "", "--for", "1m"},
		{"peek", "login", "a", policy},
		{"limits"},
		{"top", "login", policy},
		{"reset", "login", "a"},
		{"policy", "list"},
		{"policy", "get", "login", "a"},
		{"ban", "login", "a", "--for=1h", why},
		{"unban", "login", "a"},
		{"policy", "unset", "login", "--key=a"},
		{"policy", "history"},
	})
}

func testNotCompiled(t *testing.T, all [][]string) {
	t.Helper()
	server := pgtest.Server(t, pgserver.Config{Settings: map[string]string{
		"jit_provider": "plpgsql", "jit_above_cost": "20", "enable_nestloop": "off",
	}})
	for _, args := range all {
		invoke(t, server.URL(), args...).done(t)
	}
	require.NotContains(t, invoke(t, server.URL(), "doctor").stdout, "could not be looked at")
	conn, err := pgx.Connect(t.Context(), server.URL())
	require.NoError(t, err)
	defer conn.Close(t.Context())
	_, err = conn.Exec(t.Context(), "SELECT FROM pg_class JOIN pg_namespace ON true")
	require.ErrorContains(t, err, "_PG_jit_provider_init", "nothing tells whether a statement is compiled")
}
