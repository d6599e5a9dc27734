{{/* The functions of each algorithm that can be called for keys of one limiter. */}}

{{define "sets"}}{{range $i, $c := (split .)}}{{if $i}}, {{end}}{{$c}} = s.{{$c}}{{end}}{{end}}

{{define "row"}}
{{- prefix . "count, prev_count, window_start, credit, scale, expires_at, since, capacity, refill, returned"}}
{{- end}}

{{define "reading"}}coalesce(now_us, (date_part('epoch', clock_timestamp()) * 1000000)::bigint){{end}}

{{/* The first reading of the clock. This expression makes the settings, too. */}}
{{define "clock"}}CASE
    WHEN lock_timeout_ms IS NOT NULL AND lock_timeout_ms <> -1
        AND set_config('lock_timeout', lock_timeout_ms::text, true) IS NULL THEN NULL
    WHEN synchronous_commit IS NOT NULL
        AND set_config('synchronous_commit', synchronous_commit::text, true) IS NULL THEN NULL
    ELSE {{include "reading" | hang 4}} END{{end}}

{{/* By when a row has to be locked that is decided by this reading. */}}
{{define "until"}}CASE WHEN now_us IS NULL THEN timestamptz 'epoch' + (clock + 10000) * interval '1 microsecond'
    ELSE 'infinity' END{{end}}

{{/* When the waits for all rows together have lasted too long. */}}
{{define "give up"}}CASE WHEN lock_timeout_ms <> -1 THEN clock_timestamp() + lock_timeout_ms * interval '25 ms'
    ELSE 'infinity' END{{end}}

{{/* The second reading of the clock, for rows that were locked within 10 ms. */}}
{{define "soon"}}greatest(clock, least(clock + 10000,
    {{include "reading"}})){{end}}

{{/* What a rate_limit_take_ function tells of a row that it took from as it was, or that it made. */}}
{{define "told"}}ARRAY[
    {{.At | hang 4}},
    d.count, d.prev_count, d.window_start, d.credit,
    d.scale, d.expires_at, d.since, d.returned]{{end}}

{{/* The fifteen numbers about what rate_limit_all has decided; . is the place. */}}
{{define "left"}}ARRAY[{{.}},
    a.granted, a.remaining, a.retry_after_us, a.reset_after_us,
    (extract(epoch FROM a.decided_at) * 1000000)::bigint, a.count, a.prev_count, a.window_start, a.credit,
    a.scale, a.expires_at, a.taken_spent, a.taken_since, a.taken_at]{{end}}

{{/* now_us, as rate_limit_all takes it. */}}
{{define "now"}}timestamptz 'epoch' + now_us / 1000000 * interval '1 second'
    + now_us % 1000000 * interval '1 microsecond'{{end}}

{{/* What is asked for the key at .I. This divides, because the product could overflow. */}}
{{define "units"}}CASE WHEN costs IS NULL AND counts IS NULL THEN 1
    WHEN cardinality(costs) = cardinality(keys) AND cardinality(counts) = cardinality(keys)
        AND costs[{{.I}}] BETWEEN 1 AND {{.Limit}} AND counts[{{.I}}] BETWEEN 1 AND {{.Limit}} / costs[{{.I}}]
        THEN costs[{{.I}}] * counts[{{.I}}] END{{end}}

{{define "from each"}}
SELECT name, e.key, {{.}}
FROM unnest(keys, each) AS e (key, units)
{{- end}}

{{/* Takes from rows as they are, or makes them. */}}
{{define "upsert"}}
INSERT INTO rate_limit_{{.Table}} AS d
    {{include (print .Name ".insert") | hang 4}}
{{.From}}
ON CONFLICT (prefix, key) DO UPDATE SET
    {{include (print .Name ".rolls") | hang 4}}
WHERE {{.While}}
    AND {{include (print .Name ".fits") (dict "Units" (include (print .Name ".excluded")) "Rolls" true) | hang 4}}
{{- end}}

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
-- rate_limit_all decides. If all requests take,
-- {{.Takes}} does the same for less.
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
AS $$
#variable_conflict use_variable
DECLARE
    n CONSTANT integer := cardinality(keys);
BEGIN
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
    RETURN QUERY
    SELECT a.*
    FROM rate_limit_all(
        ARRAY(SELECT generate_series(1, n)), array_fill(name, ARRAY[n]), keys,
        array_fill(coalesce(durable, false), ARRAY[n]), array_fill({{.Code}}::smallint, ARRAY[n]),
        array_fill({{.Limit}}, ARRAY[n]), array_fill({{.Span}}, ARRAY[n]), array_fill({{.Refill}}, ARRAY[n]),
        array_replace(costs, NULL, 1::bigint), array_replace(counts, NULL, 1::bigint),
        lock_timeout_ms, synchronous_commit, now,
        taken_since, taken_in, taken_at, taken_spent, skip_held,
        {{if .Zoned}}array_fill(zone, ARRAY[n]){{else}}NULL::text[]{{end}},
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

-- {{.Left}} decides what is left by
-- {{.Takes}}: of keys, which follow
-- upon as many as done, those that are not taken_keys. It does so by the rules of rate_limit_all, and returns fifteen
-- numbers for each. A single key whose row exists is decided here, which costs half as much.
CREATE FUNCTION {{.Left}}(
    name text,
    keys text[],
{{- range .Arguments}}
    {{.}} {{type .}},
{{- end}}
    costs bigint[],
    counts bigint[],
    durable boolean,
    lock_timeout_ms integer,
    synchronous_commit boolean,
    now_us bigint,
    done integer,
    taken_keys text[]
)
RETURNS bigint[]
LANGUAGE plpgsql
AS $$
#variable_conflict use_variable
DECLARE
    undecided bigint[]; -- the places of the keys
    clock bigint;
    cost bigint;
    asked bigint;
    s rate_limit_row;
    t bigint;
    moved boolean;      -- the clock has jumped back, and the row with it
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
{{- end}}
BEGIN
    IF cardinality(keys) = 1 AND coalesce(cardinality(costs), 1) = 1 AND coalesce(cardinality(counts), 1) = 1
        AND coalesce(costs[1], 1) BETWEEN 1 AND {{.Limit}} AND coalesce(counts[1], 1) >= 1
        AND octet_length(name) BETWEEN 1 AND 128 AND octet_length(keys[1]) BETWEEN 1 AND 512
        AND {{include (print .Name ".valid") | hang 8}}
        {{- with maybe (print .Name ".known") ""}}
        AND {{.}}{{end}}
    THEN
{{- range $t := $.Tables}}
        {{$t.If}}
            SELECT NULL::bigint, NULL::bigint, NULL::bigint, d.ctid,
                {{fold 16 (print (include "row" "d.") ", d.log")}}
            INTO s
            FROM rate_limit_{{$t.Name}} AS d
            WHERE d.prefix = name AND d.key = keys[1] AND d.algorithm = {{$a.Code}}
            FOR UPDATE;
{{- end}}
        END IF;
        IF found THEN
            -- The clock is read after the row is locked. Read before, it could be older than the row.
            clock := {{include "reading" | hang 12}};
            moved := false;
            spent := 0;
            cost := coalesce(costs[1], 1);
            asked := coalesce(counts[1], 1);
{{include (print .Name ".roll") | indent 12}}
{{include (print .Name ".room") | indent 12}}
            remaining := remaining + s.{{.Credit}};
            granted := least(asked, remaining / cost);
            retry_after_us := CASE WHEN granted = asked THEN 0 ELSE 1 END;
{{- if eq .Name "slidinglog"}}
            needed := 0;
{{- end}}
            IF granted > 0 THEN
{{include "take" . | indent 16}}
            END IF;
{{include "tell" . | indent 12}}
            IF granted > 0 OR moved THEN
                s.expires_at := clock + reset_after_us;
{{- range $t := $.Tables}}
                {{$t.If}}
                    UPDATE rate_limit_{{$t.Name}} AS d SET
                        {{fold 24 (include "sets" (include (print $a.Name ".columns")))}}
                    WHERE d.ctid = s.tid;
{{- end}}
                END IF;
            END IF;
            RETURN ARRAY[done + 1,
                granted, remaining, retry_after_us, reset_after_us, clock,
                s.count, s.prev_count, s.window_start, s.credit,
                {{if or (eq .Name "tokenbucket") .Zoned}}s.scale{{else}}NULL{{end}}, s.expires_at, spent, s.since,
                {{if eq .Name "tokenbucket"}}s.returned + full_credit - s.credit{{else}}NULL{{end}}]
                {{- if eq .Name "slidinglog"}}

                -- 64 is maxDenialEntries
                || CASE WHEN needed > 0 THEN s.log[1:least(needed, 64)] END
                {{- end}};
        END IF;
    END IF;

    -- The row is another algorithm's, or there are several, or something is not valid.
    undecided := ARRAY(
        SELECT e.place FROM unnest(keys) WITH ORDINALITY AS e (key, place)
        WHERE (e.key = ANY (taken_keys)) IS NOT TRUE
        ORDER BY e.place);
    IF taken_keys IS NOT NULL THEN
        SELECT array_agg(keys[e.place] ORDER BY e.place), array_agg(coalesce(costs[e.place], 1) ORDER BY e.place),
            array_agg(coalesce(counts[e.place], 1) ORDER BY e.place)
        INTO keys, costs, counts
        FROM unnest(undecided) AS e (place);
    END IF;
    RETURN ARRAY(
        SELECT unnest({{include "left" "done + undecided[a.ord]" | hang 8}}
            {{- if eq .Name "slidinglog"}}
            || CASE WHEN cardinality(keys) = 1 THEN a.log END
            {{- end}})
        FROM {{.Function}}(
            name, keys, {{range .Arguments}}{{.}}, {{end}}costs, counts, durable,
            lock_timeout_ms, synchronous_commit,
            {{include "now" | hang 12}},
            NULL::bigint[], NULL::bigint[], NULL::bigint[], NULL::bigint[], false) AS a);
END
$$;

-- {{.Takes}} decides as
-- {{.Function}} does, if all requests take.
-- This is what the Go package calls. Few keys are taken from one after the other, and many by one statement, which also
-- makes rows. All that is less ordinary is decided by the rules of rate_limit_all, in the same call. The arguments are
-- the same, but for now_us, which is a time in microseconds since 1970 UTC, and for costs and counts: both are NULL, or
-- neither is.
{{- if has (print .Name ".rolls")}} fresh says that there are probably no rows, or none that still count. Then they are
-- made without looking for them first. That saves a seventh of the time, or takes a third more if there are
-- rows.{{end}}
--
-- It returns one array, because rows and their columns would cost more than the decision. First, for each key of which
-- all that was asked could be taken at once, nine numbers, in the order of the keys: the time of the decision, and
-- count, prev_count, window_start, credit, scale, expires_at, since and returned of the row. What remains, and for how
-- long, follows from these: see takenDecision in takes.go. Then, for each other key, fifteen: its place in keys, and
-- from granted to expires_at what {{.Function}} returns,
-- then its taken_spent, taken_since and taken_at. Of a single key, the log of that comes last.
--
-- The keys must ascend in the order of locking: longer ones first, then by bytes. Otherwise rate_limit_all decides.
{{- if has (print .Name ".rolls")}}
--
-- The clock is read twice: before a row is locked, and with the lock held. A decision is made by the first reading, and
-- what it needs must be true then and still be true 10 ms later. So it was also true when the row was locked: rows that
-- were waited for longer are left out, and the UPDATE is undone if its row had ended before the lock. The decision is
-- told by the second reading. Only a window or a bucket that begins does so at the first reading, because nobody else
-- can have decided anything by it since.
{{- end}}
CREATE FUNCTION {{.Takes}}(
    name text,
    keys text[],
{{- range .Arguments}}
    {{.}} {{type .}},
{{- end}}
    costs bigint[] DEFAULT NULL,
    counts bigint[] DEFAULT NULL,
    durable boolean DEFAULT false,
    lock_timeout_ms integer DEFAULT NULL,
    synchronous_commit boolean DEFAULT NULL,
    now_us bigint DEFAULT NULL
{{- if has (print .Name ".rolls")}},
    fresh boolean DEFAULT NULL{{end}}
)
RETURNS bigint[]
LANGUAGE plpgsql
SECURITY DEFINER
SET enable_seqscan = off -- a plan must not depend on how small the table was when it was made
SET plan_cache_mode = force_generic_plan -- the first five calls of a session would each make a plan of their own
AS $$
#variable_conflict use_variable
DECLARE
{{- if has (print .Name ".rolls")}}
    -- Each expression counts here, because plpgsql prepares it anew in every transaction. So this one makes the
    -- settings, too.
    clock bigint := {{include "clock" | hang 4}};
    -- What is asked for a key, or NULL if something is not valid.
    units bigint := CASE WHEN ({{include (print .Name ".valid") | hang 8}}) THEN
        {{include "units" (dict "I" "1" "Limit" .Limit) | hang 8}} END;
    taken bigint[];
    ends bigint;       -- the last time by which the row that was taken from is as it was
    late boolean;      -- a row was waited for, and the reading of the clock is too old
{{- if .Zoned}}
    window_end bigint; -- of a window that begins now
{{- end}}
    each bigint[];     -- units of each key
    this_key text;
    before text;       -- the key before it
    ascend boolean;
    begun bigint[];    -- which of them have a row that was made
    until timestamptz; -- by when a row has to be locked
    give_up timestamptz;
{{- if eq .Name "tokenbucket"}}
    -- The rules say so, because in takeall.sql capacity and refill would be those of the row.
    tokens ALIAS FOR capacity;
    inflow ALIAS FOR refill;
    full_credit bigint := CASE WHEN units IS NOT NULL THEN capacity * every_us END;
{{- end}}
{{- end}}
    told bigint[];     -- of the keys that were taken from one after the other
    done integer;      -- how many these are
    taken_keys text[]; -- that were taken from by one statement
BEGIN
{{- if not (has (print .Name ".rolls"))}}
    IF lock_timeout_ms <> -1 THEN
        PERFORM set_config('lock_timeout', lock_timeout_ms::text, true);
    END IF;
    IF synchronous_commit IS NOT NULL THEN
        PERFORM set_config('synchronous_commit', synchronous_commit::text, true);
    END IF;
{{- end}}
{{- if has (print .Name ".rolls")}}
    IF cardinality(keys) > 1 THEN
        ascend := keys[cardinality(keys)] IS NOT NULL -- or the arrays are not counted from 1
            AND (costs IS NULL AND counts IS NULL
                OR costs[cardinality(keys)] IS NOT NULL AND counts[cardinality(keys)] IS NOT NULL);
        FOREACH this_key IN ARRAY keys LOOP
            ascend := (ascend AND octet_length(this_key) BETWEEN 1 AND 512 AND (before IS NULL
                OR (-octet_length(before), before COLLATE "C")
                    < (-octet_length(this_key), this_key COLLATE "C"))) IS TRUE;
            before := this_key;
        END LOOP;
    END IF;
    -- Most calls are for one key or a few, and take from rows as they are. (If there is a row, the name and the key are
    -- valid.) For more, one statement costs less than one for each.
    IF fresh IS NOT TRUE AND units IS NOT NULL AND ascend IS NOT FALSE AND cardinality(keys) <= 6 THEN
        FOR i IN 1 .. cardinality(keys) LOOP
            IF i > 1 THEN
                units := {{include "units" (dict "I" "i" "Limit" .Limit) | hang 16}};
            END IF;
{{- range $t := $.Tables}}
            {{$t.If}}
                UPDATE rate_limit_{{$t.Name}} AS d SET
                    {{include (print $a.Name ".adds") | hang 20}}
                WHERE d.prefix = name AND d.key = keys[i]
                    AND {{include (print $a.Name ".fits") (dict "Units" "units" "Rolls" false) | hang 20}}
                RETURNING {{include "told" (dict "At" (include "reading")) | hang 16}},
                    {{include (print $a.Name ".latest") "d."}}
                INTO taken, ends;
{{- end}}
            END IF;
            IF taken[1] BETWEEN clock AND ends THEN
                told := told || taken;
                done := i;
                CONTINUE;
            END IF;
            IF found THEN
                -- The wait for the row lasted until the row ended, or the clock was set meanwhile. Another decision may
                -- be due.
                late := true;
{{- range $t := $.Tables}}
                {{$t.If}}
                    UPDATE rate_limit_{{$t.Name}} AS d SET {{include (print $a.Name ".undoes")}}
                    WHERE d.prefix = name AND d.key = keys[i];
{{- end}}
                END IF;
            END IF;
            EXIT;
        END LOOP;
        IF done = cardinality(keys) THEN
            RETURN told;
        ELSIF done > 0 THEN -- go on with the others
            keys := keys[done + 1:];
            costs := costs[done + 1:];
            counts := counts[done + 1:];
            units := {{include "units" (dict "I" "1" "Limit" .Limit) | hang 12}};
        END IF;
    END IF;
    IF late IS NULL AND ascend IS NOT FALSE
        AND units IS NOT NULL AND octet_length(name) BETWEEN 1 AND 128 AND octet_length(keys[1]) BETWEEN 1 AND 512
        {{- with maybe (print .Name ".known") ""}}
        AND {{.}}{{end}}
    THEN
{{- with maybe (print .Name ".begin") ""}}
        {{.}}
{{- end}}
        IF cardinality(keys) = 1 OR costs IS NULL AND counts IS NULL THEN
            each := array_fill(units, ARRAY[cardinality(keys)]);
        ELSE
            each := ARRAY(
                SELECT CASE WHEN u.cost BETWEEN 1 AND {{.Limit}} AND u.asked BETWEEN 1 AND {{.Limit}} / u.cost
                    THEN u.cost * u.asked END
                FROM unnest(costs, counts) AS u (cost, asked));
        END IF;
        IF cardinality(each) = cardinality(keys) AND array_position(each, NULL) IS NULL THEN
            until := {{include "until" | hang 12}};
            give_up := {{include "give up" | hang 12}};
{{- $from := include "from each" (include (print .Name ".values") "e.units")}}
{{- range $t := $.Tables}}
            {{$t.If}}
                WITH d AS (
                    {{include "upsert" (dict "Table" $t.Name "Name" $a.Name "From" $from
                        "While" "(clock_timestamp() < until OR clock_timestamp() > give_up AND _rate_limit_late())")
                        | hang 20}}
                    RETURNING d.key, {{include "told" (dict "At" (include "soon")) | hang 20}} AS told
                )
                SELECT array_agg(d.key), array_agg(d.told) INTO taken_keys, taken FROM d;
{{- end}}
            END IF;
            -- A row that was made begins by the first reading of the clock. That may be too old for it: another
            -- transaction may have made the same row, and rolled back after this one had waited for it. Such a row is
            -- deleted, and decided anew.
            IF clock_timestamp() > until THEN
                begun := ARRAY(
                    SELECT k.place
                    FROM unnest(taken_keys) WITH ORDINALITY AS k (key, place)
                    JOIN unnest(keys, each) AS e (key, units) ON e.key = k.key COLLATE "C"
                    CROSS JOIN LATERAL (SELECT taken[k.place][2] AS count, taken[k.place][3] AS prev_count,
                        taken[k.place][5] AS credit) AS d
                    WHERE {{include (print .Name ".new") "e.units"}});
                PERFORM rate_limit_reset(name, taken_keys[p], durable, NULL::integer, NULL::boolean)
                FROM unnest(begun) AS p;
                SELECT array_agg(k.key ORDER BY k.place), array_agg(taken[k.place:k.place] ORDER BY k.place)
                INTO taken_keys, taken
                FROM unnest(taken_keys) WITH ORDINALITY AS k (key, place)
                WHERE k.place <> ALL (begun);
            END IF;
            IF cardinality(taken_keys) = cardinality(keys) THEN
                IF told IS NULL THEN
                    RETURN taken;
                END IF;
                RETURN told || ARRAY(SELECT unnest(taken));
            END IF;
            told := told || ARRAY(SELECT unnest(taken));
        END IF;
    END IF;
{{- end}}

    RETURN told || {{.Left}}(
        name, keys, {{range .Arguments}}{{.}}, {{end}}costs, counts, durable,
        lock_timeout_ms, synchronous_commit, now_us, coalesce(done, 0), taken_keys);
END
$$;

COMMENT ON FUNCTION {{.Takes}} IS
    'Takes as {{.Function}} does, for less. '
    'It returns an array of numbers, for programs: see sql/limit.sql. For people there is rate_limit_allow.
Example: SELECT {{.Takes}}{{include (print .Name ".example")}}.';

{{end}}
