{{/* The function of each algorithm that can be called for keys of one limiter. */}}

{{define "now"}}(extract(epoch FROM coalesce(now, clock_timestamp())) * 1000000)::bigint{{end}}

{{/* Takes from rows as they stand, or makes them: an INSERT for what .From gives, whose units are .Units. */}}
{{define "upsert"}}
INSERT INTO rate_limit_{{.Table}} AS d {{include (print .Name ".insert")}}
{{.From}}
ON CONFLICT (prefix, key) DO UPDATE SET
{{include (print .Name ".set") | indent 4}}
WHERE (clock_timestamp() < decided_at + interval '10 ms' OR now IS NOT NULL OR lock_timeout_ms IS NOT NULL AND clock_timestamp() > decided_at + lock_timeout_ms * interval '25 ms' AND rate_limit_late())
    AND {{include (print .Name ".fits") | hang 4}}
RETURNING {{end}}

{{/* The decision about a row that took, at time .At. .Row is what precedes a column. */}}
{{define "took"}}{{include (print .Name ".left") .}}, 0::bigint, {{include (print .Name ".resets") .Row}} - {{.At}},
    decided_at + ({{.At}} - clock) * interval '1 microsecond', {{include (print .Name ".state") .Row}}, NULL::bigint[],
    {{include (print .Name ".receipt") .}}, 0::bigint{{end}}

{{define "row"}}{{.}}count, {{.}}prev_count, {{.}}window_start, {{.}}credit, {{.}}scale, {{.}}expires_at, {{.}}since, {{.}}capacity, {{.}}refill, {{.}}returned{{end}}

{{define "settings"}}ignored := concat(
                CASE WHEN lock_timeout_ms IS NOT NULL THEN set_config('lock_timeout', lock_timeout_ms::text, true) END,
                CASE WHEN synchronous_commit IS NOT NULL THEN set_config('synchronous_commit', synchronous_commit::text, true) END);{{end}}

{{range $a := .Algorithms}}
-- {{.Title}}.
--
--   name                the limiter's name, 1 to 128 bytes
--   keys                who asks, 1 to 512 bytes each; a key that stands several times is decided in that order
{{include (print .Name ".arguments")}}
--   costs               cost of one request, for each key; NULL means 1 each. A cost of 0 takes nothing and tells whether 1 would
--                       fit; a cost below 0 gives back, or grants, see taken_in; a cost above {{.Limit}} is denied with
--                       a retry_after_us of NULL, which means never
--   counts              how many such requests are asked, for each key; NULL means 1 each
--   durable             whether the rows are in rate_limit_durable rather than in rate_limit_ephemeral
--   lock_timeout_ms     longest wait for one row, for this transaction; NULL leaves the session's lock_timeout
--   synchronous_commit  whether the commit of this transaction waits for the WAL; NULL leaves the session's setting
--   now                 replaces the clock, for tests
--   taken_since, taken_in, taken_at, taken_spent
--                       which take a cost below 0 gives back: what its decision returned under these names, for each key; NULL, of
--                       taken_in, if it gives nothing back but grants credit above the limit, of which a key holds up to 2^61
--   skip_held           whether to pass over keys whose row somebody's transaction has locked: no row comes back for them, and
--                       the others are decided. A key that such a transaction has just made is waited for still
{{- if has (print .Name ".set")}}
--
-- Most requests take, and fit. One statement decides them: each takes from its row as it stands, or makes it. What does not fit,
-- and all that is not so ordinary, is left to rate_limit_all, which finds the rows locked.
--
-- The clock is read twice. What was true by the first reading, before the rows were locked, and would still be 10 ms later, was true
-- when they were: a row that was waited for longer is left. By the second reading, with every lock held, the decision is told. Only a
-- window or a bucket that begins does so at the first: nobody else can have decided anything by it since.
{{- end}}
CREATE FUNCTION {{.Function}}(
    name text,
    keys text[],
{{- range .Arguments}}
    {{.}} bigint,
{{- end}}
    costs bigint[] DEFAULT NULL,
    counts bigint[] DEFAULT NULL,
    durable boolean DEFAULT false,
    lock_timeout_ms integer DEFAULT NULL,
    synchronous_commit boolean DEFAULT NULL,
    now timestamptz DEFAULT NULL,
    taken_since bigint[] DEFAULT NULL,
    taken_in bigint[] DEFAULT NULL,
    taken_at bigint[] DEFAULT NULL,
    taken_spent bigint[] DEFAULT NULL,
    skip_held boolean DEFAULT false
)
RETURNS SETOF rate_limit_decision
LANGUAGE plpgsql
SECURITY DEFINER
{{- if has (print .Name ".set")}}
SET enable_seqscan = off
SET enable_nestloop = off -- two lists of keys are joined below, and the planner takes them for short ones
{{- end}}
AS $$
#variable_conflict use_variable
DECLARE
    ords bigint[];         -- the places of the elements that are left, if not all are
{{- if has (print .Name ".set")}}
    decided_at timestamptz := coalesce(now, clock_timestamp());
    clock bigint := (extract(epoch FROM decided_at) * 1000000)::bigint;
    t bigint;
    r rate_limit_row;      -- what one key is asked for
    r_cost bigint;         -- all of it, and the row that it was taken from
{{- range (split (include (print .Name ".columns")))}}
    r_{{.}} bigint;
{{- end}}
    taken rate_limit_row[]; -- the rows that were taken from, or made; their cost is what was taken
{{- if eq .Name "tokenbucket"}}
    full_credit bigint;
{{- end}}
    refused boolean := false; -- or which it does not fit into:
    s rate_limit_row;
    moved boolean := false;
{{- if eq .Name "sliding"}}
    rest bigint;
{{- end}}
    remaining bigint;
    free_at bigint;
    retry_after_us bigint;
    reset_after_us bigint;
    ignored text;
{{- end}}
BEGIN
{{- if has (print .Name ".set")}}
    -- One key, as in most calls of an application that is not under load. Each operator costs here: plpgsql makes an expression anew
    -- in every transaction.
    IF taken_in IS NULL AND NOT skip_held AND cardinality(keys) = 1 AND octet_length(keys[1]) BETWEEN 1 AND 512
            AND coalesce(costs[1], 1) BETWEEN 1 AND {{.Limit}} AND coalesce(cardinality(costs), 1) = 1
            AND coalesce(counts[1], 1) BETWEEN 1 AND {{.Limit}} / coalesce(costs[1], 1) AND coalesce(cardinality(counts), 1) = 1
            AND octet_length(name) BETWEEN 1 AND 128 AND {{include (print .Name ".valid")}} THEN
        r.cost := coalesce(costs[1], 1);
        r.asked := coalesce(counts[1], 1);
        r_cost := r.cost * r.asked;
{{- if eq .Name "tokenbucket"}}
        full_credit := capacity * every_us;
{{- end}}
        IF lock_timeout_ms IS NOT NULL OR synchronous_commit IS NOT NULL THEN
            {{include "settings"}}
        END IF;
{{- range $t := $.Tables}}
        {{$t.If}}
{{include "upsert" (dict "Table" $t.Name "Name" $a.Name "From" (print "VALUES (name, keys[1], " (include (print $a.Name ".values") "r_cost") ")")) | indent 12}}{{prefix "d." (include (print $a.Name ".columns"))}}
            INTO {{prefix "r_" (include (print $a.Name ".columns"))}};
            IF NOT found THEN
                SELECT {{include "row" "d."}} INTO {{include "row" "s."}}
                FROM rate_limit_{{$t.Name}} AS d WHERE d.prefix = name AND d.key = keys[1] AND d.algorithm = {{$a.Code}};
                refused := found;
            END IF;
{{- end}}
        END IF;
        IF refused THEN -- by the row as it is now: this transaction has locked it
            decided_at := coalesce(now, clock_timestamp());
            clock := (extract(epoch FROM decided_at) * 1000000)::bigint;
{{include (print .Name ".roll") | indent 12}}
{{include (print .Name ".room") | indent 12}}
            remaining := remaining + s.{{.Above}};
            IF remaining < r.cost AND NOT moved THEN
{{include (print .Name ".retry") | indent 16}}
                {{include "retry after"}}
                {{include "reset after" . | hang 16}}
                RETURN NEXT ROW(1::bigint, 0::bigint, remaining, retry_after_us, reset_after_us, decided_at, s.count, s.prev_count, s.window_start,
                    s.credit, s.scale, s.expires_at, NULL::bigint[], s.since, s.window_start, {{if eq .Name "tokenbucket"}}s.returned + full_credit - s.credit{{else}}NULL::bigint{{end}}, 0::bigint);
                RETURN;
            END IF;
        ELSIF found THEN
            t := {{include "now"}};
            IF t BETWEEN clock AND clock + 10000 THEN
                t := {{include (print .Name ".at") "r_"}};
                RETURN NEXT ROW(1::bigint, r.asked, {{include "took" (dict "Name" .Name "Row" "r_" "At" "t") | hang 20}});
                RETURN;
            END IF;
            taken := ARRAY[ROW(1, r_cost, r.asked, NULL, {{include (print .Name ".row") "r_"}}, NULL)::rate_limit_row];
        END IF;
    END IF;
{{end}}
    IF ({{include (print .Name ".valid")}}) IS NOT TRUE THEN
        RAISE EXCEPTION 'rate_limit: {{range $i, $n := .Arguments}}{{if $i}}, {{end}}{{$n}} %{{end}}: outside the exact range'{{range .Arguments}}, {{.}}{{end}}
            USING ERRCODE = 'invalid_parameter_value', HINT = '{{include (print .Name ".hint")}}';
    END IF;
    IF (octet_length(name) BETWEEN 1 AND 128 AND keys[cardinality(keys)] IS NOT NULL
            AND (costs IS NULL OR cardinality(costs) = cardinality(keys)) AND (counts IS NULL OR cardinality(counts) = cardinality(keys))
            AND (taken_in IS NULL OR cardinality(taken_in) = cardinality(keys))) IS NOT TRUE THEN
        RAISE EXCEPTION 'rate_limit: a name of 1 to 128 bytes is needed, and as many costs, counts and taken_in as keys'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'NULL instead of costs or of counts means 1 for each key, and NULL instead of taken_in that there are no refunds.';
    END IF;
{{- if has (print .Name ".set")}}
    IF r_cost IS NULL AND NOT (skip_held IS TRUE OR taken_in IS NOT NULL OR 1 > ANY (costs) OR {{.Limit}} < ANY (costs)) IS TRUE THEN
        {{include "settings"}}
{{- if eq .Name "tokenbucket"}}
        full_credit := capacity * every_us;
{{- end}}
{{- range $t := $.Tables}}
        {{$t.If}}
            WITH e AS (
                SELECT e.ord, e.key, e.asked, CASE WHEN e.asked BETWEEN 1 AND {{$a.Limit}} / e.cost THEN e.cost * e.asked ELSE 0 END AS units
                FROM (
                    SELECT e.ord, e.key, coalesce(e.cost, 1) AS cost, coalesce(e.asked, 1) AS asked, lag(e.key) OVER w IS DISTINCT FROM e.key AS first
                    FROM unnest((SELECT keys), (SELECT costs), (SELECT counts)) WITH ORDINALITY AS e (key, cost, asked, ord)
                    WINDOW w AS (ORDER BY octet_length(e.key) DESC, e.key COLLATE "C", e.ord)
                ) AS e
                WHERE e.first AND octet_length(e.key) BETWEEN 1 AND 512
            ), d AS (
{{include "upsert" (dict "Table" $t.Name "Name" $a.Name "From" (print "SELECT name, e.key, " (include (print $a.Name ".values") "e.units") ` FROM e ORDER BY octet_length(e.key) DESC, e.key COLLATE "C", e.ord`)) | indent 16}}d.*
            )
            SELECT array_agg(ROW(e.ord, e.units, e.asked, NULL, {{include (print $a.Name ".row") "d."}}, NULL)::rate_limit_row)
            INTO taken
            FROM d
            JOIN e ON e.key = d.key COLLATE "C"
            WHERE e.units > 0;
{{- end}}
        END IF;
        t := {{include "now"}};
    END IF;

    IF taken IS NOT NULL THEN
        t := greatest(t, clock); -- whatever the clock was set to meanwhile
        -- For a row that is new, and was made late, the first reading may be too old: a transaction that had made it, too, may have been
        -- waited for until it rolled back. Away with it.
        IF t > clock + 10000 THEN
            PERFORM rate_limit_reset(name, keys[e.ord], durable, NULL::integer, NULL::boolean)
            FROM unnest(taken) AS e
            WHERE {{include (print $a.Name ".at") "e."}} = clock;
            taken := ARRAY(SELECT e FROM unnest(taken) AS e WHERE {{include (print $a.Name ".at") "e."}} <> clock);
        END IF;
        RETURN QUERY
        SELECT e.ord, e.asked, {{include "took" (dict "Name" .Name "Row" "e." "At" "e.at") | hang 12}}
        FROM (SELECT e.*, {{include (print $a.Name ".at") "e."}} AS at FROM unnest(taken) AS e) AS e;
        IF cardinality(taken) = cardinality(keys) THEN
            RETURN;
        END IF;
        SELECT array_agg(e.ord), array_agg(e.key), array_agg(coalesce(e.cost, 1)), array_agg(coalesce(e.asked, 1))
        INTO ords, keys, costs, counts
        FROM unnest(keys, costs, counts) WITH ORDINALITY AS e (key, cost, asked, ord)
        WHERE NOT EXISTS (SELECT FROM unnest(taken) AS k WHERE k.ord = e.ord);
    END IF;
{{end}}
    RETURN QUERY
    SELECT coalesce(ords[a.ord], a.ord), a.granted, a.remaining, a.retry_after_us, a.reset_after_us, a.decided_at,
        a.count, a.prev_count, a.window_start, a.credit, a.scale, a.expires_at, a.log, a.taken_since, a.taken_in, a.taken_at, a.taken_spent
    FROM rate_limit_all(
        ARRAY(SELECT generate_series(1, cardinality(keys))), array_fill(name, ARRAY[cardinality(keys)]), keys,
        array_fill(coalesce(durable, false), ARRAY[cardinality(keys)]), array_fill({{.Code}}::smallint, ARRAY[cardinality(keys)]),
        array_fill({{.Limit}}, ARRAY[cardinality(keys)]), array_fill({{.Span}}, ARRAY[cardinality(keys)]), array_fill({{.Refill}}, ARRAY[cardinality(keys)]),
        costs, counts, lock_timeout_ms, synchronous_commit, now, taken_since, taken_in, taken_at, taken_spent, skip_held) AS a;
END
$$;

COMMENT ON FUNCTION {{.Function}} IS '{{include (print .Name ".comment")}}
It returns a row for each key: ord (its place in keys), granted (how many of the counts requests were granted), remaining (the largest cost that would be granted next), retry_after_us (microseconds until the others can be granted; 0: all were; NULL: never), reset_after_us (microseconds until the key is as good as new), decided_at (the database clock at the decision), the state of the key then, as in the table, and what a refund has to tell: taken_since, taken_in, taken_at and taken_spent. A denial is a row with granted = 0, never an error, and takes nothing. A refund is granted, whatever there was to give back. What is taken commits or rolls back with the transaction.
Example: SELECT * FROM {{.Function}}{{include (print .Name ".example")}}.
Optional, by name: costs and counts for each key (1 each; a cost of 0 only looks, and one below 0 grants credit above the limit, or, with the taken_since, taken_in, taken_at and taken_spent of a decision that took, gives back what that take still counts, and each unit only once if the caller asks only once), durable => true for rate_limit_durable.';

{{end}}
