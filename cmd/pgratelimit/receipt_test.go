package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/keys"
)

func TestRefundByReceipt(t *testing.T) {
	t.Parallel()

	for _, policy := range []string{
		"fixed 5/365d", "sliding 5/365d", "log 5/365d", "bucket 5 1/365d", "fixed 5/365d, log 6/365d, bucket 7 1/365d",
		"fixed 5/365d, every 5/month Europe/Berlin",
	} {
		for _, more := range [][]string{nil, {"--durable"}, {"--schema", "my limits"}} {
			if more != nil && !strings.Contains(policy, "log") {
				continue // where a row is, is all the same to most policies
			}
			t.Run(policy+strings.Join(more, " "), func(t *testing.T) {
				t.Parallel()
				db := pgtest.New(t)
				schema := more
				if len(more) == 1 {
					schema = nil // the receipt says in which table the row is
				} else if more != nil {
					pgtest.Exec(t, db.Pool, `CREATE SCHEMA "my limits"`)
					invoke(t, db.URL, append([]string{"migrate", "up"}, more...)...).done(t)
				}
				ask := func(verb string, args ...string) outcome {
					args = append([]string{verb, "mail", "alice", "--policy", policy}, args...)
					return invoke(t, db.URL, append(args, more...)...)
				}
				remaining := func() int64 { return decode[keys.Decision](t, ask("peek", "--json")).Remaining }
				file := filepath.Join(t.TempDir(), "receipt")
				refund := append([]string{"refund", file}, schema...)

				ask("take").done(t)
				require.Regexp(t, `^allowed: 1 of 5 remaining, as good as new after \S+\n$`,
					ask("take", "--cost", "3", "--receipt", file).done(t))
				info, err := os.Stat(file)
				require.NoError(t, err)
				require.EqualValues(t, 0o600, info.Mode().Perm())
				ask("take", "--cost", "1", "--receipt", file).complains(t, exitFailed, "file exists")
				require.EqualValues(t, 1, remaining())

				require.Regexp(t, `^allowed: 4 of 5 remaining, as good as new after \S+\n$`, invoke(t, db.URL, refund...).done(t))
				require.EqualValues(t, 4, remaining())
				invoke(t, db.URL, refund...).complains(t, exitFailed, "no such file", "used before")
				require.EqualValues(t, 4, remaining())

				// What is denied leaves no receipt, and what no longer counts gives nothing back.
				require.Equal(t, exitDenied, ask("take", "--cost", "5", "--receipt", file).code)
				require.NoFileExists(t, file)
				ask("take", "--receipt", file).done(t)
				for _, table := range []string{"rate_limit_ephemeral", "rate_limit_durable"} {
					prefix := ""
					if len(more) == 2 {
						prefix = `"my limits".`
					}
					pgtest.Exec(t, db.Pool, "TRUNCATE "+prefix+table)
				}
				invoke(t, db.URL, refund...).done(t)
				require.EqualValues(t, 5, remaining())
			})
		}
	}
}

// A receipt is used up unless nothing can have been given back.
func TestReceiptStaysIfTheDatabaseRefuses(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	file := filepath.Join(t.TempDir(), "receipt")
	invoke(t, db.URL, "take", "mail", "alice", "--policy", "fixed 5/365d", "--receipt", file).done(t)
	before, err := os.ReadFile(file)
	require.NoError(t, err)
	stays := func() {
		t.Helper()
		after, err := os.ReadFile(file)
		require.NoError(t, err)
		require.Equal(t, before, after)
	}
	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT FROM rate_limit_ephemeral FOR UPDATE")
	require.NoError(t, err)
	invoke(t, db.URL, "refund", file, "--timeout", "200ms").complains(t, exitFailed, "--timeout allows a statement more")
	stays()
	require.NoError(t, tx.Rollback(t.Context()))
	invoke(t, urlWith(t, db, "default_transaction_read_only=on&host=/nowhere"), "refund", file).complains(t, exitFailed)
	stays()
	require.Contains(t, invoke(t, db.URL, "refund", file).done(t), "5 of 5 remaining")
}

// A receipt is of one database and schema, whatever a take there and one elsewhere have in common.
func TestReceiptOfAnotherPlace(t *testing.T) {
	t.Parallel()

	db, other := pgtest.New(t), pgtest.New(t)
	pgtest.Exec(t, db.Pool, "CREATE SCHEMA second")
	invoke(t, db.URL, "migrate", "up", "--schema=second").done(t)
	file := filepath.Join(t.TempDir(), "receipt")
	take := []string{"take", "mail", "alice", "--policy", "fixed 5/365d"}
	invoke(t, db.URL, append(take, "--receipt", file)...).done(t)
	invoke(t, db.URL, append(take, "--schema=second")...).done(t)
	invoke(t, other.URL, take...).done(t)
	for _, o := range []outcome{
		invoke(t, other.URL, "refund", file), invoke(t, db.URL, "refund", file, "--schema=second"),
	} {
		o.complains(t, exitFailed, "the receipt is of database", "--schema")
		require.NotContains(t, o.stderr, "alice")
	}
	require.Contains(t, invoke(t, db.URL, "refund", file).done(t), "5 of 5 remaining")
}

// What is no receipt gives nothing back, and the complaint shows no key.
func TestFilesThatAreNoReceipts(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	file := filepath.Join(t.TempDir(), "receipt")
	invoke(t, db.URL, "take", "mail", "alice", "--policy", "fixed 5/365d", "--receipt", file).done(t)
	good, err := os.ReadFile(file)
	require.NoError(t, err)
	change := func(do func(r map[string]any)) string {
		var r map[string]any
		require.NoError(t, json.Unmarshal(good, &r))
		do(r)
		content, err := json.Marshal(r)
		require.NoError(t, err)
		return string(content)
	}
	for name, content := range map[string]string{
		"nothing":             "",
		"no JSON":             "alice",
		"another form":        `{"key": ["alice"]}`,
		"an empty object":     "{}",
		"no cost":             change(func(r map[string]any) { delete(r, "cost") }),
		"a negative cost":     change(func(r map[string]any) { r["cost"] = -5 }),
		"no policy":           change(func(r map[string]any) { delete(r, "policy") }),
		"a policy of no kind": change(func(r map[string]any) { r["policy"] = "often" }),
		"another policy":      change(func(r map[string]any) { r["policy"] = "fixed 5/365d, log 5/1h" }),
		"no key":              change(func(r map[string]any) { r["key"] = "" }),
		"nothing taken":       change(func(r map[string]any) { r["taken"] = []any{} }),
		"taken at no time":    change(func(r map[string]any) { r["taken"] = []any{map[string]any{}} }),
		"an edited cost":      change(func(r map[string]any) { r["cost"] = 2 }),
		"an edited key":       change(func(r map[string]any) { r["key"] = "bob" }),
		"an edited limiter":   change(func(r map[string]any) { r["limiter"] = "login" }),
		"an edited policy":    change(func(r map[string]any) { r["policy"] = "fixed 500/365d" }),
		"another table":       change(func(r map[string]any) { r["durable"] = true }),
		"another database":    change(func(r map[string]any) { r["database"] = "other" }),
		"another schema":      change(func(r map[string]any) { r["schema"] = "other" }),
		"another check sum":   change(func(r map[string]any) { r["sum"] = strings.Repeat("0", 64) }),
		"no check sum":        change(func(r map[string]any) { delete(r, "sum") }),
		"another take": change(func(r map[string]any) {
			r["taken"].([]any)[0].(map[string]any)["taken_spent"] = 4
		}),
		"an added field":      change(func(r map[string]any) { r["note"] = "alice" }),
		"a field in capitals": strings.Replace(string(good), `"cost"`, `"Cost"`, 1),
		"a doubled field":     strings.Replace(string(good), `"cost"`, `"cost": 9, "cost"`, 1),
		"another layout":      change(func(map[string]any) {}),
		"more after it":       string(good) + "\n",
		"no end of line":      strings.TrimSuffix(string(good), "\n"),
		"the JSON of take":    `{"allowed": true, "limit": 5, "remaining": 4, "retry_after_us": 0, "reset_after_us": 1}`,
	} {
		require.NoError(t, os.WriteFile(file, []byte(content), 0o600))
		o := invoke(t, db.URL, "refund", file)
		o.complains(t, exitUsage, "is no receipt")
		require.NotContains(t, o.stderr, "alice", name)
		require.FileExists(t, file)
	}
	require.EqualValues(t, 4,
		decode[keys.Decision](t, invoke(t, db.URL, "peek", "mail", "alice", "--policy", "fixed 5/365d", "--json")).Remaining)
}

// A receipt is used up by whatever link it is reached.
func TestRefundByALink(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	dir := t.TempDir()
	file, link := filepath.Join(dir, "receipt"), filepath.Join(dir, "link")
	invoke(t, db.URL, "take", "mail", "alice", "--policy", "fixed 5/365d", "--receipt", file).done(t)
	require.NoError(t, os.Symlink("receipt", link))
	require.Contains(t, invoke(t, db.URL, "refund", link).done(t), "5 of 5 remaining")
	require.NoFileExists(t, file)
	invoke(t, db.URL, "refund", link).complains(t, exitFailed, "no such file", "used before")
}

func TestGrant(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	for _, policy := range []string{
		"fixed 2/365d", "sliding 2/365d", "log 2/365d", "bucket 2 1/365d", "fixed 2/365d, log 2/365d",
		"fixed 2/365d, every 2/month Asia/Tokyo",
	} {
		ask := func(verb string, args ...string) outcome {
			return invoke(t, db.URL, append([]string{verb, policy, "alice", "--policy", policy}, args...)...)
		}
		ask("take", "--cost", "2").done(t)
		require.Equal(t, exitDenied, ask("take").code)
		require.Regexp(t, `^allowed: 3 of 2 remaining, as good as new after \S+\n$`, ask("grant", "--cost", "3").done(t))
		for range 3 {
			ask("take").done(t)
		}
		require.Equal(t, exitDenied, ask("take").code)
		require.EqualValues(t, 1, decode[keys.Decision](t, ask("grant", "--cost", "1", "--json")).Remaining)
		for _, cost := range []string{"0", "-1", "9223372036854775807"} {
			ask("grant", "--cost="+cost).complains(t, exitUsage)
		}
		ask("grant").complains(t, exitUsage, "cost")
	}
	invoke(t, db.URL, "grant", "n", "", "--policy", "fixed 2/1m", "--cost", "1").complains(t, exitUsage, "key")
}
