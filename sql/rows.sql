-- What every algorithm does with the table before and after it decides. All of it is internal: the algorithms call it,
-- with search_path already pinned and enable_seqscan already off.

-- One element of a request, with its row as it was found, or as it is to be written. To take another column from the
-- table, name it here, in rate_limit_lock's queries, and in rate_limit_write.
CREATE TYPE rate_limit_row AS (
    ord bigint,          -- the element's place in the request, from 1
    cost bigint,
    asked bigint,        -- how many requests of that cost
    tid tid,             -- where the row is; NULL: there is none
    count bigint,
    prev_count bigint,
    window_start bigint,
    credit bigint,
    scale bigint,
    expires_at bigint,   -- 0, long past: there is no row, or another algorithm wrote it
    log bigint[],        -- NULL but for the sliding window log
    since bigint,
    capacity bigint,
    refill bigint,
    returned bigint
);

-- What the algorithms return for each element of a request.
CREATE TYPE rate_limit_decision AS (
    ord bigint,             -- the element's place in the request, from 1
    granted bigint,         -- how many of the asked requests were granted
    remaining bigint,       -- the largest cost that would be granted next
    retry_after_us bigint,  -- microseconds until the others can be granted; 0: all were; NULL: never
    reset_after_us bigint,  -- microseconds until the key is as good as new
    decided_at timestamptz, -- the database's clock at the decision, from which both count
    count bigint,           -- and the key's state then, as in the table
    prev_count bigint,
    window_start bigint,
    credit bigint,
    scale bigint,
    expires_at bigint,
    log bigint[],           -- of this, only the entries that have to leave until retry_after_us
    taken_since bigint,     -- what a refund of the last request has to tell: the row's since,
    taken_in bigint,        -- the window, the entry of the log or the time in the bucket's life: window_start,
    taken_at bigint,        -- where its units end in the bucket's queue (see TokenBucket.refund in tokenbucket.go),
    taken_spent bigint      -- and how much of what these requests took came out of granted credit
);

COMMENT ON TYPE rate_limit_decision IS 'What the rate_limit_ functions decided for one key; their comments explain it.';

-- rate_limit_late gives up a statement that has waited for too many rows, one after the other: lock_timeout counts for each of them.
CREATE FUNCTION rate_limit_late()
RETURNS boolean
LANGUAGE plpgsql
AS $$
BEGIN
    RAISE EXCEPTION 'rate_limit: too many rows are held, one after the other'
        USING ERRCODE = 'lock_not_available', HINT = 'Together they may take 25 times lock_timeout_ms.';
END
$$;

-- rate_limit_lock locks the rows of all asked keys in key order, makes those that are missing, and returns all elements
-- ordered by key and then by place. Arguments as the algorithms take them, and:
--
--   max_cost    no cost above it can ever be granted: such an element locks and makes nothing, nor does a cost of 0. A
--               cost below 0 locks its row; a grant needs one, and a refund, which is one that has a taken_in, needs none
--   algorithm   who asks
--
-- Key order is that of rate_limit_all: longer keys first, then by their bytes.
--
-- Locks are taken strictly in key order, or two requests would wait for each other. So at the first missing row the
-- locking stops, before any later row is locked, and one INSERT in key order makes or locks every row from there on:
-- ON CONFLICT DO UPDATE locks the row that it finds before it looks at its WHERE, which is never true, so it changes nothing.
-- (It makes those of refunds too, or they would be locked out of order; unwritten, a row means the same as none.)
-- It also settles the race with whoever deletes a row in between: what is gone is made again, and what is locked stays.
--
-- With skip_held it waits for no row that it can see: elements whose row somebody has locked are left out of what it returns, and
-- the INSERT makes only what nobody can see. For a row that an open transaction has just made it does wait, as nobody can pass that
-- over, and then holds none but rows that come before it in key order. That the table is locked shows in the error: it comes from LOCK TABLE.
CREATE FUNCTION rate_limit_lock(
    name text,
    keys text[],
    costs bigint[],
    counts bigint[],
    max_cost bigint,
    algorithm smallint,
    durable boolean,
    lock_timeout_ms integer,
    synchronous_commit boolean,
    taken_in bigint[],
    skip_held boolean
)
RETURNS rate_limit_row[]
LANGUAGE plpgsql
AS $$
#variable_conflict use_variable
DECLARE
    found_rows rate_limit_row[];
    r rate_limit_row;
    elements refcursor;
    missing boolean;
    give_up timestamptz; -- when the rows, each of which may be waited for, have taken too long together
    ignored text;
BEGIN
    IF (octet_length(name) BETWEEN 1 AND 128 AND cardinality(keys) > 0
            AND coalesce(cardinality(costs) = cardinality(keys), true) AND coalesce(cardinality(counts) = cardinality(keys), true)
            AND coalesce(cardinality(taken_in) = cardinality(keys), true)) IS NOT TRUE THEN
        RAISE EXCEPTION 'rate_limit: a name of 1 to 128 bytes is needed, and as many costs, counts and taken_in as keys'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'NULL instead of costs or of counts means 1 for each key, and NULL instead of taken_in that there are no refunds.';
    END IF;
    ignored := concat(
        CASE WHEN lock_timeout_ms IS NOT NULL THEN set_config('lock_timeout', lock_timeout_ms::text, true) END,
        CASE WHEN synchronous_commit IS NOT NULL THEN set_config('synchronous_commit', synchronous_commit::text, true) END);

    IF skip_held AND durable THEN
        LOCK TABLE rate_limit_durable IN ROW EXCLUSIVE MODE;
    ELSIF skip_held THEN
        LOCK TABLE rate_limit_ephemeral IN ROW EXCLUSIVE MODE;
    END IF;

    -- One key, whose row exists: most calls of an application that is not under load, and worth the 35 us that this saves.
    IF cardinality(keys) = 1 AND NOT skip_held AND coalesce(costs[1], 1) <= max_cost AND coalesce(costs[1], 1) <> 0 AND coalesce(counts[1], 1) >= 1 THEN
        IF durable THEN
            SELECT 1::bigint, coalesce(costs[1], 1), coalesce(counts[1], 1), d.ctid, d.count, d.prev_count, d.window_start, d.credit, d.scale,
                CASE WHEN d.algorithm = algorithm THEN d.expires_at ELSE 0 END,
                CASE WHEN algorithm = 4 THEN d.log END, d.since, d.capacity, d.refill, d.returned
            INTO r
            FROM rate_limit_durable AS d
            WHERE d.prefix = name AND d.key = keys[1]
            FOR UPDATE;
        ELSE
            SELECT 1::bigint, coalesce(costs[1], 1), coalesce(counts[1], 1), d.ctid, d.count, d.prev_count, d.window_start, d.credit, d.scale,
                CASE WHEN d.algorithm = algorithm THEN d.expires_at ELSE 0 END,
                CASE WHEN algorithm = 4 THEN d.log END, d.since, d.capacity, d.refill, d.returned
            INTO r
            FROM rate_limit_ephemeral AS d
            WHERE d.prefix = name AND d.key = keys[1]
            FOR UPDATE;
        END IF;
        IF found THEN
            RETURN ARRAY[r];
        END IF;
    END IF;

    give_up := coalesce(clock_timestamp() + lock_timeout_ms * interval '25 ms', 'infinity');
    FOR attempt IN 1 .. 3 LOOP
        -- In each query: unnest((SELECT ...)) hides the array's length from the planner, which would else plan anew for
        -- every call; the LATERAL subquery, kept apart by FOR UPDATE or OFFSET 0, is one look-up by the primary key
        -- for each element, whatever the statistics say.
        IF 0 = ALL (costs) THEN
            IF durable THEN
                OPEN elements FOR
                    SELECT e.ord, e.cost, e.asked, d.tid, coalesce(d.count, 0), coalesce(d.prev_count, 0), coalesce(d.window_start, 0),
                        coalesce(d.credit, 0), d.scale, CASE WHEN d.algorithm = algorithm THEN d.expires_at ELSE 0 END,
                        CASE WHEN algorithm = 4 THEN d.log END, d.since, d.capacity, d.refill, d.returned
                    FROM (
                        SELECT e.key, e.ord, coalesce(e.cost, 1) AS cost, coalesce(e.asked, 1) AS asked
                        FROM unnest((SELECT keys), (SELECT costs), (SELECT counts)) WITH ORDINALITY AS e (key, cost, asked, ord)
                        ORDER BY octet_length(e.key) DESC, e.key COLLATE "C", e.ord
                    ) AS e
                    LEFT JOIN LATERAL (
                        SELECT d.ctid AS tid, d.* FROM rate_limit_durable AS d WHERE d.prefix = name AND d.key = e.key OFFSET 0
                    ) AS d ON true;
            ELSE
                OPEN elements FOR
                    SELECT e.ord, e.cost, e.asked, d.tid, coalesce(d.count, 0), coalesce(d.prev_count, 0), coalesce(d.window_start, 0),
                        coalesce(d.credit, 0), d.scale, CASE WHEN d.algorithm = algorithm THEN d.expires_at ELSE 0 END,
                        CASE WHEN algorithm = 4 THEN d.log END, d.since, d.capacity, d.refill, d.returned
                    FROM (
                        SELECT e.key, e.ord, coalesce(e.cost, 1) AS cost, coalesce(e.asked, 1) AS asked
                        FROM unnest((SELECT keys), (SELECT costs), (SELECT counts)) WITH ORDINALITY AS e (key, cost, asked, ord)
                        ORDER BY octet_length(e.key) DESC, e.key COLLATE "C", e.ord
                    ) AS e
                    LEFT JOIN LATERAL (
                        SELECT d.ctid AS tid, d.* FROM rate_limit_ephemeral AS d WHERE d.prefix = name AND d.key = e.key OFFSET 0
                    ) AS d ON true;
            END IF;
        ELSIF skip_held AND durable THEN
            OPEN elements FOR
                SELECT e.ord, e.cost, e.asked, d.tid, coalesce(d.count, 0), coalesce(d.prev_count, 0), coalesce(d.window_start, 0),
                    coalesce(d.credit, 0), d.scale, CASE WHEN d.algorithm = algorithm THEN d.expires_at ELSE 0 END,
                    CASE WHEN algorithm = 4 THEN d.log END, d.since, d.capacity, d.refill, d.returned
                FROM (
                    SELECT e.key, e.ord, coalesce(e.cost, 1) AS cost, coalesce(e.asked, 1) AS asked
                    FROM unnest((SELECT keys), (SELECT costs), (SELECT counts)) WITH ORDINALITY AS e (key, cost, asked, ord)
                    ORDER BY octet_length(e.key) DESC, e.key COLLATE "C", e.ord
                ) AS e
                LEFT JOIN LATERAL (
                    SELECT d.ctid AS tid, d.* FROM rate_limit_durable AS d WHERE d.prefix = name AND d.key = e.key FOR UPDATE SKIP LOCKED
                ) AS d ON true
                LEFT JOIN LATERAL (
                    SELECT d.ctid AS tid FROM rate_limit_durable AS d WHERE d.prefix = name AND d.key = e.key OFFSET 0
                ) AS seen ON true
                WHERE d.tid IS NOT NULL OR seen.tid IS NULL;
        ELSIF skip_held THEN
            OPEN elements FOR
                SELECT e.ord, e.cost, e.asked, d.tid, coalesce(d.count, 0), coalesce(d.prev_count, 0), coalesce(d.window_start, 0),
                    coalesce(d.credit, 0), d.scale, CASE WHEN d.algorithm = algorithm THEN d.expires_at ELSE 0 END,
                    CASE WHEN algorithm = 4 THEN d.log END, d.since, d.capacity, d.refill, d.returned
                FROM (
                    SELECT e.key, e.ord, coalesce(e.cost, 1) AS cost, coalesce(e.asked, 1) AS asked
                    FROM unnest((SELECT keys), (SELECT costs), (SELECT counts)) WITH ORDINALITY AS e (key, cost, asked, ord)
                    ORDER BY octet_length(e.key) DESC, e.key COLLATE "C", e.ord
                ) AS e
                LEFT JOIN LATERAL (
                    SELECT d.ctid AS tid, d.* FROM rate_limit_ephemeral AS d WHERE d.prefix = name AND d.key = e.key FOR UPDATE SKIP LOCKED
                ) AS d ON true
                LEFT JOIN LATERAL (
                    SELECT d.ctid AS tid FROM rate_limit_ephemeral AS d WHERE d.prefix = name AND d.key = e.key OFFSET 0
                ) AS seen ON true
                WHERE d.tid IS NOT NULL OR seen.tid IS NULL;
        ELSIF durable THEN
            OPEN elements FOR
                SELECT e.ord, e.cost, e.asked, d.tid, coalesce(d.count, 0), coalesce(d.prev_count, 0), coalesce(d.window_start, 0),
                    coalesce(d.credit, 0), d.scale, CASE WHEN d.algorithm = algorithm THEN d.expires_at ELSE 0 END,
                    CASE WHEN algorithm = 4 THEN d.log END, d.since, d.capacity, d.refill, d.returned
                FROM (
                    SELECT e.key, e.ord, coalesce(e.cost, 1) AS cost, coalesce(e.asked, 1) AS asked
                    FROM unnest((SELECT keys), (SELECT costs), (SELECT counts)) WITH ORDINALITY AS e (key, cost, asked, ord)
                    ORDER BY octet_length(e.key) DESC, e.key COLLATE "C", e.ord
                ) AS e
                LEFT JOIN LATERAL (
                    SELECT d.ctid AS tid, d.* FROM rate_limit_durable AS d WHERE d.prefix = name AND d.key = e.key FOR UPDATE
                ) AS d ON true;
        ELSE
            OPEN elements FOR
                SELECT e.ord, e.cost, e.asked, d.tid, coalesce(d.count, 0), coalesce(d.prev_count, 0), coalesce(d.window_start, 0),
                    coalesce(d.credit, 0), d.scale, CASE WHEN d.algorithm = algorithm THEN d.expires_at ELSE 0 END,
                    CASE WHEN algorithm = 4 THEN d.log END, d.since, d.capacity, d.refill, d.returned
                FROM (
                    SELECT e.key, e.ord, coalesce(e.cost, 1) AS cost, coalesce(e.asked, 1) AS asked
                    FROM unnest((SELECT keys), (SELECT costs), (SELECT counts)) WITH ORDINALITY AS e (key, cost, asked, ord)
                    ORDER BY octet_length(e.key) DESC, e.key COLLATE "C", e.ord
                ) AS e
                LEFT JOIN LATERAL (
                    SELECT d.ctid AS tid, d.* FROM rate_limit_ephemeral AS d WHERE d.prefix = name AND d.key = e.key FOR UPDATE
                ) AS d ON true;
        END IF;

        found_rows := '{}';
        missing := false;
        LOOP
            FETCH elements INTO r;
            EXIT WHEN NOT found OR clock_timestamp() > give_up AND NOT skip_held AND rate_limit_late();
            IF (r.tid IS NOT NULL AND r.asked >= 1 AND attempt = 1) IS NOT TRUE THEN -- a key whose row we have not just made is valid
                IF (r.asked >= 1 AND octet_length(keys[r.ord]) BETWEEN 1 AND 512) IS NOT TRUE THEN
                    RAISE EXCEPTION 'rate_limit: element % of the request is not valid', r.ord
                        USING ERRCODE = 'invalid_parameter_value',
                            HINT = 'A key has 1 to 512 bytes, and a count is at least 1.',
                            COLUMN = CASE WHEN octet_length(keys[r.ord]) > 512 THEN 'key' ELSE '' END;
                END IF;
                missing := r.tid IS NULL AND (r.cost BETWEEN 1 AND max_cost OR (r.cost < 0 AND taken_in[r.ord] IS NULL));
                CONTINUE WHEN missing AND skip_held AND attempt = 3; -- somebody deletes them all the time
                EXIT WHEN missing;
            END IF;
            found_rows := array_append(found_rows, r);
        END LOOP;
        CLOSE elements;
        IF NOT missing THEN
            RETURN found_rows;
        END IF;

        IF durable THEN
            INSERT INTO rate_limit_durable AS d (prefix, key)
            SELECT name, e.key COLLATE "C"
            FROM unnest((SELECT keys), (SELECT costs)) AS e (key, cost)
            WHERE coalesce(e.cost, 1) <= max_cost AND coalesce(e.cost, 1) <> 0
                AND NOT (skip_held AND EXISTS (SELECT FROM rate_limit_durable AS d WHERE d.prefix = name AND d.key = e.key OFFSET 0))
            GROUP BY e.key COLLATE "C"
            ORDER BY octet_length(e.key COLLATE "C") DESC, e.key COLLATE "C"
            ON CONFLICT (prefix, key) DO UPDATE SET count = d.count WHERE clock_timestamp() > give_up AND rate_limit_late();
        ELSE
            INSERT INTO rate_limit_ephemeral AS d (prefix, key)
            SELECT name, e.key COLLATE "C"
            FROM unnest((SELECT keys), (SELECT costs)) AS e (key, cost)
            WHERE coalesce(e.cost, 1) <= max_cost AND coalesce(e.cost, 1) <> 0
                AND NOT (skip_held AND EXISTS (SELECT FROM rate_limit_ephemeral AS d WHERE d.prefix = name AND d.key = e.key OFFSET 0))
            GROUP BY e.key COLLATE "C"
            ORDER BY octet_length(e.key COLLATE "C") DESC, e.key COLLATE "C"
            ON CONFLICT (prefix, key) DO UPDATE SET count = d.count WHERE clock_timestamp() > give_up AND rate_limit_late();
        END IF;
    END LOOP;
    RAISE EXCEPTION 'rate_limit: rows were made, and were missing again'
        USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Something deletes rows of this transaction, or keeps them from being made: a trigger?';
END
$$;

-- rate_limit_write stores new states of rows that rate_limit_lock has locked, by tid, which is fixed while they are.
CREATE FUNCTION rate_limit_write(new_rows rate_limit_row[], algorithm smallint, durable boolean)
RETURNS void
LANGUAGE plpgsql
AS $$
#variable_conflict use_variable
DECLARE
    w rate_limit_row;
BEGIN
    IF cardinality(new_rows) = 1 THEN
        w := new_rows[1];
        IF durable THEN
            UPDATE rate_limit_durable AS d
            SET algorithm = algorithm, count = w.count, prev_count = w.prev_count, window_start = w.window_start,
                credit = w.credit, scale = w.scale, expires_at = w.expires_at, log = w.log,
                since = w.since, capacity = w.capacity, refill = w.refill, returned = w.returned
            WHERE d.ctid = w.tid;
        ELSE
            UPDATE rate_limit_ephemeral AS d
            SET algorithm = algorithm, count = w.count, prev_count = w.prev_count, window_start = w.window_start,
                credit = w.credit, scale = w.scale, expires_at = w.expires_at, log = w.log,
                since = w.since, capacity = w.capacity, refill = w.refill, returned = w.returned
            WHERE d.ctid = w.tid;
        END IF;
    -- LIMIT by a subquery lets the planner expect few rows, so that it always fetches them by tid and never scans.
    ELSIF durable THEN
        UPDATE rate_limit_durable AS d
        SET algorithm = algorithm, count = n.count, prev_count = n.prev_count, window_start = n.window_start,
            credit = n.credit, scale = n.scale, expires_at = n.expires_at, log = n.log,
            since = n.since, capacity = n.capacity, refill = n.refill, returned = n.returned
        FROM (SELECT * FROM unnest((SELECT new_rows)) LIMIT (SELECT cardinality(new_rows))) AS n
        WHERE d.ctid = n.tid;
    ELSE
        UPDATE rate_limit_ephemeral AS d
        SET algorithm = algorithm, count = n.count, prev_count = n.prev_count, window_start = n.window_start,
            credit = n.credit, scale = n.scale, expires_at = n.expires_at, log = n.log,
            since = n.since, capacity = n.capacity, refill = n.refill, returned = n.returned
        FROM (SELECT * FROM unnest((SELECT new_rows)) LIMIT (SELECT cardinality(new_rows))) AS n
        WHERE d.ctid = n.tid;
    END IF;
END
$$;
