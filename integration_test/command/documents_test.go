package command

import (
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
)

// shellAndSQL returns the blocks of shell and SQL in the given files.
func shellAndSQL(t *testing.T, files ...string) (blocks []string) {
	t.Helper()
	for _, file := range files {
		text, err := os.ReadFile(filepath.Join(repository, file))
		require.NoError(t, err)
		for _, block := range regexp.MustCompile("(?ms)^ *```(?:sh|sql)\n(.*?)^ *```").FindAllSubmatch(text, -1) {
			blocks = append(blocks, string(block[1]))
		}
	}
	return blocks
}

// TestShellAndSQLOfTheDocuments runs all shell and SQL in README.md and docs/ unchanged. docs/backup.md has a test of
// its own.
func TestShellAndSQLOfTheDocuments(t *testing.T) {
	t.Parallel()

	files, err := os.ReadDir(filepath.Join(repository, "docs"))
	require.NoError(t, err)
	blocks := shellAndSQL(t, "README.md")
	for _, file := range files {
		if name := file.Name(); filepath.Ext(name) == ".md" && name != "backup.md" && name != "other-languages.md" { // see TestCurlOfTheDocument
			blocks = append(blocks, shellAndSQL(t, filepath.Join("docs", name))...)
		}
	}
	// block finds the block that contains this text, removes it from the list, and returns it.
	block := func(t *testing.T, has string) string {
		t.Helper()
		for i, block := range blocks {
			if strings.Contains(block, has) {
				blocks = append(blocks[:i:i], blocks[i+1:]...)
				return block
			}
		}
		require.Fail(t, "no block has "+has)
		return ""
	}
	psql, err := exec.LookPath("psql")
	if err != nil {
		t.Skip("psql: install it (Debian: postgresql-client)")
	}
	binary := buildCommand(t)
	server := pgtest.Server(t, pgserver.Config{}) // roles belong to the whole server

	// connect creates a database and connects to it as a superuser.
	connect := func(t *testing.T, name string) (*pgx.Conn, string) {
		t.Helper()
		conn, err := pgx.Connect(t.Context(), server.URL())
		require.NoError(t, err)
		defer conn.Close(t.Context())
		_, err = conn.Exec(t.Context(), "CREATE DATABASE "+name)
		require.NoError(t, err)
		parsed, err := url.Parse(server.URL())
		require.NoError(t, err)
		parsed.Path = "/" + name
		conn, err = pgx.Connect(t.Context(), parsed.String())
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, conn.Close(t.Context())) })
		return conn, parsed.String()
	}
	shell := func(t *testing.T, dir, databaseURL, script string, environment ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "bash", "-euxo", "pipefail", "-c", script)
		cmd.Dir = dir
		path := filepath.Dir(binary) + ":" + filepath.Dir(psql) + ":" + os.Getenv("PATH")
		cmd.Env = append(os.Environ(), append(environment, "PATH="+path, "DATABASE_URL="+databaseURL)...)
		output, err := cmd.CombinedOutput()
		require.NoError(t, err, string(output))
		return string(output)
	}
	sql := func(t *testing.T, conn *pgx.Conn, script string) {
		t.Helper()
		_, err := conn.Exec(t.Context(), script, pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err, script)
	}

	conn, databaseURL := connect(t, "one")

	// These blocks are from docs/operating.md.
	require.Contains(t, shell(t, repository, databaseURL, block(t, "# tables and functions")), "0 problems, 0 warnings")
	roles := block(t, "deploy/roles.sql")
	for _, name := range []string{"alice", "bob"} { // these roles are in each database of the server
		_, url := connect(t, name)
		shell(t, repository, url, roles)
	}
	logins := block(t, "CREATE ROLE shop LOGIN")
	sql(t, conn, logins)
	dir := t.TempDir() // the folder of the receipt and of the access log
	require.NoError(t, os.WriteFile(filepath.Join(dir, "access.log"),
		[]byte(`192.0.2.1 - - [28/Nov/2026:20:00:00 +0000] "GET / HTTP/1.1" 200 12 "-" "-"`+"\n"), 0o600))
	shell(t, dir, databaseURL, "pgratelimit take mail alice --policy 'bucket 20 5/10s' --receipt alice.receipt")
	shell(t, dir, databaseURL, block(t, "pgratelimit top login"))
	sql(t, conn, "CREATE ROLE app LOGIN")
	sql(t, conn, block(t, "GRANT USAGE ON SCHEMA public TO app"))
	sql(t, conn, block(t, "REVOKE CREATE"))
	sql(t, conn, block(t, "SET jit = off"))
	shell(t, dir, databaseURL, block(t, "pgratelimit policy set api"))
	sql(t, conn, block(t, "INSERT INTO rate_limit_policy"))
	sql(t, conn, block(t, "DELETE FROM rate_limit_policy_history"))
	schedule := block(t, "cron.schedule")
	var hasPgCron bool
	require.NoError(t, conn.QueryRow(t.Context(),
		"SELECT EXISTS (SELECT FROM pg_available_extensions WHERE name = 'pg_cron')").Scan(&hasPgCron))
	t.Run("pg_cron", func(t *testing.T) {
		t.Parallel()
		if !hasPgCron {
			t.Skip("pg_cron: install this extension of the server (Debian: postgresql-15-cron)")
		}
		sweepByPgCron(t, schedule)
	})

	role, set, grow := block(t, "CREATE ROLE limits_proxy"), block(t, "shard set"), block(t, "shard grow")
	var hasPLProxy bool
	require.NoError(t, conn.QueryRow(t.Context(),
		"SELECT EXISTS (SELECT FROM pg_available_extensions WHERE name = 'plproxy')").Scan(&hasPLProxy))
	t.Run("shards", func(t *testing.T) {
		if !hasPLProxy && os.Getenv("RATELIMIT_TEST_PLPROXY") == "" {
			t.Skip("PL/Proxy: install this extension of the server (Debian: postgresql-15-plproxy)")
		}
		for i := range 4 {
			_, url := connect(t, fmt.Sprint("limits_", i))
			shell(t, repository, url, roles)
		}
		sql(t, conn, regexp.MustCompile(`(?m)^ *\\.*$`).ReplaceAllString(role, "")) // leaves out the commands of psql
		proxy, url := connect(t, "proxy")
		shell(t, repository, url, `psql "$DATABASE_URL" -v ON_ERROR_STOP=1 -f deploy/roles.sql`)
		config := conn.Config()
		here := fmt.Sprintf("host=%s port=%d", config.Host, config.Port)
		script := regexp.MustCompile(`host=10[.0-9]*`).ReplaceAllString(set+grow, here)
		script = regexp.MustCompile(`shard (set|grow)`).ReplaceAllString(script, "shard $1 --yes") // --yes, because nobody can answer the question
		require.Contains(t, shell(t, repository, url, script), "\n0 problems, ")
		var shards int
		require.NoError(t, proxy.QueryRow(t.Context(), "SELECT rate_limit.rate_limit_shards()").Scan(&shards))
		require.Equal(t, 4, shards)
	})

	// These blocks are from docs/cookbook.md.
	sql(t, conn, block(t, "FROM rate_limit_allow("))
	resetKeyOfHMAC(t, conn, func(secret string) {
		shell(t, dir, databaseURL, block(t, "openssl dgst"), "RATE_LIMIT_SECRET="+secret)
	})

	// These blocks are from docs/comparison.md.
	own := block(t, "INTO hits")
	sql(t, conn, "CREATE TABLE hits (key text, minute timestamptz, count int, PRIMARY KEY (key, minute))")
	var count int
	for range 10 {
		// The minute may have just ended, so begin a new one.
		sql(t, conn, "UPDATE hits SET minute = date_trunc('minute', clock_timestamp())")
		require.NoError(t, conn.QueryRow(t.Context(), own, "a").Scan(&count))
	}
	require.Equal(t, 10, count)
	sql(t, conn, "UPDATE hits SET minute = date_trunc('minute', clock_timestamp())")
	require.ErrorIs(t, conn.QueryRow(t.Context(), own, "a").Scan(&count), pgx.ErrNoRows)

	// These blocks are from README.md.
	demo, tests, _ := strings.Cut(block(t, "pgratelimit demo"), "\n")
	output := shell(t, repository, databaseURL, demo)
	require.Equal(t, 10, strings.Count(output, "201 Created"), output)
	require.Equal(t, 5, strings.Count(output, "429 Too Many Requests"), output)
	// Without --dry-run, this test would run itself.
	shell(t, repository, databaseURL, strings.Replace(tests, "make ", "make --dry-run ", 1))
	get := block(t, "go get")
	t.Run("an application of one's own", func(t *testing.T) {
		build := func(dir, script string, environment ...string) {
			shell(t, dir, databaseURL, script, append(environment, "GOFLAGS=", "GOSUMDB=off")...)
		}
		buildApplication(t, build, get)
	})

	require.Empty(t, blocks, "no test runs these")
}

// resetKeyOfHMAC checks that the cookbook's lines for a shell find the key that HMAC makes.
func resetKeyOfHMAC(t *testing.T, conn *pgx.Conn, reset func(secret string)) {
	t.Helper()
	const secret = `a secret with spaces, "quotes", \ and $dollars`
	part := func(text string) httplimit.Key {
		return httplimit.ByFunc(func(*http.Request) (string, error) { return text, nil })
	}
	key, err := httplimit.HMAC([]byte(secret), httplimit.Join(part("192.0.2.1"), part("alice"))).Of(nil)
	require.NoError(t, err)
	_, err = conn.Exec(t.Context(), "SELECT rate_limit_allow('login', $1, 'sliding 5/15m')", key)
	require.NoError(t, err)
	reset(secret)
	var left int
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT count(*) FROM rate_limit_ephemeral WHERE key = $1", key).Scan(&left))
	require.Zero(t, left)
}

// buildApplication builds the program in README.md in a new module, as README.md says. It uses this copy of the
// library, not a version from the network.
func buildApplication(t *testing.T, shell func(dir, script string, environment ...string), get string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(repository, "README.md"))
	require.NoError(t, err)
	program := regexp.MustCompile("(?ms)^```go\n(package main\n.*?)^```").FindSubmatch(text)
	require.NotNil(t, program)
	library, err := filepath.Abs(repository)
	require.NoError(t, err)
	replace := "go mod edit -replace 'github.com/pgratelimit/ratelimit=" + library + "'\n"
	// go get reads some go.mod files that this repository's build does not need. This command loads them.
	shell(t.TempDir(), "go mod init example.com/graph\n"+replace+"go get github.com/pgratelimit/ratelimit@v0.0.0")
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "main.go"), program[1], 0o600))
	shell(dir, "go mod init example.com/mine\n"+replace)
	shell(dir, get, "GOPROXY=off") // without this, go would look for a published version
	shell(dir, "go build -o mine .", "GOPROXY=off")
}

// sweepByPgCron waits until pg_cron sweeps as configured. pg_cron wakes up every minute.
func sweepByPgCron(t *testing.T, schedule string) {
	t.Helper()
	server := pgtest.Server(t, pgserver.Config{Settings: map[string]string{
		"shared_preload_libraries": "pg_cron", "cron.database_name": "postgres", "cron.use_background_workers": "on",
	}})
	pool, err := pgxpool.New(t.Context(), server.URL())
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	require.NoError(t, migrations.Up(t.Context(), pool))
	_, err = pool.Exec(t.Context(), "CREATE EXTENSION pg_cron")
	require.NoError(t, err)
	pgtest.Fill(t, pool, "rate_limit_ephemeral", "login", 1500, time.UnixMicro(1))
	_, err = pool.Exec(t.Context(), schedule)
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		var rows int
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM rate_limit_ephemeral").Scan(&rows))
		return rows == 0
	}, patience, 100*time.Millisecond)
}
