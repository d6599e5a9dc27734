-- Functions for many requests that take from several keys each.

-- _rate_limit_steps returns the next state of all rows. _rate_limit_steps returns NULL if a row has no room without
-- granted credit, or has holds.
CREATE FUNCTION _rate_limit_steps(
    rows rate_limit_row[], algorithms smallint[], clock bigint, units bigint[], limits bigint[], spans_us bigint[],
    refills bigint[], zones text[]
) RETURNS rate_limit_row[] LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    s rate_limit_row;
BEGIN
    FOR i IN 1 .. cardinality(rows) LOOP
        s := _rate_limit_step(rows[i], algorithms[i], clock, units[i], 1::bigint, 1::bigint,
            limits[i], spans_us[i], refills[i], zones[i]);
        IF s.granted = 0 OR s.spent > 0 OR s.credit > 0 OR s.held IS NOT NULL THEN
            RETURN NULL;
        END IF;
        rows[i] := s;
    END LOOP;
    RETURN rows;
END
$$;

-- _rate_limit_take_all_ephemeral takes units from all rows, and returns nine numbers for each row. If a row has no
-- room, nothing is taken, and the result is NULL.
--
-- The function locks the rows in the given order. If a row is missing or has no room, the function releases the locks.
-- If rows are missing and the existing rows have room, the function makes missing rows and locks existing rows in the
-- given order, and starts again. So a request that the existing rows deny makes no row.
CREATE FUNCTION _rate_limit_take_all_ephemeral(
    names text[], keys text[], algorithms smallint[], limits bigint[], spans_us bigint[], refills bigint[],
    zones text[], units bigint[], lock_timeout_ms integer, now_us bigint
) RETURNS bigint[] LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    began bigint := _rate_limit_now(now_us);
    clock bigint;
    rows rate_limit_row[];
    missing boolean;
BEGIN
    FOR attempt IN 1 .. 2 LOOP
        BEGIN
            -- This statement locks the rows, one after the other, in the given order.
            SELECT bool_or(d.ctid IS NULL), array_agg(
                CASE WHEN d.algorithm = e.algorithm
                    THEN ROW(d.ctid, d.algorithm, d.count, d.prev_count, d.window_start, d.credit, d.scale,
                        d.expires_at, d.since, d.capacity, d.refill, d.returned, d.log,
                        d.held, d.held_next, d.held_until,
                        0, 0, 0, 0, 0, NULL, NULL, false, false, NULL)::rate_limit_row
                    ELSE _rate_limit_no_row(d.ctid, e.algorithm, d.held, d.held_next, d.held_until) END)
            INTO missing, rows
            FROM unnest(names, keys, algorithms) AS e (name, key, algorithm)
            LEFT JOIN LATERAL (
                SELECT d.ctid, d.* FROM rate_limit_ephemeral AS d
                WHERE d.prefix = e.name AND d.key = e.key
                    AND (_rate_limit_now(now_us) < began + 10000
                        OR NOT _rate_limit_give_up(began, lock_timeout_ms, now_us))
                FOR UPDATE
            ) AS d ON true;
            clock := _rate_limit_now(now_us); -- read the clock after locking
            rows := _rate_limit_steps(rows, algorithms, clock, units, limits, spans_us, refills, zones);
            IF NOT missing AND rows IS NOT NULL THEN
                UPDATE rate_limit_ephemeral AS d SET
                    algorithm = n.algorithm, count = n.count, prev_count = n.prev_count,
                    window_start = n.window_start, credit = n.credit, scale = n.scale, expires_at = n.expires_at,
                    since = n.since, capacity = n.capacity, refill = n.refill, returned = n.returned, log = n.log
                FROM unnest(rows) AS n
                WHERE d.ctid = n.tid;
                RETURN ARRAY(
                    SELECT ARRAY[clock, n.count, n.prev_count, n.window_start, n.credit,
                        n.scale, n.expires_at, n.since, n.returned]
                    FROM unnest(rows) AS n);
            END IF;
            RAISE EXCEPTION USING ERRCODE = 'RLS00';
        EXCEPTION WHEN SQLSTATE 'RLS00' THEN
            EXIT WHEN attempt = 2 OR NOT missing OR rows IS NULL;
        END;
        INSERT INTO rate_limit_ephemeral AS d (prefix, key)
        SELECT e.name, e.key
        FROM unnest(names, keys) AS e (name, key)
        ON CONFLICT (prefix, key) -- ON CONFLICT also locks existing rows, so that all rows are locked in order
        DO UPDATE SET count = d.count WHERE _rate_limit_give_up(began, lock_timeout_ms, now_us);
    END LOOP;
    RETURN NULL;
END
$$;

-- rate_limit_take_all makes the same decisions as rate_limit_all, at lower cost. rate_limit_take_all is for many
-- requests that each take from several rows of one table. The Go package calls it.
--
--   names, keys         the rows in lock order, each row once
--   durable             true for rows in rate_limit_durable, false for rows in rate_limit_ephemeral
--   algorithms, limits, spans_us, refills, zones
--                       the policy of each row, as in rate_limit_all
--   units               the units that all requests together take from each row
--   requests, row_of, costs, counts
--                       the request of each part, its row's place in keys, its cost, and the number of its requests
--
-- If every row has room for its units, all requests are granted, and the result has nine numbers for each row, like the
-- result of rate_limit_take_sliding_window. If a row has no room or has holds, rate_limit_all decides, and the result
-- has sixteen numbers for each part. This costs more than twice as much (measured with 32 requests for three existing
-- rows each).
CREATE FUNCTION rate_limit_take_all(
    names text[], keys text[], durable boolean, algorithms smallint[], limits bigint[], spans_us bigint[],
    refills bigint[], zones text[], units bigint[], requests integer[], row_of integer[], costs bigint[],
    counts bigint[], lock_timeout_ms integer DEFAULT NULL, synchronous_commit boolean DEFAULT NULL,
    now_us bigint DEFAULT NULL
) RETURNS bigint[]
LANGUAGE plpgsql
SECURITY DEFINER
SET plan_cache_mode = force_generic_plan -- otherwise each of a session's first five calls would plan its statement
SET enable_nestloop = on
SET enable_seqscan = off -- a plan must not depend on the table's size at planning
AS $$
#variable_conflict use_variable
DECLARE
    ignored text := _rate_limit_set(lock_timeout_ms, synchronous_commit);
    taken bigint[];
BEGIN
    -- Take from the rows only if the arguments are valid and the rows are in lock order. Lengths may differ in the
    -- caller's encoding. In all other cases, rate_limit_all decides, or raises an error for an invalid argument.
    IF names[cardinality(names)] IS NOT NULL AND keys[cardinality(names)] IS NOT NULL
        AND cardinality(names) = ALL (ARRAY[cardinality(keys), cardinality(algorithms), cardinality(limits),
            cardinality(spans_us), cardinality(refills), cardinality(units)])
        AND (
            SELECT bool_and((_rate_limit_valid(e.algorithm, e.max_count, e.span_us, e.refill, e.zone)
                AND e.algorithm <> 6 -- rate_limit_all says that nothing can be taken
                AND e.units BETWEEN 1 AND e.max_count
                AND octet_length(e.name) BETWEEN 1 AND 128 AND octet_length(e.key) BETWEEN 1 AND 512
                AND (e.next_key IS NULL
                    OR (-octet_length(e.key), e.key COLLATE "C", e.name COLLATE "C")
                        < (-octet_length(e.next_key), e.next_key COLLATE "C", e.next_name COLLATE "C"))) IS TRUE)
            FROM unnest(names, keys, algorithms, limits, spans_us, refills, zones, units, names[2:], keys[2:])
                AS e (name, key, algorithm, max_count, span_us, refill, zone, units, next_name, next_key))
    THEN
        taken := CASE WHEN durable
            THEN _rate_limit_take_all_durable(names, keys, algorithms, limits, spans_us, refills, zones, units,
                lock_timeout_ms, now_us)
            ELSE _rate_limit_take_all_ephemeral(names, keys, algorithms, limits, spans_us, refills, zones, units,
                lock_timeout_ms, now_us) END;
    END IF;
    IF taken IS NOT NULL THEN
        RETURN taken;
    END IF;
    SELECT array_agg(e.name ORDER BY p.place), array_agg(e.key ORDER BY p.place),
        array_agg(e.algorithm ORDER BY p.place), array_agg(e.max_count ORDER BY p.place),
        array_agg(e.span_us ORDER BY p.place), array_agg(e.refill ORDER BY p.place),
        array_agg(coalesce(e.zone, 'UTC') ORDER BY p.place)
    INTO names, keys, algorithms, limits, spans_us, refills, zones
    FROM unnest(row_of) WITH ORDINALITY AS p (row_of, place)
    LEFT JOIN unnest(names, keys, algorithms, limits, spans_us, refills, zones) WITH ORDINALITY
        AS e (name, key, algorithm, max_count, span_us, refill, zone, place) ON e.place = p.row_of;
    RETURN ARRAY(
        SELECT unnest(ARRAY[a.ord, a.granted, a.remaining, a.retry_after_us, a.reset_after_us,
            (extract(epoch FROM a.decided_at) * 1000000)::bigint, a.count, a.prev_count, a.window_start, a.credit,
            a.scale, a.expires_at, a.taken_spent, a.taken_since, a.taken_at, a.held])
        FROM rate_limit_all(
            requests, names, keys, array_fill(coalesce(durable, false), ARRAY[cardinality(keys)]), algorithms,
            limits, spans_us, refills, costs, counts, lock_timeout_ms, synchronous_commit,
            timestamptz 'epoch' + now_us / 1000000 * interval '1 second' + now_us % 1000000 * interval '1 microsecond',
            NULL::bigint[], NULL::bigint[], NULL::bigint[], NULL::bigint[], false, zones, NULL::bigint[],
            NULL::boolean[], NULL::bigint[], NULL::uuid[], NULL::bigint[]) AS a);
END
$$;

COMMENT ON FUNCTION rate_limit_take_all IS
    'Takes as rate_limit_all does, at lower cost. It returns numbers for programs, which sql/takeall.sql explains.
Example: SELECT rate_limit_take_all(ARRAY[''user'', ''everybody''], ARRAY[''user:123'', ''all''], false, '
    'ARRAY[2, 2]::smallint[], ARRAY[20, 1000], ARRAY[60000000, 60000000], ARRAY[0, 0], NULL, ARRAY[1, 1], '
    'ARRAY[1, 1], ARRAY[1, 2], NULL, NULL) '
    'takes one of 20 a minute and one of 1000 a minute, or neither.';
