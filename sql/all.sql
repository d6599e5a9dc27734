{{/* What is granted is taken, first from what there is ordinary room for, and then from granted credit. */}}
{{define "take"}}
IF s.{{.Above}} > 0 THEN
    spent := greatest(granted * cost - (remaining - s.{{.Above}}), 0);
    s.{{.Above}} := s.{{.Above}} - spent;
END IF;
units := granted * cost - spent;
{{include (print .Name ".take")}}
s.expires_at := t + {{include (print .Name ".lasts")}};
remaining := remaining - granted * cost;
{{end}}
{{/* And what is told of it; retry_after_us is above 0 if something was denied that would fit later. */}}
{{define "tell"}}
IF retry_after_us > 0 THEN
{{include (print .Name ".retry") | indent 4}}
    retry_after_us := least(free_at, s.expires_at) - clock;
END IF;
reset_after_us := CASE
    WHEN s.{{.Above}} > 0 THEN s.expires_at
    ELSE greatest(least(coalesce({{include (print .Name ".reset")}}, clock), s.expires_at), clock)
END - clock;
{{end}}

{{/* The look-up of one part's row. */}}
{{define "columns"}}{{include "row" (print . ".")}}, {{.}}.log{{end}}

{{/* All elements in the order of locking, each with its row. .Missing: whether it has to be made, or NULL if somebody has locked it. .Lock
follows each look-up. unnest((SELECT ...)) hides the arrays' length from the planner, which would else plan anew for every call; the
LATERAL subquery, kept apart by FOR UPDATE or OFFSET 0, is one look-up by the primary key, whatever the statistics say. */}}
{{define "column"}}coalesce({{range .Tables}}{{.Alias}}.{{$.Column}}, {{end}}{{.Else}}){{end}}
{{define "elements"}}
OPEN elements FOR
    SELECT e.ord, e.first,
        e.durable IS NOT NULL AND octet_length(e.name) BETWEEN 1 AND 128 AND octet_length(e.key) BETWEEN 1 AND 512,
        {{.Missing}}
{{- $tables := .Tables}}
{{- range (split "algorithm, tid, count, prev_count, window_start, credit, scale, expires_at, since, capacity, refill, returned, log")}},
        {{include "column" (dict "Tables" $tables "Column" . "Else" (or (and (has (print "zero " .)) "0") "NULL"))}}
{{- end}}
    FROM (
        SELECT e.durable, e.name, e.key, e.ord,
            row_number() OVER (PARTITION BY e.durable, octet_length(e.key), e.key COLLATE "C", e.name COLLATE "C" ORDER BY e.ord) = 1 AS first
        FROM unnest((SELECT durables), (SELECT names), (SELECT keys), (SELECT refused))
            WITH ORDINALITY AS e (durable, name, key, refused, ord)
        WHERE NOT e.refused
        ORDER BY e.durable, octet_length(e.key) DESC, e.key COLLATE "C", e.name COLLATE "C", e.ord
    ) AS e
{{- $lock := .Lock}}
{{- range .Tables}}
    LEFT JOIN LATERAL (
        SELECT d.ctid AS tid, d.* FROM rate_limit_{{.Name}} AS d
        WHERE e.first AND {{.Of "e"}} AND d.prefix = e.name AND d.key = e.key {{$lock}}
    ) AS {{.Alias}} ON true
{{- end}}
{{- if .Seen}}
    CROSS JOIN LATERAL (
        SELECT {{range $i, $t := .Tables}}{{if $i}}
            OR {{end}}EXISTS (SELECT FROM rate_limit_{{.Name}} AS d WHERE {{.Of "e"}} AND d.prefix = e.name AND d.key = e.key OFFSET 0){{end}} AS it
        OFFSET 0
    ) AS seen
{{- end}};
{{end}}
{{define "zero algorithm"}}{{end}}{{define "zero count"}}{{end}}{{define "zero prev_count"}}{{end}}{{define "zero window_start"}}{{end}}{{define "zero credit"}}{{end}}{{define "zero expires_at"}}{{end}}

{{/* The same for both tables, or for the one that all parts are in: a standby cannot look into unlogged tables. */}}
{{define "look up"}}
{{- $tid := include "column" (dict "Tables" .Tables "Column" "tid" "Else" "NULL")}}
IF locking AND skip_held THEN
{{include "elements" (dict "Tables" .Tables "Lock" "FOR UPDATE SKIP LOCKED" "Seen" true "Missing" (print "CASE WHEN NOT e.first OR " $tid " IS NOT NULL THEN false WHEN NOT seen.it THEN true END")) | indent 4}}
ELSIF locking THEN
{{include "elements" (dict "Tables" .Tables "Lock" "FOR UPDATE" "Seen" false "Missing" (print "e.first AND " $tid " IS NULL")) | indent 4}}
ELSE
{{include "elements" (dict "Tables" .Tables "Lock" "OFFSET 0" "Seen" false "Missing" "false") | indent 4}}
END IF;
{{end}}

-- rate_limit_all decides requests of several parts each, such as one for an address, one for a user and one for everybody: a request
-- takes from all of its parts, or from none. The parts may differ in everything: limiter, key, algorithm, cost and table.
--
--   requests            to which request a part belongs: parts of one request stand together, and requests in ascending order
--   names, keys         the limiter and the key of each part; a request may name the same row only once
--   durables            whether its row is in rate_limit_durable rather than in rate_limit_ephemeral
--   algorithms          1 fixed window, 2 sliding window, 3 token bucket, 4 sliding window log
--   limits              max_count of a window, capacity of a bucket
--   spans_us            window_us of a window, every_us of a bucket
--   refills             refill of a bucket
--   costs               cost of each part; NULL means 1 each, and costs that are all 0 only look. A request whose costs are below 0
--                       gives back to all of its parts, or grants credit to all of them, see taken_in
--   counts              how many such requests are asked, the same for all parts of a request; NULL means 1 each
--   lock_timeout_ms     as of the functions of one limit, like the two that follow
--   synchronous_commit
--   now
--   taken_since, taken_in, taken_at, taken_spent
--                       which take costs below 0 give back: what the decisions of its parts returned under these names; NULL, of the
--                       taken_in of its first part, if the request grants
--   skip_held           whether to pass over requests with a part whose row somebody's transaction has locked, and decide the others
--
-- A row for each part comes back. granted is that of the request; a part with room for one more has a retry_after_us of 0, so
-- the parts that refused are those with another one, and the request fits after the longest. Of a request that was passed over, a row
-- comes back for each part that is not held, with a granted of NULL.
--
-- Rows are locked in one order, whoever asks: the ephemeral ones before the durable ones, then those with longer keys, because a key that
-- everybody shares tends to be short and is best held briefly, then by key and limiter. Parts may come in any order; a single
-- request of a few that come in this one is spared the sorting. At the first missing row the locking stops, and an INSERT
-- makes the rest. But a row may be missing of a request that another part refuses, and a denial shall write nothing. So
-- before rows are made, the rest is looked at without locks: what is refused by what can be seen, is refused, and rows are made
-- for the others. Then the locking begins anew. A request that gives back needs no rows where none of its own is there. Where one
-- is, all of them are made: a take that has just made the others might else be given back to some of its limits and not to the rest.
CREATE FUNCTION rate_limit_all(
    requests integer[],
    names text[],
    keys text[],
    durables boolean[],
    algorithms smallint[],
    limits bigint[],
    spans_us bigint[],
    refills bigint[],
    costs bigint[] DEFAULT NULL,
    counts bigint[] DEFAULT NULL,
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
SET enable_nestloop = on
SET enable_seqscan = off -- a plan must not depend on how small the table was when it was made
AS $$
#variable_conflict use_variable
DECLARE
    parts integer := cardinality(keys);
    just_look boolean := coalesce(0 = ALL (costs), false);
    locking boolean := NOT just_look; -- or else looking
    in_order boolean := parts <= 8 AND requests[1] = requests[parts] AND durables[1] IS NOT NULL AND locking AND NOT skip_held; -- one request, in the order of locking
    refused boolean[]; -- of each part: its request has been refused, or had nothing to give back
    asked_rows rate_limit_row[]; -- the rows, in the order of locking
    writers smallint[];          -- which algorithm has written each of them
    in_durable boolean[];        -- in which table they are
    to_write boolean[];          -- whether they are to be written
    place integer[];             -- which of them is a part's
    rows integer;
    elements refcursor;
    give_up timestamptz; -- when the rows, each of which may be waited for, have taken too long together
    ord integer;       -- the part that was fetched
    first boolean;
    valid boolean;
    at integer;
    missing boolean;   -- NULL: it is there, and somebody has locked it
    held boolean;      -- so is the row that was fetched last
    previous integer;
    from_part integer; -- the parts of a request
    to_part integer;
    algorithm smallint;
    ignored text;

    r rate_limit_row;  -- the part at hand, and its row as it was found
    s rate_limit_row;  -- that row's state now
    clock bigint;      -- the database's clock
    t bigint;          -- the time of the decision: the clock, or the row's own time where that lies ahead of it
    moved boolean;     -- the clock has jumped back, and the row with it
    any_moved boolean; -- so of any part of a request that refuses it
    gives boolean;     -- the request gives back, or grants
    changed boolean;   -- and that changes the row
    grants boolean;    -- it grants
    first_pass integer;
    locked boolean;    -- its rows are to be locked
    decided_at timestamptz;
    cost bigint;
    asked bigint;
    granted bigint;
    remaining bigint;
    spent bigint;      -- how much of what is taken comes out of granted credit
    units bigint;      -- what is taken or given back
    back bigint;       -- of that, what goes back
    free_at bigint;    -- when what was denied would fit
    retry_after_us bigint;
    reset_after_us bigint;
    max_count bigint;
    window_us bigint;
    refill bigint;
    capacity ALIAS FOR max_count;
    every_us ALIAS FOR window_us;
    full_credit bigint;
    need bigint;
    rest bigint;
    newest integer;
    needed integer;
    age_bits CONSTANT bigint := 9007199254740991; -- a log's entry has 54 bits for its time, so the difference of two is taken modulo 2^53
BEGIN
    IF (parts > 0 AND cardinality(requests) = parts AND cardinality(names) = parts AND cardinality(durables) = parts
            AND cardinality(algorithms) = parts AND cardinality(limits) = parts AND cardinality(spans_us) = parts
            AND cardinality(refills) = parts
            AND coalesce(cardinality(costs) = parts, true) AND coalesce(cardinality(counts) = parts, true)
            AND coalesce(cardinality(taken_in) = parts, true)) IS NOT TRUE THEN
        RAISE EXCEPTION 'rate_limit: as many requests, names, durables, algorithms, limits, spans_us, refills, costs, counts and taken_in are needed as keys'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'NULL instead of costs or of counts means 1 for each key.';
    END IF;
    ignored := concat(
        CASE WHEN lock_timeout_ms IS NOT NULL THEN set_config('lock_timeout', lock_timeout_ms::text, true) END,
        CASE WHEN synchronous_commit IS NOT NULL THEN set_config('synchronous_commit', synchronous_commit::text, true) END);
    IF costs IS NULL THEN
        costs := array_fill(1::bigint, ARRAY[parts]);
    END IF;
    IF parts = 1 AND costs[1] > limits[1] THEN -- never fits: nothing to lock
        locking := false;
        in_order := false;
    END IF;
    IF skip_held AND locking AND false = ANY (durables) THEN
        LOCK TABLE rate_limit_ephemeral IN ROW EXCLUSIVE MODE;
    END IF;
    IF skip_held AND locking AND true = ANY (durables) THEN
        LOCK TABLE rate_limit_durable IN ROW EXCLUSIVE MODE;
    END IF;
    refused := array_fill(false, ARRAY[parts]);
    IF in_order THEN
        FOR part IN 2 .. parts LOOP
            in_order := in_order AND (durables[part - 1], -octet_length(keys[part - 1]), keys[part - 1] COLLATE "C", names[part - 1] COLLATE "C")
                < (durables[part], -octet_length(keys[part]), keys[part] COLLATE "C", names[part] COLLATE "C");
        END LOOP;
    END IF;

    give_up := coalesce(clock_timestamp() + lock_timeout_ms * interval '25 ms', 'infinity');
    FOR attempt IN 1 .. 5 LOOP
        rows := 0;
        asked_rows := '{}';
        writers := '{}';
        in_durable := '{}';
        to_write := '{}';
        place := array_fill(0, ARRAY[parts]);
        IF in_order THEN -- a look-up for each part: saves 30 of the 80 us that three parts take in the query below
            in_order := false;
            FOR part IN 1 .. parts LOOP
{{- range .Tables}}
                {{.IfPart}}
                    SELECT d.algorithm, d.ctid, {{include "columns" "d"}}
                    INTO algorithm, r.tid, {{include "columns" "r"}}
                    FROM rate_limit_{{.Name}} AS d
                    WHERE d.prefix = names[part] AND d.key = keys[part]
                    FOR UPDATE;
{{- end}}
                END IF;
                ord := CASE WHEN NOT found THEN part END;
                EXIT WHEN NOT found;
                rows := part;
                asked_rows[rows] := r;
                writers[rows] := algorithm;
                in_durable[rows] := durables[part];
                to_write[rows] := false;
                place[part] := rows;
            END LOOP;
        ELSE
            IF true = ALL (durables) THEN
{{include "look up" (dict "Tables" (slice .Tables 1 2)) | indent 16}}
            ELSIF false = ALL (durables) THEN
{{include "look up" (dict "Tables" (slice .Tables 0 1)) | indent 16}}
            ELSE
{{include "look up" (dict "Tables" .Tables) | indent 16}}
            END IF;
            previous := NULL;
            LOOP
                FETCH elements INTO ord, first, valid, missing, algorithm, r.tid, {{include "columns" "r"}};
                EXIT WHEN NOT found OR clock_timestamp() > give_up AND NOT skip_held AND rate_limit_late();
                IF valid IS NOT TRUE THEN
                    RAISE EXCEPTION 'rate_limit: part % is not valid', ord
                        USING ERRCODE = 'invalid_parameter_value', HINT = 'A name has 1 to 128 bytes, a key 1 to 512, and durable is true or false.',
                            COLUMN = CASE WHEN octet_length(keys[ord]) > 512 THEN 'key' ELSE '' END;
                END IF;
                IF missing AND skip_held AND attempt = 5 THEN
                    missing := NULL; -- somebody deletes it all the time
                END IF;
                EXIT WHEN missing;
                IF first THEN
                    held := missing IS NULL;
                END IF;
                IF held THEN
                    CONTINUE; -- and its place stays 0
                ELSIF first THEN
                    rows := rows + 1;
                    asked_rows[rows] := r;
                    writers[rows] := algorithm;
                    in_durable[rows] := durables[ord];
                    to_write[rows] := false;
                ELSIF requests[ord] = requests[previous] THEN
                    RAISE EXCEPTION 'rate_limit: parts % and % of one request are for the same key', previous, ord
                        USING ERRCODE = 'invalid_parameter_value', HINT = 'Ask for the sum of their costs in one part.';
                END IF;
                place[ord] := rows;
                previous := ord;
            END LOOP;
            CLOSE elements;
        END IF;
        IF ord IS NOT NULL THEN -- as it is after the last part
            locking := false;
            CONTINUE;
        END IF;

        -- The clock is read with every lock held: read before, it could be older than the rows that a lock waited for.
        decided_at := coalesce(now, clock_timestamp());
        clock := (extract(epoch FROM decided_at) * 1000000)::bigint;

        to_part := 0;
        WHILE to_part < parts LOOP
            from_part := to_part + 1;
            to_part := from_part;
            WHILE requests[to_part + 1] = requests[from_part] LOOP
                to_part := to_part + 1;
            END LOOP;
            asked := CASE WHEN counts IS NULL THEN 1 ELSE counts[from_part] END;
            gives := costs[from_part] < 0;
            grants := gives AND taken_in[from_part] IS NULL;
            IF (asked >= 1 AND (to_part = parts OR requests[to_part + 1] > requests[from_part])
                    AND (NOT gives OR 0 > ALL (costs[from_part : to_part]))) IS NOT TRUE THEN
                RAISE EXCEPTION 'rate_limit: the request of part % is not valid', from_part
                    USING ERRCODE = 'invalid_parameter_value', HINT = 'Requests ascend, a count is at least 1, and costs below 0 are not beside others.';
            END IF;
            CONTINUE WHEN refused[from_part];
            IF 0 = ANY (place[from_part : to_part]) THEN -- held
                FOR part IN from_part .. to_part LOOP
                    IF place[part] > 0 THEN
                        RETURN NEXT ROW(part::bigint, NULL::bigint, 0::bigint, NULL::bigint, 0::bigint, decided_at,
                            0::bigint, 0::bigint, 0::bigint, 0::bigint, 0::bigint, 0::bigint, NULL::bigint[],
                            0::bigint, 0::bigint, 0::bigint, 0::bigint);
                    END IF;
                END LOOP;
                CONTINUE;
            END IF;

            -- First how many fit into all of the parts, then what that means for each of them.
            granted := CASE WHEN just_look OR costs[from_part] = 0 THEN 0 ELSE asked END;
            any_moved := false;
            -- A request of one part needs only the second pass, but where it may be left to the next attempt.
            first_pass := CASE WHEN to_part = from_part AND (locking OR just_look) THEN 2 ELSE 1 END;
            FOR pass IN first_pass .. 2 LOOP
                IF pass = 2 AND NOT locking AND NOT just_look THEN
                    -- Refused by what others have taken, or nothing to give back. Not so if a request before it will change one of its rows.
                    locked := CASE WHEN gives AND NOT grants THEN EXISTS (SELECT FROM unnest(place[from_part : to_part]) AS p (place) WHERE asked_rows[p.place].tid IS NOT NULL)
                            ELSE granted > 0 OR any_moved END -- what has moved has to be written
                        OR EXISTS (SELECT FROM unnest(place[from_part : to_part]) AS p (place) WHERE to_write[p.place])
                        OR to_part = from_part AND costs[from_part] BETWEEN 1 AND limits[from_part]; -- it needs no row but one from which it takes
                    IF locked THEN
                        FOREACH at IN ARRAY place[from_part : to_part] LOOP
                            to_write[at] := true;
                        END LOOP;
                        EXIT;
                    END IF;
                    refused[from_part : to_part] := array_fill(true, ARRAY[to_part - from_part + 1]);
                END IF;
                FOR part IN from_part .. to_part LOOP
                    algorithm := algorithms[part];
                    at := place[part];
                    s := asked_rows[at];
                    IF writers[at] <> algorithm THEN -- as if there were none
                        s := ROW(s.ord, s.cost, s.asked, s.tid, 0, 0, 0, 0, NULL, 0, NULL, NULL, NULL, NULL, NULL);
                    END IF;
                    cost := costs[part];
                    moved := false;
                    max_count := limits[part];
                    window_us := spans_us[part];
                    refill := refills[part];
                    CASE algorithm
{{- range .Algorithms}}
                    WHEN {{.Code}} THEN
                        IF pass = first_pass AND ((cost >= 1 OR just_look OR gives OR cost = 0 AND to_part = from_part) AND {{include (print .Name ".valid") | hang 28}}) IS NOT TRUE THEN
                            RAISE EXCEPTION 'rate_limit: the numbers of part % are outside the exact range', part
                                USING ERRCODE = 'invalid_parameter_value', HINT = 'Of limit, span and refill: {{include (print .Name ".hint")}}';
                        END IF;
                        CONTINUE WHEN pass = 1 AND asked = 1 AND {{include (print .Name ".enough")}}; -- what fits into less, fits: saves the rest
{{include (print .Name ".roll") | indent 24}}
                        IF gives AND pass = 2 THEN
                            -- By division, because the product could overflow.
                            units := CASE WHEN asked > -(9223372036854775807 / cost) THEN 9223372036854775807 ELSE -asked * cost END;
                            IF grants THEN
                                changed := true;
                                s.{{.Above}} := least(s.{{.Above}} + least(units, 2305843009213693952), 2305843009213693952);
                                s.since := coalesce(s.since, t);
                                s.expires_at := t + {{include (print .Name ".lasts")}};
                            ELSE
                                -- What came out of credit goes back first, as credit, if the row is still the one that it came from.
                                back := least(greatest(coalesce(taken_spent[part], 0), 0), units);
                                units := units - back;
                                changed := coalesce(back > 0 AND s.since = taken_since[part] AND s.{{.Above}} < 2305843009213693952{{with maybe (print .Name ".full") ""}} AND NOT ({{.}}){{end}}, false);
                                IF changed THEN
                                    s.{{.Above}} := s.{{.Above}} + least(back, 2305843009213693952 - s.{{.Above}});
                                    s.expires_at := greatest(s.expires_at, t + {{include (print .Name ".lasts")}});
                                END IF;
{{include (print .Name ".refund") | indent 32}}
                            END IF;
                        END IF;
{{include (print .Name ".room") | indent 24}}
                        remaining := remaining + s.{{.Above}};
{{- end}}
                    ELSE
                        RAISE EXCEPTION 'rate_limit: % is no algorithm', algorithm
                            USING ERRCODE = 'invalid_parameter_value', HINT = 'Write 1 for a fixed window, 2 for a sliding window, 3 for a token bucket, 4 for a sliding window log.';
                    END CASE;
                    IF pass = first_pass AND NOT (just_look OR gives) THEN
                        any_moved := any_moved OR (moved AND cost > remaining AND cost <= max_count);
                        granted := CASE WHEN cost BETWEEN 1 AND max_count THEN least(granted, remaining / cost) ELSE 0 END;
                    END IF;
                    CONTINUE WHEN pass = 1;

                    spent := 0;
                    needed := 0;
                    retry_after_us := CASE
                        WHEN granted = asked THEN 0
                        WHEN cost > max_count THEN NULL
                        WHEN remaining - granted * cost >= greatest(cost, 1) THEN 0
                        ELSE 1 -- see below
                    END;
                    CASE algorithm
{{- range .Algorithms}}
                    WHEN {{.Code}} THEN
                        IF granted > 0 AND NOT gives THEN
{{include "take" . | indent 28}}
                        END IF;
{{include "tell" . | indent 24}}
{{- end}}
                    END CASE;

                    IF (granted > 0 AND (changed OR NOT gives)) OR (moved AND cost > 0 AND retry_after_us > 0) THEN
                        s.expires_at := clock + reset_after_us;
                        asked_rows[at] := s;
                        writers[at] := algorithm;
                        to_write[at] := true;
                    END IF;
                    RETURN NEXT ROW(part::bigint, granted, remaining, retry_after_us, reset_after_us, decided_at,
                        s.count, s.prev_count, s.window_start, s.credit, CASE WHEN algorithm = 3 THEN s.scale END, s.expires_at,
                        CASE WHEN needed > 0 THEN s.log[1:least(needed, 64)] END, -- or the first part of that: see maxDenialEntries
                        s.since, s.window_start, CASE WHEN algorithm = 3 THEN s.returned + full_credit - s.credit END, spent);
                END LOOP;
            END LOOP;
        END LOOP;

        IF just_look THEN
            RETURN;
        ELSIF locking THEN
{{- range .Tables}}
            IF true = ANY (to_write) AND {{if eq .Name "durable"}}true{{else}}false{{end}} = ANY (in_durable) THEN
                -- LIMIT by a subquery lets the planner expect few rows, so that it always fetches them by tid and never scans.
                UPDATE rate_limit_{{.Name}} AS d
                SET algorithm = n.algorithm, count = n.count, prev_count = n.prev_count, window_start = n.window_start,
                    credit = n.credit, scale = n.scale, expires_at = n.expires_at, log = n.log,
                    since = n.since, capacity = n.capacity, refill = n.refill, returned = n.returned
                FROM (
                    SELECT * FROM unnest((SELECT asked_rows), (SELECT writers), (SELECT to_write), (SELECT in_durable))
                        AS n (ord, cost, asked, tid, count, prev_count, window_start, credit, scale, expires_at, since, capacity, refill, returned, log,
                            algorithm, to_write, durable)
                    WHERE n.to_write AND {{.Of "n"}} LIMIT (SELECT rows)
                ) AS n
                WHERE d.ctid = n.tid;
            END IF;
{{- end}}
            RETURN;
        ELSIF true = ALL (refused) THEN
            RETURN;
        END IF;
{{- range .Tables}}
        IF {{if eq .Name "durable"}}true{{else}}false{{end}} = ANY (durables) THEN
            INSERT INTO rate_limit_{{.Name}} AS d (prefix, key)
            SELECT e.name COLLATE "C", e.key COLLATE "C"
            FROM unnest((SELECT names), (SELECT keys), (SELECT durables), (SELECT refused)) AS e (name, key, durable, refused)
            WHERE NOT e.refused AND {{.Of "e"}}
                AND NOT (skip_held AND EXISTS (SELECT FROM rate_limit_{{.Name}} AS d WHERE d.prefix = e.name AND d.key = e.key OFFSET 0))
            GROUP BY e.name COLLATE "C", e.key COLLATE "C"
            ORDER BY octet_length(e.key COLLATE "C") DESC, e.key COLLATE "C", e.name COLLATE "C"
            ON CONFLICT (prefix, key) DO UPDATE SET count = d.count WHERE clock_timestamp() > give_up AND rate_limit_late();
        END IF;
{{- end}}
        locking := true;
    END LOOP;
    RAISE EXCEPTION 'rate_limit: rows were made, and were missing again'
        USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Something deletes rows of this transaction, or keeps them from being made: a trigger?';
END
$$;

COMMENT ON FUNCTION rate_limit_all IS 'Decides requests that take from several limits at once, or from none of them. The arrays have an element for each part: the request that it belongs to, limiter, key, whether it is in rate_limit_durable, algorithm (1 fixed window, 2 sliding window, 3 token bucket, 4 sliding window log), max_count or capacity, window_us or every_us, and refill.
It returns a row for each part, as the functions of one limit do; granted is that of the whole request, and the parts that refused it are those with a retry_after_us other than 0. The request fits after the longest of them.
Example: SELECT * FROM rate_limit_all(ARRAY[1, 1], ARRAY[''address'', ''user''], ARRAY[''192.0.2.1'', ''user:123''], ARRAY[false, false], ARRAY[2, 3]::smallint[], ARRAY[100, 20], ARRAY[60000000, 10000000], ARRAY[0, 5]) takes one of 100 a minute and one token of a bucket, or neither.
Optional, by name: costs for each part (1 each; costs that are all 0 only look, and a request whose costs are below 0 grants all of its parts credit above the limit, or, with the taken_since, taken_in, taken_at and taken_spent of the decisions of one that took, gives back what that still counts), and counts.';
