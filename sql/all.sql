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
-- request of a few that come in this one is spared the sorting. At the first missing row the locking stops, as in
-- rate_limit_lock. But here a row may be missing of a request that another part refuses, and a denial shall write nothing. So
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
    back bigint;       -- what goes back
    decided_at timestamptz;
    asked bigint;
    granted bigint;
    remaining bigint;
    spent bigint;      -- how much of what is taken comes out of granted credit
    retry_after_us bigint;
    reset_after_us bigint;
    max_count bigint;
    window_us bigint;
    ends bigint;
    rest bigint;
    weight bigint;
    ask bigint;
    wait bigint;
    capacity bigint;
    refill bigint;
    every_us bigint;
    full_credit bigint;
    need bigint;
    units bigint;
    newest integer;
    needed integer;
    over bigint;
    age_bits CONSTANT bigint := 9007199254740991;
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
                IF durables[part] THEN
                    SELECT d.algorithm, d.ctid, d.count, d.prev_count, d.window_start, d.credit, d.scale, d.expires_at, d.log, d.since, d.capacity, d.refill, d.returned
                    INTO algorithm, r.tid, r.count, r.prev_count, r.window_start, r.credit, r.scale, r.expires_at, r.log, r.since, r.capacity, r.refill, r.returned
                    FROM rate_limit_durable AS d
                    WHERE d.prefix = names[part] AND d.key = keys[part]
                    FOR UPDATE;
                ELSE
                    SELECT d.algorithm, d.ctid, d.count, d.prev_count, d.window_start, d.credit, d.scale, d.expires_at, d.log, d.since, d.capacity, d.refill, d.returned
                    INTO algorithm, r.tid, r.count, r.prev_count, r.window_start, r.credit, r.scale, r.expires_at, r.log, r.since, r.capacity, r.refill, r.returned
                    FROM rate_limit_ephemeral AS d
                    WHERE d.prefix = names[part] AND d.key = keys[part]
                    FOR UPDATE;
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
            -- The same query three times. What each of its parts is for stands in rows.sql; a row is looked up for its first part.
            IF locking AND skip_held THEN
                OPEN elements FOR
                    SELECT e.ord, e.first,
                        e.durable IS NOT NULL AND octet_length(e.name) BETWEEN 1 AND 128 AND octet_length(e.key) BETWEEN 1 AND 512,
                        CASE WHEN NOT e.first OR coalesce(d.tid, l.tid) IS NOT NULL THEN false WHEN NOT seen.it THEN true END,
                        coalesce(d.algorithm, l.algorithm, 0),
                        coalesce(d.tid, l.tid), coalesce(d.count, l.count, 0), coalesce(d.prev_count, l.prev_count, 0),
                        coalesce(d.window_start, l.window_start, 0), coalesce(d.credit, l.credit, 0), coalesce(d.scale, l.scale),
                        coalesce(d.expires_at, l.expires_at, 0), coalesce(d.log, l.log), coalesce(d.since, l.since), coalesce(d.capacity, l.capacity),
                        coalesce(d.refill, l.refill), coalesce(d.returned, l.returned)
                    FROM (
                        SELECT e.durable, e.name, e.key, e.ord,
                            row_number() OVER (PARTITION BY e.durable, octet_length(e.key), e.key COLLATE "C", e.name COLLATE "C" ORDER BY e.ord) = 1 AS first
                        FROM unnest((SELECT durables), (SELECT names), (SELECT keys), (SELECT refused))
                            WITH ORDINALITY AS e (durable, name, key, refused, ord)
                        WHERE NOT e.refused
                        ORDER BY e.durable, octet_length(e.key) DESC, e.key COLLATE "C", e.name COLLATE "C", e.ord
                    ) AS e
                    LEFT JOIN LATERAL (
                        SELECT d.ctid AS tid, d.* FROM rate_limit_ephemeral AS d
                        WHERE e.first AND NOT e.durable AND d.prefix = e.name AND d.key = e.key FOR UPDATE SKIP LOCKED
                    ) AS d ON true
                    LEFT JOIN LATERAL (
                        SELECT d.ctid AS tid, d.* FROM rate_limit_durable AS d
                        WHERE e.first AND e.durable AND d.prefix = e.name AND d.key = e.key FOR UPDATE SKIP LOCKED
                    ) AS l ON true
                    CROSS JOIN LATERAL (
                        SELECT EXISTS (SELECT FROM rate_limit_ephemeral AS d WHERE NOT e.durable AND d.prefix = e.name AND d.key = e.key OFFSET 0)
                            OR EXISTS (SELECT FROM rate_limit_durable AS d WHERE e.durable AND d.prefix = e.name AND d.key = e.key OFFSET 0) AS it
                        OFFSET 0
                    ) AS seen;
            ELSIF locking THEN
                OPEN elements FOR
                    SELECT e.ord, e.first,
                        e.durable IS NOT NULL AND octet_length(e.name) BETWEEN 1 AND 128 AND octet_length(e.key) BETWEEN 1 AND 512,
                        e.first AND coalesce(d.tid, l.tid) IS NULL, coalesce(d.algorithm, l.algorithm, 0),
                        coalesce(d.tid, l.tid), coalesce(d.count, l.count, 0), coalesce(d.prev_count, l.prev_count, 0),
                        coalesce(d.window_start, l.window_start, 0), coalesce(d.credit, l.credit, 0), coalesce(d.scale, l.scale),
                        coalesce(d.expires_at, l.expires_at, 0), coalesce(d.log, l.log), coalesce(d.since, l.since), coalesce(d.capacity, l.capacity),
                        coalesce(d.refill, l.refill), coalesce(d.returned, l.returned)
                    FROM (
                        SELECT e.durable, e.name, e.key, e.ord,
                            row_number() OVER (PARTITION BY e.durable, octet_length(e.key), e.key COLLATE "C", e.name COLLATE "C" ORDER BY e.ord) = 1 AS first
                        FROM unnest((SELECT durables), (SELECT names), (SELECT keys), (SELECT refused))
                            WITH ORDINALITY AS e (durable, name, key, refused, ord)
                        WHERE NOT e.refused
                        ORDER BY e.durable, octet_length(e.key) DESC, e.key COLLATE "C", e.name COLLATE "C", e.ord
                    ) AS e
                    LEFT JOIN LATERAL (
                        SELECT d.ctid AS tid, d.* FROM rate_limit_ephemeral AS d
                        WHERE e.first AND NOT e.durable AND d.prefix = e.name AND d.key = e.key FOR UPDATE
                    ) AS d ON true
                    LEFT JOIN LATERAL (
                        SELECT d.ctid AS tid, d.* FROM rate_limit_durable AS d
                        WHERE e.first AND e.durable AND d.prefix = e.name AND d.key = e.key FOR UPDATE
                    ) AS l ON true;
            ELSE
                OPEN elements FOR
                    SELECT e.ord, e.first,
                        e.durable IS NOT NULL AND octet_length(e.name) BETWEEN 1 AND 128 AND octet_length(e.key) BETWEEN 1 AND 512,
                        false, coalesce(d.algorithm, l.algorithm, 0),
                        coalesce(d.tid, l.tid), coalesce(d.count, l.count, 0), coalesce(d.prev_count, l.prev_count, 0),
                        coalesce(d.window_start, l.window_start, 0), coalesce(d.credit, l.credit, 0), coalesce(d.scale, l.scale),
                        coalesce(d.expires_at, l.expires_at, 0), coalesce(d.log, l.log), coalesce(d.since, l.since), coalesce(d.capacity, l.capacity),
                        coalesce(d.refill, l.refill), coalesce(d.returned, l.returned)
                    FROM (
                        SELECT e.durable, e.name, e.key, e.ord,
                            row_number() OVER (PARTITION BY e.durable, octet_length(e.key), e.key COLLATE "C", e.name COLLATE "C" ORDER BY e.ord) = 1 AS first
                        FROM unnest((SELECT durables), (SELECT names), (SELECT keys), (SELECT refused))
                            WITH ORDINALITY AS e (durable, name, key, refused, ord)
                        WHERE NOT e.refused
                        ORDER BY e.durable, octet_length(e.key) DESC, e.key COLLATE "C", e.name COLLATE "C", e.ord
                    ) AS e
                    LEFT JOIN LATERAL (
                        SELECT d.ctid AS tid, d.* FROM rate_limit_ephemeral AS d
                        WHERE e.first AND NOT e.durable AND d.prefix = e.name AND d.key = e.key OFFSET 0
                    ) AS d ON true
                    LEFT JOIN LATERAL (
                        SELECT d.ctid AS tid, d.* FROM rate_limit_durable AS d
                        WHERE e.first AND e.durable AND d.prefix = e.name AND d.key = e.key OFFSET 0
                    ) AS l ON true;
            END IF;

            previous := NULL;
            LOOP
                FETCH elements INTO ord, first, valid, missing, algorithm, r.tid, r.count, r.prev_count, r.window_start, r.credit, r.scale, r.expires_at, r.log,
                    r.since, r.capacity, r.refill, r.returned;
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
            granted := CASE WHEN just_look THEN 0 ELSE asked END;
            any_moved := false;
            FOR pass IN 1 .. 2 LOOP
                IF pass = 2 AND NOT locking AND NOT just_look THEN
                    EXIT WHEN CASE
                        WHEN gives AND NOT grants THEN EXISTS (SELECT FROM unnest(place[from_part : to_part]) AS p (place) WHERE asked_rows[p.place].tid IS NOT NULL)
                        ELSE granted > 0 OR any_moved -- what has moved has to be written
                    END;
                    -- Refused, by what others have taken, or nothing to give back; what the requests before it are about to take or
                    -- give back does not count here.
                    refused[from_part : to_part] := array_fill(true, ARRAY[to_part - from_part + 1]);
                END IF;
                FOR part IN from_part .. to_part LOOP
                    algorithm := algorithms[part];
                    at := place[part];
                    s := asked_rows[at];
                    IF writers[at] <> algorithm THEN
                        s.expires_at := 0;
                    END IF;
                    r.ord := part;
                    r.cost := costs[part];
                    r.asked := asked;
                    moved := false;
                    CASE algorithm
                    WHEN 1 THEN
                        max_count := limits[part];
                        window_us := spans_us[part];
                        IF pass = 1 AND (max_count >= 1 AND window_us BETWEEN 1 AND 2251799813685248 AND max_count <= 4611686018427387904 / window_us AND (r.cost >= 1 OR just_look OR gives)) IS NOT TRUE THEN
                            RAISE EXCEPTION 'rate_limit: the numbers of part % are outside the exact range', part
                                USING ERRCODE = 'invalid_parameter_value', HINT = 'The limit and the span are at least 1, the span is at most 2^51, and their product is at most 2^62. Costs are at least 1, or below 0, or all 0.';
                        END IF;
                        CONTINUE WHEN pass = 1 AND asked = 1 AND r.cost <= max_count - s.count; -- what fits into less, fits: saves the rest
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
                        IF gives AND pass = 2 THEN
                            -- By division, because the product could overflow.
                            units := CASE WHEN r.asked > -(9223372036854775807 / r.cost) THEN 9223372036854775807 ELSE -r.asked * r.cost END;
                            IF taken_in[r.ord] IS NULL THEN -- a grant
                                changed := true;
                                s.credit := least(s.credit + least(units, 2305843009213693952), 2305843009213693952);
                                s.since := coalesce(s.since, t);
                                s.expires_at := t + window_us;
                            ELSE
                                -- What came out of credit goes back first, as credit, if the row is still the one that it came from.
                                back := least(greatest(coalesce(taken_spent[r.ord], 0), 0), units);
                                units := units - back;
                                changed := coalesce(back > 0 AND s.since = taken_since[r.ord] AND s.credit < 2305843009213693952, false);
                                IF changed THEN
                                    s.credit := s.credit + least(back, 2305843009213693952 - s.credit);
                                    s.expires_at := greatest(s.expires_at, t + window_us);
                                END IF;
                                IF s.window_start = taken_in[r.ord] THEN
                                    changed := changed OR (units > 0 AND s.count > 0);
                                    s.count := s.count - least(units, s.count);
                                END IF;
                                IF s.count = 0 THEN
                                    IF s.credit = 0 THEN -- as good as new
                                        t := clock;
                                        s.since := NULL;
                                    END IF;
                                    s.window_start := t;
                                END IF;
                            END IF;
                        END IF;
                        remaining := greatest(max_count - s.count, 0) + s.credit;
                    WHEN 2 THEN
                        max_count := limits[part];
                        window_us := spans_us[part];
                        IF pass = 1 AND (max_count >= 1 AND window_us BETWEEN 1 AND 2251799813685248 AND max_count <= 4611686018427387904 / window_us AND (r.cost >= 1 OR just_look OR gives)) IS NOT TRUE THEN
                            RAISE EXCEPTION 'rate_limit: the numbers of part % are outside the exact range', part
                                USING ERRCODE = 'invalid_parameter_value', HINT = 'The limit and the span are at least 1, the span is at most 2^51, and their product is at most 2^62. Costs are at least 1, or below 0, or all 0.';
                        END IF;
                        CONTINUE WHEN pass = 1 AND asked = 1 AND r.cost <= max_count - s.count - s.prev_count;
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
                            IF t - s.window_start >= 2 * window_us OR (s.count = 0 AND (s.prev_count = 0 OR t - s.window_start >= window_us)) THEN
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
                        IF gives AND pass = 2 THEN
                            -- By division, because the product could overflow.
                            units := CASE WHEN r.asked > -(9223372036854775807 / r.cost) THEN 9223372036854775807 ELSE -r.asked * r.cost END;
                            IF taken_in[r.ord] IS NULL THEN -- a grant
                                changed := true;
                                s.credit := least(s.credit + least(units, 2305843009213693952), 2305843009213693952);
                                s.since := coalesce(s.since, t);
                                s.expires_at := t + 2 * window_us;
                            ELSE
                                -- What came out of credit goes back first, as credit, if the row is still the one that it came from.
                                back := least(greatest(coalesce(taken_spent[r.ord], 0), 0), units);
                                units := units - back;
                                changed := coalesce(back > 0 AND s.since = taken_since[r.ord] AND s.credit < 2305843009213693952, false);
                                IF changed THEN
                                    s.credit := s.credit + least(back, 2305843009213693952 - s.credit);
                                    s.expires_at := greatest(s.expires_at, t + 2 * window_us);
                                END IF;
                                IF s.window_start = taken_in[r.ord] THEN
                                    changed := changed OR (units > 0 AND s.count > 0);
                                    s.count := s.count - least(units, s.count);
                                ELSIF s.window_start - window_us = taken_in[r.ord] THEN
                                    changed := changed OR (units > 0 AND s.prev_count > 0);
                                    s.prev_count := s.prev_count - least(units, s.prev_count);
                                END IF;
                                IF s.count = 0 AND s.prev_count = 0 THEN
                                    IF s.credit = 0 THEN -- as good as new
                                        t := clock;
                                        s.since := NULL;
                                    END IF;
                                    s.window_start := t;
                                END IF;
                            END IF;
                        END IF;
                        rest := s.window_start + window_us - t;
                        weight := CASE
                            WHEN s.prev_count = 0 THEN 0
                            -- A prev_count that an older, larger limit has left could overflow the product; this asks by division.
                            WHEN rest > max_count * window_us / s.prev_count THEN max_count
                            ELSE (s.prev_count * rest + window_us - 1) / window_us
                        END;
                        remaining := greatest(max_count - s.count - weight, 0) + s.credit;
                    WHEN 3 THEN
                        max_count := limits[part];
                        capacity := limits[part];
                        every_us := spans_us[part];
                        refill := refills[part];
                        IF pass = 1 AND (capacity >= 1 AND refill >= 1 AND every_us >= 1 AND capacity <= 4611686018427387904 / every_us
                                AND (capacity * every_us - 1) / refill < 2251799813685248 AND (r.cost >= 1 OR just_look OR gives)) IS NOT TRUE THEN
                            RAISE EXCEPTION 'rate_limit: the numbers of part % are outside the exact range', part
                                USING ERRCODE = 'invalid_parameter_value', HINT = 'The limit, the span and the refill are at least 1, limit * span is at most 2^62, and divided by refill it is at most 2^51. Costs are at least 1, or below 0, or all 0.';
                        END IF;
                        CONTINUE WHEN pass = 1 AND asked = 1 AND s.scale = every_us AND r.cost <= least(s.credit / every_us, capacity);
                        full_credit := capacity * every_us;
                        IF clock >= s.expires_at THEN
                            s.count := 0;
                            s.credit := full_credit;
                            s.window_start := clock;
                        ELSE
                            IF s.scale <> every_us OR s.capacity <> capacity OR s.refill <> refill THEN -- what was taken before stays taken
                                s.since := greatest(s.since + 1, s.window_start, clock);
                                s.returned := 0;
                            END IF;
                            IF s.scale <> every_us THEN
                                -- The policy has changed. Whole tokens are kept, and the part of one, rounded down; its product may
                                -- need 128 bits, which only numeric has, and this runs only until the next grant.
                                s.credit := CASE WHEN s.credit / s.scale >= capacity THEN full_credit
                                    ELSE s.credit / s.scale * every_us + div((s.credit % s.scale)::numeric * every_us, s.scale)::bigint END;
                            END IF;
                            s.credit := least(s.credit, full_credit);
                            IF s.credit = full_credit AND s.count = 0 THEN -- the capacity is lower now: as good as new
                                s.window_start := clock;
                                s.expires_at := clock;
                            ELSIF s.window_start - clock > (full_credit - 1) / refill + 1 THEN
                                s.window_start := clock;
                                s.since := greatest(s.since + 1, clock);
                                s.returned := 0;
                                s.expires_at := clock + (full_credit - CASE WHEN s.count > 0 THEN 0 ELSE s.credit END - 1) / refill + 1;
                                moved := true;
                            END IF;
                        END IF;
                        s.scale := every_us;
                        s.capacity := capacity;
                        s.refill := refill;
                        t := greatest(clock, s.window_start);
                        -- Asked by division, because the product overflows after a long time.
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
                        IF gives AND pass = 2 THEN
                            -- By division, because the product could overflow.
                            units := CASE WHEN r.asked > -(9223372036854775807 / r.cost) THEN 9223372036854775807 ELSE -r.asked * r.cost END;
                            IF taken_in[r.ord] IS NULL THEN -- a grant
                                changed := true;
                                s.count := least(s.count + least(units, 2305843009213693952), 2305843009213693952);
                                s.expires_at := t + (full_credit - 1) / refill + 1;
                            ELSE
                                -- What came out of credit goes back first, as credit, if the row is still the one that it came from.
                                back := least(greatest(coalesce(taken_spent[r.ord], 0), 0), units);
                                units := units - back;
                                changed := coalesce(back > 0 AND s.since = taken_since[r.ord] AND s.count < 2305843009213693952 AND (s.count > 0 OR s.credit < full_credit), false);
                                IF changed THEN
                                    s.count := s.count + least(back, 2305843009213693952 - s.count);
                                    s.expires_at := greatest(s.expires_at, t + (full_credit - 1) / refill + 1);
                                END IF;
                                -- Where the units are in the queue of missing tokens: see TokenBucket.refund in tokenbucket.go.
                                IF s.since = taken_since[r.ord] AND taken_in[r.ord] BETWEEN 0 AND t AND s.credit < full_credit THEN
                                    units := least(units, capacity) * every_us;
                                    need := least(greatest(greatest(coalesce(taken_at[r.ord], 0), 0) - s.returned, units), full_credit);
                                    back := CASE
                                        WHEN t - taken_in[r.ord] <= need / refill THEN least(units, need - (t - taken_in[r.ord]) * refill, full_credit - s.credit)
                                        ELSE 0
                                    END;
                                    changed := changed OR back > 0;
                                    s.credit := s.credit + back;
                                    s.returned := s.returned + back;
                                    IF s.returned > 2305843009213693952 THEN -- lest the sum overflow
                                        s.since := greatest(s.since + 1, t);
                                        s.returned := 0;
                                    END IF;
                                END IF;
                                IF changed AND s.credit = full_credit AND s.count = 0 THEN -- as good as new
                                    t := clock;
                                    s.window_start := clock;
                                    s.since := clock;
                                    s.returned := 0;
                                END IF;
                            END IF;
                        END IF;
                        remaining := s.credit / every_us + s.count;
                    WHEN 4 THEN
                        max_count := limits[part];
                        window_us := spans_us[part];
                        IF pass = 1 AND (max_count BETWEEN 1 AND 1000 AND window_us BETWEEN 1 AND 2251799813685248 AND (r.cost >= 1 OR just_look OR gives)) IS NOT TRUE THEN
                            RAISE EXCEPTION 'rate_limit: the numbers of part % are outside the exact range', part
                                USING ERRCODE = 'invalid_parameter_value', HINT = 'The limit and the span are at least 1, the limit is at most 1000, and the span at most 2^51. Costs are at least 1, or below 0, or all 0.';
                        END IF;
                        CONTINUE WHEN pass = 1 AND asked = 1 AND r.cost <= max_count - s.count;
                        IF clock >= s.expires_at OR (s.count | s.credit) = 0 THEN
                            s.count := 0;
                            s.credit := 0;
                            s.window_start := clock;
                            s.since := NULL;
                            s.log := NULL;
                        ELSIF s.window_start - clock > window_us THEN
                            s.log := ARRAY(
                                SELECT (((e.entry >> 10) - s.window_start + clock) << 10) | (e.entry & 1023)
                                FROM unnest(s.log) WITH ORDINALITY AS e (entry, place)
                                ORDER BY e.place
                            );
                            s.window_start := clock;
                            s.expires_at := clock + window_us;
                            moved := true;
                        END IF;
                        t := greatest(clock, s.window_start);
                        needed := 0;
                        WHILE needed < cardinality(s.log) AND (t - (s.log[needed + 1] >> 10) & age_bits) >= window_us LOOP
                            needed := needed + 1;
                            s.count := s.count - (s.log[needed] & 1023);
                        END LOOP;
                        IF needed > 0 THEN
                            s.log := s.log[needed + 1:];
                        END IF;
                        IF s.count = 0 THEN
                            s.window_start := t;
                            s.since := CASE WHEN s.credit > 0 THEN s.since END;
                        END IF;
                        IF gives AND pass = 2 THEN
                            -- By division, because the product could overflow.
                            units := CASE WHEN r.asked > -(9223372036854775807 / r.cost) THEN 9223372036854775807 ELSE -r.asked * r.cost END;
                            IF taken_in[r.ord] IS NULL THEN -- a grant
                                changed := true;
                                s.credit := least(s.credit + least(units, 2305843009213693952), 2305843009213693952);
                                s.since := coalesce(s.since, t);
                                s.expires_at := t + window_us;
                            ELSE
                                -- What came out of credit goes back first, as credit, if the row is still the one that it came from.
                                back := least(greatest(coalesce(taken_spent[r.ord], 0), 0), units);
                                units := units - back;
                                changed := coalesce(back > 0 AND s.since = taken_since[r.ord] AND s.credit < 2305843009213693952, false);
                                IF changed THEN
                                    s.credit := s.credit + least(back, 2305843009213693952 - s.credit);
                                    s.expires_at := greatest(s.expires_at, t + window_us);
                                END IF;
                                needed := (
                                    SELECT e.nth
                                    FROM unnest(s.log) WITH ORDINALITY AS e (entry, nth)
                                    WHERE (e.entry >> 10) << 10 = taken_in[r.ord] << 10
                                );
                                back := least(units, s.log[needed] & 1023);
                                IF needed > 0 AND back > 0 THEN
                                    changed := true;
                                    s.count := s.count - back;
                                    IF back = (s.log[needed] & 1023) THEN
                                        s.log := s.log[1:needed - 1] || s.log[needed + 1:];
                                    ELSE
                                        s.log[needed] := s.log[needed] - back;
                                    END IF;
                                    newest := cardinality(s.log);
                                    IF newest > 0 THEN
                                        s.window_start := t - (t - (s.log[newest] >> 10) & age_bits);
                                        t := greatest(clock, s.window_start);
                                    END IF;
                                END IF;
                                IF s.count = 0 THEN
                                    IF s.credit = 0 THEN -- as good as new
                                        t := clock;
                                        s.since := NULL;
                                    END IF;
                                    s.window_start := t;
                                END IF;
                            END IF;
                        END IF;
                        remaining := greatest(max_count - s.count, 0) + s.credit;
                    ELSE
                        RAISE EXCEPTION 'rate_limit: % is no algorithm', algorithm
                            USING ERRCODE = 'invalid_parameter_value', HINT = 'Write 1 for a fixed window, 2 for a sliding window, 3 for a token bucket, 4 for a sliding window log.';
                    END CASE;
                    IF pass = 1 THEN
                        CONTINUE WHEN just_look OR gives;
                        any_moved := any_moved OR (moved AND r.cost > remaining AND r.cost <= max_count);
                        granted := CASE WHEN r.cost <= max_count THEN least(granted, remaining / r.cost) ELSE 0 END;
                        CONTINUE;
                    END IF;

                    spent := 0;
                    CASE algorithm
                    WHEN 1 THEN
                        IF granted > 0 AND NOT gives THEN
                            IF s.credit > 0 THEN -- for what there is no ordinary room
                                spent := greatest(granted * r.cost - (remaining - s.credit), 0);
                                s.credit := s.credit - spent;
                            END IF;
                            s.count := s.count + granted * r.cost - spent;
                            s.expires_at := t + window_us;
                            remaining := remaining - granted * r.cost;
                        END IF;
                        ends := least(s.window_start + window_us, s.expires_at);
                        retry_after_us := CASE
                            WHEN granted = r.asked OR (r.cost <= max_count AND remaining >= greatest(r.cost, 1)) THEN 0
                            WHEN r.cost <= max_count THEN ends - clock
                        END;
                        reset_after_us := CASE WHEN s.credit > 0 THEN s.expires_at - clock WHEN s.count > 0 THEN ends - clock ELSE 0 END;
                    WHEN 2 THEN
                        IF granted > 0 AND NOT gives THEN
                            IF s.credit > 0 THEN -- for what there is no ordinary room
                                spent := greatest(granted * r.cost - (remaining - s.credit), 0);
                                s.credit := s.credit - spent;
                            END IF;
                            s.count := s.count + granted * r.cost - spent;
                            s.expires_at := t + 2 * window_us;
                            remaining := remaining - granted * r.cost;
                        END IF;

                        IF granted = r.asked THEN
                            retry_after_us := 0;
                        ELSIF r.cost > max_count THEN
                            retry_after_us := NULL;
                        ELSIF remaining >= greatest(r.cost, 1) THEN
                            retry_after_us := 0;
                        ELSE
                            ask := greatest(r.cost, 1) - s.credit;
                            IF ask <= max_count - s.count THEN -- the sum could overflow
                                -- It fits into this window, once prev_count * rest has fallen to what is left of max_count * window_us.
                                wait := rest - (max_count - s.count - ask) * window_us / s.prev_count;
                            ELSE
                                -- Only into the next window, where count takes the place of prev_count.
                                wait := rest + window_us - (max_count - ask) * window_us / s.count;
                            END IF;
                            retry_after_us := least(t + wait, s.expires_at) - clock;
                        END IF;
                        reset_after_us := CASE
                            WHEN s.credit > 0 THEN s.expires_at - clock
                            WHEN s.count > 0 THEN least(s.window_start + 2 * window_us, s.expires_at) - clock
                            WHEN s.prev_count > 0 THEN least(s.window_start + window_us, s.expires_at) - clock
                            ELSE 0
                        END;
                    WHEN 3 THEN
                        IF granted > 0 AND NOT gives THEN
                            IF s.count > 0 THEN -- for what there is no ordinary room
                                spent := greatest(granted * r.cost - (remaining - s.count), 0);
                                s.count := s.count - spent;
                            END IF;
                            s.credit := s.credit - (granted * r.cost - spent) * every_us;
                            s.expires_at := t + (full_credit - 1) / refill + 1;
                            remaining := remaining - granted * r.cost;
                        END IF;

                        IF granted = r.asked THEN
                            retry_after_us := 0;
                        ELSIF r.cost > capacity THEN
                            retry_after_us := NULL;
                        ELSIF remaining >= greatest(r.cost, 1) THEN
                            retry_after_us := 0;
                        ELSE
                            need := (greatest(r.cost, 1) - s.count) * every_us - s.credit;
                            retry_after_us := least(t + (need - 1) / refill + 1, s.expires_at) - clock;
                        END IF;
                        need := full_credit - s.credit;
                        reset_after_us := CASE WHEN s.count > 0 THEN s.expires_at - clock WHEN need > 0 THEN least(t + (need - 1) / refill + 1, s.expires_at) - clock ELSE 0 END;
                    WHEN 4 THEN
                        IF granted > 0 AND NOT gives THEN
                            IF s.credit > 0 THEN -- for what there is no ordinary room
                                spent := greatest(granted * r.cost - (remaining - s.credit), 0);
                                s.credit := s.credit - spent;
                            END IF;
                            units := granted * r.cost - spent;
                            s.count := s.count + units;
                            IF units > 0 THEN
                                newest := coalesce(cardinality(s.log), 0);
                                IF (t - (s.log[newest] >> 10) & age_bits) = 0 THEN
                                    units := units + (s.log[newest] & 1023);
                                    newest := newest - 1;
                                END IF;
                                s.log := s.log[1:newest] || ARRAY[(t << 10) | units];
                                s.window_start := t;
                            END IF;
                            s.expires_at := t + window_us;
                            remaining := remaining - granted * r.cost;
                        END IF;

                        needed := 0;
                        IF granted = r.asked THEN
                            retry_after_us := 0;
                        ELSIF r.cost > max_count THEN
                            retry_after_us := NULL;
                        ELSIF remaining >= greatest(r.cost, 1) THEN
                            retry_after_us := 0;
                        ELSE
                            -- When enough of the oldest entries have left.
                            over := s.count - s.credit + greatest(r.cost, 1) - max_count;
                            WHILE over > 0 LOOP
                                needed := needed + 1;
                                over := over - (s.log[needed] & 1023);
                            END LOOP;
                            retry_after_us := least(t + window_us - (t - (s.log[needed] >> 10) & age_bits), s.expires_at) - clock;
                        END IF;
                        reset_after_us := CASE
                            WHEN s.credit > 0 THEN s.expires_at - clock
                            WHEN s.count > 0 THEN least(s.window_start + window_us, s.expires_at) - clock
                            ELSE 0
                        END;
                    END CASE;

                    IF (granted > 0 AND (changed OR NOT gives)) OR (moved AND r.cost > 0 AND retry_after_us > 0) THEN
                        s.expires_at := clock + reset_after_us;
                        asked_rows[at] := s;
                        writers[at] := algorithm;
                        to_write[at] := true;
                    END IF;
                    RETURN NEXT ROW(part::bigint, granted, remaining, retry_after_us, reset_after_us, decided_at,
                        s.count, s.prev_count, s.window_start, s.credit, CASE WHEN algorithm = 3 THEN s.scale END, s.expires_at, NULL::bigint[],
                        s.since, s.window_start, CASE WHEN algorithm = 3 THEN s.returned + full_credit - s.credit END, spent);
                END LOOP;
            END LOOP;
        END LOOP;

        IF just_look THEN
            RETURN;
        ELSIF locking THEN
            UPDATE rate_limit_ephemeral AS d
            SET algorithm = n.algorithm, count = n.count, prev_count = n.prev_count, window_start = n.window_start,
                credit = n.credit, scale = n.scale, expires_at = n.expires_at,
                log = CASE WHEN n.algorithm = 4 THEN n.log END,
                since = n.since, capacity = n.capacity, refill = n.refill, returned = n.returned
            FROM (
                SELECT * FROM unnest((SELECT asked_rows), (SELECT writers), (SELECT to_write), (SELECT in_durable))
                    AS n (ord, cost, asked, tid, count, prev_count, window_start, credit, scale, expires_at, log, since, capacity, refill, returned,
                        algorithm, to_write, durable)
                WHERE n.to_write AND NOT n.durable LIMIT (SELECT rows)
            ) AS n
            WHERE d.ctid = n.tid;
            IF true = ANY (in_durable) THEN
                UPDATE rate_limit_durable AS d
                SET algorithm = n.algorithm, count = n.count, prev_count = n.prev_count, window_start = n.window_start,
                    credit = n.credit, scale = n.scale, expires_at = n.expires_at,
                    log = CASE WHEN n.algorithm = 4 THEN n.log END,
                    since = n.since, capacity = n.capacity, refill = n.refill, returned = n.returned
                FROM (
                    SELECT * FROM unnest((SELECT asked_rows), (SELECT writers), (SELECT to_write), (SELECT in_durable))
                        AS n (ord, cost, asked, tid, count, prev_count, window_start, credit, scale, expires_at, log, since, capacity, refill, returned,
                        algorithm, to_write, durable)
                    WHERE n.to_write AND n.durable LIMIT (SELECT rows)
                ) AS n
                WHERE d.ctid = n.tid;
            END IF;
            RETURN;
        ELSIF true = ALL (refused) THEN
            RETURN;
        END IF;
        INSERT INTO rate_limit_ephemeral AS d (prefix, key)
        SELECT e.name COLLATE "C", e.key COLLATE "C"
        FROM unnest((SELECT names), (SELECT keys), (SELECT durables), (SELECT refused)) AS e (name, key, durable, refused)
        WHERE NOT e.refused AND NOT e.durable
            AND NOT (skip_held AND EXISTS (SELECT FROM rate_limit_ephemeral AS d WHERE d.prefix = e.name AND d.key = e.key OFFSET 0))
        GROUP BY e.name COLLATE "C", e.key COLLATE "C"
        ORDER BY octet_length(e.key COLLATE "C") DESC, e.key COLLATE "C", e.name COLLATE "C"
        ON CONFLICT (prefix, key) DO UPDATE SET count = d.count WHERE clock_timestamp() > give_up AND rate_limit_late();
        INSERT INTO rate_limit_durable AS d (prefix, key)
        SELECT e.name COLLATE "C", e.key COLLATE "C"
        FROM unnest((SELECT names), (SELECT keys), (SELECT durables), (SELECT refused)) AS e (name, key, durable, refused)
        WHERE NOT e.refused AND e.durable
            AND NOT (skip_held AND EXISTS (SELECT FROM rate_limit_durable AS d WHERE d.prefix = e.name AND d.key = e.key OFFSET 0))
        GROUP BY e.name COLLATE "C", e.key COLLATE "C"
        ORDER BY octet_length(e.key COLLATE "C") DESC, e.key COLLATE "C", e.name COLLATE "C"
        ON CONFLICT (prefix, key) DO UPDATE SET count = d.count WHERE clock_timestamp() > give_up AND rate_limit_late();
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
