package main

import (
	"math"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

// requireNarrow checks that no line is wider than columns, and that no time is broken into two lines.
func requireNarrow(t *testing.T, text string, columns int) {
	t.Helper()
	for line := range strings.Lines(text) {
		require.LessOrEqual(t, utf8.RuneCountInString(strings.TrimRight(line, "\n")), columns, text)
		require.NotRegexp(t, `\d{4}-\d\d-\d\d\s*$`, line)
	}
}

func TestHelpFitsIntoAPage(t *testing.T) {
	t.Parallel()

	for name := range commands(t) {
		if !strings.HasPrefix(name, "completion") && name != "help" {
			requireNarrow(t, invoke(t, "", append(strings.Fields(name), "--help")...).done(t), cli.PageWidth)
		}
	}
	out := invoke(t, "", "--help").done(t)
	requireNarrow(t, out, cli.PageWidth)
	for _, group := range []string{"Limits:\n  cancel ", "Policies:\n  ban ", "The database:\n  doctor "} {
		require.Contains(t, out, "\n"+group)
	}
}

func TestTablesFit(t *testing.T) {
	t.Parallel()

	const at = "2026-11-26 15:40:14Z"
	table := "A\tB\tC\none\t" + at + "\t" + strings.Repeat("word ", 10) + at + " `a b c` end\n2\t\t\n\nno table\n"
	require.Equal(t, `A    B                     C
one  2026-11-26 15:40:14Z  word word word word word
                           word word word word word
                           2026-11-26 15:40:14Z `+"`a b c`"+`
                           end
2`+strings.Repeat(" ", 26)+`

no table
`, cli.Layout(table, 55))
	require.Equal(t, `A  one
B  2026-11-26 15:40:14Z
C  word word word word word
   word word word word word
   2026-11-26 15:40:14Z
`+"   `a b c` end"+`

A  2

no table
`, cli.Layout(table, 30))
	require.Contains(t, cli.Layout(table, 0), "word "+at+" `a b c` end\n")
	require.Equal(t, "in force  x\nleft      y\n", cli.Layout("in force\tx\nleft\ty\n", 80))
	require.Empty(t, cli.Layout("", 80))
}

// On a terminal, the tables of all commands fit, even with long keys and comments.
func TestTerminalOf100Columns(t *testing.T) {
	t.Parallel()

	db := testNarrow(t, []string{"top", "login", "--policy=fixed 5/365d"}, []string{"policy", "history"})
	out := invoke(t, db.URL, "top", "login", "--policy=fixed 5/365d").done(t)
	require.Contains(t, out, "\n"+strings.Repeat("k", 20)+"…"+strings.Repeat("k", 16)+"end  4 ")
	require.Contains(t, out, "\n1 row of limiter login ")
	require.Contains(t, invoke(t, db.URL, "top", "login", "--policy=fixed 5/365d", "--json").done(t), longKey)
}

func TestThoroughTerminalOf100Columns(t *testing.T) {
	t.Parallel()
	testNarrow(t, []string{"limits"}, []string{"policy", "list"}, []string{"policy", "get", "login", longKey},
		[]string{"explain", "login", longKey}, []string{"migrate", "status"})
}

var longKey = strings.Repeat("k", 200) + "end"

// testNarrow runs commands on a terminal. The database has a limiter, a policy and a ban, all for a long key.
func testNarrow(t *testing.T, all ...[]string) *pgtest.DB {
	t.Helper()
	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, "SELECT rate_limit_allow('login', $1, 'fixed 5/365d')", longKey)
	pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, key, mode, policy, valid_until, comment) VALUES
		('login', $1, 'enforce', 'fixed 9/365d', '2100-01-01 00:00:00Z', repeat('because ', 30)),
		('login', $1, 'deny', NULL, now() + interval '1 hour', repeat('because ', 30))`, longKey)
	for _, args := range all {
		code, shown := onTerminal(t, command(t, db.URL, args...)).wait()
		require.Zero(t, code, shown)
		requireNarrow(t, shown, 100)
		require.NotContains(t, shown, longKey)
	}
	return db
}

func TestWordsForNumbers(t *testing.T) {
	t.Parallel()

	for span, text := range map[time.Duration]string{
		0: "0s", time.Microsecond: "1ms", 1500 * time.Millisecond: "1.5s", 61*time.Second + time.Millisecond: "1m1.001s",
		time.Hour - time.Microsecond: "1h", 2 * time.Hour: "2h", 90*time.Minute + time.Second: "1h31m",
		23*time.Hour + 59*time.Minute + time.Second: "1d", 24 * time.Hour: "1d",
		105*time.Hour + 21*time.Minute + 36808*time.Millisecond: "4d9h", 47*time.Hour + 40*time.Minute: "2d",
		365 * 24 * time.Hour: "365d",
	} {
		require.Equal(t, text, cli.Span(span.Microseconds()), span.String())
	}
	require.NotPanics(t, func() { cli.Span(math.MaxInt64 / 1000) })
	for n, text := range map[int64]string{0: "0 rows", 1: "1 row", 2: "2 rows"} {
		require.Equal(t, text, cli.Count(n, "row"))
	}
	require.Equal(t, []string{"1 batch", "2 batches"}, []string{cli.Count(1, "batch"), cli.Count(2, "batch")})
	require.Equal(t, []string{"1 proxy", "2 proxies", "2 keys"}, []string{cli.Count(1, "proxy"), cli.Count(2, "proxy"), cli.Count(2, "key")})
}

func TestDidYouMean(t *testing.T) {
	t.Parallel()

	for line, meant := range map[string]string{
		"tpo": "did you mean top?", "limit": "did you mean limits?", "polcy list": "did you mean policy?",
		"policy lsit": "did you mean list or set?", "migrate upp": "did you mean up?", "shard lst": "did you mean list",
		"sideways": "",
	} {
		o := invoke(t, "", strings.Fields(line)...)
		o.complains(t, exitUsage, "unknown command", meant)
		require.Equal(t, meant != "", strings.Contains(o.stderr, "did you mean"), o.stderr)
	}
}
