{{/* The sliding window counter. sliding.go holds its specification and its model. limit.sql and all.sql show what each
block is for. */}}
{{define "sliding.title"}}The sliding window counter; see sliding.go{{end}}
{{define "sliding.arguments"}}{{include "fixed.arguments"}}{{end}}
{{define "sliding.valid"}}{{include "fixed.valid"}}{{end}}
{{define "sliding.hint"}}{{include "fixed.hint"}}{{end}}
{{define "sliding.comment"}}Takes from sliding windows of window_us microseconds, each of which admits max_count. '
'What a window has taken is estimated from two counters: '
'the window before counts for the share of it that the sliding window still covers.{{end}}
{{define "sliding.example"}}{{include "fixed.example"}}{{end}}
{{define "sliding.lasts"}}2 * window_us{{end}}

{{define "sliding.insert"}}(prefix, key, algorithm, count, window_start, expires_at){{end}}
{{define "sliding.values"}}2, {{.}}, clock, clock + 2 * window_us{{end}}
{{define "sliding.adds"}}count = d.count + excluded.count{{end}}
{{define "sliding.rolls"}}
count = CASE WHEN d.window_start > ended THEN d.count ELSE 0 END + excluded.count,
prev_count = CASE WHEN d.window_start > ended THEN d.prev_count
    WHEN d.expires_at > clock THEN d.count ELSE 0 END,
window_start = CASE WHEN d.window_start > ended THEN d.window_start
    WHEN d.expires_at > clock THEN d.window_start + window_us ELSE clock END,
expires_at = CASE WHEN d.window_start > ended THEN d.expires_at
    WHEN d.expires_at > clock THEN d.expires_at + window_us ELSE excluded.expires_at END
{{end}}
{{/* A window that began then, or before, has ended. */}}
{{define "sliding.ended"}}clock - window_us{{end}}
{{/* Whether a window that goes on for 10 ms has room. d.window_start less . is how long it still lasts. */}}
{{define "sliding.has room"}}
abs(d.window_start - clock) < window_us - 10000 AND d.prev_count <= max_count
AND excluded.count <= max_count - d.count - (window_us - 1
    + d.prev_count * least(d.window_start - {{.}}, window_us)) / window_us
{{- end}}
{{/* The difference of the times, because their sum could overflow. */}}
{{define "sliding.fits"}}
d.algorithm = 2 AND d.since IS NULL AND {{if .Rolls}}CASE
    WHEN d.expires_at <= clock THEN d.window_start <= ended
    WHEN d.expires_at - d.window_start <> 2 * window_us THEN false
    WHEN d.window_start <= ended THEN clock + 10000 < d.expires_at
        AND d.count BETWEEN 1 AND max_count
        AND excluded.count <= max_count
            - (d.count * (d.expires_at - clock) + window_us - 1) / window_us
    ELSE {{include "sliding.has room" "ended" | hang 4}} END
{{- else}}d.expires_at - d.window_start = 2 * window_us
AND {{include "sliding.has room" (print "(" (include "sliding.ended") ")")}}
{{- end}}
{{end}}
{{define "sliding.new"}}{{.Taken}}[2] = {{.Units}} AND {{.Taken}}[3] = 0{{end}}
{{define "sliding.columns"}}count, prev_count, window_start, credit, expires_at, since{{end}}

{{define "sliding.enough"}}cost <= max_count - s.count - s.prev_count{{end}}
{{define "sliding.roll"}}
IF clock >= s.expires_at OR (s.count | s.prev_count | s.credit) = 0 THEN
    s.credit := 0;
    s.count := 0;
    s.prev_count := 0;
    s.window_start := clock;
    s.since := NULL;
ELSIF s.window_start - clock > window_us THEN
    s.window_start := clock;
    s.expires_at := clock + CASE WHEN s.count > 0 OR s.credit > 0 THEN 2 ELSE 1 END * window_us;
    moved := true;
END IF;
t := greatest(clock, s.window_start);
IF s.count = 0 OR t - s.window_start >= window_us THEN
    IF t - s.window_start >= 2 * window_us
        OR (s.count = 0 AND (s.prev_count = 0 OR t - s.window_start >= window_us))
    THEN
        s.count := 0;
        s.prev_count := 0;
        s.window_start := t;
        s.since := CASE WHEN s.credit > 0 THEN s.since END;
    ELSIF t - s.window_start >= window_us THEN
        s.prev_count := s.count;
        s.count := 0;
        s.window_start := s.window_start + window_us;
    END IF;
END IF;
{{end}}
{{define "sliding.refund"}}
IF taken_in[part] = s.window_start AND s.window_start = r.window_start THEN
    back := least(units, s.count);
    changed := changed OR back > 0;
    s.count := s.count - back;
    r.count := r.count - back;
ELSIF taken_in[part] = s.window_start - window_us
    AND r.window_start IN (s.window_start, taken_in[part])
THEN
    back := least(units, s.prev_count);
    changed := changed OR back > 0;
    s.prev_count := s.prev_count - back;
    IF r.window_start = s.window_start THEN
        r.prev_count := r.prev_count - back;
    ELSE
        r.count := r.count - back;
    END IF;
END IF;
IF s.count = 0 AND s.prev_count = 0 THEN
    IF s.credit = 0 THEN -- as good as new
        t := clock;
        s.since := NULL;
    END IF;
    s.window_start := t;
END IF;
{{end}}
{{define "sliding.room"}}
-- rest is how long the current window still lasts, and how much of the one before is still
-- covered. The window before still weighs prev_count * rest / window_us, rounded up.
rest := s.window_start + window_us - t;
remaining := greatest(max_count - s.count - CASE
    WHEN s.prev_count = 0 THEN 0
    -- A prev_count that an older, larger limit has left could overflow the product. So this
    -- divides instead.
    WHEN rest > max_count * window_us / s.prev_count THEN max_count
    ELSE (s.prev_count * rest + window_us - 1) / window_us
END, 0);
{{end}}
{{define "sliding.take"}}{{include "fixed.take"}}{{end}}
{{define "sliding.retry"}}
free_at := greatest(cost, 1) - s.credit; -- of so many
free_at := t + CASE
    -- They fit into this window once prev_count * rest has fallen to what is left of
    -- max_count * window_us.
    WHEN free_at <= max_count - s.count THEN
        rest - (max_count - s.count - free_at) * window_us / s.prev_count
    -- They fit only into the next one, where count takes the place of prev_count.
    ELSE rest + window_us - (max_count - free_at) * window_us / s.count
END;
{{end}}
{{define "sliding.reset"}}CASE WHEN s.count > 0 THEN s.window_start + 2 * window_us
    WHEN s.prev_count > 0 THEN s.window_start + window_us END{{end}}
