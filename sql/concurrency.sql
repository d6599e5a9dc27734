-- Concurrency: at most max_count units at a time. A slot is a hold that is never settled, but released. So the policy
-- counts nothing, and a row needs no column for it: hold.sql keeps the sum of the live slots in the row of the key.
--
-- A request that does not fit can wait: it gets a ticket, which is a row of the list of the holds with the status 3.
-- The tickets of a key are its line. Tests compare these functions with internal/model/slot.go. They keep these
-- promises, all by the database's clock:
--
--   - Never are more than max_count units live.
--   - A slot or a ticket that has ended is never live again.
--   - The fences of a key ascend, because nextval runs while the row of the key is locked.
--   - Tickets of the same group become slots in the order in which they were made.
--   - A ticket that has ended, or that can never fit, holds nobody up.

-- _rate_limit_valid_slots tells whether a policy's numbers are in the range.
CREATE FUNCTION _rate_limit_valid_slots(max_count bigint, span_us bigint, refill bigint)
RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT max_count BETWEEN 1 AND 1000000 AND span_us = 0 AND refill = 0
$$;

-- _rate_limit_concurrent decides requests for a row, as if no slot was live. It counts nothing. _rate_limit_fixed
-- explains the arguments.
CREATE FUNCTION _rate_limit_concurrent(
    s rate_limit_row, cost bigint, most bigint, max_count bigint
) RETURNS rate_limit_row LANGUAGE plpgsql AS $$
BEGIN
    s.granted := CASE WHEN cost BETWEEN 1 AND max_count THEN most ELSE 0 END;
    s.remaining := max_count;
    s.retry_after_us := CASE WHEN cost <= max_count THEN 0 END;
    s.reset_after_us := 0;
    s.spent := 0;
    s.changed := false;
    s.moved := false;
    RETURN s;
END
$$;

-- _rate_limit_wrong_wish tells whether an object does not describe a slot that is asked for.
CREATE FUNCTION _rate_limit_wrong_wish(wish jsonb) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT (jsonb_typeof(wish) = 'object' AND wish - ARRAY['holder', 'group', 'weight', 'wait'] = jsonb '{}'
        AND octet_length(coalesce(wish->>'holder', '')) <= 256 AND (wish->>'holder' ~ '[[:cntrl:]]') IS NOT TRUE
        AND octet_length(coalesce(wish->>'group', '')) <= 256
        AND coalesce(wish->>'weight', '1') ~ '^[0-9]{1,4}$'
        AND coalesce(wish->>'weight', '1')::integer BETWEEN 1 AND 1000
        AND coalesce(wish->>'wait', 'false') IN ('true', 'false')) IS NOT TRUE
$$;

-- _rate_limit_next_fence returns the next fence or place. The row of the key must be locked. Both tables share the
-- sequence of the table that is logged, so no number comes twice after a crash. The sequence must have no cache,
-- because a session with a cache could return a smaller number than another session before. (A literal with the
-- sequence's name would not work in every schema.)
CREATE FUNCTION _rate_limit_next_fence() RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
    RETURN nextval(pg_get_serial_sequence(pg_typeof(NULL::rate_limit_durable_hold)::text, 'fence')::regclass);
END
$$;

-- _rate_limit_slots_after_ephemeral returns how long a request that is denied or in line has to wait at least: until
-- cost fits beside the live holds, and if there is a line, until the next hold ends, or without holds, a ticket.
CREATE FUNCTION _rate_limit_slots_after_ephemeral(
    s rate_limit_row, name text, key text, clock bigint, cost bigint, max_count bigint
) RETURNS bigint
LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    first CONSTANT bigint := (SELECT min(h.ends_at) FROM rate_limit_ephemeral_hold AS h
        WHERE h.key = key AND h.prefix = name AND h.status = 3 AND h.ends_at > clock);
BEGIN
    RETURN greatest(0, (
            SELECT e.ends_at - clock -- then free units have ended, at least as many as are missing
            FROM (
                SELECT h.ends_at, sum(h.units) OVER (ORDER BY h.ends_at ROWS UNBOUNDED PRECEDING) AS free
                FROM rate_limit_ephemeral_hold AS h
                WHERE h.key = key AND h.prefix = name AND h.status = 0 AND h.ends_at > clock
            ) AS e
            WHERE e.free >= s.held + cost - max_count
            ORDER BY e.ends_at LIMIT 1),
        CASE WHEN first IS NOT NULL THEN coalesce(s.held_next, first) - clock END);
END
$$;

-- _rate_limit_hand_over_ephemeral makes slots of the next tickets as long as they fit, and tells the listeners of the
-- channel rate_limit_slot: the id and the fence of the slot, with a space between them. Next is the group that holds
-- least for its weight, and of this group the first ticket. If several groups hold as much, the first of these tickets
-- is next. A next ticket that does not fit stops the line, so that small tickets cannot pass a big one for ever.
--
-- The slot keeps its ticket's end. So its holder knows by its own clock until when it has the slot, even if it hears of
-- it late. s has the live holds, and the list has no other live holds and no tickets that have ended.
CREATE FUNCTION _rate_limit_hand_over_ephemeral(s rate_limit_row, name text, key text)
RETURNS rate_limit_row
LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    id uuid;
    units bigint;
    room bigint;
    fence bigint;
BEGIN
    LOOP
        SELECT w.id, w.units, w.max_count - coalesce(s.held, 0) INTO id, units, room
        FROM (
            SELECT DISTINCT ON (h.line_group) h.id, h.units, h.max_count, h.line_group, h.weight, h.fence
            FROM rate_limit_ephemeral_hold AS h
            WHERE h.key = key AND h.prefix = name AND h.status = 3 AND h.units <= h.max_count
            ORDER BY h.line_group, h.fence
        ) AS w
        ORDER BY (
                SELECT coalesce(sum(h.units), 0) FROM rate_limit_ephemeral_hold AS h
                WHERE h.key = key AND h.prefix = name AND h.status = 0 AND h.line_group = w.line_group
            )::float8 / w.weight, w.fence
        LIMIT 1;
        EXIT WHEN NOT found OR units > room;
        UPDATE rate_limit_ephemeral_hold AS h SET status = 0, fence = _rate_limit_next_fence()
        WHERE h.id = id AND h.key = key AND h.prefix = name
        RETURNING h.fence INTO fence;
        s.held := coalesce(s.held, 0) + units;
        -- A literal must not contain the name, because access.sql would insert the schema into it.
        PERFORM pg_notify(concat('rate_limit', '_slot'), concat(id, ' ', fence));
    END LOOP;
    RETURN s;
END
$$;

-- _rate_limit_write_line_ephemeral ends a write to the list of a key: it deletes tickets that have ended, hands over,
-- and completes the sums of the row. max_count is the new limit of the line, or NULL if the limit stays.
CREATE FUNCTION _rate_limit_write_line_ephemeral(
    s rate_limit_row, name text, key text, clock bigint, max_count bigint
) RETURNS rate_limit_row
LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    longest CONSTANT bigint := clock + 86400000000;
    first bigint; -- the first and the last end of a ticket
    last bigint;
    most bigint; -- the largest limit of a ticket; while so much is held, nothing can be handed over
    differs boolean;
BEGIN
    SELECT min(h.ends_at), max(h.ends_at), max(h.max_count), bool_or(h.max_count <> max_count)
    INTO first, last, most, differs
    FROM rate_limit_ephemeral_hold AS h
    WHERE h.key = key AND h.prefix = name AND h.status = 3;
    IF first <= clock THEN
        DELETE FROM rate_limit_ephemeral_hold AS h
        WHERE h.key = key AND h.prefix = name AND h.status = 3 AND h.ends_at <= clock;
    END IF;
    IF differs OR last > longest THEN -- longest: the clock was set back
        UPDATE rate_limit_ephemeral_hold AS h
        SET ends_at = least(h.ends_at, longest), max_count = coalesce(max_count, h.max_count)
        WHERE h.key = key AND h.prefix = name AND h.status = 3;
    END IF;
    IF coalesce(s.held, 0) < most THEN
        s := _rate_limit_hand_over_ephemeral(s, name, key);
    END IF;
    SELECT min(h.ends_at), max(h.ends_at) INTO s.held_next, s.held_until
    FROM rate_limit_ephemeral_hold AS h
    WHERE h.key = key AND h.prefix = name AND h.status = 0;
    s.held := CASE WHEN s.held_next IS NOT NULL THEN s.held END;
    RETURN s;
END
$$;

-- _rate_limit_slot_ephemeral acquires a slot, or releases one if ttl_us is NULL. It locks the row of the key. The
-- result is that of rate_limit_slots.
CREATE FUNCTION _rate_limit_slot_ephemeral(
    name text, key text, durable boolean, max_count bigint, cost bigint, ttl_us bigint, slot uuid, wish jsonb,
    now timestamptz, skip_held boolean
) RETURNS rate_limit_decision
LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    wait CONSTANT boolean := (wish->>'wait')::boolean IS TRUE;
    told rate_limit_decision;
    s rate_limit_row;
    was rate_limit_row;
    clock bigint;
    units bigint;
    status smallint;
    fence bigint;
    ends bigint;
    tickets boolean;
    line boolean := false; -- whether a ticket is in line that can fit
BEGIN
    -- 1. Lock the row of the key. Make it if it is missing, but not for a release of nothing.
    FOR attempt IN 1 .. 5 LOOP
        IF skip_held THEN
            SELECT d.ctid, d.held, d.held_next, d.held_until INTO s.tid, s.held, s.held_next, s.held_until
            FROM rate_limit_ephemeral AS d WHERE d.prefix = name AND d.key = key FOR UPDATE SKIP LOCKED;
        ELSE
            SELECT d.ctid, d.held, d.held_next, d.held_until INTO s.tid, s.held, s.held_next, s.held_until
            FROM rate_limit_ephemeral AS d WHERE d.prefix = name AND d.key = key FOR UPDATE;
        END IF;
        EXIT WHEN found;
        told.decided_at := coalesce(now, clock_timestamp());
        clock := (extract(epoch FROM told.decided_at) * 1000000)::bigint;
        told.remaining := CASE WHEN skip_held THEN _rate_limit_holder(name, key, durable) END;
        IF told.remaining IS NOT NULL THEN
            told.granted := -2;
            RETURN told;
        ELSIF ttl_us IS NULL AND NOT EXISTS (SELECT FROM rate_limit_ephemeral_hold AS h
            WHERE h.id = slot AND h.key = key AND h.prefix = name AND h.status = 3 AND h.ends_at > clock)
        THEN
            told.granted := -3;
            told.remaining := max_count;
            told.retry_after_us := 0;
            told.reset_after_us := 0;
            told.held := 0;
            RETURN told;
        ELSIF NOT skip_held THEN
            INSERT INTO rate_limit_ephemeral (prefix, key) VALUES (name, key) ON CONFLICT DO NOTHING;
        ELSIF NOT _rate_limit_try_to_make(name, key, durable) THEN -- another transaction is making it
            told.granted := -2;
            told.remaining := 0;
            RETURN told;
        END IF;
    END LOOP;
    IF s.tid IS NULL THEN
        RAISE EXCEPTION 'rate_limit: rows were made, and were missing again'
            USING ERRCODE = 'object_not_in_prerequisite_state',
                HINT = 'Something deletes rows of this transaction, or keeps them from being made: a trigger?';
    END IF;

    -- 2. Read the clock after the lock, and see what is live and who is in line.
    told.decided_at := coalesce(now, clock_timestamp());
    clock := (extract(epoch FROM told.decided_at) * 1000000)::bigint;
    was := s;
    IF s.held_next <= clock THEN
        s := _rate_limit_live_ephemeral(s, name, key, clock);
    END IF;
    tickets := EXISTS (
        SELECT FROM rate_limit_ephemeral_hold AS h WHERE h.key = key AND h.prefix = name AND h.status = 3);
    IF tickets AND ttl_us IS NOT NULL THEN
        line := EXISTS (SELECT FROM rate_limit_ephemeral_hold AS h
            WHERE h.key = key AND h.prefix = name AND h.status = 3 AND h.ends_at > clock AND h.units <= max_count);
    END IF;

    -- 3. Decide and write. A denial writes nothing.
    told.granted := 0;
    told.retry_after_us := 0;
    IF ttl_us IS NULL THEN
        DELETE FROM rate_limit_ephemeral_hold AS h
        WHERE h.id = slot AND h.key = key AND h.prefix = name AND h.fence > 0 AND h.ends_at > clock
            AND (h.status = 3 OR h.status = 0 AND s.held IS NOT NULL)
        RETURNING h.units, h.status, h.fence, h.ends_at INTO units, status, fence, ends;
        told.granted := CASE WHEN found THEN 1 ELSE -3 END;
        IF found AND status = 0 THEN
            s.held := nullif(s.held - units, 0);
        END IF;
    ELSIF cost > max_count THEN
        told.retry_after_us := NULL;
    ELSIF NOT line AND cost <= max_count - coalesce(s.held, 0) THEN
        told.granted := 1;
        status := 0;
        s.held := coalesce(s.held, 0) + cost;
    ELSIF wait THEN
        status := 3;
    END IF;
    IF status IS NOT NULL THEN
        PERFORM _rate_limit_note_ends_ephemeral(was, name, key, clock);
    END IF;
    IF ttl_us IS NOT NULL AND status IS NOT NULL THEN
        fence := _rate_limit_next_fence();
        ends := clock + ttl_us;
        INSERT INTO rate_limit_ephemeral_hold (
            id, prefix, key, units, ends_at, status, algorithm, max_count, span_us, refill,
            holder, line_group, weight, made_at, fence)
        VALUES (slot, name, key, cost, ends, status, 6, max_count, 0, 0,
            wish->>'holder', coalesce(wish->>'group', ''), coalesce((wish->>'weight')::integer, 1), clock, fence);
    END IF;
    IF status IS NOT NULL THEN
        IF tickets OR status = 3 OR s.held_until > clock + 86400000000 THEN
            s := _rate_limit_write_line_ephemeral(s, name, key, clock, CASE WHEN wait THEN max_count END);
            IF status = 3 AND ttl_us IS NOT NULL THEN
                SELECT h.status, h.fence INTO status, fence
                FROM rate_limit_ephemeral_hold AS h WHERE h.id = slot AND h.key = key AND h.prefix = name;
                told.granted := CASE WHEN status = 0 THEN 1 ELSE 0 END;
            END IF;
        ELSIF ttl_us IS NOT NULL THEN
            s.held_next := least(s.held_next, ends);
            s.held_until := greatest(s.held_until, ends);
        ELSIF s.held IS NULL THEN
            s.held_next := NULL;
            s.held_until := NULL;
        ELSIF ends IN (s.held_next, s.held_until) THEN
            SELECT min(h.ends_at), max(h.ends_at) INTO s.held_next, s.held_until
            FROM rate_limit_ephemeral_hold AS h
            WHERE h.key = key AND h.prefix = name AND h.status = 0;
        END IF;
        IF (s.held, s.held_next, s.held_until) IS DISTINCT FROM (was.held, was.held_next, was.held_until) THEN
            UPDATE rate_limit_ephemeral AS d SET held = s.held, held_next = s.held_next, held_until = s.held_until
            WHERE d.ctid = s.tid;
        END IF;
        told.log := ARRAY[(status = 0)::int, fence, ends];
    END IF;
    told.held := coalesce(s.held, 0);
    told.remaining := greatest(max_count - told.held, 0);
    told.reset_after_us := greatest(s.held_until - clock, 0);
    IF told.granted = 0 AND cost <= max_count THEN
        told.retry_after_us := _rate_limit_slots_after_ephemeral(s, name, key, clock, cost, max_count);
    END IF;
    RETURN told;
END
$$;

-- _rate_limit_renew_ephemeral makes those slots and tickets last for at least ttl_us that are live, sets their limits,
-- and hands over. It makes a key's row that is missing, because the row expires while only tickets are left.
CREATE FUNCTION _rate_limit_renew_ephemeral(slots uuid[], limits bigint[], ttl_us bigint, now_us bigint) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    ids uuid[]; -- the slots and tickets that exist
    names_of text[]; -- of each of them
    keys_of text[];
    limits_of bigint[];
    names text[]; -- each key once, in the lock order of rate_limit_all
    keys text[];
    one record;
    was rate_limit_row;
    s rate_limit_row;
    clock bigint;
BEGIN
    -- A slot never moves to another key, so this locks no row.
    SELECT array_agg(h.id), array_agg(h.prefix), array_agg(h.key), array_agg(e.max_count)
    INTO ids, names_of, keys_of, limits_of
    FROM unnest(slots, limits) AS e (id, max_count)
    CROSS JOIN LATERAL (
        SELECT h.id, h.prefix, h.key FROM rate_limit_ephemeral_hold AS h
        WHERE h.id = e.id AND h.status IN (0, 3) AND h.fence > 0
        OFFSET 0
    ) AS h;
    IF ids IS NULL THEN
        RETURN;
    END IF;
    SELECT array_agg(e.name), array_agg(e.key) INTO names, keys
    FROM (
        SELECT DISTINCT -octet_length(e.key), e.key COLLATE "C" AS key, e.name COLLATE "C" AS name
        FROM unnest(names_of, keys_of) AS e (name, key)
        ORDER BY 1, 2, 3
    ) AS e;

    -- This statement makes missing rows and locks the others, one after the other, in the given order.
    INSERT INTO rate_limit_ephemeral AS d (prefix, key)
    SELECT e.name, e.key
    FROM unnest(names, keys) AS e (name, key)
    ON CONFLICT (prefix, key) DO UPDATE SET held = d.held WHERE false;
    clock := _rate_limit_now(now_us); -- after the locks

    -- LATERAL with OFFSET 0 searches for each row by its key, however large Postgres believes the tables to be.
    UPDATE rate_limit_ephemeral_hold AS h
    SET ends_at = greatest(h.ends_at, clock + ttl_us), max_count = coalesce(e.max_count, h.max_count)
    FROM unnest(ids, names_of, keys_of, limits_of) AS e (id, name, key, max_count)
    CROSS JOIN LATERAL (
        SELECT h.ctid FROM rate_limit_ephemeral_hold AS h
        WHERE h.id = e.id AND h.key = e.key AND h.prefix = e.name AND h.status IN (0, 3)
            AND h.ends_at > clock AND (h.ends_at < clock + ttl_us OR h.max_count <> e.max_count)
        OFFSET 0
    ) AS n
    WHERE h.ctid = n.ctid;

    -- In most keys, nobody stands in line, and nothing has ended. The other keys follow one by one.
    FOR one IN
        SELECT e.name, e.key, d.ctid AS tid, d.held, d.held_next, d.held_until
        FROM unnest(names, keys) AS e (name, key)
        CROSS JOIN LATERAL (
            SELECT d.ctid, d.held, d.held_next, d.held_until
            FROM rate_limit_ephemeral AS d
            WHERE d.prefix = e.name AND d.key = e.key
                AND (d.held IS NULL OR d.held_next <= clock OR d.held_until > clock + 86400000000
                    OR EXISTS (SELECT FROM rate_limit_ephemeral_hold AS h
                        WHERE h.key = e.key AND h.prefix = e.name AND h.status = 3))
            OFFSET 0
        ) AS d
    LOOP
        was := _rate_limit_no_row(one.tid, 6::smallint, one.held, one.held_next, one.held_until);
        s := _rate_limit_live_ephemeral(was, one.name, one.key, clock);
        PERFORM _rate_limit_note_ends_ephemeral(was, one.name, one.key, clock);
        s := _rate_limit_write_line_ephemeral(s, one.name, one.key, clock, NULL::bigint);
        UPDATE rate_limit_ephemeral AS d SET held = s.held WHERE d.ctid = s.tid AND d.held IS DISTINCT FROM s.held;
    END LOOP;

    -- The ends in the rows follow those in the list.
    UPDATE rate_limit_ephemeral AS d SET held_next = n.first, held_until = n.last
    FROM unnest(names, keys) AS e (name, key)
    CROSS JOIN LATERAL (
        SELECT d.ctid FROM rate_limit_ephemeral AS d WHERE d.prefix = e.name AND d.key = e.key OFFSET 0
    ) AS tid
    CROSS JOIN LATERAL (
        SELECT min(h.ends_at) AS first, max(h.ends_at) AS last
        FROM rate_limit_ephemeral_hold AS h WHERE h.key = e.key AND h.prefix = e.name AND h.status = 0
    ) AS n
    WHERE d.ctid = tid.ctid AND (d.held_next, d.held_until) IS DISTINCT FROM (n.first, n.last);
END
$$;

-- rate_limit_slots acquires and releases slots. All arguments but the last four have an element for each slot.
--
--   names, keys, durables
--                    the limiter, the key and the table
--   limits           the limit of the policy
--   costs            how many units the slot has; 0 for a release
--   ttls_us          how long a new slot lasts unless it is renewed, from 1000 to 86400000000; NULL for a release
--   slots            the id of the slot. The id of a new slot is random
--   wishes           for a new slot, an object that may have holder, group, weight and wait. If there is no slot, the
--                    request is denied, and writes nothing. With wait, it gets a ticket instead
--   lock_timeout_ms, synchronous_commit, now, skip_held
--                    as in rate_limit_all
--
-- The result has a row for each slot. After a request for a slot, granted is 1 if the slot is held, otherwise 0. Then
-- retry_after_us is the time until it may be free. log is NULL after a denial. Otherwise it has 1 for a slot or 0 for a
-- ticket, its fence or its place in the line, and its end. After a release, granted is 1, or -3 if the slot or the
-- ticket is not live. granted is -2 for a row that skip_held skips: see rate_limit_all.
CREATE FUNCTION rate_limit_slots(
    names text[], keys text[], durables boolean[], limits bigint[], costs bigint[], ttls_us bigint[], slots uuid[],
    wishes jsonb[], lock_timeout_ms integer DEFAULT NULL, synchronous_commit boolean DEFAULT NULL,
    now timestamptz DEFAULT NULL, skip_held boolean DEFAULT false
) RETURNS SETOF rate_limit_decision
LANGUAGE plpgsql
SECURITY DEFINER
SET plan_cache_mode = force_generic_plan -- otherwise each of a session's first five calls would plan its statements
SET enable_nestloop = on
SET enable_seqscan = off -- a plan must not depend on the table's size at planning
AS $$
#variable_conflict use_variable
DECLARE
    n CONSTANT integer := cardinality(keys);
    ignored text := _rate_limit_set(lock_timeout_ms, synchronous_commit);
    began CONSTANT bigint := _rate_limit_now(NULL::bigint);
    told rate_limit_decision;
    places integer[] := ARRAY[1];
    i integer;
BEGIN
    IF (array_lower(keys, 1) = 1 AND n = ALL (ARRAY[cardinality(names), cardinality(durables), cardinality(limits),
        cardinality(costs), cardinality(ttls_us), cardinality(slots), cardinality(wishes)])) IS NOT TRUE
    THEN
        RAISE EXCEPTION 'rate_limit: the number of elements is not the same for all arguments'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'At least one key is needed.';
    END IF;
    FOR part IN 1 .. n LOOP
        IF (octet_length(names[part]) BETWEEN 1 AND 128 AND octet_length(keys[part]) BETWEEN 1 AND 512
            AND durables[part] IS NOT NULL AND slots[part] IS NOT NULL AND limits[part] BETWEEN 1 AND 1000000
            AND CASE WHEN ttls_us[part] IS NULL THEN costs[part] = 0
                ELSE costs[part] >= 1 AND ttls_us[part] BETWEEN 1000 AND 86400000000
                    AND NOT _rate_limit_wrong_wish(wishes[part]) END) IS NOT TRUE
        THEN
            RAISE EXCEPTION 'rate_limit: the request for slot % is not valid', part
                USING ERRCODE = 'invalid_parameter_value',
                    COLUMN = CASE WHEN octet_length(names[part]) > 128 THEN 'name'
                        WHEN octet_length(keys[part]) > 512 THEN 'key' ELSE '' END,
                    HINT = 'A name has 1 to 128 bytes, and a key 1 to 512. A limit is from 1 to 1000000. Acquire a '
                        'slot with a cost of at least 1, a ttl of 1000 to 86400000000 us, a new id, a holder and a '
                        'group of at most 256 bytes, and a weight from 1 to 1000. Release it with its id and a cost '
                        'of 0.';
        END IF;
    END LOOP;
    IF skip_held THEN -- otherwise the call would wait for a locked table beyond its lock_timeout for rows
        IF false = ANY (durables) THEN
            LOCK TABLE rate_limit_ephemeral IN ROW EXCLUSIVE MODE;
        END IF;
        IF true = ANY (durables) THEN
            LOCK TABLE rate_limit_durable IN ROW EXCLUSIVE MODE;
        END IF;
    END IF;
    IF n > 1 THEN -- in the lock order of rate_limit_all
        places := ARRAY(
            SELECT e.i
            FROM unnest(names, keys, durables) WITH ORDINALITY AS e (name, key, durable, i)
            ORDER BY e.durable, -octet_length(e.key), e.key COLLATE "C", e.name COLLATE "C", e.i);
    END IF;
    FOREACH i IN ARRAY places LOOP
        IF durables[i] THEN
            told := _rate_limit_slot_durable(names[i], keys[i], true, limits[i], costs[i], ttls_us[i], slots[i],
                wishes[i], now, skip_held);
        ELSE
            told := _rate_limit_slot_ephemeral(names[i], keys[i], false, limits[i], costs[i], ttls_us[i], slots[i],
                wishes[i], now, skip_held);
        END IF;
        told.ord := i;
        RETURN NEXT told;
        IF n > 1 AND NOT skip_held THEN
            PERFORM _rate_limit_give_up(began, lock_timeout_ms, NULL::bigint);
        END IF;
    END LOOP;
END
$$;

COMMENT ON FUNCTION rate_limit_slots IS
    'Acquires and releases many slots at once, as rate_limit_acquire and rate_limit_release do for one. '
    'sql/concurrency.sql explains the arguments and the result.
Example: SELECT * FROM rate_limit_slots(ARRAY[''imports''], ARRAY[''tenant:7''], ARRAY[false], ARRAY[5], ARRAY[1],
    ARRAY[30000000], ARRAY[gen_random_uuid()], ARRAY[''{"holder": "worker 7"}'']::jsonb[])';

-- rate_limit_renew_all makes slots and tickets last for at least ttl_us from now, and hands free units over to the next
-- tickets of their keys. A process calls it for all its slots at once.
--
--   slots            the ids of slots and tickets of both tables
--   lock_timeout_ms, synchronous_commit
--                    as in rate_limit_take_sliding_window
--   now_us           the time in tests; otherwise NULL
--   limits           for each slot the limit of its key now, for the case that the policy has changed. A ticket is
--                    served by the limit that it has, so a raised limit serves the line. NULL leaves the limits
--
-- The result has a row for each slot or ticket that is live: whether it still waits, its fence, or its place in the
-- line while it waits, and its end. A slot without a row is lost: it has ended, was released, or was taken away. It is
-- never revived.
CREATE FUNCTION rate_limit_renew_all(
    slots uuid[], ttl_us bigint, lock_timeout_ms integer DEFAULT NULL, synchronous_commit boolean DEFAULT NULL,
    now_us bigint DEFAULT NULL, limits bigint[] DEFAULT NULL,
    OUT slot uuid, OUT waiting boolean, OUT fence bigint, OUT ends_us bigint, OUT clock_us bigint
) RETURNS SETOF record
LANGUAGE plpgsql
SECURITY DEFINER
SET plan_cache_mode = force_generic_plan -- otherwise each of a session's first five calls would plan its statements
SET enable_nestloop = on
SET enable_seqscan = off -- a plan must not depend on the table's size at planning
AS $$
#variable_conflict use_variable
DECLARE
    ignored text := _rate_limit_set(lock_timeout_ms, synchronous_commit);
BEGIN
    IF (ttl_us BETWEEN 1000 AND 86400000000) IS NOT TRUE THEN
        RAISE EXCEPTION 'rate_limit: ttl_us is %', coalesce(ttl_us::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value', COLUMN = 'ttl_us',
                HINT = 'It is from 1 millisecond to 24 hours. Renew a slot while its work goes on.';
    ELSIF cardinality(limits) <> cardinality(slots) OR NOT (1 <= ALL (limits) AND 1000000 >= ALL (limits)) THEN
        RAISE EXCEPTION 'rate_limit: limits does not have a limit for each slot'
            USING ERRCODE = 'invalid_parameter_value',
                HINT = 'A limit is from 1 to 1000000. Without limits, those of the slots stay.';
    END IF;
    -- Every call uses the tables of keys before those of holds: see _rate_limit_end_hold.
    LOCK TABLE rate_limit_ephemeral, rate_limit_durable IN ROW EXCLUSIVE MODE;
    PERFORM _rate_limit_renew_ephemeral(slots, limits, ttl_us, now_us);
    PERFORM _rate_limit_renew_durable(slots, limits, ttl_us, now_us);
    clock_us := _rate_limit_now(now_us);
    RETURN QUERY
        SELECT h.id, h.status = 3, h.fence, h.ends_at, clock_us
        FROM rate_limit_ephemeral_hold AS h
        WHERE h.id = ANY (slots) AND h.status IN (0, 3) AND h.fence > 0 AND h.ends_at > clock_us
        UNION ALL
        SELECT h.id, h.status = 3, h.fence, h.ends_at, clock_us
        FROM rate_limit_durable_hold AS h
        WHERE h.id = ANY (slots) AND h.status IN (0, 3) AND h.fence > 0 AND h.ends_at > clock_us;
END
$$;

COMMENT ON FUNCTION rate_limit_renew_all IS
    'Renews many slots at once, as rate_limit_renew does for one. sql/concurrency.sql explains the result.
Example: SELECT * FROM rate_limit_renew_all(
    ARRAY(SELECT slot FROM rate_limit_acquire(''imports'', ''tenant:7'', ''concurrent 5'')), 30000000)';

CREATE FUNCTION rate_limit_acquire(
    name text, key text, policy text DEFAULT NULL, cost bigint DEFAULT 1, ttl interval DEFAULT interval '30 seconds',
    durable boolean DEFAULT false, holder text DEFAULT NULL, wait boolean DEFAULT false,
    OUT allowed boolean, OUT slot uuid, OUT fence bigint, OUT retry_after interval, OUT retry_after_seconds integer
)
LANGUAGE plpgsql
SECURITY DEFINER
AS $$
#variable_conflict use_variable
DECLARE
    id uuid := _rate_limit_hold_id(key COLLATE "C");
    told bigint[];
BEGIN
    PERFORM _rate_limit_check_ttl(ttl);
    IF (cost >= 1) IS NOT TRUE THEN
        RAISE EXCEPTION 'rate_limit: cost is %, and a slot needs at least 1', coalesce(cost::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value', COLUMN = 'cost', HINT = 'Acquire 1 for an ordinary job.';
    ELSIF octet_length(holder) > 256 OR holder ~ '[[:cntrl:]]' THEN
        RAISE EXCEPTION 'rate_limit: holder is too long, or has control characters'
            USING ERRCODE = 'invalid_parameter_value', COLUMN = 'holder',
                HINT = 'It has at most 256 bytes. Name the process, such as worker-7.';
    END IF;
    SELECT a.allowed, a.retry_after, a.retry_after_seconds, a.told
    INTO allowed, retry_after, retry_after_seconds, told
    FROM _rate_limit_ask(name COLLATE "C", key COLLATE "C", policy COLLATE "C", cost, durable, false,
        (extract(epoch FROM ttl) * 1000000)::bigint, id, NULL::bigint,
        jsonb_strip_nulls(jsonb_build_object('holder', holder, 'wait', coalesce(wait, false)))) AS a;
    slot := CASE WHEN told IS NOT NULL THEN id WHEN allowed THEN '00000000-0000-0000-0000-000000000000' END;
    fence := CASE WHEN told[1] = 1 THEN told[2] END;
END
$$;

COMMENT ON FUNCTION rate_limit_acquire IS 'Acquires a slot of a key for at most ttl, if one is free.
Example: SELECT * FROM rate_limit_acquire(''imports'', ''tenant:7'', ''concurrent 5'')
  policy       concurrent 5: at most 5 at a time. With commas also others, such as concurrent 5, fixed 1000/1d
  cost         how many of the units the slot needs: 3 of 8 for a big job
  ttl          from 1 ms to 24 hours. Then the slot is free, unless rate_limit_renew is called before: at a third of ttl
  holder       who holds the slot, for people: at most 256 bytes
  wait         whether to stand in line if no slot is free. Not for a policy with commas
See rate_limit_allow for the other parameters. It returns
  allowed      whether the slot is held now
  slot         the slot, for rate_limit_renew and rate_limit_release. NULL if denied. With wait, it is the place in the
               line: renew it until allowed is true. The policy mode off, which counts nothing, gives the slot
               00000000-0000-0000-0000-000000000000, which never ends
  fence        a number that is larger than that of each earlier slot of the key. The resource behind the limit can
               refuse a smaller one. NULL if allowed is false
  retry_after  when a slot may be free, if no holder renews or releases. 0 if allowed
  retry_after_seconds  retry_after in seconds, rounded up
Call it in a transaction of its own: until the transaction ends, all calls for the key wait.';

CREATE FUNCTION rate_limit_renew(
    slot uuid, ttl interval DEFAULT interval '30 seconds',
    OUT allowed boolean, OUT fence bigint, OUT ends_at timestamptz
)
LANGUAGE plpgsql
SECURITY DEFINER
AS $$
#variable_conflict use_variable
BEGIN
    PERFORM _rate_limit_check_ttl(ttl);
    IF slot = '00000000-0000-0000-0000-000000000000' THEN -- made by the policy mode off
        allowed := true;
        ends_at := 'infinity';
        RETURN;
    END IF;
    SELECT NOT r.waiting, CASE WHEN NOT r.waiting THEN r.fence END, timestamptz 'epoch' + r.ends_us * interval '1 us'
    INTO allowed, fence, ends_at
    FROM rate_limit_renew_all(ARRAY[slot], (extract(epoch FROM ttl) * 1000000)::bigint, NULL::integer, NULL::boolean,
        NULL::bigint) AS r;
    allowed := coalesce(allowed, false);
END
$$;

COMMENT ON FUNCTION rate_limit_renew IS 'Makes a slot, or a place in the line, last for at least ttl from now.
Example: SELECT * FROM rate_limit_renew(
    (SELECT slot FROM rate_limit_acquire(''imports'', ''tenant:7'', ''concurrent 5'')))
It returns
  allowed      whether the slot is held now
  fence        the fence of the slot. NULL if allowed is false
  ends_at      the end of the slot or of the place in the line. NULL if it is lost: it had ended, or was released. Then
               somebody else may have it, so stop';

CREATE FUNCTION rate_limit_release(slot uuid) RETURNS boolean
LANGUAGE plpgsql
SECURITY DEFINER
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
DECLARE
    h record;
    granted bigint;
BEGIN
    IF slot = '00000000-0000-0000-0000-000000000000' THEN -- made by the policy mode off
        RETURN true;
    END IF;
    -- Every call uses the tables of keys before those of holds: see _rate_limit_end_hold.
    LOCK TABLE rate_limit_ephemeral, rate_limit_durable IN ROW EXCLUSIVE MODE;
    -- A slot never moves to another key, so this locks no row.
    SELECT false AS durable, e.prefix, e.key, e.max_count INTO h
    FROM rate_limit_ephemeral_hold AS e WHERE e.id = slot AND e.fence > 0;
    IF NOT found THEN
        SELECT true AS durable, d.prefix, d.key, d.max_count INTO h
        FROM rate_limit_durable_hold AS d WHERE d.id = slot AND d.fence > 0;
        IF NOT found THEN
            RETURN false;
        END IF;
    END IF;
    granted := (
        SELECT a.granted
        FROM rate_limit_slots(ARRAY[h.prefix], ARRAY[h.key], ARRAY[h.durable], ARRAY[h.max_count], ARRAY[0]::bigint[],
            ARRAY[NULL]::bigint[], ARRAY[slot], ARRAY[NULL]::jsonb[]) AS a);
    RETURN granted = 1;
END
$$;

COMMENT ON FUNCTION rate_limit_release IS
    'Frees a slot, or leaves the line. Returns false, and changes nothing, if the slot is lost or released already.
Example: SELECT rate_limit_release(
    (SELECT slot FROM rate_limit_acquire(''imports'', ''tenant:7'', ''concurrent 5'')))';
