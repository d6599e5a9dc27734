{{/* The token bucket. tokenbucket.go holds its specification and its model. limit.sql and all.sql show what each
block is for. */}}
{{define "tokenbucket.title"}}The token bucket; see tokenbucket.go{{end}}
{{define "tokenbucket.arguments"}}
--   capacity            tokens in a full bucket; capacity * every_us may reach 2^62
--   refill              tokens that flow in, evenly, over every_us; at least 1
--   every_us            in microseconds, from 1 to 2^51. Filling an empty bucket may take 2^51 microseconds (71 years)
{{end}}
{{define "tokenbucket.valid"}}{{$capacity := "capacity"}}{{$refill := "refill"}}{{$every := "every_us"}}
{{- with .}}{{$capacity = "max_count"}}{{$refill = "inflow"}}{{$every = "window_us"}}{{end -}}
{{$capacity}} >= 1 AND {{$refill}} >= 1 AND {{$every}} BETWEEN 1 AND 2251799813685248
    AND {{$capacity}} <= 4611686018427387904 / {{$every}}
    AND ({{$capacity}} * {{$every}} - 1) / {{$refill}} < 2251799813685248{{end}}
{{define "tokenbucket.hint"}}capacity, refill and every_us are at least 1, every_us is at most 2^51, '
'capacity * every_us is at most 2^62, and divided by refill it is at most 2^51.{{end}}
{{define "tokenbucket.comment"}}Takes from token buckets. '
'A bucket holds capacity tokens, starts full, and gets refill tokens, evenly, over every_us microseconds.{{end}}
{{define "tokenbucket.example"}}(''api'', ARRAY[''user:123''], 20, 5, 10000000) '
    'takes one token from a bucket of 20 that gets 5 more every 10 seconds{{end}}
{{define "tokenbucket.lasts"}}(capacity * every_us - 1) / refill + 1{{end}}

{{define "tokenbucket.insert"}}
(prefix, key, algorithm, credit, scale, capacity, refill, since, returned,
    window_start, expires_at)
{{- end}}
{{define "tokenbucket.values"}}3, full_credit - {{.}} * every_us, every_us, tokens, inflow,
    clock, 0, clock, clock + ({{.}} * every_us - 1) / inflow + 1{{end}}
{{/* Whether the bucket is not full by the clock, or a while later. */}}
{{define "tokenbucket.runs"}}clock{{.}} - d.window_start <= (full_credit - d.credit - 1) / inflow{{end}}
{{define "tokenbucket.level"}}d.credit + greatest(clock - d.window_start, 0) * inflow{{end}}
{{define "tokenbucket.adds"}}
credit = {{include "tokenbucket.level"}}
    - (full_credit - excluded.credit),
window_start = greatest(clock, d.window_start),
expires_at = greatest(clock, d.window_start)
    + (full_credit - ({{include "tokenbucket.level"}})
        + (full_credit - excluded.credit) - 1) / inflow + 1
{{end}}
{{define "tokenbucket.rolls"}}
scale = every_us,
capacity = tokens,
refill = inflow,
credit = CASE WHEN {{include "tokenbucket.runs" ""}}
    THEN {{include "tokenbucket.level"}} - full_credit
    ELSE 0 END + excluded.credit,
window_start = CASE WHEN {{include "tokenbucket.runs" ""}}
    THEN greatest(clock, d.window_start) ELSE clock END,
since = CASE WHEN {{include "tokenbucket.runs" ""}}
    THEN d.since ELSE clock END,
returned = CASE WHEN {{include "tokenbucket.runs" ""}}
    THEN d.returned ELSE 0 END,
expires_at = CASE WHEN {{include "tokenbucket.runs" ""}}
    THEN greatest(clock, d.window_start)
        + (full_credit - ({{include "tokenbucket.level"}})
        + (full_credit - excluded.credit) - 1) / inflow + 1
    ELSE excluded.expires_at END
{{end}}
{{define "tokenbucket.fits"}}
d.algorithm = 3 AND d.count = 0 AND d.scale = every_us AND d.capacity = tokens
    AND d.refill = inflow AND d.credit < full_credit
    AND d.window_start - clock <= (full_credit - 1) / inflow + 1
    AND {{if .Rolls}}CASE
        WHEN {{include "tokenbucket.runs" " + 10000"}}
            THEN {{include "tokenbucket.level"}}
                >= full_credit - excluded.credit
        ELSE clock - d.window_start > (full_credit - d.credit - 1) / inflow END
    {{- else}}{{include "tokenbucket.runs" " + 10000"}}
    AND {{include "tokenbucket.level"}} >= full_credit - excluded.credit{{end}}
{{end}}
{{define "tokenbucket.new"}}{{.Taken}}[5] = full_credit - {{.Units}} * every_us{{end}}
{{define "tokenbucket.columns"}}count, window_start, credit, scale, expires_at, since, capacity, refill, returned{{end}}

{{define "tokenbucket.enough"}}s.scale = every_us AND cost <= least(s.credit / every_us, capacity){{end}}
{{define "tokenbucket.another"}}moved OR s.credit = full_credit AND s.count = 0
    OR (r.scale, r.capacity, r.refill) IS DISTINCT FROM (every_us, capacity, refill){{end}}
{{define "tokenbucket.roll"}}
full_credit := capacity * every_us;
IF clock >= s.expires_at THEN
    s.count := 0;
    s.credit := full_credit;
    s.window_start := clock;
ELSE
    -- What was taken under another policy stays taken.
    IF s.scale <> every_us OR s.capacity <> capacity OR s.refill <> refill THEN
        s.since := greatest(s.since + 1, s.window_start, clock);
        s.returned := 0;
    END IF;
    IF s.scale <> every_us THEN
        -- The policy has changed. Whole tokens are kept, and so is the part of one, rounded
        -- down. Its product may need 128 bits, which only numeric has. This runs only until the
        -- next grant.
        s.credit := CASE WHEN s.credit / s.scale >= capacity THEN full_credit
            ELSE s.credit / s.scale * every_us
                + div((s.credit % s.scale)::numeric * every_us, s.scale)::bigint END;
    END IF;
    s.credit := least(s.credit, full_credit);
    -- The capacity may be lower now, and the bucket as good as new.
    IF s.credit = full_credit AND s.count = 0 THEN
        s.window_start := clock;
        s.expires_at := clock;
    ELSIF s.window_start - clock > (full_credit - 1) / refill + 1 THEN
        s.window_start := clock;
        s.since := greatest(s.since + 1, clock);
        s.returned := 0;
        s.expires_at := clock
            + (full_credit - CASE WHEN s.count > 0 THEN 0 ELSE s.credit END - 1) / refill + 1;
        moved := true;
    END IF;
END IF;
s.scale := every_us;
s.capacity := capacity;
s.refill := refill;
t := greatest(clock, s.window_start);
-- This divides, because the product would overflow after a long time.
IF s.credit < full_credit AND t - s.window_start <= (full_credit - s.credit - 1) / refill THEN
    s.credit := s.credit + (t - s.window_start) * refill;
ELSE
    s.credit := full_credit;
    IF s.count = 0 THEN -- as good as new
        s.since := t;
        s.returned := 0;
    END IF;
END IF;
s.window_start := t;
{{end}}
{{/* What may be leased at time t: TokenBucket.leased in tokenbucket.go. 128 is leasesInBucket. */}}
{{define "tokenbucket.leases"}}
lease_us := ((full_credit - 1) / refill + 1) / 128;
leases := CASE
    WHEN s.log IS NULL OR t - s.log[1] >= 2 * lease_us THEN ARRAY[t, 0, 0]
    WHEN t - s.log[1] >= lease_us THEN ARRAY[t, 0, s.log[2]]
    ELSE ARRAY[least(s.log[1], t), s.log[2], s.log[3]]
END;
{{end}}
{{define "tokenbucket.refund"}}
-- TokenBucket.refund in tokenbucket.go explains where the units are in the queue of
-- missing tokens.
IF s.since = taken_since[part] AND taken_in[part] BETWEEN 0 AND t
    AND NOT ({{include "tokenbucket.another"}})
THEN
    units := least(units, capacity) * every_us;
    need := least(
        greatest(greatest(coalesce(taken_at[part], 0), 0) - s.returned, units),
        full_credit);
    rest := 0; -- how much of the bucket stays empty for leases
    IF s.log IS NOT NULL THEN
{{include "tokenbucket.leases" | indent 8}}
        ahead := greatest(coalesce(leased[part], 0), 0);
        IF t - taken_in[part] >= lease_us THEN
            ahead := 0; -- its lease may not be counted any more
        END IF;
        IF taken_in[part] >= leases[1] THEN
            leases[2] := greatest(leases[2] - ahead, 0);
        ELSE
            leases[3] := greatest(leases[3] - ahead, 0);
        END IF;
        s.log := NULL;
        IF leases[2] + leases[3] > 0 THEN
            s.log := leases;
            rest := least(leases[2] + leases[3], capacity) * every_us
                + lease_us * refill;
        END IF;
        r.log := s.log;
    END IF;
    back := CASE
        WHEN t - taken_in[part] <= need / refill
            THEN greatest(least(units, need - (t - taken_in[part]) * refill,
                full_credit - s.credit - rest), 0)
        ELSE 0
    END;
    changed := changed OR back > 0;
    s.credit := s.credit + back;
    r.credit := r.credit + back;
    s.returned := s.returned + back;
    IF s.returned > 2305843009213693952 THEN -- so that the sum never overflows
        s.since := greatest(s.since + 1, t);
        s.returned := 0;
    END IF;
    r.since := s.since;
    r.returned := s.returned;
END IF;
IF changed AND s.credit = full_credit AND s.count = 0 THEN -- as good as new
    t := clock;
    s.window_start := clock;
    s.since := clock;
    s.returned := 0;
END IF;
{{end}}
{{define "tokenbucket.room"}}
remaining := s.credit / every_us;
{{end}}
{{define "tokenbucket.take"}}
s.credit := s.credit - units * every_us;
{{end}}
{{define "tokenbucket.retry"}}
free_at := t + ((greatest(cost, 1) - s.count) * every_us - s.credit - 1) / refill + 1;
{{end}}
{{define "tokenbucket.reset"}}
CASE WHEN s.credit < full_credit
    THEN t + (full_credit - s.credit - 1) / refill + 1 END
{{- end}}
