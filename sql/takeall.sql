{{/* rate_limit_take_all has the rules of limit.sql for all algorithms at once. So the names in these are columns here,
and excluded is what is asked for. A log has no such rules. */}}

{{/* What a column is to be for each algorithm, by its "values" or its "rolls". */}}
{{define "by algorithm"}}
{{- $cases := ""}}{{$of := .Of}}{{$by := .By}}{{$column := .Column}}
{{- range .Algorithms}}{{$code := .Code}}{{with column .Name $by $column (print $of ".units")}}
    {{- $cases = print $cases `
    WHEN ` $code " THEN " (. | hang 4)}}{{end}}{{end}}
{{- if $cases}}CASE {{.Of}}.algorithm{{$cases}}
    ELSE {{.Else}} END{{else}}{{.Else}}{{end}}{{end}}

{{/* The rows that are asked for. .With has further arrays, and .As their names. What is not valid is found out first,
because numbers could overflow. */}}
{{define "asked"}}
SELECT p.*
{{- range $c := (split "count, credit, scale, expires_at")}},
    {{include "by algorithm" (dict "Of" "p" "By" "values" "Column" $c "Else" "NULL" "Algorithms" $.Algorithms)
        | hang 4}} AS {{$c}}
{{- end}}
FROM (
    SELECT v.*, CASE WHEN v.valid THEN v.asked END AS units,
        CASE WHEN v.algorithm = 3 AND v.valid THEN v.max_count * v.window_us END AS full_credit,
        CASE WHEN v.algorithm = 5 AND v.valid
            THEN _rate_limit_window_end(clock, v.window_us, v.zone) END AS window_end,
        CASE WHEN v.algorithm = 2 AND v.valid THEN {{include "sliding.ended"}} END AS ended
    FROM (
        SELECT u.*, u.max_count AS tokens, u.window_us AS every_us, CASE u.algorithm
        {{- range .Algorithms}}{{if has (print .Name ".rolls")}}
            WHEN {{.Code}} THEN {{include (print .Name ".valid") "of columns" | hang 8}}
                {{- with maybe (print .Name ".known") ""}}
                AND {{.}}{{end}}{{end}}
        {{- end}} END
            AND u.asked BETWEEN 1 AND u.max_count AS valid
        FROM unnest(names, keys, algorithms,
                limits, spans_us, refills, zones, units{{with .With}}, {{.}}{{end}})
            WITH ORDINALITY AS u (name, key, algorithm,
                max_count, window_us, inflow, zone, asked{{with .As}}, {{.}}{{end}}, place)
        OFFSET 0 -- or each expression would be put in wherever it is used
    ) AS v
) AS p
OFFSET 0
{{- end}}

{{/* Finds out whether all rows have room, and where they are. A row of algorithm 0 has been made, and nobody has taken
from it. What is done to a row that goes on also begins it, unless a policy is longer than the time since 1970. */}}
{{define "look"}}
SELECT bool_and((excluded.valid
    AND octet_length(excluded.name) BETWEEN 1 AND 128
    AND octet_length(excluded.key) BETWEEN 1 AND 512
    {{- if .Locks}}
    AND d.ctid IS NOT NULL
    AND ({{include "in time" | hang 8}}
        OR {{include "give up" | hang 8}})
    {{- end}}
    AND CASE WHEN coalesce(d.algorithm, 0) = 0
        THEN excluded.expires_at < 2 * clock AND (full_credit - 1) / inflow < clock IS NOT FALSE
        ELSE CASE excluded.algorithm
        {{- range .Algorithms}}{{if has (print .Name ".rolls")}}
        WHEN {{.Code}} THEN {{include (print .Name ".fits") (dict "Rolls" true) | hang 8}}{{end}}
        {{- end}} END END
    ) IS TRUE),
    array_agg(d.ctid)
INTO fits, tids
FROM (
    {{include "asked" (dict "With" "" "As" "" "Algorithms" .Algorithms) | hang 4}}
) AS excluded
LEFT JOIN LATERAL (
    SELECT d.ctid, d.* FROM rate_limit_{{.Table}} AS d
    WHERE d.prefix = excluded.name AND d.key = excluded.key
    {{if .Locks}}FOR UPDATE{{else}}OFFSET 0{{end}}
) AS d ON true;
{{- end}}

-- rate_limit_take_all decides as rate_limit_all does, for less. It is for many requests of several parts each that all
-- take, from rows of one table. The Go package calls it.
--
--   names, keys         the rows, each of them once, in the order of locking
--   durable             whether they are in rate_limit_durable rather than in rate_limit_ephemeral
--   algorithms, limits, spans_us, refills, zones
--                       of each row, as in rate_limit_all
--   units               what all requests together take from each row
--   requests, row_of, costs, counts
--                       of each part: its request, which of the rows it takes from, and the others as in rate_limit_all
--
-- If every row has room for its units, all requests are granted. Then it returns nine numbers for each row, as the
-- functions do whose names begin with rate_limit_take_. Otherwise rate_limit_all decides the parts, and fifteen numbers
-- for each are returned.
--
-- The rows are locked in the order in which they come, looked at, and written. If one is missing or has no room, the
-- locks are given back, because rate_limit_all may have to make rows, and to lock others before those. If rows are
-- missing, and what can be seen has room, they are made, and everything begins anew.
--
-- The clock is read twice, as in those functions: before a row is locked, and when all are. What fits by the first
-- reading still fits by the second, which is the time of the decision for all rows.
CREATE FUNCTION rate_limit_take_all(
    names text[],
    keys text[],
    durable boolean,
    algorithms smallint[],
    limits bigint[],
    spans_us bigint[],
    refills bigint[],
    zones text[],
    units bigint[],
    requests integer[],
    row_of integer[],
    costs bigint[],
    counts bigint[],
    lock_timeout_ms integer DEFAULT NULL,
    synchronous_commit boolean DEFAULT NULL,
    now_us bigint DEFAULT NULL
)
RETURNS bigint[]
LANGUAGE plpgsql
SECURITY DEFINER
SET enable_nestloop = on
SET enable_seqscan = off -- a plan must not depend on how small the table was when it was made
SET plan_cache_mode = force_generic_plan -- the first five calls of a session would each make a plan of their own
AS $$
#variable_conflict use_variable
DECLARE
    clock bigint := {{include "clock" | hang 4}};
    possible boolean := (names[cardinality(names)] IS NOT NULL AND keys[cardinality(names)] IS NOT NULL
        AND cardinality(names) = ALL (ARRAY[cardinality(keys), cardinality(algorithms), cardinality(limits),
            cardinality(spans_us), cardinality(refills), cardinality(units)])
        -- Otherwise rows would be locked in another order. The caller's encoding may have other lengths.
        AND (SELECT bool_and((e.next_key IS NULL
                OR (-octet_length(e.key), e.key COLLATE "C", e.name COLLATE "C")
                    < (-octet_length(e.next_key), e.next_key COLLATE "C", e.next_name COLLATE "C")) IS TRUE)
            FROM unnest(names, keys, names[2:], keys[2:]) AS e (name, key, next_name, next_key))) IS TRUE;
    fits boolean;
    tids tid[];
    taken bigint[];
    ignored text;
BEGIN
{{include "commit" | indent 4}}
{{- range $t := .Tables}}
    {{$t.If}}
        FOR attempt IN 1 .. 2 LOOP
            EXIT WHEN NOT possible;
            BEGIN
                {{include "look" (dict "Table" $t.Name "Locks" true "Algorithms" $.Algorithms) | hang 16}}
                IF fits THEN
                    clock := {{include "soon" | hang 20}};
                    WITH d AS (
                        UPDATE rate_limit_{{$t.Name}} AS d SET
                        algorithm = excluded.algorithm
{{- range $c := (split (include "row" ""))}},
                        {{$c}} = {{include "by algorithm" (dict "Of" "excluded" "By" "rolls" "Column" $c
                            "Else" (print "d." $c) "Algorithms" $.Algorithms) | hang 16}}
{{- end}}
                        FROM (
                            {{include "asked" (dict "With" "tids" "As" "tid" "Algorithms" $.Algorithms) | hang 20}}
                            LIMIT (SELECT cardinality(tids)) -- as in rate_limit_all
                        ) AS excluded
                        WHERE d.ctid = excluded.tid
                        RETURNING excluded.place, {{include "told" (dict "At" "clock") | hang 20}} AS told
                    )
                    SELECT array_agg(d.told ORDER BY d.place) INTO taken FROM d;
                    RETURN taken;
                END IF;
                RAISE EXCEPTION USING ERRCODE = 'RLS00';
            EXCEPTION WHEN SQLSTATE 'RLS00' THEN
                EXIT WHEN attempt = 2 OR array_position(tids, NULL) IS NULL;
            END;
            -- A request that is refused by what can be seen makes no row.
            {{include "look" (dict "Table" $t.Name "Locks" false "Algorithms" $.Algorithms) | hang 12}}
            EXIT WHEN NOT fits;
            -- This also locks those that exist, so that all are locked in order.
            INSERT INTO rate_limit_{{$t.Name}} AS d (prefix, key)
            SELECT e.name, e.key
            FROM unnest(names, keys) AS e (name, key)
            ON CONFLICT (prefix, key)
            DO UPDATE SET count = d.count WHERE {{include "give up" | hang 12}};
        END LOOP;
{{- end}}
    END IF;

    SELECT array_agg(e.name ORDER BY p.place), array_agg(e.key ORDER BY p.place),
        array_agg(e.algorithm ORDER BY p.place), array_agg(e.max_count ORDER BY p.place),
        array_agg(e.window_us ORDER BY p.place), array_agg(e.refill ORDER BY p.place),
        array_agg(coalesce(e.zone, 'UTC') ORDER BY p.place)
    INTO names, keys, algorithms, limits, spans_us, refills, zones
    FROM unnest(row_of) WITH ORDINALITY AS p (row_of, place)
    LEFT JOIN unnest(names, keys, algorithms, limits, spans_us, refills, zones) WITH ORDINALITY
        AS e (name, key, algorithm, max_count, window_us, refill, zone, place) ON e.place = p.row_of;
    RETURN ARRAY(
        SELECT unnest({{include "left" "a.ord" | hang 8}})
        FROM rate_limit_all(
            requests, names, keys, array_fill(coalesce(durable, false), ARRAY[cardinality(keys)]), algorithms,
            limits, spans_us, refills, costs, counts, lock_timeout_ms, synchronous_commit,
            {{include "now" | hang 12}},
            NULL::bigint[], NULL::bigint[], NULL::bigint[], NULL::bigint[], false, zones, NULL::bigint[]) AS a);
END
$$;

COMMENT ON FUNCTION rate_limit_take_all IS
    'Takes as rate_limit_all does, for less. It returns an array of numbers, for programs: see sql/takeall.sql.
Example: SELECT rate_limit_take_all(ARRAY[''user'', ''everybody''], ARRAY[''user:123'', ''all''], false, '
    'ARRAY[2, 2]::smallint[], ARRAY[20, 1000], ARRAY[60000000, 60000000], ARRAY[0, 0], NULL, ARRAY[1, 1], '
    'ARRAY[1, 1], ARRAY[1, 2], NULL, NULL) '
    'takes one of 20 a minute and one of 1000 a minute, or neither.';
