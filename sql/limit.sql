{{/* The functions of each algorithm that can be called for keys of one limiter. */}}

{{define "sets"}}{{range $i, $c := (split .)}}{{if $i}}, {{end}}{{$c}} = s.{{$c}}{{end}}{{end}}

{{define "row"}}
{{- prefix . "count, prev_count, window_start, credit, scale, expires_at, since, capacity, refill, returned"}}
{{- end}}

{{/* If the million were an integer, Postgres would look through all operators: 6 % of the instructions of a session's
first call. */}}
{{define "reading"}}coalesce(now_us, (date_part('epoch', clock_timestamp()) * float8 '1e6')::bigint){{end}}

{{/* The first reading of the clock. This expression sets lock_timeout, too. */}}
{{define "clock"}}CASE
    WHEN coalesce(lock_timeout_ms, -1) <> -1
        AND set_config('lock_timeout', lock_timeout_ms::text, true) IS NULL THEN NULL
    ELSE {{include "reading" | hang 4}} END{{end}}

{{define "commit"}}
IF synchronous_commit IS NOT NULL THEN
    ignored := set_config('synchronous_commit', synchronous_commit::text, true);
END IF;
{{end}}

{{/* Whether what is asked for is valid, and so is what is to be made. */}}
{{define "can take"}}
{{- if eq .Name "tokenbucket"}}full_credit IS NOT NULL
    {{- else if eq .Name "calendar"}}clock + 10000 < window_end
    {{- else}}{{include (print .Name ".valid")}}{{end}}
    AND units IS NOT NULL
    AND (octet_length(name) - 1) >> 7 = 0 -- which is BETWEEN 1 AND 128, with one call less{{end}}

{{/* Whether a row was locked soon enough to be decided by this reading. */}}
{{define "in time"}}{{include "reading"}}
    < clock + 10000{{end}}

{{/* Gives up when the waits for all rows together have lasted too long. */}}
{{define "give up"}}_rate_limit_give_up(clock, lock_timeout_ms, now_us){{end}}

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

{{/* Takes from rows as they are, or makes them. If .Rolls, it also begins windows and buckets anew. That is for
several keys: for one, more expressions would cost more than the rules of rate_limit_all do now and then. */}}
{{define "upsert"}}
INSERT INTO rate_limit_{{.Table}} AS d
    {{include (print .Name ".insert") | hang 4}}
{{.Rows}}
ON CONFLICT (prefix, key) DO UPDATE SET
    {{include (print .Name (or (and .Rolls ".rolls") ".adds")) | hang 4}}
WHERE {{.While}}
    AND {{include (print .Name ".fits") . | hang 4}}
RETURNING {{.Tells}}
{{- end}}

{{range $a := .Algorithms}}
-- {{.Left}} decides what is left by
-- {{.Function}}: those of keys that are not
-- among taken_keys. It does so by the rules of rate_limit_all, and returns fifteen numbers for each. A single key whose
-- row exists is decided here, which costs half as much.
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
    taken_keys text[]
)
RETURNS bigint[]
LANGUAGE plpgsql
SET enable_seqscan = off -- a plan must not depend on how small the table was when it was made
AS $$
#variable_conflict use_variable
DECLARE
    undecided integer[]; -- the places of the keys
    n integer;
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
    IF cardinality(keys) = 1
        AND (costs IS NULL OR cardinality(costs) = 1 AND costs[1] BETWEEN 1 AND {{.Limit}})
        AND (counts IS NULL OR cardinality(counts) = 1 AND counts[1] >= 1)
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
            RETURN ARRAY[1,
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
    n := cardinality(undecided);
    IF taken_keys IS NOT NULL THEN
        SELECT array_agg(keys[e.place] ORDER BY e.place),
            array_agg(CASE WHEN costs IS NULL THEN 1 ELSE costs[e.place] END ORDER BY e.place),
            array_agg(CASE WHEN counts IS NULL THEN 1 ELSE counts[e.place] END ORDER BY e.place)
        INTO keys, costs, counts
        FROM unnest(undecided) AS e (place);
    END IF;
    RETURN ARRAY(
        SELECT unnest({{include "left" "undecided[a.ord]" | hang 8}}
            {{- if eq .Name "slidinglog"}}
            || CASE WHEN n = 1 THEN a.log END
            {{- end}})
        FROM rate_limit_all(
            undecided, array_fill(name, ARRAY[n]), keys,
            array_fill(coalesce(durable, false), ARRAY[n]), array_fill({{.Code}}::smallint, ARRAY[n]),
            array_fill({{.Limit}}, ARRAY[n]), array_fill({{.Span}}, ARRAY[n]), array_fill({{.Refill}}, ARRAY[n]),
            costs, counts, lock_timeout_ms, synchronous_commit,
            {{include "now" | hang 12}},
            NULL::bigint[], NULL::bigint[], NULL::bigint[], NULL::bigint[], false,
            {{if .Zoned}}array_fill(zone, ARRAY[n]){{else}}NULL::text[]{{end}}, NULL::bigint[]) AS a);
END
$$;

-- {{include (print .Name ".title")}}.
-- {{.Function}} decides requests that take, each of one key. It is what the Go package calls.
{{- if has (print .Name ".rolls")}} One
-- statement takes from the rows as they are, and makes missing ones: a short one for a single key, and another for
-- several. All that is less ordinary is decided by the rules of rate_limit_all, in the same call.
{{- else}} It
-- does so by the rules of rate_limit_all, for less if it is one key.{{end}}
--
--   name                the limiter's name, 1 to 128 bytes
--   keys                who asks, 1 to 512 bytes each. They ascend in the order of locking: longer ones first, then by
--                       bytes. Otherwise rate_limit_all decides
{{include (print .Name ".arguments")}}
--   costs               cost of one request, for each key
--   counts              how many such requests are asked, for each key. costs and counts are both NULL, which means 1
--                       each, or neither is
--   durable             whether the rows are in rate_limit_durable rather than in rate_limit_ephemeral
--   lock_timeout_ms     longest wait for one row, for this transaction; NULL leaves the session's lock_timeout. So does
--                       -1, which says that the call is part of a transaction of its caller's, as with AllowTx. A proxy
--                       for shards refuses that, because it cannot take back what a shard has committed
--   synchronous_commit  whether the commit of this transaction waits for the WAL; NULL leaves the session's setting
--   now_us              replaces the clock, for tests: microseconds since 1970 UTC
--
-- It returns one array, because rows and their columns would cost more than the decision. First, for each key of which
-- all that was asked could be taken at once, nine numbers, in the order of the keys: the time of the decision, and
-- count, prev_count, window_start, credit, scale, expires_at, since and returned of the row. What remains, and for how
-- long, follows from these: see takenDecision in takes.go. Then, for each other key, fifteen: its place in keys, and
-- from granted to expires_at what rate_limit_all returns, then its taken_spent, taken_since and taken_at. Of a single
-- key, the log of that comes last. (The array may have two dimensions. unnest returns the numbers all the same.)
{{- if has (print .Name ".rolls")}}
--
-- The clock is read twice: before a row is locked, and with the lock held. A decision is made by the first reading, and
-- what it needs must be true then and still be true 10 ms later. So it was also true when the row was locked: rows that
-- were waited for longer are left out. The decision is told by the second reading. Only a window or a bucket that
-- begins does so at the first reading, because nobody else can have decided anything by it since.
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
    lock_timeout_ms integer DEFAULT NULL,
    synchronous_commit boolean DEFAULT NULL,
    now_us bigint DEFAULT NULL
)
RETURNS bigint[]
LANGUAGE plpgsql
SECURITY DEFINER
SET plan_cache_mode = force_generic_plan -- the first five calls of a session would each make a plan of their own
AS $$
#variable_conflict use_variable
DECLARE
{{- if has (print .Name ".rolls")}}
    -- Each expression counts here, because plpgsql prepares it anew in every transaction. So this one sets
    -- lock_timeout, too.
    clock bigint := {{include "clock" | hang 4}};
    taken bigint[];
    units bigint := 1; -- what is asked for the first key, or NULL if costs or counts are not valid
    each bigint[];     -- what is asked for each of several keys; NULL if that is 1 each
{{- if .Zoned}}
    -- Of a window that begins now. It has to go on for 10 ms, as in the rules for a row that is there.
    window_end bigint := CASE WHEN {{include (print .Name ".valid") | hang 8}}
        THEN _rate_limit_window_end(clock, window_us, zone) END;
{{- end}}
    this_key text;
    before text;       -- the key before it
    ascend boolean;    -- whether several keys ascend
    begun bigint[];    -- which of the keys have a row that was made
{{- with maybe (print .Name ".ended") ""}}
    ended bigint;
{{- end}}
{{- if eq .Name "tokenbucket"}}
    -- The rules say so, because in takeall.sql capacity and refill would be those of the row.
    tokens ALIAS FOR capacity;
    inflow ALIAS FOR refill;
    full_credit bigint := CASE WHEN {{include (print .Name ".valid") | hang 8}}
        THEN capacity * every_us END;
{{- end}}
{{- end}}
    told bigint[];     -- of the keys that were taken from
    taken_keys text[]; -- these keys
    ignored text;
BEGIN
{{- if has (print .Name ".rolls")}}
    IF num_nonnulls(costs, counts, synchronous_commit) > 0 THEN
{{include "commit" | indent 8}}
        units := CASE WHEN num_nonnulls(costs, counts) = 0 THEN 1
            WHEN cardinality(costs) = cardinality(keys) AND cardinality(counts) = cardinality(keys)
            AND costs[1] BETWEEN 1 AND {{.Limit}} AND counts[1] BETWEEN 1 AND {{.Limit}} / costs[1]
            THEN costs[1] * counts[1] END; -- this divides, because the product could overflow
        IF cardinality(keys) > 1 AND units IS NOT NULL AND costs IS NOT NULL THEN
            each := ARRAY(
                SELECT CASE WHEN u.cost BETWEEN 1 AND {{.Limit}} AND u.asked BETWEEN 1 AND {{.Limit}} / u.cost
                    THEN u.cost * u.asked END
                FROM unnest(costs, counts) AS u (cost, asked));
            units := CASE WHEN array_position(each, NULL) IS NULL
                AND costs[cardinality(keys)] IS NOT NULL -- or they are not counted from 1
                AND counts[cardinality(keys)] IS NOT NULL THEN units END;
        END IF;
    END IF;
    IF cardinality(keys) = 1 THEN
        this_key := keys[1];
        IF {{include "can take" . | hang 8}}
            AND (octet_length(this_key) - 1) >> 9 = 0 -- BETWEEN 1 AND 512
        THEN
{{- range $t := $.Tables}}
            {{$t.If}}
                {{include "upsert" (dict "Table" $t.Name "Name" $a.Name "Rolls" false
                    "Rows" (print "VALUES (name, this_key, " (include (print $a.Name ".values") "units") ")")
                    "While" (include "in time")
                    "Tells" (include "told" (dict "At" (include "reading")))) | hang 16}}
                INTO taken;
{{- end}}
            END IF;
            IF (taken[1] - clock) >> 13 = 0 THEN -- within 8 ms
                RETURN taken;
            ELSIF taken[1] > clock + 10000
                AND {{include (print .Name ".new") (dict "Taken" "taken" "Units" "units")}}
            THEN
                PERFORM rate_limit_reset(name, this_key, durable, NULL::integer, NULL::boolean); -- as below
            ELSIF taken IS NOT NULL THEN -- the clock has been set, or this process stopped, since the row was locked
                taken[1] := greatest(clock, least(clock + 10000, taken[1]));
                RETURN taken;
            END IF;
        END IF;
    ELSIF {{include "can take" . | hang 4}}
        AND array_lower(keys, 1) = 1 AND array_ndims(keys) = 1
    THEN
        FOREACH this_key IN ARRAY keys LOOP
            ascend := (ascend IS NOT FALSE AND (octet_length(this_key) - 1) >> 9 = 0 AND (before IS NULL
                OR (-octet_length(before), before COLLATE "C")
                    < (-octet_length(this_key), this_key COLLATE "C"))) IS TRUE;
            before := this_key;
        END LOOP;
        IF ascend THEN
{{- with maybe (print .Name ".ended") ""}}
            ended := {{.}};
{{- end}}
{{- range $t := $.Tables}}
            {{$t.If}}
                WITH d AS (
                    {{include "upsert" (dict "Table" $t.Name "Name" $a.Name "Rolls" true
                        "Rows" (print "SELECT name, e.key, " (include (print $a.Name ".values") "coalesce(e.units, 1)")
                            `
FROM unnest(keys, each) AS e (key, units)`)
                        "While" (print "(" (include "in time" | hang 4) `
    OR ` (include "give up" | hang 4) ")")
                        "Tells" (print "d.key, " (include "told" (dict "At" (include "soon"))) " AS told"))
                        | hang 20}}
                )
                SELECT array_agg(d.key), array_agg(d.told) INTO taken_keys, taken FROM d;
{{- end}}
            END IF;
            -- A row that was made begins by the first reading of the clock. That may be too old for it: another
            -- transaction may have made the same row, and rolled back after this one had waited for it. Such a row is
            -- deleted, and decided anew.
            IF {{include "reading" | hang 12}} > clock + 10000 THEN
                begun := ARRAY(
                    SELECT k.place
                    FROM unnest(taken_keys) WITH ORDINALITY AS k (key, place)
                    JOIN unnest(keys, each) AS e (key, units) ON e.key = k.key COLLATE "C"
                    WHERE {{include (print .Name ".new")
                        (dict "Taken" "taken[k.place]" "Units" "coalesce(e.units, 1)")}});
                PERFORM rate_limit_reset(name, taken_keys[p], durable, NULL::integer, NULL::boolean)
                FROM unnest(begun) AS p;
                SELECT array_agg(k.key ORDER BY k.place), array_agg(taken[k.place:k.place] ORDER BY k.place)
                INTO taken_keys, taken
                FROM unnest(taken_keys) WITH ORDINALITY AS k (key, place)
                WHERE k.place <> ALL (begun);
            END IF;
            IF cardinality(taken_keys) = cardinality(keys) THEN
                RETURN taken;
            END IF;
            told := ARRAY(SELECT unnest(taken));
        END IF;
    END IF;
{{- else}}
{{include "commit" | indent 4}}
    IF lock_timeout_ms <> -1 THEN
        ignored := set_config('lock_timeout', lock_timeout_ms::text, true);
    END IF;
{{- end}}
    RETURN told || {{.Left}}(
        name, keys, {{range .Arguments}}{{.}}, {{end}}costs, counts, durable,
        lock_timeout_ms, synchronous_commit, now_us, taken_keys);
END
$$;

COMMENT ON FUNCTION {{.Function}} IS
    '{{include (print .Name ".comment") | hang 4}}
It takes what the costs and counts of each key say, or denies it, '
    'and returns an array of numbers, for programs: see sql/limit.sql. For people there is rate_limit_allow.
Example: SELECT {{.Function}}{{include (print .Name ".example")}}.';

{{end}}
