{{/* The sliding window log. slidinglog.go holds its specification and its model. limit.sql and all.sql show what each
block is for. */}}
{{define "slidinglog.title"}}The sliding window log; see slidinglog.go{{end}}
{{define "slidinglog.arguments"}}
--   max_count           the limit, in units of cost, at most 1000
--   window_us           length of the window in microseconds, at most 2^51 (71 years)
{{end}}
{{define "slidinglog.valid"}}max_count BETWEEN 1 AND 1000 AND window_us BETWEEN 1 AND 2251799813685248{{end}}
{{define "slidinglog.hint"}}max_count and window_us are at least 1, max_count is at most 1000, '
'and window_us at most 2^51.{{end}}
{{define "slidinglog.comment"}}Takes from sliding windows of window_us microseconds, any of which admits max_count, '
'at most 1000. It is exact, because it keeps a log of what was taken and when.{{end}}
{{define "slidinglog.example"}}{{include "fixed.example"}}{{end}}
{{define "slidinglog.lasts"}}window_us{{end}}

{{define "slidinglog.columns"}}count, window_start, credit, expires_at, since, log{{end}}
{{define "slidinglog.enough"}}{{include "fixed.enough"}}{{end}}
{{define "slidinglog.roll"}}
IF clock >= s.expires_at OR (s.count | s.credit) = 0 THEN
    s.count := 0;
    s.credit := 0;
    s.window_start := clock;
    s.since := NULL;
    s.log := NULL;
ELSIF s.window_start - clock > window_us THEN
    s.log := ARRAY(
        SELECT (((e.entry >> 10) - s.window_start + clock) << 10) | (e.entry & 1023)
        FROM unnest(s.log) WITH ORDINALITY AS e (entry, place)
        ORDER BY e.place
    );
    s.window_start := clock;
    s.expires_at := clock + window_us;
    moved := true;
END IF;
t := greatest(clock, s.window_start);
needed := 0;
WHILE needed < cardinality(s.log)
    AND (t - (s.log[needed + 1] >> 10) & age_bits) >= window_us
LOOP
    needed := needed + 1;
    s.count := s.count - (s.log[needed] & 1023);
END LOOP;
IF needed > 0 THEN
    s.log := s.log[needed + 1:];
END IF;
IF s.count = 0 THEN
    s.window_start := t;
    s.since := CASE WHEN s.credit > 0 THEN s.since END;
END IF;
{{end}}
{{define "slidinglog.refund"}}
needed := (
    SELECT e.nth
    FROM unnest(s.log) WITH ORDINALITY AS e (entry, nth)
    WHERE (e.entry >> 10) << 10 = taken_in[part] << 10
);
back := least(units, s.log[needed] & 1023);
IF needed > 0 AND back > 0 AND NOT moved THEN
    changed := true;
    IF clock < t THEN -- the row's time may fall, but what has left does not come back
        r.log := s.log;
        r.count := s.count;
    END IF;
    s.count := s.count - back;
    r.count := r.count - back;
    rest := cardinality(r.log) - cardinality(s.log); -- how many entries have left
    needed := needed + rest;
    IF back = (r.log[needed] & 1023) THEN
        r.log := r.log[1:needed - 1] || r.log[needed + 1:];
    ELSE
        r.log[needed] := r.log[needed] - back;
    END IF;
    newest := cardinality(r.log);
    IF newest > 0 THEN
        r.window_start := t - (t - (r.log[newest] >> 10) & age_bits);
    END IF;
    s.window_start := r.window_start;
    t := greatest(clock, s.window_start);
    s.log := r.log[rest + 1:];
END IF;
{{include "fixed.empty"}}
{{end}}
{{define "slidinglog.room"}}{{include "fixed.room"}}{{end}}
{{define "slidinglog.take"}}
s.count := s.count + units;
IF units > 0 THEN
    newest := coalesce(cardinality(s.log), 0);
    IF (t - (s.log[newest] >> 10) & age_bits) = 0 THEN
        units := units + (s.log[newest] & 1023);
        newest := newest - 1;
    END IF;
    s.log := s.log[1:newest] || ARRAY[(t << 10) | units];
    s.window_start := t;
END IF;
{{end}}
{{define "slidinglog.retry"}}
-- It fits when enough of the oldest entries have left.
units := s.count - s.credit + greatest(cost, 1) - max_count;
WHILE units > 0 LOOP
    needed := needed + 1;
    units := units - (s.log[needed] & 1023);
END LOOP;
free_at := t + window_us - (t - (s.log[needed] >> 10) & age_bits);
{{end}}
{{define "slidinglog.reset"}}CASE WHEN s.count > 0 THEN s.window_start + window_us END{{end}}
