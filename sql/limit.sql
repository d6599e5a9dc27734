{{/* The function of each algorithm that can be called for keys of one limiter. */}}

{{define "now"}}(extract(epoch FROM coalesce(now, clock_timestamp())) * 1000000)::bigint{{end}}

{{/* Takes from rows as they are, or makes them: an INSERT for what .From gives. */}}
{{define "upsert"}}
INSERT INTO rate_limit_{{.Table}} AS d
    {{include (print .Name ".insert") | hang 4}}
{{.From}}
ON CONFLICT (prefix, key) DO UPDATE SET
{{include (print .Name ".rolls") | indent 4}}
WHERE (clock_timestamp() < decided_at + interval '10 ms' OR now IS NOT NULL
        OR lock_timeout_ms IS NOT NULL
            AND clock_timestamp() > decided_at + lock_timeout_ms * interval '25 ms'
            AND _rate_limit_late())
    AND {{include (print .Name ".fits") (dict "Units" (include (print .Name ".excluded")) "Rolls" true) | hang 4}}
RETURNING {{end}}

{{define "of each"}}
SELECT name, e.key, {{.}}
FROM e ORDER BY e.place
{{end}}

{{/* The decision about a row that took, at time .At. .Row is what precedes a column. */}}
{{define "took"}}{{include (print .Name ".left") .}},
0::bigint, {{include (print .Name ".resets") .Row}} - {{.At}},
{{.DecidedAt}},
{{include (print .Name ".state") .Row}}, NULL::bigint[],
{{include (print .Name ".receipt") .}}, 0::bigint{{end}}

{{/* The time by which the decision about a row of the one statement is told: see below. */}}
{{define "at"}}CASE
    WHEN {{include (print .Name ".new") "e."}} THEN e.window_start
    ELSE least(t, {{include (print .Name ".latest") "e."}})
END{{end}}

{{define "sets"}}{{range $i, $c := (split .)}}{{if $i}}, {{end}}{{$c}} = s.{{$c}}{{end}}{{end}}

{{define "row"}}
{{- prefix . "count, prev_count, window_start, credit, scale, expires_at, since, capacity, refill, returned"}}
{{- end}}

{{define "settings"}}
IF lock_timeout_ms <> -1 THEN
    ignored := set_config('lock_timeout', lock_timeout_ms::text, true);
ELSE
    lock_timeout_ms := NULL;
END IF;
IF synchronous_commit IS NOT NULL THEN
    ignored := set_config('synchronous_commit', synchronous_commit::text, true);
END IF;
{{end}}

{{range $a := .Algorithms}}
-- {{include (print .Name ".title")}}.
--
--   name                the limiter's name, 1 to 128 bytes
--   keys                who asks, 1 to 512 bytes each. A key may stand here several times, and is decided in that order
{{include (print .Name ".arguments")}}
--   costs               cost of one request, for each key; NULL means 1 each. A cost of 0 takes nothing and tells
--                       whether a cost of 1 would fit. A cost below 0 gives back or grants, see taken_in. A cost
--                       above {{.Limit}} is denied with a retry_after_us of NULL, which means never
--   counts              how many such requests are asked, for each key; NULL means 1 each
--   durable             whether the rows are in rate_limit_durable rather than in rate_limit_ephemeral
--   lock_timeout_ms     longest wait for one row, for this transaction; NULL leaves the session's lock_timeout. So does
--                       -1, which says that the call is part of a transaction of its caller's, as with AllowTx. A proxy
--                       for shards refuses that, because it cannot take back what a shard has committed
--   synchronous_commit  whether the commit of this transaction waits for the WAL; NULL leaves the session's setting
--   now                 replaces the clock, for tests
--   taken_since, taken_in, taken_at, taken_spent
--                       which take a cost below 0 gives back: what the decision of that take returned under these
--                       names, for each key. If taken_in is NULL, nothing is given back, and the cost grants credit
--                       above the limit. A key holds up to 2^61 of credit
--   skip_held           whether to decide only the other keys if somebody's transaction has locked the row of a key, or
--                       is just making it. For such a key a row comes back with a granted of -2, or none: see
--                       rate_limit_all
--
-- A few keys that come in the order of locking are decided one after the other
{{- if has (print .Name ".rolls")}}. If the row exists and will
-- stay in force for a while, an UPDATE takes from it. Otherwise the row is locked and written, or made. Many keys are
-- decided by one statement: it takes from each row as it is, or makes it
{{- end}}. Everything
-- less ordinary is left to rate_limit_all.
{{- if has (print .Name ".rolls")}}
--
-- The clock is read twice: before a row is locked, and with the lock held. A decision is made by the first reading, and
-- what it needs must be true then and still be true 10 ms later. So it was also true when the row was locked: the one
-- statement leaves out rows that were waited for longer, and the UPDATE is undone if its row had ended before the lock.
-- The decision is told by the second reading. Only a window or a bucket that begins does so at the first reading,
-- because nobody else can have decided anything by it since.
{{- end}}
CREATE FUNCTION {{.Function}}(
    name text,
    keys text[],
{{- range .Arguments}}
    {{.}} {{type .}},
{{- end}}
    costs bigint[] DEFAULT NULL,
    counts bigint[] DEFAULT NULL,
    durable boolean DEFAULT false,
{{include "arguments" ""}}
SET enable_seqscan = off -- a plan must not depend on how small the table was when it was made
{{- if has (print .Name ".rolls")}}
SET enable_nestloop = off -- two lists of keys are joined below, and the planner takes them for short ones
{{- end}}
AS $$
#variable_conflict use_variable
DECLARE
    decided_at timestamptz;
    clock bigint;
{{- if has (print .Name ".rolls")}}
    taken rate_limit_row[]; -- the rows that one statement took from or made; their cost is what was taken
{{- end}}
    t bigint;
    n integer := cardinality(keys);
    few boolean;            -- whether to decide one key after the other
    undecided bigint[];     -- the places of the keys that are left to rate_limit_all
    give_up timestamptz;
    cost bigint := 1;       -- what is asked for the current key
    asked bigint := 1;
{{- if has (print .Name ".adds")}}
    r_cost bigint := 1;     -- all of that together, and below it the row if it was taken from it
{{- range (split (include (print .Name ".returned")))}}
    r_{{.}} bigint;
{{- end}}
{{- end}}
    s rate_limit_row;       -- otherwise the row's state
    moved boolean;          -- the clock has jumped back, and the row with it
    granted bigint;
    remaining bigint;
    spent bigint;
    units bigint;
    free_at bigint;
    retry_after_us bigint;
    reset_after_us bigint;
{{- if eq .Name "sliding"}}
    rest bigint;
{{- else if eq .Name "tokenbucket"}}
    full_credit bigint;
{{- else if eq .Name "slidinglog"}}
    newest integer;
    needed integer;
    age_bits CONSTANT bigint := 9007199254740991; -- as in rate_limit_all
{{- else if .Zoned}}
    window_end bigint;      -- of a window that begins now
{{- end}}
    ignored text;
BEGIN
    -- One key, as in most calls of an application that is not under load, or a few in the order of locking, are decided
    -- one after the other. Each operator counts here, because plpgsql prepares an expression anew in every transaction.
    few := n BETWEEN 1 AND {{$.Few}} AND taken_in IS NULL AND NOT skip_held
        AND {{include (print .Name ".valid") | hang 8}}
        {{- with maybe (print .Name ".known") ""}}
        AND {{.}}{{end}};
    IF few AND (n > 1 OR costs IS NOT NULL OR counts IS NOT NULL) THEN
        few := coalesce(cardinality(costs), n) = n AND coalesce(cardinality(counts), n) = n;
        FOR i IN 1 .. n LOOP
            few := few AND coalesce(costs[i], 1) BETWEEN 1 AND {{.Limit}}
                AND coalesce(counts[i], 1) BETWEEN 1 AND {{.Limit}} / greatest(costs[i], 1);
        END LOOP;
        FOR i IN 2 .. n LOOP
            few := few AND (-octet_length(keys[i - 1]), keys[i - 1] COLLATE "C")
                <= (-octet_length(keys[i]), keys[i] COLLATE "C");
        END LOOP;
    END IF;
    IF few THEN
{{include "settings" | indent 8}}
{{- if eq .Name "tokenbucket"}}
        full_credit := capacity * every_us;
{{- end}}
        <<each_key>>
        FOR i IN 1 .. n LOOP
            IF i > 1 THEN -- the rows before this one are locked
                give_up := coalesce(give_up, clock_timestamp() + lock_timeout_ms * interval '25 ms');
                IF now IS NULL AND clock_timestamp() > give_up THEN
                    PERFORM _rate_limit_late();
                END IF;
            END IF;
            IF costs IS NOT NULL OR counts IS NOT NULL THEN
                cost := coalesce(costs[i], 1);
                asked := coalesce(counts[i], 1);
{{- if has (print .Name ".adds")}}
                r_cost := cost * asked;
{{- end}}
            END IF;
{{- if has (print .Name ".adds")}}
            -- Most calls take from a row as it is. (If there is one, the name and the key are valid.)
            decided_at := coalesce(now, clock_timestamp());
            clock := (extract(epoch FROM decided_at) * 1000000)::bigint;
{{- range $t := $.Tables}}
            {{$t.If}}
                UPDATE rate_limit_{{$t.Name}} AS d SET
                    {{include (print $a.Name ".adds") | hang 20}}
                WHERE d.prefix = name AND d.key = keys[i]
                    AND {{include (print $a.Name ".fits") (dict "Units" "r_cost" "Rolls" false) | hang 20}}
                RETURNING {{prefix "d." (include (print $a.Name ".returned"))}}
                INTO {{prefix "r_" (include (print $a.Name ".returned"))}};
{{- end}}
            END IF;
            IF found THEN
                decided_at := coalesce(now, clock_timestamp());
                t := (extract(epoch FROM decided_at) * 1000000)::bigint;
                -- Is the window still running, or the bucket still filling?
                IF t BETWEEN clock AND {{include (print .Name ".latest") "r_"}} THEN
                    RETURN NEXT ROW(i::bigint, asked,
                        {{include "took" (dict "Name" .Name "Row" "r_" "At" "t" "DecidedAt" "decided_at") | hang 24}});
                    CONTINUE;
                END IF;
                -- The wait for the row lasted until the row ended, or the clock was set meanwhile. Another decision
                -- may be due.
{{- range $t := $.Tables}}
                {{$t.If}}
                    UPDATE rate_limit_{{$t.Name}} AS d SET {{include (print $a.Name ".undoes")}}
                    WHERE d.prefix = name AND d.key = keys[i];
{{- end}}
                END IF;
            END IF;
{{- end}}
            IF (octet_length(name) BETWEEN 1 AND 128 AND octet_length(keys[i]) BETWEEN 1 AND 512) IS NOT TRUE THEN
                undecided := ARRAY(SELECT generate_series(i, n)::bigint); -- rate_limit_all raises the error
                EXIT;
            END IF;
            FOR attempt IN 1 .. 3 LOOP
                IF attempt = 3 THEN
                    -- Another algorithm has written the row, or somebody deletes it all the time. The keys behind it
                    -- are left to rate_limit_all too: locking a later row before this one could cause a deadlock.
                    undecided := ARRAY(SELECT generate_series(i, n)::bigint);
                    EXIT each_key;
                END IF;
{{- range $t := $.Tables}}
                {{$t.If}}
                    SELECT NULL::bigint, NULL::bigint, NULL::bigint, d.ctid,
                        {{fold 24 (print (include "row" "d.") ", d.log")}}
                    INTO s
                    FROM rate_limit_{{$t.Name}} AS d
                    WHERE d.prefix = name AND d.key = keys[i] AND d.algorithm = {{$a.Code}}
                    FOR UPDATE;
{{- end}}
                END IF;
                IF NOT found THEN
{{- if has (print .Name ".adds")}} -- what is asked fits into a new row
                    IF attempt > 1 THEN
                        decided_at := coalesce(now, clock_timestamp());
                        clock := (extract(epoch FROM decided_at) * 1000000)::bigint;
                    END IF;
{{- with maybe (print .Name ".begin") ""}}
                    {{.}}
{{- end}}
{{- range $t := $.Tables}}
                    {{$t.If}}
                        INSERT INTO rate_limit_{{$t.Name}} AS d
                            {{include (print $a.Name ".insert") | hang 28}}
                        VALUES (name, keys[i], {{include (print $a.Name ".values") "r_cost"}})
                        ON CONFLICT (prefix, key) DO NOTHING
                        RETURNING {{prefix "d." (include (print $a.Name ".returned"))}}
                        INTO {{prefix "r_" (include (print $a.Name ".returned"))}};
{{- end}}
                    END IF;
                    CONTINUE WHEN NOT found; -- somebody else has made it
                    -- Whoever was making it may have rolled back. Then this call has waited for them, and its reading
                    -- of the clock is too old.
                    IF now IS NULL AND clock_timestamp() > decided_at + interval '10 ms' THEN
                        PERFORM rate_limit_reset(name, keys[i], durable, NULL::integer, NULL::boolean);
                        CONTINUE;
                    END IF;
{{- $about := dict "Name" .Name "Row" "r_" "At" "clock" "DecidedAt" "decided_at"}}
                    RETURN NEXT ROW(i::bigint, asked,
                        {{include "took" $about | hang 24}});
                    EXIT;
{{- else}}
                    s := ROW(NULL, NULL, NULL, NULL, 0, 0, 0, 0, NULL, 0, NULL, NULL, NULL, NULL, NULL)::rate_limit_row;
{{- end}}
                END IF;
                -- The clock is read after the row is locked. Read before, it could be older than the row.
                decided_at := coalesce(now, clock_timestamp());
                clock := (extract(epoch FROM decided_at) * 1000000)::bigint;
                moved := false;
{{include (print .Name ".roll") | indent 16}}
{{include (print .Name ".room") | indent 16}}
                remaining := remaining + s.{{.Credit}};
                granted := least(asked, remaining / cost);
                retry_after_us := CASE WHEN granted = asked THEN 0 ELSE 1 END;
                spent := 0;
{{- if eq .Name "slidinglog"}}
                needed := 0;
{{- end}}
                IF granted > 0 THEN
{{include "take" . | indent 20}}
                END IF;
{{include "tell" . | indent 16}}
                IF granted > 0 OR moved THEN
                    s.expires_at := clock + reset_after_us;
{{- range $t := $.Tables}}
                    {{$t.If}}
                        UPDATE rate_limit_{{$t.Name}} AS d SET
                            {{fold 28 (include "sets" (include (print $a.Name ".columns")))}}
                        WHERE d.ctid = s.tid;
{{- if not (has (print $a.Name ".adds"))}}
                        IF s.tid IS NULL THEN
                            INSERT INTO rate_limit_{{$t.Name}} AS d
                                (prefix, key, algorithm, {{include (print $a.Name ".columns")}})
                            VALUES (name, keys[i], {{$a.Code}}, {{prefix "s." (include (print $a.Name ".columns"))}})
                            ON CONFLICT (prefix, key) DO NOTHING;
                        END IF;
{{- end}}
{{- end}}
                    END IF;
{{- if not (has (print .Name ".adds"))}}
                    CONTINUE WHEN NOT found; -- somebody else has made it
                    -- Whoever was making it may have rolled back. Then this call has waited for them, and its reading
                    -- of the clock is too old.
                    IF s.tid IS NULL AND now IS NULL AND clock_timestamp() > decided_at + interval '10 ms' THEN
                        PERFORM rate_limit_reset(name, keys[i], durable, NULL::integer, NULL::boolean);
                        CONTINUE;
                    END IF;
{{- end}}
                END IF;
                RETURN NEXT ROW(i::bigint, granted, remaining, retry_after_us, reset_after_us, decided_at,
                    s.count, s.prev_count, s.window_start, s.credit,
                    {{if or (eq .Name "tokenbucket") .Zoned}}s.scale{{else}}NULL::bigint{{end}}, s.expires_at,
                    {{if eq .Name "slidinglog" -}}
                        CASE WHEN needed > 0 THEN s.log[1:least(needed, 64)] END
                    {{- else}}NULL::bigint[]{{end}},
                    s.since, s.window_start,
                    {{if eq .Name "tokenbucket"}}s.returned + full_credit - s.credit{{else}}NULL::bigint{{end}}, spent);
                EXIT;
            END LOOP;
        END LOOP;
        IF undecided IS NULL THEN
            RETURN;
        END IF;
    END IF;

    IF ({{include (print .Name ".valid") | hang 4}}
        {{- with maybe (print .Name ".known") ""}}
    AND {{.}}{{end}}) IS NOT TRUE THEN
        RAISE EXCEPTION 'rate_limit: {{range $i, $n := .Arguments}}{{if $i}}, {{end}}{{$n}} %{{end}}
            {{- ": "}}outside the exact range'
            {{- range .Arguments}},
                {{.}}{{end}}
            USING ERRCODE = 'invalid_parameter_value',
                HINT = '{{include (print .Name ".hint") | hang 20}}';
    END IF;
    IF (octet_length(name) BETWEEN 1 AND 128 AND keys[cardinality(keys)] IS NOT NULL
            AND (costs IS NULL OR cardinality(costs) = cardinality(keys))
            AND (counts IS NULL OR cardinality(counts) = cardinality(keys))
            AND (taken_in IS NULL OR cardinality(taken_in) = cardinality(keys))) IS NOT TRUE THEN
        RAISE EXCEPTION 'rate_limit: % is not valid', CASE
                WHEN (octet_length(name) BETWEEN 1 AND 128) IS NOT TRUE THEN 'name'
                WHEN keys[cardinality(keys)] IS NULL THEN 'keys'
                WHEN cardinality(costs) <> cardinality(keys) THEN 'costs'
                WHEN cardinality(counts) <> cardinality(keys) THEN 'counts'
                ELSE 'taken_in' END
            USING ERRCODE = 'invalid_parameter_value',
                HINT = 'A name has 1 to 128 bytes. At least one key is needed, and as many costs, counts and taken_in '
                    'as keys. NULL instead of costs or counts means 1 for each key, and NULL instead of taken_in that '
                    'there are no refunds.',
                COLUMN = CASE WHEN octet_length(name) > 128 THEN 'name' ELSE '' END;
    END IF;
{{- if has (print .Name ".rolls")}}
    IF NOT few AND NOT (skip_held IS TRUE OR taken_in IS NOT NULL
        OR 1 > ANY (costs) OR {{.Limit}} < ANY (costs)) IS TRUE
    THEN
{{include "settings" | indent 8}}
        decided_at := coalesce(now, clock_timestamp());
        clock := (extract(epoch FROM decided_at) * 1000000)::bigint;
{{- if eq .Name "tokenbucket"}}
        full_credit := capacity * every_us;
{{- end}}
{{- with maybe (print .Name ".begin") ""}}
        {{.}}
{{- end}}
{{- range $t := $.Tables}}
        {{$t.If}}
            WITH e AS (
                SELECT e.ord, e.place, e.key, e.asked,
                    CASE WHEN e.asked BETWEEN 1 AND {{$a.Limit}} / e.cost THEN e.cost * e.asked ELSE 0 END AS units
                FROM (
                    SELECT e.*, lag(e.place) OVER (ORDER BY e.place, e.ord) IS DISTINCT FROM e.place AS first
                    FROM (
                        SELECT e.ord, e.key, coalesce(e.cost, 1) AS cost, coalesce(e.asked, 1) AS asked,
                            concat(1512 - octet_length(e.key), e.key) COLLATE "C" AS place
                        FROM unnest((SELECT keys), (SELECT costs), (SELECT counts))
                            WITH ORDINALITY AS e (key, cost, asked, ord)
                    ) AS e
                ) AS e
                WHERE e.first AND octet_length(e.key) BETWEEN 1 AND 512
            ), d AS (

{{- $from := include "of each" (include (print $a.Name ".values") "e.units")}}
{{include "upsert" (dict "Table" $t.Name "Name" $a.Name "From" $from) | indent 16}}d.*
            )
            SELECT array_agg(ROW(e.ord, e.units, e.asked, NULL,
                {{include (print $a.Name ".row") "d."}}, NULL
            )::rate_limit_row)
            INTO taken
            FROM d
            JOIN e ON e.key = d.key COLLATE "C"
            WHERE e.units > 0;
{{- end}}
        END IF;
    END IF;

    IF taken IS NOT NULL THEN
        -- The clock may have been set back meanwhile.
        t := greatest({{include "now"}}, clock);
        -- If a new row was made late, the first reading may be too old for it: another transaction may have made the
        -- same row, and rolled back after this one had waited for it. Such a row is deleted, and decided anew.
        IF t > clock + 10000 THEN
            PERFORM rate_limit_reset(name, keys[e.ord], durable, NULL::integer, NULL::boolean)
            FROM unnest(taken) AS e
            WHERE {{include "at" . | hang 12}} = clock;
            taken := ARRAY(
                SELECT e FROM unnest(taken) AS e
                WHERE {{include "at" . | hang 16}} <> clock);
        END IF;
        RETURN QUERY
{{- $decided := "decided_at + (e.at - clock) * interval '1 microsecond'"}}
        SELECT e.ord, e.asked,
            {{include "took" (dict "Name" .Name "Row" "e." "At" "e.at" "DecidedAt" $decided) | hang 12}}
        FROM (
            SELECT e.*, {{include "at" . | hang 12}} AS at
            FROM unnest(taken) AS e
        ) AS e;
        IF cardinality(taken) = cardinality(keys) THEN
            RETURN;
        END IF;
        undecided := ARRAY(
            SELECT e.ord FROM generate_series(1, cardinality(keys)) AS e (ord)
            WHERE NOT EXISTS (SELECT FROM unnest(taken) AS k WHERE k.ord = e.ord));
    END IF;
{{- end}}
    IF undecided IS NOT NULL THEN
        SELECT array_agg(keys[e.ord] ORDER BY e.ord), array_agg(coalesce(costs[e.ord], 1) ORDER BY e.ord),
            array_agg(coalesce(counts[e.ord], 1) ORDER BY e.ord)
        INTO keys, costs, counts
        FROM unnest(undecided) AS e (ord);
    END IF;
    RETURN QUERY
    SELECT coalesce(undecided[a.ord], a.ord), a.granted, a.remaining, a.retry_after_us, a.reset_after_us, a.decided_at,
        a.count, a.prev_count, a.window_start, a.credit, a.scale, a.expires_at, a.log,
        a.taken_since, a.taken_in, a.taken_at, a.taken_spent
    FROM rate_limit_all(
        ARRAY(SELECT generate_series(1, cardinality(keys))), array_fill(name, ARRAY[cardinality(keys)]), keys,
        array_fill(coalesce(durable, false), ARRAY[cardinality(keys)]),
        array_fill({{.Code}}::smallint, ARRAY[cardinality(keys)]),
        array_fill({{.Limit}}, ARRAY[cardinality(keys)]), array_fill({{.Span}}, ARRAY[cardinality(keys)]),
        array_fill({{.Refill}}, ARRAY[cardinality(keys)]),
        costs, counts, lock_timeout_ms, synchronous_commit, now,
        taken_since, taken_in, taken_at, taken_spent, skip_held,
        {{if .Zoned}}array_fill(zone, ARRAY[cardinality(keys)]){{else}}NULL::text[]{{end}},
        NULL::bigint[]) AS a;
END
$$;

COMMENT ON FUNCTION {{.Function}} IS
    '{{include (print .Name ".comment") | hang 4}}
It returns a row for each key: '
    'ord (its place in keys), '
    'granted (how many of the counts requests were granted), '
    'remaining (the largest cost that would be granted next), '
    'retry_after_us (microseconds until the others can be granted; 0: all were; NULL: never), '
    'reset_after_us (microseconds until the key is as good as new), '
    'decided_at (the database clock at the decision), '
    'the state of the key then, as in the table, '
    'and what a refund has to tell: taken_since, taken_in, taken_at and taken_spent. '
    'A denial is a row with granted = 0, never an error, and takes nothing. '
    'A refund is always granted, even if there was nothing to give back. '
    'What is taken commits or rolls back with the transaction.
Example: SELECT * FROM {{.Function}}{{include (print .Name ".example")}}.
Optional, by name: costs and counts for each key, which are 1 each by default, '
    'and durable => true for rate_limit_durable. '
    'A cost of 0 only looks. A cost below 0 grants credit above the limit. '
    'With the taken_since, taken_in, taken_at and taken_spent of a decision that took, a cost below 0 is a refund: '
    'it gives back what that take still counts. '
    'Each unit is given back only once if the caller asks only once.';

{{end}}