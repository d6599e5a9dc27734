package sql_test

import (
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// calendarSamples returns times within fifty years: the times before and after every clock change of a time zone, and
// one time in each year.
func calendarSamples(zone *time.Location) (times []int64) {
	from, to := time.Date(1987, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(2037, 1, 1, 0, 0, 0, 0, time.UTC)
	for year := from; year.Before(to); year = year.AddDate(1, 0, 0) {
		times = append(times, year.UnixMicro()+int64(year.Year())*3_141_592_653)
	}
	for t := from; ; {
		_, end := t.In(zone).ZoneBounds()
		if end.IsZero() || end.After(to) {
			return times
		}
		if !end.After(t) { // Go's data has an end before t on the last day of leap years
			t = t.Add(24 * time.Hour)
			continue
		}
		t = end
		times = append(times, t.UnixMicro()-45*60_000_000, t.UnixMicro()-1, t.UnixMicro())
	}
}

// compareCalendars compares the windows of sample times with Postgres's date_trunc. The window of a sample must contain
// no boundary of date_trunc, and must end at a boundary. compareCalendars returns a description of all mistakes. For
// zones whose offsets are the same in Postgres and Go, the model must find the same ends. The result agree is the
// number of these zones.
func compareCalendars(t *testing.T, db pgtest.Executor, zones []string) (wrong []string, agree int) {
	t.Helper()
	for chunk := range slices.Chunk(zones, 50) {
		var names []string
		var times, offsets []int64
		ends := make([][]int64, len(modeltest.Units()))
		for _, name := range chunk {
			zone, err := time.LoadLocation(name)
			if err != nil {
				zone = time.UTC // the server also has samples
			}
			for _, clock := range calendarSamples(zone) {
				_, offset := time.UnixMicro(clock).In(zone).Zone()
				names, times, offsets = append(names, name), append(times, clock), append(offsets, int64(offset))
				for i, unit := range modeltest.Units() {
					ends[i] = append(ends[i], model.CalendarWindow{Span: unit, Zone: name}.End(clock))
				}
			}
		}
		rows, err := db.Query(t.Context(), `
			WITH s AS (
				SELECT s.zone, s.clock, timestamptz 'epoch' + s.clock * interval '1 microsecond' AS instant, s.clock_offset, s.ends
				FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[], $8::bigint[])
					AS r (zone, clock, clock_offset, minute, hour, day, week, month)
				CROSS JOIN LATERAL (SELECT r.zone, r.clock, r.clock_offset, ARRAY[minute, hour, day, week, month] AS ends) AS s
			), w AS (
				SELECT s.*, u.unit, s.ends[u.place] AS model_end, e.window_end, date_trunc(u.unit, s.instant, s.zone) AS label,
					timestamptz 'epoch' + e.window_end / 1000000 * interval '1 second' AS ends_at,
					date_trunc(u.unit, timestamptz 'epoch' + (e.window_end / 1000000 * interval '1 second' - interval '1 microsecond'),
						s.zone) AS last,
					s.clock_offset = extract(epoch FROM (s.instant AT TIME ZONE s.zone) - (s.instant AT TIME ZONE 'UTC')) AS same_offset
				FROM s
				CROSS JOIN unnest('{minute,hour,day,week,month}'::text[],
					'{60000000,3600000000,86400000000,604800000000,2678400000000}'::bigint[]) WITH ORDINALITY AS u (unit, window_us, place)
				CROSS JOIN LATERAL (SELECT _rate_limit_window_end(s.clock, u.window_us, s.zone) AS window_end OFFSET 0) AS e
			)
			SELECT w.zone, bool_and(w.same_offset),
				array_agg(concat_ws(' ', w.zone, w.unit, w.instant, 'until', w.ends_at)) FILTER (WHERE (
					w.instant < w.ends_at
					-- All times up to the last microsecond of a window have the same date_trunc. If midnight occurs twice, date_trunc
					-- of the minute in between is the next day, and of the hour after it the day before.
					AND CASE WHEN w.label <= w.instant THEN w.last IN (w.label, w.ends_at)
						ELSE w.label = w.ends_at AND (w.last <= w.instant OR w.last = w.ends_at) END
					-- At the end, another window starts. A new hour may start within an hour of the clock before the
					-- change.
					AND (w.label = w.ends_at OR date_trunc(w.unit, w.ends_at, w.zone) > w.label)
					AND (w.unit IN ('minute', 'hour') OR date_trunc(w.unit, w.ends_at, w.zone) = w.ends_at)
				) IS NOT TRUE),
				array_agg(concat_ws(' ', w.zone, w.unit, w.instant, 'until', w.ends_at, 'and in Go', w.model_end))
					FILTER (WHERE w.model_end <> w.window_end)
			FROM w GROUP BY w.zone`,
			names, times, offsets, ends[0], ends[1], ends[2], ends[3], ends[4])
		require.NoError(t, err)
		var zone string
		var same bool
		var broken, different []string
		_, err = pgx.ForEachRow(rows, []any{&zone, &same, &broken, &different}, func() error {
			wrong = append(wrong, broken...)
			if same {
				agree++
				wrong = append(wrong, different...)
			}
			return nil
		})
		require.NoError(t, err)
	}
	return wrong, agree
}

// serverZones returns the time zones of the database that a policy can have.
func serverZones(t *testing.T, db pgtest.Executor) []string {
	t.Helper()
	rows, err := db.Query(t.Context(), `
		SELECT name FROM pg_timezone_names WHERE _rate_limit_valid_calendar(1, 60000000, name) ORDER BY name`)
	require.NoError(t, err)
	zones, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return zones
}

// Calendar windows equal Postgres's date_trunc in all time zones of the server, around every clock change in fifty
// years.
func TestThoroughCalendarWindowsAreThoseOfThePostgresCalendar(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")
	db := pgtest.New(t)
	zones := serverZones(t, db.Pool)
	require.Greater(t, len(zones), 300)
	wrong, agree := compareCalendars(t, db.Pool, zones)
	require.Empty(t, wrong)
	t.Logf("%d time zones; of %d, this process has the same data", len(zones), agree)
	steady := modeltest.SteadyZones()[1:]
	wrong, agree = compareCalendars(t, db.Pool, steady)
	require.Empty(t, wrong)
	require.Equal(t, len(steady), agree)
}

// The comparison notices windows that end at another time.
func TestMistakesInTheCalendarAreSeen(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")
	for right, wrong := range map[string]string{
		"window_us / 2 * 3":               "window_us / 2 * 5",     // the end of the next window
		"ELSE window_us / 2":              "ELSE window_us / 3",    // a day of 25 hours, a month of 31 days
		"window_us - 1000000":             "window_us + 1000000",   // the next hour may begin within this window
		"ends := begins;":                 "ends := ends;",         // the second midnight
		"begins + window_us *":            "instant + window_us *", // not a calendar window
		"date_trunc(unit, instant, zone)": "date_trunc(unit, instant, 'UTC')",
		"date_trunc(unit, later, zone)":   "begins + window_us * interval '1 microsecond'", // 24 hours, 31 days
	} {
		t.Run(right, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			pgtest.Rewrite(t, db.Pool, "_rate_limit_window_end", right, wrong,
				// This check would notice one of these mistakes.
				"IF ends <= instant THEN\n        RAISE", "IF false THEN\n        RAISE")
			seen, _ := compareCalendars(t, db.Pool, []string{"Europe/Berlin", "America/St_Johns", "Australia/Lord_Howe"})
			require.NotEmpty(t, seen)
		})
	}
}
