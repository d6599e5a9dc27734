-- _rate_limit_left_ephemeral decides the keys that are not in taken_keys. A rate_limit_take_ function calls
-- _rate_limit_left_ephemeral if one statement could not take from all keys. _rate_limit_left_ephemeral returns the
-- statement's numbers in the order of keys, and then sixteen numbers for each other key. rate_limit_take_sliding_window
-- explains the numbers.
--
-- valid says whether the arguments are valid. began is the statement's reading of the clock. If there are several keys,
-- the statement has already locked all rows, so this function does not wait for locks.
--
-- This function decides one key after another, up to the first missing row. From there on, rate_limit_all decides,
-- which costs more than twice as much.
CREATE FUNCTION _rate_limit_left_ephemeral(
    name text, keys text[], algorithm smallint, max_count bigint, span_us bigint, refill bigint, zone text,
    costs bigint[], counts bigint[], lock_timeout_ms integer, now_us bigint,
    valid boolean, began bigint, taken_keys text[], taken bigint[]
) RETURNS bigint[]
LANGUAGE plpgsql
SET enable_seqscan = off -- a plan must not depend on the table's size at planning
AS $$
#variable_conflict use_variable
DECLARE
    s rate_limit_row;
    clock bigint;
    asked bigint;
    n integer := coalesce(cardinality(keys), 0);
    places integer[]; -- the places of the undecided keys; NULL means all keys
    place integer;
    done integer := 0; -- how many elements of places have been decided
    told bigint[];
    gone text[];
BEGIN
    IF taken IS NOT NULL THEN
        IF array_ndims(taken) = 1 THEN -- there is only one key
            taken := ARRAY[taken];
            taken_keys := keys;
        END IF;
        IF _rate_limit_now(now_us) > began + 10000 THEN
            -- A row that the statement made begins at began. This time is too early if the statement waited for another
            -- transaction that made the row and rolled back. Delete a row that is too early, and decide again.
            WITH d AS (
                DELETE FROM rate_limit_ephemeral AS d
                USING (
                    SELECT DISTINCT ON (e.key COLLATE "C") e.key, e.cost, e.asked
                    FROM unnest(keys, costs, counts) WITH ORDINALITY AS e (key, cost, asked, place)
                    ORDER BY e.key COLLATE "C", e.place
                ) AS e
                WHERE d.prefix = name AND d.key = e.key AND e.key = ANY (taken_keys)
                    AND d.window_start = began AND d.prev_count = 0
                    AND coalesce(e.cost, 1) * coalesce(e.asked, 1)
                        = CASE WHEN algorithm = 3 THEN _rate_limit_ceil_div(d.count, span_us) ELSE d.count END
                RETURNING d.key
            )
            SELECT array_agg(d.key) INTO gone FROM d;
        END IF;
        SELECT array_agg(e.place ORDER BY e.place) FILTER (WHERE t.place IS NULL),
            array_agg(ARRAY[greatest(began, least(began + 10000, taken[t.place][1])), taken[t.place][2],
                    taken[t.place][3], taken[t.place][4], taken[t.place][5], taken[t.place][6], taken[t.place][7],
                    taken[t.place][8], taken[t.place][9]]
                ORDER BY e.place) FILTER (WHERE t.place IS NOT NULL)
        INTO places, told
        FROM (
            SELECT e.key, e.place, row_number() OVER (PARTITION BY e.key COLLATE "C" ORDER BY e.place) = 1 AS first
            FROM unnest(keys) WITH ORDINALITY AS e (key, place)
        ) AS e
        LEFT JOIN unnest(taken_keys) WITH ORDINALITY AS t (key, place)
            ON e.first AND t.key = e.key COLLATE "C" AND (t.key = ANY (gone)) IS NOT TRUE;
        told := ARRAY(SELECT unnest(told));
        IF places IS NULL THEN
            RETURN told;
        END IF;
        n := cardinality(places);
    END IF;

    FOR i IN 1 .. CASE WHEN valid THEN n ELSE 0 END LOOP
        place := CASE WHEN places IS NULL THEN i ELSE places[i] END;
        -- Lock the row of the key, and read it.
        SELECT d.ctid, d.algorithm, d.count, d.prev_count, d.window_start, d.credit, d.scale, d.expires_at,
            d.since, d.capacity, d.refill, d.returned, d.log, d.held, d.held_next, d.held_until,
            0::int8, 0::int8, 0::int8, 0::int8, 0::int8, NULL::int8, NULL::int8[], false, false, false INTO s
        FROM rate_limit_ephemeral AS d
        WHERE d.prefix = name AND d.key = keys[place] AND d.algorithm = algorithm
            AND d.held IS NULL -- rate_limit_all decides keys with holds
        FOR UPDATE;
        EXIT WHEN NOT found;
        clock := _rate_limit_now(now_us); -- after the lock; an earlier reading could be older than the row
        asked := coalesce(counts[place], 1);
        s := _rate_limit_step(s, algorithm, clock, coalesce(costs[place], 1), asked, asked,
            max_count, span_us, refill, zone);
        IF s.changed THEN
            UPDATE rate_limit_ephemeral AS d SET
                count = s.count, prev_count = s.prev_count, window_start = s.window_start, credit = s.credit,
                scale = s.scale, expires_at = s.expires_at, since = s.since, capacity = s.capacity,
                refill = s.refill, returned = s.returned, log = s.log
            WHERE d.ctid = s.tid;
        END IF;
        told := told || ARRAY[place, s.granted, s.remaining, s.retry_after_us, s.reset_after_us, clock, s.count,
            s.prev_count, s.window_start, s.credit, s.scale, s.expires_at, s.spent, s.since, s.taken_at, 0]
            || s.told_log;
        IF i = n THEN
            RETURN told;
        END IF;
        done := i;
    END LOOP;

    places := CASE WHEN places IS NULL THEN ARRAY(SELECT generate_series(done + 1, n)) ELSE places[done + 1:] END;
    n := cardinality(places);
    IF n < cardinality(keys) THEN
        keys := ARRAY(SELECT keys[p] FROM unnest(places) WITH ORDINALITY AS e (p, i) ORDER BY e.i);
        costs := CASE WHEN costs IS NOT NULL
            THEN ARRAY(SELECT costs[p] FROM unnest(places) WITH ORDINALITY AS e (p, i) ORDER BY e.i) END;
        counts := CASE WHEN counts IS NOT NULL
            THEN ARRAY(SELECT counts[p] FROM unnest(places) WITH ORDINALITY AS e (p, i) ORDER BY e.i) END;
    END IF;
    RETURN told || ARRAY(
        SELECT unnest(ARRAY[places[a.ord], a.granted, a.remaining, a.retry_after_us, a.reset_after_us,
            (extract(epoch FROM a.decided_at) * 1000000)::bigint, a.count, a.prev_count, a.window_start, a.credit,
            a.scale, a.expires_at, a.taken_spent, a.taken_since, a.taken_at, a.held]
            || CASE WHEN n = 1 THEN a.log END)
        FROM rate_limit_all(
            places, array_fill(name, ARRAY[n]), keys,
            array_fill('ephemeral' = 'durable', ARRAY[n]), -- false; in the copy for rate_limit_durable it is true
            array_fill(algorithm, ARRAY[n]), array_fill(max_count, ARRAY[n]), array_fill(span_us, ARRAY[n]),
            array_fill(refill, ARRAY[n]), costs, counts, lock_timeout_ms, NULL::boolean,
            timestamptz 'epoch' + now_us / 1000000 * interval '1 second' + now_us % 1000000 * interval '1 microsecond',
            NULL::bigint[], NULL::bigint[], NULL::bigint[], NULL::bigint[], false,
            CASE WHEN algorithm = 5 THEN array_fill(zone, ARRAY[n]) END, NULL::bigint[], NULL::boolean[],
            NULL::bigint[], NULL::uuid[], NULL::bigint[]) AS a
        ORDER BY a.ord);
END
$$;
