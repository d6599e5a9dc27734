package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/receipttext"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/keys"
)

func TestThoroughRefundByReceipt(t *testing.T) {
	t.Parallel()

	for _, policy := range []string{
		"fixed 5/365d", "sliding 5/365d", "log 5/365d", "bucket 5 1/365d", "fixed 5/365d, log 6/365d, bucket 7 1/365d",
		"fixed 5/365d, every 5/month Europe/Berlin",
	} {
		for _, more := range [][]string{nil, {"--durable"}, {"--schema", "my limits"}} {
			if more != nil && !strings.Contains(policy, "log") {
				continue // most policies work with both tables
			}
			t.Run(policy+strings.Join(more, " "), func(t *testing.T) {
				t.Parallel()
				db := pgtest.New(t)
				schema := more
				if len(more) == 1 {
					schema = nil // the receipt names the row's table
				} else if more != nil {
					pgtest.Exec(t, db.Pool, `CREATE SCHEMA "my limits"`)
					invoke(t, db.URL, append([]string{"migrate", "up"}, more...)...).done(t)
				}
				ask := func(verb string, args ...string) outcome {
					args = append([]string{verb, "mail", "alice", "--policy", policy}, args...)
					return invoke(t, db.URL, append(args, more...)...)
				}
				remaining := func() int64 { return decode[keys.Answer](t, ask("peek", "--json")).Remaining }
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

				require.Regexp(t, `^refunded: 4 of 5 remaining, as good as new after \S+\n$`, invoke(t, db.URL, refund...).done(t))
				require.EqualValues(t, 4, remaining())
				invoke(t, db.URL, refund...).complains(t, exitFailed, "no such file", "used before")
				require.EqualValues(t, 4, remaining())

				// A denial writes no receipt. A refund does not give back units that no longer count.
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

// A refund removes the receipt, unless it is certain that nothing was given back.
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
	invoke(t, db.URL, "refund", file, "--timeout", "2s").complains(t, exitFailed, "the row of the key is held")
	stays()
	require.NoError(t, tx.Rollback(t.Context()))
	invoke(t, urlWith(t, db, "default_transaction_read_only=on&host=/nowhere"), "refund", file).complains(t, exitFailed)
	stays()
	require.Contains(t, invoke(t, db.URL, "refund", file).done(t), "5 of 5 remaining")
}

// An invalid receipt refunds nothing, and the message contains no key.
func TestFilesThatAreNoReceipts(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	file := filepath.Join(t.TempDir(), "receipt")
	invoke(t, db.URL, "take", "mail", "alice", "--policy", "fixed 5/365d", "--receipt", file).done(t)
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	good, ok := receipttext.Parse(strings.TrimSpace(string(text)))
	require.True(t, ok)
	change := func(do func(r *receipttext.Receipt)) string {
		r := good
		do(&r)
		return r.String()
	}
	for name, content := range map[string]string{
		"nothing":             "",
		"no receipt":          "alice",
		"a part":              string(text[:len(text)-3]),
		"two":                 string(text) + string(text),
		"no limiter":          change(func(r *receipttext.Receipt) { r.Limiter = "" }),
		"a policy of no kind": change(func(r *receipttext.Receipt) { r.Policy = "often" }),
		"another policy":      change(func(r *receipttext.Receipt) { r.Policy = "fixed 5/365d, log 5/1h" }),
		"no key":              change(func(r *receipttext.Receipt) { r.Key = "" }),
		"a negative cost":     change(func(r *receipttext.Receipt) { r.Units = -5 }),
		"the JSON of take":    `{"allowed": true, "limit": 5, "remaining": 4, "retry_after_us": 0, "reset_after_us": 1}`,
	} {
		require.NoError(t, os.WriteFile(file, []byte(content), 0o600))
		o := invoke(t, db.URL, "refund", file)
		require.Equal(t, exitUsage, o.code, name)
		o.complains(t, exitUsage)
		require.NotContains(t, o.stderr, "alice", name)
		require.FileExists(t, file)
	}
	require.EqualValues(t, 4,
		decode[keys.Answer](t, invoke(t, db.URL, "peek", "mail", "alice", "--policy", "fixed 5/365d", "--json")).Remaining)
}

// refund accepts a receipt of an application.
func TestRefundOfAnApplicationsTake(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	limiter, err := ratelimit.New(db.Pool, ratelimit.Config{
		Name: "mail", Policy: ratelimit.FixedWindow{Limit: 5, Window: time.Hour}, Durable: true,
	})
	require.NoError(t, err)
	taken, err := limiter.AllowN(t.Context(), "alice", 3)
	require.NoError(t, err)
	text, err := taken.Receipt()
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "receipt")
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	require.Contains(t, invoke(t, db.URL, "refund", file).done(t), "5 of 5 remaining")
}

// If a refund names a link to a receipt, it removes the receipt itself.
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
	testGrant(t, db, ofTwo()[:1])
	invoke(t, db.URL, "grant", "n", "", "--policy", "fixed 2/1m", "--cost", "1").complains(t, exitUsage, "key")
}

func TestThoroughGrant(t *testing.T) {
	t.Parallel()
	testGrant(t, pgtest.New(t), ofTwo()[1:])
}

func testGrant(t *testing.T, db *pgtest.DB, all []string) {
	t.Helper()
	for _, policy := range all {
		ask := func(verb string, args ...string) outcome {
			return invoke(t, db.URL, append([]string{verb, policy, "alice", "--policy", policy}, args...)...)
		}
		take := func(n int) bool {
			return pgtest.Scalar[bool](t, db.Pool, "SELECT allowed FROM rate_limit_allow($1, 'alice', $1, $2)", policy, n)
		}
		require.True(t, take(2))
		require.False(t, take(1))
		require.Regexp(t, `^granted: 3 of 2 remaining, as good as new after \S+\n$`, ask("grant", "--cost", "3").done(t))
		require.True(t, take(2))
		require.True(t, take(1))
		require.False(t, take(1))
		granted := decode[keys.Answer](t, ask("grant", "--cost", "1", "--json"))
		require.EqualValues(t, 1, granted.Remaining)
		require.Nil(t, granted.Decision)
		for _, cost := range []string{"0", "-1", "9223372036854775807"} {
			ask("grant", "--cost="+cost).complains(t, exitUsage)
		}
		ask("grant").complains(t, exitUsage, "cost")
	}
}

// ofTwo returns policies with a limit of 2, which do not end during a test.
func ofTwo() []string {
	return []string{
		"fixed 2/365d, log 2/365d", "fixed 2/365d", "sliding 2/365d", "log 2/365d", "bucket 2 1/365d",
		"fixed 2/365d, every 2/month Asia/Tokyo",
	}
}

// A charge counts above the limit, and says how much the key owes. A charge that would be too large counts nothing.
func TestCharge(t *testing.T) {
	t.Parallel()
	testCharge(t, ofTwo()[:1])
}

func TestThoroughCharge(t *testing.T) {
	t.Parallel()
	testCharge(t, ofTwo()[1:])
}

func testCharge(t *testing.T, all []string) {
	t.Helper()
	db := pgtest.New(t)
	for _, policy := range all {
		ask := func(verb string, args ...string) outcome {
			return invoke(t, db.URL, append([]string{verb, policy, "alice", "--policy", policy}, args...)...)
		}
		require.Regexp(t, `^charged: 1 of 2 remaining, as good as new after \S+\n$`, ask("charge", "--cost", "1").done(t))
		require.Regexp(t, `^charged: 0 of 2 remaining, 2 owed, retry after \S+, as good as new after \S+\n$`,
			ask("charge", "--cost", "3").done(t))
		require.Equal(t, exitDenied, ask("take").code)
		ask("charge", "--cost", "19").complains(t, exitFailed, "18 would be accepted")
		charged := decode[keys.Answer](t, ask("charge", "--cost", "18", "--json"))
		require.EqualValues(t, 20, charged.Owed)
		require.False(t, charged.Allowed)
		require.Positive(t, charged.RetryAfterUS)
		for _, cost := range []string{"0", "-1"} {
			ask("charge", "--cost="+cost).complains(t, exitUsage)
		}
		ask("charge").complains(t, exitUsage, "cost")
	}
}
