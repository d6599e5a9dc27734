package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/replay"
)

// replayLog writes a log of 20 requests of <Anna>, and 5 of 192.0.2.9, within a minute.
func replayLog(t *testing.T) string {
	t.Helper()
	log := "time,key\n"
	for i := range 20 {
		log += fmt.Sprintf("%d,<Anna>\n", 1_700_000_000+i)
		if i%4 == 0 {
			log += fmt.Sprintf("%d,192.0.2.9\n", 1_700_000_000+i)
		}
	}
	file := filepath.Join(t.TempDir(), "log.csv")
	require.NoError(t, os.WriteFile(file, []byte(log), 0o600))
	return file
}

func TestReplay(t *testing.T) {
	t.Parallel()
	file := replayLog(t)
	r := decode[replay.Report](t, invoke(t, "", "replay", file, "--current", "fixed 10/1m", "--policy", "fixed 12/1m",
		"--policy", "fixed 4/1m", "--sweep", "sliding N/1m", "--deny-at-most", "1 key", "--json", "--show-keys"))
	require.EqualValues(t, 25, r.Lines.Read)
	require.Len(t, r.Policies, 3)
	for i, want := range [][3]int64{{15, 10, 1}, {17, 8, 1}, {8, 17, 2}} {
		p := r.Policies[i]
		require.Equal(t, want, [3]int64{p.Allowed, p.Denied, p.KeysDenied})
		require.EqualValues(t, 25, p.Requests)
		require.EqualValues(t, 2, p.Keys)
		require.Equal(t, i == 0, p.Current)
	}
	require.EqualValues(t, 2, r.Policies[1].Change.NowAllowed)
	require.EqualValues(t, 1, r.Policies[1].Change.KeysBetter)
	require.EqualValues(t, 7, r.Policies[2].Change.NowDenied)
	require.Equal(t, replay.ChangedKey{Key: "<Anna>", NowDenied: 6}, r.Policies[2].Change.Most[0])
	require.InDelta(t, 50, r.Policies[0].LongestSeconds, 0)
	require.EqualValues(t, 5, *r.Sweep.Limit)

	text := invoke(t, "", "replay", file, "--policy", "fixed 10/1m").done(t)
	require.Contains(t, text, "25 requests of 2 keys, as csv")
	require.Contains(t, text, "key-")
	require.NotContains(t, text, "Anna")
}

func TestReplayFailsIfTooMuchIsDenied(t *testing.T) {
	t.Parallel()
	file := replayLog(t)
	for share, code := range map[string]int{"39.9%": exitDenied, "40%": 0} {
		require.Equal(t, code, invoke(t, "", "replay", file, "--policy", "fixed 10/1m", "--fail-if-denied-above", share).code)
	}
}

func TestReplayOfWrongCommandLines(t *testing.T) {
	t.Parallel()
	file := replayLog(t)
	for _, args := range [][]string{
		{file},
		{file, "--policy", "concurrent 5"},
		{file, "--policy", "every 5/day Nowhere/Else"},
		{file, "--sweep", "fixed 5/1m"},
		{"-", "--sweep", "fixed N/1m"},
		{file, "--sweep", "fixed N/1m", "--deny-at-most", "5"},
		{file, "--policy", "fixed 5/1m", "--fail-if-denied-above", "101%"},
		{file, "--policy", "fixed 5/1m", "--max-keys", "-1"},
	} {
		invoke(t, "", append([]string{"replay"}, args...)...).complains(t, exitUsage)
	}
	invoke(t, "", "replay", file, "--policy", "fixed 5/1m", "--format", "xml").complains(t, exitFailed, "xml")
	invoke(t, "", "replay", file, "--policy", "fixed 5/1m", "--key", "user").complains(t, exitFailed, "user")
	invoke(t, "", "replay", file+"x", "--policy", "fixed 5/1m").complains(t, exitFailed, "no such file")
}

// The page needs nothing from the network, and keys cannot put anything into it.
func TestReplayPage(t *testing.T) {
	t.Parallel()
	html := filepath.Join(t.TempDir(), "report.html")
	invoke(t, "", "replay", replayLog(t), "--current", "fixed 10/1m", "--policy", "sliding 5/1m", "--sweep", "fixed N/1m",
		"--html", html, "--show-keys").done(t)
	page, err := os.ReadFile(html)
	require.NoError(t, err)
	require.Equal(t, 3, strings.Count(string(page), "<svg"))
	require.Contains(t, string(page), "&lt;Anna&gt;")
	for _, not := range []string{"<Anna>", "http", "<script", "src="} {
		require.NotContains(t, string(page), not)
	}
}

func TestReplayFromThePolicyInForce(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	file := replayLog(t)
	set := func(name, key, mode, policy string) {
		pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, key, mode, policy, comment)
			VALUES ($1, nullif($2, ''), $3, nullif($4, ''), 'test')`, name, key, mode, policy)
	}
	for _, policy := range []string{"fixed 3/1m", "fixed 11/1m, log 12/1m"} {
		set("login", "", "enforce", policy)
		r := decode[replay.Report](t, invoke(t, db.URL, "replay", file, "--limiter", "login", "--json"))
		require.Equal(t, policy, r.Policies[0].Policy)
		require.True(t, r.Policies[0].Current)
	}
	invoke(t, db.URL, "replay", file, "--limiter", "other").complains(t, exitFailed, "no policy for all keys of other")

	// A row for a key decides it also beside the policies to try, and the policy in the code is in force for the others.
	set("other", "<Anna>", "enforce", "fixed 7/1m")
	args := []string{"replay", file, "--limiter", "other", "--current", "fixed 1/1m", "--policy", "fixed 2/1m", "--sweep", "fixed N/1m",
		"--deny-at-most", "1 key"}
	r := decode[replay.Report](t, invoke(t, db.URL, append(args, "--json")...))
	require.Equal(t, "fixed 1/1m", r.Policies[0].Policy)
	require.EqualValues(t, 13+4, r.Policies[0].Denied)
	require.EqualValues(t, 13+3, r.Policies[1].Denied)
	require.EqualValues(t, 20, r.Policies[1].ByRows)
	require.EqualValues(t, 1, r.Policies[1].Change.NowAllowed)
	require.EqualValues(t, 5, *r.Sweep.Limit)
	require.Contains(t, invoke(t, db.URL, args...).done(t), "beside fixed 2/1m, rows for a key or a prefix decide 20 requests\n")
	set("other", "", "off", "")
	require.Zero(t, decode[replay.Report](t, invoke(t, db.URL, append(args, "--json")...)).Policies[0].Denied-13)
	invoke(t, db.URL, "replay", file, "--limiter", "other").complains(t, exitFailed, "no policy for all keys of other")
}
