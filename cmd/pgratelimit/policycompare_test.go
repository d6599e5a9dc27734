package main

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/policies"
)

// 'policy compare' shows the reports for each shadow policy, with the keys that the policy would deny most often.
func TestPolicyCompare(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	require.Equal(t, "there is no shadow policy\n", invoke(t, db.URL, "policy", "compare", "login").done(t))
	pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, key_prefix, mode, policy, comment) VALUES
		('login', NULL, 'shadow', 'sliding 5/1m', 'why'), ('login', 'user:', 'shadow', 'log 3/1m', 'why'),
		('login', 'user:', 'enforce', 'sliding 10/1m', 'why'), ('other', NULL, 'shadow', 'sliding 5/1m', 'why')`)
	id := pgtest.Scalar[int64](t, db.Pool, "SELECT id FROM rate_limit_policy WHERE policy = 'sliding 5/1m' AND name = 'login'")
	pgtest.Exec(t, db.Pool, `SELECT rate_limit_report(array_fill(id, ARRAY[4]), array_fill(row_changed_us, ARRAY[4]), ARRAY['', 'a', E'b\n', 'c'],
		ARRAY[1000, 0, 0, 0]::bigint[], ARRAY[10, 8, 2, 0]::bigint[], ARRAY[55, 20, 30, 5]::bigint[])
		FROM rate_limit_policies() WHERE id = $1`, id)

	// Counts start when the row begins or was last changed, even if the first report is later.
	pgtest.Exec(t, db.Pool, `ALTER TABLE rate_limit_policy DISABLE TRIGGER USER;
		UPDATE rate_limit_policy SET valid_from = now() - interval '9 days', changed_at = now() - interval '3 days';
		ALTER TABLE rate_limit_policy ENABLE TRIGGER USER`)
	began := pgtest.Scalar[time.Time](t, db.Pool, "SELECT changed_at FROM rate_limit_policy WHERE id = $1", id)
	require.Regexp(t, strings.Replace(`^FOR +SHADOW POLICY +DECIDED +DENIED +WOULD BE DENIED +SINCE
everybody +sliding 5/1m +1000 +10 \(1\.0 %\) +55 \(5\.5 %\) +BEGAN
  "b\\n" +2 +30 *
  a +8 +20 *
prefix user: +log 3/1m +0 +0 +0 +\d\S+ \d\S+Z, nothing reported yet
$`, "BEGAN", began.UTC().Format("2006-01-02 15:04:05Z"), 1), invoke(t, db.URL, "policy", "compare", "login", "-n", "2").done(t))

	all := decode[[]policies.Comparison](t, invoke(t, db.URL, "policy", "compare", "login", "--json"))
	require.Len(t, all, 2)
	require.Equal(t, []policies.ComparedKey{
		{Key: "b\n", WouldDeny: 30, Denied: 2}, {Key: "a", WouldDeny: 20, Denied: 8}, {Key: "c", WouldDeny: 5},
	}, all[0].Keys)
	require.WithinDuration(t, began, all[0].Since, 0)
	require.Nil(t, all[1].Until)
	require.Empty(t, decode[[]policies.Comparison](t, invoke(t, db.URL, "policy", "compare", "login", "--json", "-n", "0"))[0].Keys)
	require.Equal(t, exitUsage, invoke(t, db.URL, "policy", "compare", "login", "-n", "-1").code)
	require.Equal(t, exitUsage, invoke(t, db.URL, "policy", "compare").code)
}
