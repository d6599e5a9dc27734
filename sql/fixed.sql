{{/* The fixed window. fixed.go holds its specification and its model. limit.sql and all.sql show what each block is
for. */}}
{{define "fixed.title"}}The fixed window; see fixed.go{{end}}
{{define "fixed.arguments"}}
--   max_count           the limit, in units of cost; max_count * window_us may reach 2^62
--   window_us           length of the window in microseconds, at most 2^51 (71 years)
{{end}}
{{define "fixed.valid"}}max_count >= 1 AND window_us BETWEEN 1 AND 2251799813685248
    AND max_count <= 4611686018427387904 / window_us{{end}}
{{define "fixed.hint"}}max_count and window_us are at least 1, window_us is at most 2^51, '
'and their product is at most 2^62.{{end}}
{{define "fixed.comment"}}Takes from fixed windows of window_us microseconds, each of which admits max_count. '
'A window starts at the first request after the one before has ended.{{end}}
{{define "fixed.example"}}(''login'', ARRAY[''user:123''], 10, 60000000) takes one of 10 a minute{{end}}
{{define "fixed.lasts"}}window_us{{end}}

{{define "fixed.insert"}}(prefix, key, algorithm, count, window_start, expires_at){{end}}
{{define "fixed.values"}}1, {{.}}, clock, clock + window_us{{end}}
{{define "fixed.adds"}}count = d.count + excluded.count{{end}}
{{define "fixed.rolls"}}
count = CASE WHEN clock < d.expires_at THEN d.count ELSE 0 END + excluded.count,
window_start = CASE WHEN clock < d.expires_at THEN d.window_start ELSE clock END,
expires_at = CASE WHEN clock < d.expires_at THEN d.expires_at ELSE excluded.expires_at END
{{end}}
{{define "fixed.fits"}}
d.algorithm = 1 AND d.since IS NULL AND d.window_start - clock <= window_us
    AND {{if .Rolls}}(clock >= d.expires_at
    OR {{end}}clock + 10000 < d.expires_at AND d.expires_at = d.window_start + window_us
    AND excluded.count <= max_count - d.count{{if .Rolls}}){{end}}
{{end}}
{{define "fixed.new"}}{{.Taken}}[2] = {{.Units}}{{end}}
{{define "fixed.columns"}}count, window_start, credit, expires_at, since{{end}}

{{define "fixed.enough"}}cost <= max_count - s.count{{end}}
{{define "fixed.roll"}}
IF clock >= s.expires_at OR (s.count | s.credit) = 0 THEN
    s.count := 0;
    s.credit := 0;
    s.window_start := clock;
    s.since := NULL;
ELSIF s.window_start - clock > window_us THEN
    s.window_start := clock;
    s.expires_at := clock + window_us;
    moved := true;
END IF;
t := greatest(clock, s.window_start);
IF t - s.window_start >= window_us OR s.count = 0 THEN
    s.count := 0;
    s.window_start := t;
    s.since := CASE WHEN s.credit > 0 THEN s.since END;
END IF;
{{end}}
{{define "fixed.empty"}}
IF s.count = 0 THEN
    IF s.credit = 0 THEN -- as good as new
        t := clock;
        s.since := NULL;
    END IF;
    s.window_start := t;
END IF;
{{end}}
{{define "fixed.refund"}}
IF taken_in[part] = s.window_start AND s.window_start = r.window_start THEN
    back := least(units, s.count);
    changed := changed OR back > 0;
    s.count := s.count - back;
    r.count := r.count - back;
END IF;
{{include "fixed.empty"}}
{{end}}
{{define "fixed.room"}}
remaining := greatest(max_count - s.count, 0);
{{end}}
{{define "fixed.take"}}
s.count := s.count + units;
{{end}}
{{define "fixed.retry"}}
free_at := s.window_start + window_us;
{{end}}
{{define "fixed.reset"}}CASE WHEN s.count > 0 THEN s.window_start + window_us END{{end}}
