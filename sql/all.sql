-- rate_limit_all decides everything. Requests may have several parts each, such as one for an address, one for a user
-- and one for everybody. A request takes from all of its parts or from none. The parts may differ in everything:
-- limiter, key, algorithm, cost and table.
--
--   requests            the request that a part belongs to. Parts of one request stand together, and requests ascend
--   names, keys         the limiter and the key of each part. A request may name the same row only once
--   durables            whether its row is in rate_limit_durable rather than in rate_limit_ephemeral
--   algorithms          {{include "codes" .Algorithms}}
--   limits              max_count of a window, capacity of a bucket
--   spans_us            window_us of a window, every_us of a bucket; of a calendar window, as its function takes it
--   refills             refill of a bucket
--   costs               cost of each part; NULL means 1 each. Costs that are all 0 only look, and tell whether a cost
--                       of 1 would fit. A cost above the limit is denied with a retry_after_us of NULL, which means
--                       never. A request whose costs are below 0 gives back to all of its parts, or grants credit above
--                       the limit to all of them, up to 2^61 each: see taken_in
--   counts              how many such requests are asked, the same for all parts of a request; NULL means 1 each
--   lock_timeout_ms     as in the functions whose names begin with rate_limit_take_, like the next one
--   synchronous_commit
--   now                 replaces the clock, for tests
--   taken_since, taken_in, taken_at, taken_spent
--                       which take costs below 0 give back: what the decisions of its parts returned under these names.
--                       If taken_in of its first part is NULL, the request grants credit
--   skip_held           whether to pass over requests with a part whose row somebody's transaction has locked, or is
--                       just making, and decide only the others. A row that is being made cannot be seen, and is waited
--                       for as long as lock_timeout_ms. After five such waits, requests for rows that still have to be
--                       made are passed over as well
--   zones               time zone of each part that is a calendar window; NULL means UTC for each
--   leased              of a part that is a token bucket, how many of the units it asks for, the last ones, are to be
--                       spent later; see Lease in lease.go. Of one that gives back, how many units are not held by that
--                       lease any more. What is leased of a bucket keeps room in it: see TokenBucket.leased in
--                       tokenbucket.go
--
-- It returns a row for each part. granted is that of the request. A part with room for one more has a retry_after_us of
-- 0, so the parts that refused are those with another retry_after_us. The request fits after the longest of them. Of a
-- request that was passed over, a row comes back for each part. A part that is held has a granted of -2, and in place
-- of remaining the transaction that has locked its row, or 0 if the row is being made. A part that is not held has a
-- granted of NULL.
--
-- Rows are locked in one order, whoever asks: the ephemeral ones before the durable ones, then those with longer keys,
-- then by key and limiter. Longer keys come first because a key that everybody shares tends to be short, and is best
-- held briefly. Parts may come in any order. A single request of a few parts that come in this one is not sorted again.
--
-- At the first missing row the locking stops, and an INSERT makes the missing rows. But another part may refuse the
-- request that misses the row, and a denial must write nothing. So before rows are made, all parts are looked at
-- without locks, and none are made for a request that is refused by what can be seen. Then the locking begins anew, and
-- the locked rows decide everything. The exception is a request that was refused: it is told what was true when it was
-- looked at, unless the others have locked all of its rows. To make or lock its rows now, after rows that come later,
-- would break the order of locking.
--
-- So nobody deadlocks: whoever waits for a row holds none that comes later. The locking stops at the first missing row.
-- The INSERT waits for that one and for later ones, because those before it are locked. It locks all that it comes to,
-- so none of these can vanish. With skip_held, the locking passes over held rows and waits for none. But a held row may
-- vanish while rows behind it are locked. It is not made then, and its requests are passed over.
--
-- If none of a refund's rows exists, none is made. If any exists, the missing ones are made too. Otherwise a take that
-- has just made them could be given back to some of its limits and not to the others.
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
    skip_held boolean DEFAULT false,
    zones text[] DEFAULT NULL,
    leased bigint[] DEFAULT NULL
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
    just_look boolean := coalesce(0 = ALL (costs) AND costs[1] = 0 AND costs[parts] = 0, false); -- counted from 1
    locking boolean := NOT just_look; -- or only looking
    -- It is one request, whose parts come in the order of locking.
    in_order boolean := parts <= 8 AND requests[1] = requests[parts] AND durables[1] IS NOT NULL
        AND locking AND NOT skip_held;
    refused boolean[]; -- for each part: its request was refused, or had nothing to give back, when it was looked at
    seen rate_limit_row[];   -- the part's row at that time
    seen_writers smallint[]; -- the algorithm that had written it
    seen_at timestamptz;     -- that time
    as_seen boolean;         -- one of the request's rows is not locked, so it is told what was true at that time
    asked_rows rate_limit_row[]; -- the rows, in the order of locking
    writers smallint[];          -- the algorithm that has written each of them
    in_durable boolean[];        -- the table that each of them is in
    to_write boolean[];          -- whether each of them is to be written
    place integer[];             -- for each part, which of them is its row
    rows integer;
    elements refcursor;
    waits integer;       -- how many waits for rows that are being made were in vain
    give_up timestamptz; -- when the waits for all rows together have lasted too long
    ord integer;       -- the part that was fetched
    first boolean;
    valid boolean;
    at integer;
    holder bigint;     -- the transaction that has locked its row; -1 if there is no row
    held_by bigint;    -- the holder of the row that was fetched last
    holders bigint[];  -- the holder of each part's row; 0 if the row is being made
    tried boolean := false; -- missing rows have been made as far as possible
    previous integer;
    from_part integer; -- the parts of a request
    to_part integer;
    algorithm smallint;
    ignored text;

    r rate_limit_row;  -- the current part, and its row as it was found
    s rate_limit_row;  -- that row's state now
    clock bigint;      -- the database's clock
    t bigint;          -- the time of the decision: the clock, or the row's own time if that is ahead of it
    moved boolean;     -- the clock has jumped back, and the row with it
    any_moved boolean; -- this is so for a part that refuses the request
    gives boolean;     -- the request gives back, or grants
    changed boolean;   -- the request changes the row
    grants boolean;    -- the request grants
    first_pass integer;
    locked boolean;    -- the request's rows are to be locked
    locked_at timestamptz; -- when all rows were locked, or looked at
    decided_at timestamptz;
    cost bigint;
    asked bigint;
    granted bigint;
    remaining bigint;
    spent bigint;      -- how much of what is taken comes out of granted credit
    units bigint;      -- what is taken or given back
    back bigint;       -- how much of that goes back
    free_at bigint;    -- when what was denied would fit
    retry_after_us bigint;
    reset_after_us bigint;
    max_count bigint;
    window_us bigint;
    refill bigint;
    zone text;
    capacity ALIAS FOR max_count;
    every_us ALIAS FOR window_us;
    full_credit bigint;
    ahead bigint;
    lease_us bigint;   -- no lease of a bucket lasts longer
    leases bigint[];   -- what may be leased of it: TokenBucket.leased in tokenbucket.go
    need bigint;
    rest bigint;
    newest integer;
    needed integer;
    -- An entry of a log has 54 bits for its time, so the difference of two is taken modulo 2^53.
    age_bits CONSTANT bigint := 9007199254740991;
BEGIN
    IF (array_ndims(keys) = 1 AND array_lower(keys, 1) = 1
            AND cardinality(requests) = parts AND cardinality(names) = parts AND cardinality(durables) = parts
            AND cardinality(algorithms) = parts AND cardinality(limits) = parts AND cardinality(spans_us) = parts
            AND cardinality(refills) = parts
            AND coalesce(cardinality(costs) = parts, true) AND coalesce(cardinality(counts) = parts, true)
            AND coalesce(cardinality(taken_in) = parts, true) AND coalesce(cardinality(leased) = parts, true))
        IS NOT TRUE
    THEN
        RAISE EXCEPTION 'rate_limit: % is not valid', (
                SELECT (string_to_array('keys requests names durables algorithms limits spans_us refills '
                    'costs counts taken_in leased', ' '))[e.place]
                FROM unnest(ARRAY[CASE WHEN array_ndims(keys) = 1 AND array_lower(keys, 1) = 1 THEN parts END,
                    cardinality(requests), cardinality(names), cardinality(durables),
                    cardinality(algorithms), cardinality(limits), cardinality(spans_us), cardinality(refills),
                    cardinality(costs), cardinality(counts), cardinality(taken_in), cardinality(leased)])
                    WITH ORDINALITY AS e (n, place)
                WHERE e.n IS NULL AND e.place < 9 OR e.n <> parts
                ORDER BY e.place LIMIT 1)
            USING ERRCODE = 'invalid_parameter_value',
                HINT = 'At least one key is needed, counted from 1, and as many elements of the others as keys. '
                    'NULL instead of costs or of counts means 1 for each key.';
    END IF;
    ignored := concat(
        CASE WHEN lock_timeout_ms <> -1 THEN set_config('lock_timeout', lock_timeout_ms::text, true) END,
        CASE WHEN synchronous_commit IS NOT NULL
            THEN set_config('synchronous_commit', synchronous_commit::text, true) END);
    IF costs IS NULL THEN
        costs := array_fill(1::bigint, ARRAY[parts]);
    END IF;
    IF parts = 1 AND costs[1] > limits[1] THEN -- it never fits, so there is nothing to lock
        just_look := true;
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
            in_order := in_order AND (durables[part - 1], -octet_length(keys[part - 1]),
                    keys[part - 1] COLLATE "C", names[part - 1] COLLATE "C")
                < (durables[part], -octet_length(keys[part]), keys[part] COLLATE "C", names[part] COLLATE "C");
        END LOOP;
    END IF;

    give_up := CASE
        WHEN lock_timeout_ms > 0 THEN clock_timestamp() + lock_timeout_ms * interval '25 ms'
        ELSE 'infinity'
    END;
    FOR attempt IN 1 .. 5 LOOP
        rows := 0;
        asked_rows := '{}';
        writers := '{}';
        in_durable := '{}';
        to_write := '{}';
        place := array_fill(0, ARRAY[parts]);
        -- A look-up for each part saves 30 of the 80 us that three parts take in the query below.
        IF in_order THEN
            in_order := false;
            FOR part IN 1 .. parts LOOP
{{- range .Tables}}
                {{.IfPart}}
                    SELECT d.algorithm, d.ctid,
                        {{fold 24 (include "columns" "d")}}
                    INTO algorithm, r.tid,
                        {{fold 24 (include "columns" "r")}}
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
                FETCH elements INTO ord, first, valid, holder, algorithm, r.tid,
                    {{fold 20 (include "columns" "r")}};
                EXIT WHEN NOT found OR clock_timestamp() > give_up AND NOT skip_held AND _rate_limit_late();
                IF valid IS NOT TRUE THEN
                    RAISE EXCEPTION 'rate_limit: the % of part % is not valid', CASE
                            WHEN (octet_length(names[ord]) BETWEEN 1 AND 128) IS NOT TRUE THEN 'name'
                            WHEN (octet_length(keys[ord]) BETWEEN 1 AND 512) IS NOT TRUE THEN 'key'
                            ELSE 'durable' END, ord
                        USING ERRCODE = 'invalid_parameter_value',
                            HINT = 'A name has 1 to 128 bytes, a key 1 to 512, and durable is true or false.',
                            COLUMN = CASE WHEN octet_length(names[ord]) > 128 THEN 'name'
                                WHEN octet_length(keys[ord]) > 512 THEN 'key' ELSE '' END;
                END IF;
                EXIT WHEN holder = -1 AND NOT tried;
                IF first THEN
                    held_by := CASE WHEN holder = -1 THEN coalesce(holders[ord], -1) ELSE holder END;
                END IF;
                IF held_by IS NOT NULL THEN
                    holders[ord] := held_by;
                    CONTINUE; -- its place stays 0
                ELSIF first THEN
                    rows := rows + 1;
                    asked_rows[rows] := r;
                    writers[rows] := algorithm;
                    in_durable[rows] := durables[ord];
                    to_write[rows] := false;
                ELSIF requests[ord] = requests[previous] THEN
                    RAISE EXCEPTION 'rate_limit: parts % and % of one request are for the same key', previous, ord
                        USING ERRCODE = 'invalid_parameter_value',
                            HINT = 'Ask for the sum of their costs in one part.';
                END IF;
                place[ord] := rows;
                previous := ord;
            END LOOP;
            CLOSE elements;
        END IF;
        IF ord IS NOT NULL THEN -- after the last part it would be NULL, so a row is missing
            locking := false;
            CONTINUE;
        END IF;

        IF NOT locking THEN
            refused := array_fill(false, ARRAY[parts]);
        END IF;
        -- The clock is read with every lock held. Read before, it could be older than a row that was waited for.
        locked_at := coalesce(now, clock_timestamp());
        decided_at := locked_at;
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
            changed := NOT gives;
            IF (asked >= 1 AND (to_part = parts OR requests[to_part + 1] > requests[from_part])
                    AND (NOT gives OR 0 > ALL (costs[from_part : to_part]))) IS NOT TRUE THEN
                RAISE EXCEPTION 'rate_limit: the % of part % is not valid', CASE
                        WHEN (asked >= 1) IS NOT TRUE THEN 'count'
                        WHEN (to_part = parts OR requests[to_part + 1] > requests[from_part]) IS NOT TRUE
                            THEN 'next request'
                        ELSE 'cost' END, from_part
                    USING ERRCODE = 'invalid_parameter_value',
                        HINT = 'Requests ascend, a count is at least 1, and costs below 0 are not beside others.';
            END IF;
            IF 0 = ANY (place[from_part : to_part]) THEN -- held
                FOR part IN from_part .. to_part LOOP
                    IF place[part] > 0 OR holders[part] >= 0 THEN
                        RETURN NEXT ROW(part::bigint,
                            CASE WHEN place[part] = 0 THEN -2 END::bigint,
                            CASE WHEN place[part] = 0 THEN holders[part] ELSE 0 END,
                            NULL::bigint, 0::bigint, decided_at,
                            0::bigint, 0::bigint, 0::bigint, 0::bigint, 0::bigint, 0::bigint, NULL::bigint[],
                            0::bigint, 0::bigint, 0::bigint, 0::bigint);
                    END IF;
                END LOOP;
                CONTINUE;
            END IF;

            as_seen := refused[from_part];
            IF as_seen THEN
                as_seen := EXISTS (
                    SELECT FROM unnest(place[from_part : to_part]) AS p (place) WHERE asked_rows[p.place].tid IS NULL);
            END IF;
            IF as_seen THEN
                decided_at := seen_at;
                clock := (extract(epoch FROM decided_at) * 1000000)::bigint;
            END IF;

            -- The first pass finds out how many fit into all parts, the second what that means for each of them.
            granted := CASE WHEN just_look OR costs[from_part] = 0 OR as_seen AND NOT gives THEN 0 ELSE asked END;
            any_moved := false;
            -- A request of one part needs only the second pass, unless it may be left to the next attempt.
            first_pass := CASE WHEN as_seen OR to_part = from_part AND (locking OR just_look) THEN 2 ELSE 1 END;
            FOR pass IN first_pass .. 2 LOOP
                IF pass = 2 AND NOT locking AND NOT just_look THEN
                    -- Is it refused by what others have taken, or is there nothing to give back? That does not
                    -- count if a request before it will change one of its rows. What has moved has to be written. A
                    -- request of one part needs no row but the one that it takes from.
                    locked := CASE WHEN gives AND NOT grants THEN EXISTS (
                                SELECT FROM unnest(place[from_part : to_part]) AS p (place)
                                WHERE asked_rows[p.place].tid IS NOT NULL)
                            ELSE granted > 0 OR any_moved END
                        OR EXISTS (
                            SELECT FROM unnest(place[from_part : to_part]) AS p (place) WHERE to_write[p.place])
                        OR to_part = from_part AND costs[from_part] BETWEEN 1 AND limits[from_part];
                    refused[from_part : to_part] := array_fill(NOT locked, ARRAY[to_part - from_part + 1]);
                    seen_at := decided_at;
                    FOR part IN from_part .. to_part LOOP
                        at := place[part];
                        to_write[at] := to_write[at] OR locked;
                        seen[part] := asked_rows[at];
                        seen_writers[part] := writers[at];
                    END LOOP;
                    EXIT;
                END IF;
                FOR part IN from_part .. to_part LOOP
                    algorithm := algorithms[part];
                    at := place[part];
                    s := CASE WHEN as_seen THEN seen[part] ELSE asked_rows[at] END;
                    -- A row of another algorithm counts as no row.
                    IF (CASE WHEN as_seen THEN seen_writers[part] ELSE writers[at] END) <> algorithm THEN
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
{{- if .Zoned}}
                        zone := CASE WHEN zones IS NULL THEN 'UTC' ELSE zones[part] END;
{{- end}}
                        IF pass = first_pass
                            AND ((cost >= 1 OR just_look OR gives OR cost = 0 AND to_part = from_part)
                                AND {{include (print .Name ".valid") | hang 32}}
                                {{- with maybe (print .Name ".known") ""}}
                                AND {{.}}{{end}}
                            ) IS NOT TRUE
                        THEN
                            RAISE EXCEPTION 'rate_limit: the % of part % is outside the exact range', CASE
                                    WHEN (cost >= 1 OR just_look OR gives OR cost = 0 AND to_part = from_part)
                                        IS NOT TRUE THEN 'cost'
                                    ELSE 'limit, span or {{if .Zoned}}zone{{else}}refill{{end}}' END, part
                                USING ERRCODE = 'invalid_parameter_value',
                                    HINT = 'Of limit, span and {{if .Zoned}}zone{{else}}refill{{end}}: '
                                    '{{include (print .Name ".hint") | hang 36}}';
                        END IF;
                        -- What fits into less than the room there is, fits. Then the rest need not be worked out.
                        CONTINUE WHEN pass = 1 AND asked = 1
                            AND {{include (print .Name ".enough")}};
{{include (print .Name ".roll") | indent 24}}
                        IF gives AND pass = 2 AND NOT as_seen THEN
                            -- This divides, because the product could overflow.
                            units := CASE WHEN asked > -(9223372036854775807 / cost) THEN 9223372036854775807
                                ELSE -asked * cost END;
                            IF grants THEN
                                changed := true;
                                s.{{.Credit}} := least(s.{{.Credit}} + least(units, 2305843009213693952),
                                    2305843009213693952);
                                s.since := coalesce(s.since, t);
                                s.expires_at := t + {{include (print .Name ".lasts")}};
                            ELSE
                                -- What goes back is all that changes. The row is not rolled forward, and it does
                                -- not end earlier, unless nothing in it counts. Callers who ask under other numbers
                                -- may still count what these numbers no longer count.
                                r := asked_rows[at];
                                -- What came out of credit goes back first, as credit, if the row is still the one
                                -- that it came from.
                                back := least(greatest(coalesce(taken_spent[part], 0), 0), units);
                                units := units - back;
                                changed := coalesce(back > 0 AND s.since = taken_since[part]
                                    AND s.{{.Credit}} < 2305843009213693952
                                    {{- with maybe (print .Name ".another") ""}}
                                    AND NOT ({{. | hang 32}}){{end}},
                                    false);
                                IF changed THEN
                                    s.{{.Credit}} := s.{{.Credit}} + least(back, 2305843009213693952 - s.{{.Credit}});
                                    r.{{.Credit}} := s.{{.Credit}};
                                    s.expires_at := greatest(s.expires_at, t + {{include (print .Name ".lasts")}});
                                    r.expires_at := greatest(r.expires_at, t + {{include (print .Name ".lasts")}});
                                END IF;
{{include (print .Name ".refund") | indent 32}}
                            END IF;
                        END IF;
{{include (print .Name ".room") | indent 24}}
                        remaining := remaining + s.{{.Credit}};
{{- end}}
                    ELSE
                        RAISE EXCEPTION 'rate_limit: % is no algorithm', algorithm
                            USING ERRCODE = 'invalid_parameter_value', HINT = 'Write '
                                '{{include "codes" .Algorithms}}.';
                    END CASE;
                    IF pass = first_pass AND NOT (just_look OR gives) THEN
                        any_moved := any_moved OR (moved AND cost > remaining AND cost <= max_count);
                        granted := CASE WHEN cost BETWEEN 1 AND max_count
                            THEN least(granted, remaining / cost) ELSE 0 END;
                    END IF;
                    CONTINUE WHEN pass = 1;

                    spent := 0;
                    needed := 0;
                    retry_after_us := CASE
                        WHEN granted = asked THEN 0
                        WHEN cost > max_count THEN NULL
                        WHEN remaining - granted * cost >= greatest(cost, 1) THEN 0
                        ELSE 1 -- worked out below
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

                    IF (granted > 0 AND changed) OR (moved AND cost > 0 AND retry_after_us > 0) THEN
                        IF NOT gives OR grants OR (reset_after_us = 0 AND r.count = 0 AND r.prev_count = 0) THEN
                            s.expires_at := clock + reset_after_us;
                            r := s;
                        END IF;
                        -- How many of the requests that were granted are spent later, and how many units may be held?
                        -- (TokenBucket.lend in tokenbucket.go.) The decision tells what was leased before.
                        ahead := CASE WHEN leased[part] > 0 AND algorithm = 3 AND NOT gives
                            THEN least(leased[part] / cost - (asked - granted), granted) END;
                        IF ahead > 0 THEN
{{include "tokenbucket.leases" | indent 28}}
                            ahead := least(ahead * cost, 2305843009213693952 - leases[2], (full_credit - s.credit
                                - least(leases[2] + leases[3], capacity) * every_us - lease_us * refill) / every_us);
                            IF ahead > 0 THEN
                                leases[2] := leases[2] + ahead;
                                r.log := leases;
                            END IF;
                        END IF;
                        asked_rows[at] := r;
                        writers[at] := algorithm;
                        to_write[at] := true;
                    END IF;
                    RETURN NEXT ROW(part::bigint, granted, remaining, retry_after_us, reset_after_us, decided_at,
                        s.count, s.prev_count, s.window_start, s.credit,
                        s.scale, s.expires_at,
                        CASE
                            WHEN needed > 0 THEN s.log[1:least(needed, 64)] -- 64 is maxDenialEntries
                            WHEN algorithm = 3 AND leased[part] > 0 AND NOT gives THEN s.log
                        END,
                        s.since, s.window_start,
                        CASE WHEN algorithm = 3 THEN s.returned + full_credit - s.credit END, spent);
                END LOOP;
            END LOOP;
            IF as_seen THEN
                decided_at := locked_at;
                clock := (extract(epoch FROM decided_at) * 1000000)::bigint;
            END IF;
        END LOOP;

        IF just_look THEN
            RETURN;
        ELSIF locking THEN
{{- range .Tables}}
            IF true = ANY (to_write) AND {{if eq .Name "durable"}}true{{else}}false{{end}} = ANY (in_durable) THEN
                -- LIMIT by a subquery lets the planner expect few rows, so it always fetches them by tid and never
                -- scans.
                UPDATE rate_limit_{{.Name}} AS d
                SET algorithm = n.algorithm, count = n.count, prev_count = n.prev_count, window_start = n.window_start,
                    credit = n.credit, scale = n.scale, expires_at = n.expires_at, log = n.log,
                    since = n.since, capacity = n.capacity, refill = n.refill, returned = n.returned
                FROM (
                    SELECT * FROM unnest((SELECT asked_rows), (SELECT writers), (SELECT to_write), (SELECT in_durable))
                        AS n (ord, cost, asked, tid, count, prev_count, window_start, credit, scale, expires_at,
                            since, capacity, refill, returned, log, algorithm, to_write, durable)
                    WHERE n.to_write AND {{.Of "n"}} LIMIT (SELECT rows)
                ) AS n
                WHERE d.ctid = n.tid;
            END IF;
{{- end}}
            RETURN;
        END IF;
        IF skip_held THEN
            -- The rows are made one after the other, to find out which of them others are making.
            tried := true;
            waits := 0;
            FOR ord IN
                SELECT min(e.ord)
                FROM unnest((SELECT names), (SELECT keys), (SELECT durables), (SELECT refused))
                    WITH ORDINALITY AS e (name, key, durable, refused, ord)
                WHERE NOT e.refused
                GROUP BY e.durable, e.name COLLATE "C", e.key COLLATE "C"
                ORDER BY e.durable, octet_length(e.key COLLATE "C") DESC, e.key COLLATE "C", e.name COLLATE "C"
            LOOP
                EXIT WHEN waits = 5;
                IF holders[ord] IS NOT NULL THEN
                    -- The row was held, and may be gone. Rows behind it are locked by now, so it is not made: that
                    -- could mean to wait for somebody who makes it too, and then waits for those.
                    holders[ord] := -1;
                    CONTINUE;
                END IF;
                BEGIN
{{- range .Tables}}
                    {{if eq .Name "durable"}}ELSE{{else}}IF NOT durables[ord] THEN{{end}}
                        INSERT INTO rate_limit_{{.Name}} AS d (prefix, key)
                        SELECT names[ord], keys[ord]
                        WHERE NOT EXISTS (
                            SELECT FROM rate_limit_{{.Name}} AS d WHERE d.prefix = names[ord] AND d.key = keys[ord])
                        ON CONFLICT (prefix, key) DO NOTHING;
{{- end}}
                    END IF;
                EXCEPTION WHEN lock_not_available THEN
                    holders[ord] := 0;
                    waits := waits + 1;
                END;
            END LOOP;
            locking := true;
            CONTINUE;
        END IF;
{{- range .Tables}}
        IF {{if eq .Name "durable"}}true{{else}}false{{end}} = ANY (durables) THEN
            INSERT INTO rate_limit_{{.Name}} AS d (prefix, key)
            SELECT e.name COLLATE "C", e.key COLLATE "C"
            FROM unnest((SELECT names), (SELECT keys),
                (SELECT durables), (SELECT refused)) AS e (name, key, durable, refused)
            WHERE NOT e.refused AND {{.Of "e"}}
            GROUP BY e.name COLLATE "C", e.key COLLATE "C"
            ORDER BY octet_length(e.key COLLATE "C") DESC, e.key COLLATE "C", e.name COLLATE "C"
            ON CONFLICT (prefix, key)
            DO UPDATE SET count = d.count WHERE clock_timestamp() > give_up AND _rate_limit_late();
        END IF;
{{- end}}
        locking := true;
    END LOOP;
    RAISE EXCEPTION 'rate_limit: rows were made, and were missing again'
        USING ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'Something deletes rows of this transaction, or keeps them from being made: a trigger?';
END
$$;

COMMENT ON FUNCTION rate_limit_all IS
    'Decides requests that take from several limits at once, or from none of them. '
    'The arrays have an element for each part: the request that it belongs to, limiter, key, '
    'whether it is in rate_limit_durable, '
    'algorithm ({{include "codes" .Algorithms}}), '
    'max_count or capacity, window_us or every_us, and refill. '
    'zones, by name, has the time zone of each that is a calendar window; NULL means UTC.
It returns a row for each part: '
    'ord (its place in the arrays), '
    'granted (how many of the counts requests were granted, as wholes), '
    'remaining (the largest cost that would be granted next), '
    'retry_after_us (microseconds until the others can be granted; 0: all were; NULL: never), '
    'reset_after_us (microseconds until the key is as good as new), '
    'decided_at (the database clock at the decision), '
    'the state of the key then, as in the table, '
    'and what a refund has to tell: taken_since, taken_in, taken_at and taken_spent. '
    'The parts that refused a request are those with a retry_after_us other than 0. '
    'The request fits after the longest of them. '
    'A denial is a row with granted = 0, never an error, and takes nothing. '
    'What is taken commits or rolls back with the transaction.
Example: SELECT * FROM rate_limit_all(ARRAY[1, 1], ARRAY[''address'', ''user''], '
    'ARRAY[''192.0.2.1'', ''user:123''], ARRAY[false, false], ARRAY[2, 3]::smallint[], '
    'ARRAY[100, 20], ARRAY[60000000, 10000000], ARRAY[0, 5]) '
    'takes one of 100 a minute and one token of a bucket, or neither.
Optional, by name: costs for each part, which are 1 each by default, and counts. '
    'Costs that are all 0 only look. '
    'A request whose costs are below 0 grants all of its parts credit above the limit. '
    'With the taken_since, taken_in, taken_at and taken_spent of the decisions of one that took, it is a refund: '
    'it gives back what that request still counts.';
