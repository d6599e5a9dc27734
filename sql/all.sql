-- The functions for all algorithms. rate_limit_all can decide every kind of request, except for slots.

-- _rate_limit_valid tells whether a policy's numbers are in the range of exact arithmetic. The result is NULL for an
-- unknown algorithm.
CREATE FUNCTION _rate_limit_valid(algorithm smallint, max_count bigint, span_us bigint, refill bigint, zone text)
RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
        WHEN algorithm IN (1, 2) THEN _rate_limit_valid_window(max_count, span_us)
        WHEN algorithm = 3 THEN _rate_limit_valid_bucket(max_count, refill, span_us)
        WHEN algorithm = 4 THEN _rate_limit_valid_log(max_count, span_us)
        WHEN algorithm = 5 THEN _rate_limit_valid_calendar(max_count, span_us, zone)
        WHEN algorithm = 6 THEN _rate_limit_valid_slots(max_count, span_us, refill) END
$$;

-- _rate_limit_step decides requests for a row with the row's algorithm. _rate_limit_fixed explains the arguments.
CREATE FUNCTION _rate_limit_step(
    s rate_limit_row, algorithm smallint, clock bigint, cost bigint, asked bigint, most bigint,
    max_count bigint, span_us bigint, refill bigint, zone text
) RETURNS rate_limit_row LANGUAGE plpgsql AS $$
BEGIN
    -- Each expression costs time in each transaction that evaluates it, so each algorithm has its own.
    IF algorithm = 1 THEN
        RETURN _rate_limit_fixed(s, clock, cost, asked, most, max_count, span_us);
    ELSIF algorithm = 2 THEN
        RETURN _rate_limit_sliding(s, clock, cost, asked, most, max_count, span_us);
    ELSIF algorithm = 3 THEN
        RETURN _rate_limit_bucket(s, clock, cost, asked, most, max_count, span_us, refill);
    ELSIF algorithm = 4 THEN
        RETURN _rate_limit_log(s, clock, cost, asked, most, max_count, span_us);
    ELSIF algorithm = 5 THEN
        RETURN _rate_limit_calendar(s, clock, cost, asked, most, max_count, span_us, zone);
    ELSE
        RETURN _rate_limit_concurrent(s, cost, most, max_count);
    END IF;
END
$$;

-- _rate_limit_wrong_hold tells whether the arguments of a part that makes, settles or extends a hold do not go
-- together.
CREATE FUNCTION _rate_limit_wrong_hold(
    cost bigint, asked bigint, charges boolean, ttl_us bigint, hold uuid, differs boolean
) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT (NOT differs AND CASE
        WHEN hold IS NULL THEN ttl_us IS NULL
        ELSE coalesce(asked, 1) = 1 AND coalesce(cost, 1) >= 0
            AND CASE WHEN ttl_us IS NULL THEN charges
                ELSE ttl_us BETWEEN 1000 AND 86400000000 AND charges IS NOT TRUE END
        END) IS NOT TRUE
$$;

-- _rate_limit_check raises an error if arguments of rate_limit_all are invalid. _rate_limit_check returns whether the
-- parts are in lock order and no two parts have the same row.
CREATE FUNCTION _rate_limit_check(
    requests integer[], names text[], keys text[], durables boolean[], algorithms smallint[], limits bigint[],
    spans_us bigint[], refills bigint[], zones text[], costs bigint[], counts bigint[], taken_in bigint[],
    leased bigint[], charges boolean[], ttls_us bigint[], holds uuid[], delays_us bigint[],
    looks boolean
) RETURNS boolean LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    n CONSTANT integer := cardinality(keys);
    -- Check that all costs are above 0, and that the array begins at 1.
    takes CONSTANT boolean := costs IS NULL OR costs[1] > 0 AND costs[n] > 0 AND 0 < ALL (costs);
    in_order boolean := true;
    algorithm smallint;
    max_count bigint;
    span_us bigint;
    refill bigint;
    zone text := 'UTC';
    lengths integer[];
    valid boolean;
    differs boolean;
    wrong text;
BEGIN
    lengths := ARRAY[cardinality(requests), cardinality(names), cardinality(durables), cardinality(algorithms),
        cardinality(limits), cardinality(spans_us), cardinality(refills), coalesce(cardinality(costs), n),
        coalesce(cardinality(counts), n), coalesce(cardinality(taken_in), n), coalesce(cardinality(leased), n),
        coalesce(cardinality(charges), n), coalesce(cardinality(ttls_us), n), coalesce(cardinality(holds), n),
        coalesce(cardinality(delays_us), n)];
    IF (array_ndims(keys) = 1 AND array_lower(keys, 1) = 1 AND n = ALL (lengths)) IS NOT TRUE THEN
        RAISE EXCEPTION 'rate_limit: % is not valid', (
                SELECT coalesce(min(e.name), 'keys')
                FROM unnest(string_to_array('requests names durables algorithms limits spans_us refills costs counts '
                    'taken_in leased charges ttls_us holds delays_us', ' '), lengths) AS e (name, n)
                WHERE e.n IS DISTINCT FROM n AND array_ndims(keys) = 1 AND array_lower(keys, 1) = 1)
            USING ERRCODE = 'invalid_parameter_value',
                HINT = 'At least one key is needed, and as many elements of the others as keys. '
                    'NULL instead of costs or of counts means 1 for each key.';
    END IF;
    FOR part IN 1 .. n LOOP
        in_order := in_order AND (part = 1
            OR (durables[part - 1], -octet_length(keys[part - 1]), keys[part - 1] COLLATE "C",
                    names[part - 1] COLLATE "C")
                < (durables[part], -octet_length(keys[part]), keys[part] COLLATE "C", names[part] COLLATE "C"));
        algorithm := algorithms[part]; -- a variable costs less than an array element that is used several times
        max_count := limits[part];
        span_us := spans_us[part];
        refill := refills[part];
        IF zones IS NOT NULL THEN
            zone := zones[part];
            IF algorithm = 5 AND zone <> 'epoch' AND _rate_limit_valid_calendar(1::bigint, 60000000::bigint, zone) THEN
                PERFORM timestamptz 'epoch' AT TIME ZONE zone; -- raises an error if the server does not know the zone
            END IF;
        END IF;
        IF algorithm <= 2 THEN
            valid := _rate_limit_valid_window(max_count, span_us);
        ELSIF algorithm = 3 THEN
            valid := _rate_limit_valid_bucket(max_count, refill, span_us);
        ELSIF algorithm = 4 THEN
            valid := _rate_limit_valid_log(max_count, span_us);
        ELSIF algorithm = 5 THEN
            valid := _rate_limit_valid_calendar(max_count, span_us, zone);
        ELSE
            valid := _rate_limit_valid_slots(max_count, span_us, refill);
        END IF;
        wrong := CASE WHEN valid IS NOT TRUE THEN 'policy' END;
        IF algorithm = 6 AND (costs[part] = 0 AND holds[part] IS NULL) IS NOT TRUE THEN
            wrong := 'slot';
        END IF;
        IF (algorithm BETWEEN 1 AND 6) IS NOT TRUE THEN
            wrong := 'algorithm';
        END IF;
        IF delays_us IS NOT NULL THEN
            IF _rate_limit_wrong_delay(delays_us[part], costs[part], counts[part], algorithm, charges[part],
                holds[part], part > 1 AND requests[part] = requests[part - 1]
                    AND delays_us[part] IS DISTINCT FROM delays_us[part - 1])
            THEN
                wrong := 'delay';
            END IF;
        END IF;
        IF ttls_us IS NOT NULL OR holds IS NOT NULL THEN
            differs := false;
            IF part > 1 AND requests[part] = requests[part - 1] THEN
                differs := (ttls_us[part], holds[part], ttls_us[part] IS NULL OR costs[part] = 0) IS DISTINCT FROM
                    (ttls_us[part - 1], holds[part - 1], ttls_us[part] IS NULL OR costs[part - 1] = 0);
            END IF;
            IF _rate_limit_wrong_hold(costs[part], counts[part], charges[part], ttls_us[part], holds[part], differs)
            THEN
                wrong := 'hold';
            END IF;
        END IF;
        wrong := CASE
            WHEN (octet_length(names[part]) BETWEEN 1 AND 128) IS NOT TRUE THEN 'name'
            WHEN (octet_length(keys[part]) BETWEEN 1 AND 512) IS NOT TRUE THEN 'key'
            WHEN durables[part] IS NULL THEN 'durable'
            WHEN (part = 1 OR requests[part] >= requests[part - 1]) IS NOT TRUE THEN 'next request'
            WHEN counts IS NOT NULL AND (counts[part] >= 1) IS NOT TRUE THEN 'count'
            ELSE wrong END;
        IF takes IS NOT TRUE THEN
            wrong := CASE
                WHEN holds[part] IS NOT NULL AND costs[part] >= 0 THEN wrong
                WHEN costs[part] IS NULL
                    OR requests[part] = requests[part - 1] AND sign(costs[part]) <> sign(costs[part - 1])
                    OR costs[part] = 0 AND NOT looks AND requests[part] IN (requests[part - 1], requests[part + 1])
                THEN 'cost' ELSE wrong END;
        END IF;
        CONTINUE WHEN wrong IS NULL;
        RAISE EXCEPTION 'rate_limit: %', CASE wrong
                WHEN 'algorithm' THEN format('%s is no algorithm', coalesce(algorithm::text, 'NULL'))
                WHEN 'policy' THEN format('the limit, span, refill or zone of part %s is outside the exact range', part)
                ELSE format('the %s of part %s is not valid', wrong, part) END
            USING ERRCODE = 'invalid_parameter_value',
                COLUMN = CASE WHEN octet_length(names[part]) > 128 THEN 'name'
                    WHEN octet_length(keys[part]) > 512 THEN 'key' ELSE '' END,
                HINT = CASE wrong
                    WHEN 'policy' THEN 'Limit, span and refill of a bucket are at least 1. A span is at most 2^51 us, '
                        'limit * span at most 2^62, and for a bucket, divided by refill, at most 2^51. A log has a '
                        'limit of at most 1000. A calendar window has a span of 60000000 (a minute), 3600000000 '
                        '(an hour), 86400000000 (a day), 604800000000 (a week) or 2678400000000 (a month), and a zone '
                        'like UTC or Europe/Berlin. For any other span, the zone is epoch. Concurrency has a '
                        'limit of 1 to 1000000, a span of 0 and a refill of 0.'
                    WHEN 'algorithm'
                        THEN 'Write 1 fixed window, 2 sliding window, 3 token bucket, 4 sliding log, 5 calendar '
                            'window, 6 concurrency.'
                    WHEN 'hold' THEN 'A hold has an id, a ttl of 1000 to 86400000000 us, and a count of 1. It is '
                        'settled by a charge with its id and without a ttl, and extended by a cost of 0 with both.'
                    WHEN 'slot' THEN 'Concurrency has slots, of which nothing can be taken. Its cost is 0: look.'
                    WHEN 'delay' THEN 'A reservation has a delay of at least 0 us, a cost of at least 1, and a count '
                        'of 1. All its parts are token buckets, and have the same delay.'
                    ELSE 'A name has 1 to 128 bytes, a key 1 to 512, and durable is true or false. Requests ascend. '
                        'A count is at least 1. Costs of a request are all above or all below 0.' END;
    END LOOP;
    RETURN in_order;
END
$$;

-- _rate_limit_rows_in_lock_order returns each row of the parts once, in lock order: ephemeral rows before durable rows,
-- then longer keys first, then by key and name. part_of[i] is a part that uses row i. row_of[j] is the row that part j
-- uses.
CREATE FUNCTION _rate_limit_rows_in_lock_order(
    requests integer[], names text[], keys text[], durables boolean[], OUT part_of integer[], OUT row_of integer[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    twice integer[];
BEGIN
    SELECT array_agg(e.part ORDER BY e.place) FILTER (WHERE e.first), array_agg(e.place ORDER BY e.part),
        min(ARRAY[e.before, e.part]) FILTER (WHERE e.request = e.request_before)
    INTO part_of, row_of, twice
    FROM (
        SELECT e.part, e.request, dense_rank() OVER places AS place, row_number() OVER same = 1 AS first,
            lag(e.part) OVER same AS before, lag(e.request) OVER same AS request_before
        FROM unnest(requests, names, keys, durables) WITH ORDINALITY AS e (request, name, key, durable, part)
        WINDOW
            places AS (ORDER BY e.durable, -octet_length(e.key), e.key COLLATE "C", e.name COLLATE "C"),
            same AS (
                PARTITION BY e.durable, -octet_length(e.key), e.key COLLATE "C", e.name COLLATE "C" ORDER BY e.part)
    ) AS e;
    IF twice IS NOT NULL THEN
        RAISE EXCEPTION 'rate_limit: parts % and % of one request are for the same key', twice[1], twice[2]
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Ask for the sum of their costs in one part.';
    END IF;
END
$$;

-- _rate_limit_try_to_make makes a row for requests with skip_held. _rate_limit_try_to_make returns false if another
-- transaction is making the row, and does not end within lock_timeout. SKIP LOCKED cannot skip a row that is not
-- visible yet.
CREATE FUNCTION _rate_limit_try_to_make(name text, key text, durable boolean) RETURNS boolean LANGUAGE plpgsql AS $$
#variable_conflict use_variable
BEGIN
    IF durable THEN
        INSERT INTO rate_limit_durable (prefix, key) VALUES (name, key) ON CONFLICT DO NOTHING;
    ELSE
        INSERT INTO rate_limit_ephemeral (prefix, key) VALUES (name, key) ON CONFLICT DO NOTHING;
    END IF;
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END
$$;

-- _rate_limit_holder returns the id of the transaction that has locked a row, or NULL if none is visible.
CREATE FUNCTION _rate_limit_holder(name text, key text, durable boolean) RETURNS bigint LANGUAGE plpgsql AS $$
#variable_conflict use_variable
BEGIN
    IF durable THEN
        RETURN (SELECT d.xmax::text::bigint FROM rate_limit_durable AS d WHERE d.prefix = name AND d.key = key);
    END IF;
    RETURN (SELECT d.xmax::text::bigint FROM rate_limit_ephemeral AS d WHERE d.prefix = name AND d.key = key);
END
$$;

-- _rate_limit_look reads a row and its live holds without a lock. STABLE lets _rate_limit_look see the same data as the
-- calling statement.
CREATE FUNCTION _rate_limit_look(name text, key text, durable boolean, now_us bigint) RETURNS rate_limit_row
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_variable
DECLARE
    s rate_limit_row;
BEGIN
    IF durable THEN
        SELECT d.ctid, d.algorithm, d.count, d.prev_count, d.window_start, d.credit, d.scale, d.expires_at,
            d.since, d.capacity, d.refill, d.returned, d.log, d.held, d.held_next, d.held_until,
            0::int8, 0::int8, 0::int8, 0::int8, 0::int8, NULL::int8, NULL::int8[], false, false, false INTO s
        FROM rate_limit_durable AS d WHERE d.prefix = name AND d.key = key;
    ELSE
        SELECT d.ctid, d.algorithm, d.count, d.prev_count, d.window_start, d.credit, d.scale, d.expires_at,
            d.since, d.capacity, d.refill, d.returned, d.log, d.held, d.held_next, d.held_until,
            0::int8, 0::int8, 0::int8, 0::int8, 0::int8, NULL::int8, NULL::int8[], false, false, false INTO s
        FROM rate_limit_ephemeral AS d WHERE d.prefix = name AND d.key = key;
    END IF;
    IF s.held IS NOT NULL THEN
        s := CASE WHEN durable THEN _rate_limit_live_durable(s, name, key, _rate_limit_now(now_us))
            ELSE _rate_limit_live_ephemeral(s, name, key, _rate_limit_now(now_us)) END;
    END IF;
    RETURN s;
END
$$;

-- _rate_limit_earliest_unlocked returns how long after the time clock n units fit into a row that is not locked. The
-- request was denied beside holds, but since then the row and its holds may have changed. A list of holds that is later
-- than the row would give a wrong time. So the row is read again. STABLE lets all functions see the same data, as it is
-- when this function begins. If n units fit by now, the result is 1, because 0 would mean that they fitted at the time
-- clock.
CREATE FUNCTION _rate_limit_earliest_unlocked(
    name text, key text, durable boolean, algorithm smallint, clock bigint, n bigint,
    max_count bigint, span_us bigint, refill bigint, zone text, delay_us bigint, now_us bigint
) RETURNS bigint LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_variable
DECLARE
    later CONSTANT bigint := _rate_limit_now(now_us); -- not before the data
    s rate_limit_row := _rate_limit_look(name, key, durable, later);
BEGIN
    IF s.algorithm IS DISTINCT FROM algorithm THEN
        s := _rate_limit_no_row(s.tid, algorithm, s.held, s.held_next, s.held_until);
    END IF;
    s := _rate_limit_step(s, algorithm, later, 0::bigint, 1::bigint, 0::bigint, max_count, span_us, refill, zone);
    RETURN greatest(later - clock + CASE WHEN durable
        THEN _rate_limit_earliest_durable(
            s, name, key, algorithm, later, n, max_count, span_us, refill, zone, delay_us)
        ELSE _rate_limit_earliest_ephemeral(
            s, name, key, algorithm, later, n, max_count, span_us, refill, zone, delay_us) END, 1);
END
$$;

-- rate_limit_all decides every kind of request, except for slots: see concurrency.sql. A request can have several
-- parts, such as a limit for an address, a limit for a user, and a limit for all users. A request takes from all of its
-- parts or from none. The parts can have different limiters, keys, algorithms, costs and tables.
--
--   requests            the request of each part, in ascending order
--   names, keys         the limiter and the key of each part. All parts of a request must have different rows
--   durables            true for a row in rate_limit_durable, false for a row in rate_limit_ephemeral
--   algorithms          1 fixed window, 2 sliding window, 3 token bucket, 4 sliding log, 5 calendar window,
--                       6 concurrency
--   limits              max_count of a window or of concurrency, or capacity of a bucket
--   spans_us            window_us of a window, or every_us of a bucket; 0 for concurrency
--   refills             refill of a bucket
--   costs               the cost of each part; NULL means 1 for each part. If all costs are 0, nothing is taken, and
--                       retry_after_us is 0 if a cost of 1 would fit. A cost above the limit is denied with a
--                       retry_after_us of NULL, which means never. Costs below 0 are a refund to all parts of a request
--                       or a grant of credit above the limit, up to 2^61 for each part: see taken_in
--   counts              the number of such requests, the same for all parts of a request; NULL means 1 for each part
--   lock_timeout_ms, synchronous_commit
--                       as in rate_limit_take_sliding_window
--   now                 the time in tests; otherwise NULL
--   taken_since, taken_in, taken_at, taken_spent
--                       for a refund, the values that the decisions about the take returned. If taken_in of a request's
--                       first part is NULL, the request grants credit
--   skip_held           whether to decide only requests whose rows no other transaction has locked or is making. A row
--                       that is being made is not visible, so the call waits for it for up to lock_timeout_ms. After
--                       five such waits, the call also skips requests for all other missing rows
--   zones               the time zone of each part that is a calendar window; NULL means UTC for each part
--   leased              for a take from a token bucket, how many of the last units will be spent later: see Lease in
--                       lease.go. For a refund, how many units the lease no longer holds. A bucket keeps room for its
--                       leases: see TokenBucket.leased in internal/model
--   charges             whether each request is a charge, which counts cost * count units whether they fit or not, if
--                       no key then owes too much: see charge.sql. NULL means that no request is a charge
--   ttls_us, holds      the length and the new id of each request that makes a hold of its costs: see hold.sql. A
--                       charge with the id of a hold, and without a length, settles the hold. Its costs are what was
--                       used, also 0. Costs of 0 with both extend the hold. All parts of a request have the same
--                       length and id, and a count of 1
--   delays_us           for a reservation, how many microseconds after the decision its tokens may be ready at the
--                       latest: see reserve.sql. Otherwise NULL. All parts of a reservation are token buckets, and have
--                       the same delay and a count of 1
--
-- The result has a row for each part. granted is the number of granted requests. retry_after_us is 0 if the part has
-- room for another request. The parts with another retry_after_us have denied the request, which fits after the longest
-- retry_after_us. A skipped request has a row for each part: if another transaction has locked the part's row, granted
-- is -2, and remaining is the transaction's id, or 0 if the row is being made. If the part's row is not locked, granted
-- is NULL. If the part's row is missing and this call did not try to make it, the result has no row for the part.
-- After a charge, granted is count, and retry_after_us is the time until a cost of 1 fits. If a key would owe too much,
-- granted is 0, and nothing is counted. The largest charge that a key accepts follows from the other columns: see
-- _rate_limit_chargeable. After a settlement, log is the answer: how many units were counted, 1 if the hold had ended,
-- and when it was settled. If the hold was settled before, log is the first answer, and nothing is counted again.
-- granted is -3 for a part of which no such hold is known. After an extension, granted is 1, or for all parts -3 if the
-- hold is not known, or -4 if it is not live. For a reservation with a granted of 1, retry_after_us is the time until
-- the part's tokens are ready, 0 if they are ready now. The request is ready after the longest of them. For a denied
-- reservation, retry_after_us is the time until the same reservation would be granted.
--
-- The five steps are: make the missing rows, lock all rows, read the clock, decide, and write what was granted.
--
-- A denial must write nothing. So the first pass only locks rows. If a row is missing, the first pass reads all other
-- rows without locks, and denies the requests that these rows deny. (A request for a single row whose cost is not above
-- the limit is always decided with a lock.) The second pass makes and locks the rows of all other requests.
--
-- All calls lock rows in the same order, so they cannot deadlock: ephemeral rows before durable rows, then longer keys
-- first, then by key and name. (A key that many requests share is usually short, and is best locked briefly.) Making a
-- row also locks the row. The first pass stops at the first missing row, and the second pass continues there. The
-- second pass makes and locks a row before it goes on to the next row. So a call only waits for rows that come after
-- all rows that it has locked. If a sweeper deletes a row between the two statements, the row is made again before any
-- later row. Two transactions with several calls can deadlock. Make one call for all keys, or sort the keys.
--
-- A refund makes no row if all rows of the request are missing. If a row exists, the refund makes the missing rows.
-- Otherwise the refund of a take that has just made its rows could reach only some of the limits.
CREATE FUNCTION rate_limit_all(
    requests integer[], names text[], keys text[], durables boolean[], algorithms smallint[],
    limits bigint[], spans_us bigint[], refills bigint[],
    costs bigint[] DEFAULT NULL, counts bigint[] DEFAULT NULL,
    lock_timeout_ms integer DEFAULT NULL, synchronous_commit boolean DEFAULT NULL, now timestamptz DEFAULT NULL,
    taken_since bigint[] DEFAULT NULL, taken_in bigint[] DEFAULT NULL, taken_at bigint[] DEFAULT NULL,
    taken_spent bigint[] DEFAULT NULL, skip_held boolean DEFAULT false, zones text[] DEFAULT NULL,
    leased bigint[] DEFAULT NULL, charges boolean[] DEFAULT NULL, ttls_us bigint[] DEFAULT NULL,
    holds uuid[] DEFAULT NULL, delays_us bigint[] DEFAULT NULL
) RETURNS SETOF rate_limit_decision
LANGUAGE plpgsql
SECURITY DEFINER
SET plan_cache_mode = force_generic_plan -- otherwise each of a session's first five calls would plan its statements
SET enable_nestloop = on
SET enable_seqscan = off -- a plan must not depend on the table's size at planning
AS $$
#variable_conflict use_variable
DECLARE
    parts CONSTANT integer := cardinality(keys);
    -- A cost above the limit never fits, so no row must be locked. A charge counts even so.
    looks CONSTANT boolean := coalesce(0 = ALL (costs) AND holds IS NULL
        OR parts = 1 AND costs[1] > limits[1] AND charges[1] IS NOT TRUE, false);
    -- The time when the waits for all rows have taken too long.
    give_up CONSTANT timestamptz := CASE WHEN lock_timeout_ms > 0
        THEN clock_timestamp() + lock_timeout_ms * interval '25 ms' ELSE 'infinity' END;
    ignored text := _rate_limit_set(lock_timeout_ms, synchronous_commit);
    locking boolean := NOT looks; -- whether this pass locks rows; otherwise it only reads them
    making boolean := false;      -- whether this pass also makes missing rows
    part_of integer[];            -- a part of each row, in lock order
    row_of integer[];             -- the row of each part
    rows rate_limit_row[];        -- the rows as they were found, or as they will be written
    locked integer := 0;          -- the number of rows that are locked, from the first on
    needed boolean[];             -- whether to lock each row
    holders bigint[];             -- who holds a skipped row: a transaction, 0 if the row is just being
                                  -- made, or -1 if it is missing and this call did not try to make it
    waits integer := 0;           -- how many waits for rows that are being made have failed
    told boolean[];               -- whether each part's request has been answered
    steps rate_limit_row[];       -- the next state of each part's row
    s rate_limit_row;
    part integer;
    from_part integer;            -- the first part of a request
    to_part integer;
    missing boolean;
    passed_over boolean;
    decided_at timestamptz;
    clock bigint;
    now_us CONSTANT bigint := (extract(epoch FROM now) * 1000000)::bigint;
    cost bigint;
    asked bigint;
    most bigint;
    max_count bigint;
    span_us bigint;
    granted bigint;
    gives boolean;                -- whether the request is a refund or a grant
    charging boolean;             -- whether the request is a charge
    ends boolean;                 -- whether the request settles or extends a hold
    -- Whether a request is for a hold or a reservation, or a row has holds.
    beside boolean := num_nonnulls(holds, delays_us) > 0;
    was rate_limit_row;
    undecided boolean;            -- whether the request may still be granted, so that its rows must be locked
    lent bigint;
    writes boolean := false;
BEGIN
    IF _rate_limit_check(requests, names, keys, durables, algorithms, limits, spans_us, refills, zones,
        costs, counts, taken_in, leased, charges, ttls_us, holds, delays_us, looks)
    THEN
        FOR i IN 1 .. parts LOOP
            part_of[i] := i;
        END LOOP;
        row_of := part_of;
    ELSE
        SELECT r.part_of, r.row_of INTO part_of, row_of
        FROM _rate_limit_rows_in_lock_order(requests, names, keys, durables) AS r;
    END IF;
    needed := array_fill(true, ARRAY[cardinality(part_of)]);
    told := array_fill(false, ARRAY[parts]);
    costs := coalesce(costs, array_fill(1::bigint, ARRAY[parts]));
    counts := coalesce(counts, array_fill(1::bigint, ARRAY[parts]));
    zones := coalesce(zones, array_fill('UTC'::text, ARRAY[parts]));
    IF skip_held AND locking THEN
        IF false = ANY (durables) THEN
            LOCK TABLE rate_limit_ephemeral IN ROW EXCLUSIVE MODE;
        END IF;
        IF true = ANY (durables) THEN
            LOCK TABLE rate_limit_durable IN ROW EXCLUSIVE MODE;
        END IF;
    END IF;

    LOOP
        FOR i IN locked + 1 .. CASE WHEN locking THEN cardinality(part_of) ELSE 0 END LOOP
            CONTINUE WHEN NOT needed[i];
            part := part_of[i];
            missing := making AND (rows[i]).tid IS NULL;
            FOR attempt IN 1 .. 5 LOOP
                -- 1. Make the row if it is missing.
                IF NOT missing THEN
                    NULL;
                ELSIF skip_held THEN
                    holders[i] := CASE WHEN waits = 5 THEN -1
                        WHEN NOT _rate_limit_try_to_make(names[part], keys[part], durables[part]) THEN 0 END;
                    waits := waits + CASE WHEN holders[i] = 0 THEN 1 ELSE 0 END;
                    EXIT WHEN holders[i] IS NOT NULL;
                ELSIF durables[part] THEN
                    INSERT INTO rate_limit_durable (prefix, key) VALUES (names[part], keys[part])
                    ON CONFLICT DO NOTHING;
                ELSE
                    INSERT INTO rate_limit_ephemeral (prefix, key) VALUES (names[part], keys[part])
                    ON CONFLICT DO NOTHING;
                END IF;

                -- 2. Lock the row, or skip it.
                IF NOT skip_held AND durables[part] THEN
                    SELECT d.ctid, d.algorithm, d.count, d.prev_count, d.window_start, d.credit, d.scale, d.expires_at,
                        d.since, d.capacity, d.refill, d.returned, d.log, d.held, d.held_next, d.held_until,
                        0::int8, 0::int8, 0::int8, 0::int8, 0::int8, NULL::int8, NULL::int8[], false, false,
                        false INTO s
                    FROM rate_limit_durable AS d WHERE d.prefix = names[part] AND d.key = keys[part] FOR UPDATE;
                ELSIF NOT skip_held THEN
                    SELECT d.ctid, d.algorithm, d.count, d.prev_count, d.window_start, d.credit, d.scale, d.expires_at,
                        d.since, d.capacity, d.refill, d.returned, d.log, d.held, d.held_next, d.held_until,
                        0::int8, 0::int8, 0::int8, 0::int8, 0::int8, NULL::int8, NULL::int8[], false, false,
                        false INTO s
                    FROM rate_limit_ephemeral AS d WHERE d.prefix = names[part] AND d.key = keys[part] FOR UPDATE;
                ELSIF durables[part] THEN
                    SELECT d.ctid, d.algorithm, d.count, d.prev_count, d.window_start, d.credit, d.scale, d.expires_at,
                        d.since, d.capacity, d.refill, d.returned, d.log, d.held, d.held_next, d.held_until,
                        0::int8, 0::int8, 0::int8, 0::int8, 0::int8, NULL::int8, NULL::int8[], false, false,
                        false INTO s
                    FROM rate_limit_durable AS d WHERE d.prefix = names[part] AND d.key = keys[part]
                    FOR UPDATE SKIP LOCKED;
                ELSE
                    SELECT d.ctid, d.algorithm, d.count, d.prev_count, d.window_start, d.credit, d.scale, d.expires_at,
                        d.since, d.capacity, d.refill, d.returned, d.log, d.held, d.held_next, d.held_until,
                        0::int8, 0::int8, 0::int8, 0::int8, 0::int8, NULL::int8, NULL::int8[], false, false,
                        false INTO s
                    FROM rate_limit_ephemeral AS d WHERE d.prefix = names[part] AND d.key = keys[part]
                    FOR UPDATE SKIP LOCKED;
                END IF;
                missing := NOT found;
                EXIT WHEN NOT missing;
                IF skip_held THEN
                    holders[i] := _rate_limit_holder(names[part], keys[part], durables[part]);
                END IF;
                EXIT WHEN NOT making OR holders[i] IS NOT NULL;
            END LOOP;
            IF missing AND holders[i] IS NULL THEN
                EXIT WHEN NOT making;
                RAISE EXCEPTION 'rate_limit: rows were made, and were missing again'
                    USING ERRCODE = 'object_not_in_prerequisite_state',
                        HINT = 'Something deletes rows of this transaction, or keeps them from being made: a trigger?';
            END IF;
            IF holders[i] IS NULL THEN -- if a holder was found, s is the previous row
                rows[i] := s;
                beside := beside OR s.held IS NOT NULL;
            END IF;
            IF NOT making THEN
                locked := i;
            END IF;
            IF i > 1 AND clock_timestamp() > give_up AND NOT skip_held THEN
                PERFORM _rate_limit_late();
            END IF;
        END LOOP;
        IF locking AND NOT making AND locked < cardinality(part_of) THEN
            locking := false;
        END IF;
        IF NOT locking THEN
            -- Read the other rows. One statement sees all rows at the same moment.
            rows[locked + 1:cardinality(part_of)] := ARRAY(
                SELECT _rate_limit_look(names[e.part], keys[e.part], durables[e.part], now_us)
                FROM unnest(part_of) WITH ORDINALITY AS e (part, place)
                WHERE e.place > locked
                ORDER BY e.place);
            FOR i IN locked + 1 .. cardinality(part_of) LOOP
                beside := beside OR (rows[i]).held IS NOT NULL;
            END LOOP;
        END IF;
        needed := array_fill(false, ARRAY[cardinality(part_of)]);

        -- 3. Read the clock after locking all rows. An earlier reading could be older than a row.
        decided_at := coalesce(now, clock_timestamp());
        clock := (extract(epoch FROM decided_at) * 1000000)::bigint;

        -- 4. Roll the rows forward to the clock, and decide.
        to_part := 0;
        steps := NULL;
        WHILE to_part < parts LOOP
            from_part := to_part + 1;
            to_part := from_part;
            WHILE requests[to_part + 1] = requests[from_part] LOOP
                to_part := to_part + 1;
            END LOOP;
            CONTINUE WHEN told[from_part];
            asked := counts[from_part];
            gives := costs[from_part] < 0;
            charging := coalesce(charges[from_part] AND costs[from_part] > 0, false);
            ends := holds[from_part] IS NOT NULL AND (charges[from_part] OR costs[from_part] = 0) IS TRUE;
            undecided := false;
            passed_over := false;
            FOR i IN from_part .. CASE WHEN skip_held OR NOT locking THEN to_part ELSE 0 END LOOP
                passed_over := passed_over OR holders[row_of[i]] IS NOT NULL;
                undecided := undecided OR needed[row_of[i]];
            END LOOP;
            IF passed_over THEN
                FOR i IN from_part .. to_part LOOP
                    told[i] := true;
                    CONTINUE WHEN holders[row_of[i]] = -1;
                    RETURN NEXT ROW(i::bigint, CASE WHEN holders[row_of[i]] >= 0 THEN -2 END::bigint,
                        coalesce(holders[row_of[i]], 0), NULL::bigint, 0::bigint, decided_at, 0::bigint, 0::bigint,
                        0::bigint, 0::bigint, 0::bigint, 0::bigint, NULL::bigint[],
                        0::bigint, 0::bigint, 0::bigint, 0::bigint, 0::bigint);
                END LOOP;
                CONTINUE;
            END IF;

            -- Find how many requests fit into each part, and grant as many as fit into all parts.
            most := CASE WHEN gives OR ends OR costs[from_part] <> 0 THEN asked ELSE 0 END;
            FOR pass IN 1 .. 2 LOOP
                granted := most;
                FOR i IN from_part .. to_part LOOP
                    CONTINUE WHEN (steps[i]).granted = most; -- in the second pass, this part does not change
                    cost := costs[i];
                    max_count := limits[i];
                    span_us := spans_us[i];
                    s := rows[row_of[i]];
                    IF s.algorithm IS DISTINCT FROM algorithms[i] THEN -- a row of another algorithm counts as no row
                        s := _rate_limit_no_row(s.tid, algorithms[i], s.held, s.held_next, s.held_until);
                    END IF;
                    IF beside AND s.held_next <= clock THEN
                        IF durables[i] THEN
                            s := _rate_limit_live_durable(s, names[i], keys[i], clock);
                        ELSE
                            s := _rate_limit_live_ephemeral(s, names[i], keys[i], clock);
                        END IF;
                    END IF;
                    IF gives THEN
                        undecided := undecided OR taken_in[from_part] IS NULL OR s.tid IS NOT NULL;
                        s := _rate_limit_give(s, algorithms[i], clock,
                            -- The comparison divides, because the product could overflow.
                            CASE WHEN asked > -(9223372036854775807 / cost) THEN 9223372036854775807
                                ELSE -asked * cost END, taken_in[from_part] IS NULL, leased[i],
                            taken_since[i], taken_in[i], taken_at[i], taken_spent[i],
                            max_count, span_us, refills[i], zones[i]);
                        IF s.changed AND s.held_until > clock + 86400000000 THEN -- the clock was set back
                            s.held_next := least(s.held_next, clock + 86400000000);
                            s.held_until := clock + 86400000000;
                        END IF;
                    ELSIF beside AND delays_us[i] IS NOT NULL THEN
                        s := _rate_limit_reserve(s, clock, cost, most, max_count, span_us, refills[i],
                            _rate_limit_longest_delay(delays_us[i], max_count, span_us, refills[i]));
                        granted := least(granted, s.granted);
                        undecided := undecided OR s.changed AND s.granted = 0;
                    ELSIF beside AND (s.held IS NOT NULL OR holds[i] IS NOT NULL) THEN
                        IF durables[i] THEN
                            s := _rate_limit_beside_durable(s, names[i], keys[i], algorithms[i], clock, cost, asked,
                                most, max_count, span_us, refills[i], zones[i], charging OR ends AND charges[i] IS TRUE,
                                ttls_us[i], holds[i]);
                        ELSE
                            s := _rate_limit_beside_ephemeral(s, names[i], keys[i], algorithms[i], clock, cost, asked,
                                most, max_count, span_us, refills[i], zones[i], charging OR ends AND charges[i] IS TRUE,
                                ttls_us[i], holds[i]);
                        END IF;
                        granted := least(granted, s.granted);
                        undecided := undecided OR s.changed AND (ends OR s.granted = 0);
                    ELSIF charging THEN
                        s := _rate_limit_charge(s, algorithms[i], clock, cost, asked, most,
                            max_count, span_us, refills[i], zones[i]);
                        granted := least(granted, s.granted);
                    ELSE
                        s := _rate_limit_step(s, algorithms[i], clock, cost, asked, most,
                            max_count, span_us, refills[i], zones[i]);
                        granted := least(granted, s.granted);
                        undecided := undecided OR s.changed AND s.granted = 0;
                    END IF;
                    steps[i] := s;
                    EXIT WHEN granted = 0 AND most > 0 AND from_part < to_part;
                END LOOP;
                EXIT WHEN granted = most OR from_part = to_part;
                most := granted;
            END LOOP;
            IF NOT locking THEN
                undecided := undecided OR granted > 0 AND NOT gives AND NOT ends
                    OR from_part = to_part AND costs[from_part] BETWEEN 1 AND limits[from_part] AND NOT charging;
            END IF;
            FOR i IN from_part .. to_part LOOP
                told[i] := locking OR looks OR NOT undecided;
                IF NOT told[i] THEN
                    needed[row_of[i]] := true;
                    CONTINUE;
                END IF;
                s := steps[i];
                IF leased[i] > 0 AND algorithms[i] = 3 AND NOT gives THEN -- return the leases before this take
                    lent := least(leased[i] / costs[i] - (asked - granted), granted);
                    steps[i].told_log := s.log;
                    s.log := _rate_limit_bucket_lend(s, lent * costs[i]);
                END IF;
                IF beside THEN
                    was := rows[row_of[i]];
                END IF;
                IF s.changed AND locking THEN
                    s.durable := durables[i];
                    rows[row_of[i]] := s;
                    writes := true;
                    IF beside AND (was.held IS NOT NULL OR holds[i] IS NOT NULL) THEN
                        max_count := limits[i];
                        IF durables[i] THEN
                            PERFORM _rate_limit_write_holds_durable(s, was, names[i], keys[i], algorithms[i], clock,
                                costs[i], max_count, spans_us[i], refills[i], zones[i], ttls_us[i], holds[i]);
                        ELSE
                            PERFORM _rate_limit_write_holds_ephemeral(s, was, names[i], keys[i], algorithms[i], clock,
                                costs[i], max_count, spans_us[i], refills[i], zones[i], ttls_us[i], holds[i]);
                        END IF;
                        IF NOT (s.moved OR gives) AND (ttls_us[i] IS NOT NULL OR s.granted = 0 OR costs[i] = 0) THEN
                            -- Only the holds have changed.
                            was.held := s.held;
                            was.held_next := s.held_next;
                            was.held_until := s.held_until;
                            was.durable := s.durable;
                            was.changed := true;
                            rows[row_of[i]] := was;
                        END IF;
                    END IF;
                END IF;
                IF gives THEN
                    max_count := limits[i];
                    span_us := spans_us[i];
                    s := _rate_limit_step(s, algorithms[i], clock, 0::bigint, 1::bigint, 0::bigint,
                        max_count, span_us, refills[i], zones[i]);
                    s.granted := asked;
                    s.retry_after_us := 0;
                    s.told_log := NULL;
                    s.remaining := greatest(s.remaining - coalesce(s.held, 0), 0);
                    s.reset_after_us := greatest(s.reset_after_us, s.held_until - clock);
                ELSIF algorithms[i] = 3 THEN
                    s := steps[i];
                END IF;
                IF beside AND s.retry_after_us = -1 THEN
                    cost := CASE WHEN charging OR ends THEN 1 ELSE greatest(costs[i], 1) END;
                    s.retry_after_us := CASE
                        WHEN NOT locking THEN _rate_limit_earliest_unlocked(names[i], keys[i], durables[i],
                            algorithms[i], clock, cost, limits[i], spans_us[i], refills[i], zones[i], delays_us[i],
                            now_us)
                        WHEN durables[i] THEN _rate_limit_earliest_durable(s, names[i], keys[i], algorithms[i], clock,
                            cost, limits[i], spans_us[i], refills[i], zones[i], delays_us[i])
                        ELSE _rate_limit_earliest_ephemeral(s, names[i], keys[i], algorithms[i], clock,
                            cost, limits[i], spans_us[i], refills[i], zones[i], delays_us[i]) END;
                END IF;
                IF beside AND ends AND charges[i] AND s.granted = 1 AND s.told_log IS NULL THEN
                    s.granted := -3;
                END IF;
                RETURN NEXT ROW(i::bigint, s.granted, s.remaining, s.retry_after_us, s.reset_after_us, decided_at,
                    s.count, s.prev_count, s.window_start, s.credit, s.scale, s.expires_at, s.told_log,
                    s.since, s.window_start, s.taken_at, s.spent, coalesce(s.held, 0));
            END LOOP;
        END LOOP;

        -- 5. Write what was granted.
        IF writes THEN
            IF false = ANY (durables) THEN
                UPDATE rate_limit_ephemeral AS d SET
                    algorithm = n.algorithm, count = n.count, prev_count = n.prev_count,
                    window_start = n.window_start, credit = n.credit, scale = n.scale, expires_at = n.expires_at,
                    since = n.since, capacity = n.capacity, refill = n.refill, returned = n.returned, log = n.log,
                    held = n.held, held_next = n.held_next, held_until = n.held_until
                FROM unnest(rows) AS n
                WHERE d.ctid = n.tid AND n.changed AND NOT n.durable;
            END IF;
            IF true = ANY (durables) THEN
                UPDATE rate_limit_durable AS d SET
                    algorithm = n.algorithm, count = n.count, prev_count = n.prev_count,
                    window_start = n.window_start, credit = n.credit, scale = n.scale, expires_at = n.expires_at,
                    since = n.since, capacity = n.capacity, refill = n.refill, returned = n.returned, log = n.log,
                    held = n.held, held_next = n.held_next, held_until = n.held_until
                FROM unnest(rows) AS n
                WHERE d.ctid = n.tid AND n.changed AND n.durable;
            END IF;
        END IF;
        EXIT WHEN locking OR looks OR true <> ALL (needed);
        locking := true;
        making := true;
    END LOOP;
END
$$;

COMMENT ON FUNCTION rate_limit_all IS
    'Decides requests that take from several limits at once, or from none of them. It returns a row for each part, '
    'with its place, ord, and granted (how many of the requests), remaining, retry_after_us, reset_after_us, '
    'decided_at, and the state of the key. '
    'A denial is a row with granted = 0, never an error, and takes nothing. '
    'The take commits or rolls back with the transaction. sql/all.sql explains every parameter.
Example: SELECT * FROM rate_limit_all(ARRAY[1, 1], ARRAY[''address'', ''user''], '
    'ARRAY[''192.0.2.1'', ''user:123''], ARRAY[false, false], ARRAY[2, 3]::smallint[], '
    'ARRAY[100, 20], ARRAY[60000000, 10000000], ARRAY[0, 5]) '
    'takes one of 100 a minute and one token of a bucket, or neither.';
