package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/upkeep"
)

// fillExpired inserts rows that expired long ago.
func fillExpired(t *testing.T, db *pgtest.DB, name string, n int) {
	t.Helper()
	pgtest.Exec(
		t,
		db.Pool,
		"INSERT INTO rate_limit_ephemeral (prefix, key, expires_at) SELECT $1, i::text, 1 FROM generate_series(1, $2::int) AS i",
		name,
		n,
	)
}

func TestSweep(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	fillExpired(t, db, "login", 2500)
	fill(t, db, "rate_limit_ephemeral", "login", 3, 1)
	require.Regexp(t, `^deleted 2500 rows, read \d+ pages, in 3 batches and \S+\n$`, invoke(t, db.URL, "sweep").done(t))
	require.Equal(t, 3, pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM rate_limit_ephemeral"))

	fillExpired(t, db, "login", 10)
	result := decode[upkeep.SweepResult](t, invoke(t, db.URL, "sweep", "--json"))
	require.EqualValues(t, 10, result.Deleted)
	require.True(t, result.Complete)
	require.Positive(t, result.TookUS)

	fill(t, db, "rate_limit_durable", "api", 4, 1)
	require.EqualValues(t, 3, decode[upkeep.SweepResult](t, invoke(t, db.URL, "sweep", "--json", "--existing", "api")).Deleted)
	require.Equal(t, 4, pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM rate_limit_durable"))

	pgtest.Exec(t, db.Pool,
		"UPDATE rate_limit_sweeper SET held_by = 'somebody', held_at = clock_timestamp() + interval '1 second'")
	pgtest.Exec(t, db.Pool, "UPDATE rate_limit_sweeper SET held_at = clock_timestamp()")
	require.Equal(t, "skipped: another sweeper is at work\n", invoke(t, db.URL, "sweep").done(t))
}

func TestSweepStays(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	rows := func() int { return pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM rate_limit_ephemeral") }
	fillExpired(t, db, "login", 5)
	process := start(t, command(t, db.URL, "sweep", "--every", "1s", "--json"))
	process.readTo(`{"time":`)
	fillExpired(t, db, "login", 6)
	process.readTo(`{"time":`)
	require.Zero(t, rows())
	require.NoError(t, process.interrupt())
	require.Empty(t, process.stderr.String())

	var deleted []int
	for line := range strings.Lines(process.out.String()) {
		var pass struct {
			Msg     string
			Deleted int
		}
		require.NoError(t, json.Unmarshal([]byte(line), &pass))
		deleted = append(deleted, pass.Deleted)
	}
	require.Equal(t, []int{5, 6}, deleted)
}

func TestSweepShowsABarOnATerminal(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	fillExpired(t, db, "login", 20_000)
	p := onTerminal(t, command(t, db.URL, "sweep", "--share", "0.1"))
	p.waitFor("sweeping")
	code, shown := p.wait()
	require.Zero(t, code, shown)
	require.Regexp(t, `sweeping +\d+% \|█+ *\|`, shown)
	last := shown[strings.LastIndex(shown, "\r")+1:] // the text on the line after the bar was cleared
	require.Regexp(t, `^deleted 20000 rows, read \d+ pages, in \d+ batches and \S+\n$`, last)

	// With --json, there is no bar.
	fillExpired(t, db, "login", 3000)
	p = onTerminal(t, command(t, db.URL, "sweep", "--json"))
	code, shown = p.wait()
	require.Zero(t, code)
	require.True(t, strings.HasPrefix(shown, "{\n"), shown)
}

func TestInterruptASweep(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	fillExpired(t, db, "login", 20_000)
	p := onTerminal(t, command(t, db.URL, "sweep", "--share", "0.001")) // --share causes long pauses
	rows := func() int { return pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM rate_limit_ephemeral") }
	p.waitFor("sweeping") // the first batch has been swept
	p.typeIn("\x03")
	code, shown := p.wait()
	require.Equal(t, exitFailed, code)
	require.Contains(t, shown, "; the next sweep goes on from there\npgratelimit sweep: interrupted\n")
	require.Zero(t, rows()%1000, "whole batches")
	require.Positive(t, rows())
	require.Less(t, rows(), 20_000)
}
