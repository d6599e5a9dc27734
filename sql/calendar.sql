{{/* The calendar window. calendar.go holds its specification and its model. limit.sql and all.sql show what each block
is for. */}}
{{define "calendar.title"}}The calendar window; see calendar.go{{end}}
{{define "calendar.arguments"}}
--   max_count           the limit, in units of cost, at most 2^62
--   window_us           60000000 for windows of a minute, 3600000000 for an hour, 86400000000 for a day, 604800000000
--                       for a week, 2678400000000 for a month
--   zone                the time zone: UTC, or a name with a slash, such as Europe/Berlin
{{end}}
{{define "calendar.valid"}}max_count BETWEEN 1 AND 4611686018427387904
    AND window_us IN (60000000, 3600000000, 86400000000, 604800000000, 2678400000000)
    AND octet_length(zone) <= 64
    AND zone COLLATE "C" ~ '^(UTC|[A-Z][A-Za-z_-]*(/[A-Z][A-Za-z_-]*)+)$'
    AND zone COLLATE "C" !~* '^(right|posix)/'{{end}}
{{define "calendar.known"}}timestamptz 'epoch' AT TIME ZONE zone IS NOT NULL{{end}}
{{define "calendar.hint"}}max_count is at least 1 and at most 2^62. '
'window_us is 60000000 (a minute), 3600000000 (an hour), 86400000000 (a day), '
'604800000000 (a week) or 2678400000000 (a month). '
'zone is UTC or a name like Europe/Berlin.{{end}}
{{define "calendar.comment"}}Takes from the minutes, hours, days, weeks or months of a time zone, '
'each of which admits max_count.{{end}}
{{define "calendar.example"}}(''mail'', ''{user:123}'', 1000, 2678400000000, ''Europe/Berlin'') '
'takes one of 1000 a month{{end}}
{{define "calendar.lasts"}}2 * window_us{{end}}

{{define "calendar.insert"}}(prefix, key, algorithm, count, window_start, scale, expires_at){{end}}
{{define "calendar.values"}}5, {{.}}, clock, window_end - clock, window_end{{end}}
{{define "calendar.adds"}}count = d.count + excluded.count{{end}}
{{define "calendar.rolls"}}
count = CASE WHEN clock < d.expires_at THEN d.count ELSE 0 END + excluded.count,
window_start = CASE WHEN clock < d.expires_at THEN d.window_start ELSE clock END,
scale = CASE WHEN clock < d.expires_at THEN d.scale ELSE excluded.scale END,
expires_at = CASE WHEN clock < d.expires_at THEN d.expires_at ELSE excluded.expires_at END
{{end}}
{{define "calendar.fits"}}
d.algorithm = 5 AND d.since IS NULL AND d.window_start - clock <= window_us
    AND {{if .Rolls}}(clock >= d.expires_at
    OR {{end}}clock + 10000 < d.expires_at AND d.expires_at = d.window_start + d.scale
    AND d.scale <= 2 * window_us AND excluded.count <= max_count - d.count{{if .Rolls}}){{end}}
{{end}}
{{define "calendar.new"}}{{.Taken}}[2] = {{.Units}}{{end}}
{{define "calendar.columns"}}count, window_start, credit, scale, expires_at, since{{end}}

{{define "calendar.enough"}}cost <= max_count - s.count{{end}}
{{define "calendar.roll"}}
-- Not the window of a longer unit.
s.count := CASE WHEN s.scale <= 2 * window_us THEN s.count ELSE 0 END;
IF clock >= s.expires_at OR (s.count | s.credit) = 0 THEN
    s.count := 0;
    s.credit := 0;
    s.window_start := clock;
    s.since := NULL;
ELSIF s.window_start - clock > window_us THEN
    s.window_start := clock;
    s.scale := window_us;
    s.expires_at := clock + CASE WHEN s.credit > 0 THEN 2 * window_us ELSE window_us END;
    moved := true;
END IF;
t := greatest(clock, s.window_start);
IF s.count = 0 OR t - s.window_start >= s.scale THEN
    s.count := 0;
    s.window_start := t;
    s.scale := _rate_limit_window_end(t, window_us, zone) - t;
    s.since := CASE WHEN s.credit > 0 THEN s.since END;
END IF;
{{end}}
{{define "calendar.empty"}}
IF s.count = 0 THEN
    IF s.credit = 0 THEN -- as good as new
        t := clock;
        s.since := NULL;
    END IF;
    s.window_start := t;
    s.scale := _rate_limit_window_end(t, window_us, zone) - t;
END IF;
{{end}}
{{define "calendar.refund"}}
IF taken_in[part] = s.window_start AND s.window_start = r.window_start THEN
    back := least(units, s.count);
    changed := changed OR back > 0;
    s.count := s.count - back;
    r.count := r.count - back;
END IF;
{{include "calendar.empty"}}
{{end}}
{{define "calendar.room"}}
remaining := greatest(max_count - s.count, 0);
{{end}}
{{define "calendar.take"}}
s.count := s.count + units;
{{end}}
{{define "calendar.retry"}}
free_at := s.window_start + s.scale;
{{end}}
{{define "calendar.reset"}}CASE WHEN s.count > 0 THEN s.window_start + s.scale END{{end}}

-- _rate_limit_window_end tells when the window ends that a clock is in: when the next one starts, by date_trunc.
-- Clocks change at whole seconds, so it takes whole seconds.
CREATE FUNCTION _rate_limit_window_end(
    clock bigint,
    window_us bigint,
    zone text
)
RETURNS bigint
LANGUAGE plpgsql
STABLE
AS $$
#variable_conflict use_variable
DECLARE
    unit CONSTANT text := CASE window_us WHEN 60000000 THEN 'minute' WHEN 3600000000 THEN 'hour'
        WHEN 86400000000 THEN 'day' WHEN 604800000000 THEN 'week' ELSE 'month' END;
    instant CONSTANT timestamptz := timestamptz 'epoch' + clock / 1000000 * interval '1 second';
    begins CONSTANT timestamptz := date_trunc(unit, instant, zone);
    -- A time in the next window: windows of days and more differ in length by less than half of it. Of hours and
    -- minutes the next one starts where date_trunc changes, which is within a window only if clocks change there.
    later CONSTANT timestamptz := begins
        + CASE WHEN window_us < 86400000000 THEN window_us - 1000000 ELSE window_us / 2 * 3 END
            * interval '1 microsecond';
    ends timestamptz := date_trunc(unit, later, zone);
BEGIN
    IF begins > instant THEN -- midnight comes once more, or was left out
        ends := begins;
    ELSIF ends <= instant THEN
        ends := begins + window_us * interval '1 microsecond';
    END IF;
    IF ends <= instant THEN
        RAISE EXCEPTION 'rate_limit: what the server knows of the time zone is not right'
            USING ERRCODE = 'invalid_parameter_value', COLUMN = 'zone',
                HINT = 'Its files may count leap seconds, as those in the folder right do. Take another zone.';
    END IF;
    RETURN extract(epoch FROM ends)::bigint * 1000000;
END
$$;
