-- Holds. A hold sets units of a key aside until its end. It is not usage: it only leaves less room for requests, under
-- every algorithm. Tests compare these functions with internal/model/hold.go.
--
-- The row of the key has the sum of its live holds. So a decision does not read the list of the holds, except those
-- that have ended since the last write. Only RetryAfter of a denial reads more of the list.
--
-- Each function has a copy for rate_limit_durable: see twins.sql.

-- _rate_limit_forgotten returns whether a hold is not known any more at the time clock. That is an hour after its
-- settlement, or a day after its end if nobody has settled it.
CREATE FUNCTION _rate_limit_forgotten(status smallint, ends_at bigint, settled_at bigint, clock bigint)
RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN status = 2 THEN settled_at <= clock - 3600000000 ELSE ends_at <= clock - 86400000000 END
$$;

-- _rate_limit_live_ephemeral subtracts from the sum of a row the holds that have ended at the time clock. It writes
-- nothing.
CREATE FUNCTION _rate_limit_live_ephemeral(s rate_limit_row, name text, key text, clock bigint) RETURNS rate_limit_row
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_variable
DECLARE
    next bigint;
BEGIN
    IF s.held_next <= clock THEN
        next := (SELECT min(h.ends_at) FROM rate_limit_ephemeral_hold AS h
            WHERE h.key = key AND h.prefix = name AND h.status = 0 AND h.ends_at > clock);
        IF next IS NULL THEN -- all have ended
            s.held := NULL;
            s.held_until := NULL;
        ELSE
            s.held := s.held - (SELECT coalesce(sum(h.units), 0) FROM rate_limit_ephemeral_hold AS h
                WHERE h.key = key AND h.prefix = name AND h.status = 0 AND h.ends_at BETWEEN s.held_next AND clock);
        END IF;
        s.held_next := next;
    END IF;
    RETURN s;
END
$$;

-- _rate_limit_beside_ephemeral decides a request for a row with holds, or a request that makes, settles or extends a
-- hold. s has the live holds at the time clock. It writes nothing. If retry_after_us is -1, the caller computes it by
-- _rate_limit_earliest_ephemeral when the holds are written.
CREATE FUNCTION _rate_limit_beside_ephemeral(
    s rate_limit_row, name text, key text, algorithm smallint, clock bigint, cost bigint, asked bigint, most bigint,
    max_count bigint, span_us bigint, refill bigint, zone text, charges boolean, ttl_us bigint, hold uuid
) RETURNS rate_limit_row
LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    longest CONSTANT bigint := clock + 86400000000; -- no hold ends later
    was rate_limit_row;
    known boolean := false; -- whether the hold to settle or to extend is known
    live boolean;
    units bigint;
    ends bigint;
    status smallint;
    used bigint;
    late boolean;
    settled_at bigint;
    answer bigint[];
BEGIN
    s.moved := false;
    was := s;
    s := _rate_limit_step(
        s, algorithm, clock, 0::bigint, 1::bigint, 0::bigint, max_count, span_us, refill, zone);
    IF hold IS NOT NULL AND (charges OR cost = 0) THEN
        SELECT h.units, h.ends_at, h.status, h.used, h.late, h.settled_at
        INTO units, ends, status, used, late, settled_at
        FROM rate_limit_ephemeral_hold AS h
        WHERE h.id = hold AND h.key = key AND h.prefix = name AND h.fence = 0 -- a slot is only released
            AND NOT _rate_limit_forgotten(h.status, h.ends_at, h.settled_at, clock);
        known := found;
        live := known AND status = 0 AND ends > clock AND was.held IS NOT NULL;
    END IF;

    IF hold IS NOT NULL AND charges THEN -- settle
        IF NOT known OR status = 2 OR most < asked THEN
            s.granted := most;
        ELSIF cost > 0 THEN
            s := _rate_limit_charge(was, algorithm, clock, cost, asked, most, max_count, span_us, refill, zone);
        ELSE
            s.granted := 1;
        END IF;
        IF status = 2 THEN -- repeat the first answer
            answer := ARRAY[used, late::int, settled_at];
        ELSIF known AND s.granted = 1 THEN
            answer := ARRAY[cost, (NOT live)::int, clock];
            s.changed := true;
            IF live AND units < s.held THEN
                s.held := s.held - units;
                IF ends = s.held_next OR ends = s.held_until THEN
                    SELECT min(h.ends_at), max(h.ends_at) INTO s.held_next, s.held_until
                    FROM rate_limit_ephemeral_hold AS h
                    WHERE h.key = key AND h.prefix = name AND h.status = 0 AND h.ends_at > clock AND h.id <> hold;
                END IF;
            ELSIF live THEN -- no other hold is live
                s.held := NULL;
                s.held_next := NULL;
                s.held_until := NULL;
            END IF;
        END IF;
    ELSIF hold IS NOT NULL AND cost = 0 THEN -- extend
        s.granted := CASE WHEN most < asked THEN most WHEN NOT known THEN -3 WHEN NOT live THEN -4 ELSE 1 END;
        IF s.granted = 1 AND clock + ttl_us > ends THEN
            s.held_until := greatest(s.held_until, clock + ttl_us);
            IF ends = s.held_next THEN
                SELECT least(min(h.ends_at), clock + ttl_us) INTO s.held_next
                FROM rate_limit_ephemeral_hold AS h
                WHERE h.key = key AND h.prefix = name AND h.status = 0 AND h.ends_at > clock AND h.id <> hold;
            END IF;
        END IF;
        s.changed := s.granted = 1;
    ELSIF charges THEN
        s := _rate_limit_charge(was, algorithm, clock, cost, asked, most, max_count, span_us, refill, zone);
    ELSE
        IF cost BETWEEN 1 AND max_count THEN
            s.granted := least(most, greatest(s.remaining - coalesce(s.held, 0), 0) / cost);
            s.changed := s.granted > 0
                OR s.remaining - coalesce(s.held, 0) < cost AND (s.moved OR (s.held_until > longest) IS TRUE);
        END IF;
        IF s.granted > 0 AND hold IS NULL THEN
            s := _rate_limit_step(
                was, algorithm, clock, cost, s.granted, s.granted, max_count, span_us, refill, zone);
        ELSIF s.granted > 0 THEN
            s.held := coalesce(s.held, 0) + cost;
            s.held_next := least(s.held_next, clock + ttl_us);
            s.held_until := greatest(s.held_until, clock + ttl_us);
        END IF;
    END IF;

    IF s.changed THEN
        s.expires_at := CASE WHEN s.moved THEN clock + s.reset_after_us ELSE s.expires_at END;
        s.held_next := CASE WHEN s.held IS NOT NULL THEN least(s.held_next, longest) END;
        s.held_until := CASE WHEN s.held IS NOT NULL THEN least(s.held_until, longest) END;
    END IF;
    s.told_log := answer; -- otherwise NULL: a client cannot decide by the log, because it does not know the holds
    s.remaining := greatest(s.remaining - coalesce(s.held, 0), 0);
    s.reset_after_us := greatest(s.reset_after_us, s.held_until - clock);
    s.retry_after_us := CASE
        WHEN NOT charges AND (s.granted = asked OR s.granted < 0) THEN 0
        WHEN NOT charges AND cost > max_count THEN NULL
        WHEN s.remaining >= CASE WHEN charges THEN 1 ELSE greatest(cost, 1) END THEN 0
        ELSE -1 END;
    RETURN s;
END
$$;

-- _rate_limit_fits_after returns how long it takes until n units fit into a row beside the held units, or for a
-- reservation, until n units will be ready within delay_us. The result is at least after. It is NULL if they never fit.
-- The row is rolled forward.
CREATE FUNCTION _rate_limit_fits_after(
    s rate_limit_row, algorithm smallint, clock bigint, n bigint, held bigint, after bigint,
    max_count bigint, span_us bigint, refill bigint, zone text, delay_us bigint
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    -- Held units and granted credit cancel out, but the held units stay when the credit expires with the row.
    by_credit CONSTANT bigint := least(held, s.credit);
    expires_at CONSTANT bigint := s.expires_at;
    most CONSTANT bigint := _rate_limit_most(max_count, span_us, refill, delay_us);
    wait bigint;
BEGIN
    IF held - by_credit > most - n THEN
        RETURN NULL;
    ELSIF delay_us IS NOT NULL THEN
        wait := least(_rate_limit_ready_after(s, clock, n, held) - delay_us, expires_at - clock);
    ELSE
        s.credit := s.credit - by_credit;
        s := _rate_limit_step(s, algorithm, clock, n + held - by_credit, 1::bigint, 0::bigint,
            max_count, span_us, refill, zone);
        wait := s.retry_after_us;
    END IF;
    wait := greatest(wait, after);
    RETURN CASE WHEN held <= most - n OR clock + wait < expires_at THEN wait END;
END
$$;

-- _rate_limit_earliest_ephemeral returns how long it takes until n units fit, if nothing happens except that holds end.
-- The result is NULL if they never fit. s is rolled forward. delay_us is that of a reservation, and otherwise NULL.
--
-- After each end, fewer units are held, and the time until the row has room for n beside them is shorter. The result is
-- the first time when both have passed. So it is at the first end that is not before this time, or at the time that the
-- row needs after the end before. A binary search finds it. But what fits only by granted credit must fit before the
-- credit expires. So the ends after which n fits only by credit are searched first, and then the others.
--
-- STABLE lets it see the same data as the calling function, if that is STABLE too: see _rate_limit_earliest_unlocked.
CREATE FUNCTION _rate_limit_earliest_ephemeral(
    s rate_limit_row, name text, key text, algorithm smallint, clock bigint, n bigint,
    max_count bigint, span_us bigint, refill bigint, zone text, delay_us bigint
) RETURNS bigint
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_variable
DECLARE
    longest CONSTANT bigint := _rate_limit_longest_delay(delay_us, max_count, span_us, refill);
    most CONSTANT bigint := _rate_limit_most(max_count, span_us, refill, longest);
    best bigint := _rate_limit_fits_after(
        s, algorithm, clock, n, coalesce(s.held, 0), 0::bigint, max_count, span_us, refill, zone, longest);
    ends bigint[];  -- when the holds end, from now on
    rests bigint[]; -- what is held after each end
    by_credit integer; -- after how many ends n fits only by credit
    first integer := 1;
    last integer;
    low integer;    -- this end is too early
    high integer;   -- at this end, the row has room
    middle integer;
BEGIN
    IF s.held IS NULL THEN
        RETURN best;
    END IF;
    -- The index has the order, so nothing is sorted.
    SELECT array_agg(e.ends_at - clock), array_agg(e.rest), count(*) FILTER (WHERE e.rest > most - n)
    INTO ends, rests, by_credit
    FROM (
        SELECT h.ends_at, s.held - (sum(h.units) OVER (ORDER BY h.ends_at ROWS UNBOUNDED PRECEDING))::bigint AS rest
        FROM rate_limit_ephemeral_hold AS h
        WHERE h.key = key AND h.prefix = name AND h.status = 0 AND h.ends_at > clock
            AND (h.ends_at - clock < best) IS NOT FALSE
        ORDER BY h.ends_at
    ) AS e;
    FOREACH last IN ARRAY ARRAY[by_credit, coalesce(cardinality(ends), 0)] LOOP
        low := first - 1;
        high := last + 1;
        WHILE high - low > 1 LOOP
            middle := (low + high) / 2;
            IF _rate_limit_fits_after(s, algorithm, clock, n, rests[middle], 0::bigint,
                max_count, span_us, refill, zone, longest) <= ends[middle]
            THEN
                high := middle;
            ELSE
                low := middle;
            END IF;
        END LOOP;
        FOR i IN greatest(low, first) .. least(high, last) LOOP
            best := least(best, _rate_limit_fits_after(
                s, algorithm, clock, n, rests[i], ends[i], max_count, span_us, refill, zone, longest));
        END LOOP;
        first := last + 1;
    END LOOP;
    RETURN best;
END
$$;

-- _rate_limit_note_ends_ephemeral notes which holds of a key have ended, so that a clock that is set back cannot revive
-- a hold whose room others may have got. was is the row before the write.
CREATE FUNCTION _rate_limit_note_ends_ephemeral(was rate_limit_row, name text, key text, clock bigint) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    longest CONSTANT bigint := clock + 86400000000;
BEGIN
    -- If no hold was in the sum, but some are live in the list, then somebody has deleted the row.
    IF was.held_next <= clock OR was.held IS NULL THEN
        UPDATE rate_limit_ephemeral_hold AS h SET status = 1
        WHERE h.key = key AND h.prefix = name AND h.status = 0 AND (h.ends_at <= clock OR was.held IS NULL);
    END IF;
    IF was.held_until > longest THEN -- the clock was set back
        UPDATE rate_limit_ephemeral_hold AS h SET ends_at = longest
        WHERE h.key = key AND h.prefix = name AND h.status = 0 AND h.ends_at > longest;
    END IF;
END
$$;

-- _rate_limit_write_holds_ephemeral writes the holds of a key whose row changes: it notes ends, and makes the hold, or
-- settles or extends it. was is the row before.
CREATE FUNCTION _rate_limit_write_holds_ephemeral(
    s rate_limit_row, was rate_limit_row, name text, key text, algorithm smallint, clock bigint, cost bigint,
    max_count bigint, span_us bigint, refill bigint, zone text, ttl_us bigint, hold uuid
) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_variable
BEGIN
    PERFORM _rate_limit_note_ends_ephemeral(was, name, key, clock);
    IF s.told_log IS NOT NULL THEN
        UPDATE rate_limit_ephemeral_hold AS h
        SET status = 2, used = s.told_log[1], late = s.told_log[2] = 1, settled_at = s.told_log[3]
        WHERE h.id = hold AND h.key = key AND h.prefix = name AND h.status < 2;
    ELSIF ttl_us IS NOT NULL AND cost = 0 THEN
        UPDATE rate_limit_ephemeral_hold AS h SET ends_at = greatest(h.ends_at, clock + ttl_us)
        WHERE h.id = hold AND h.key = key AND h.prefix = name AND h.status = 0;
    ELSIF ttl_us IS NOT NULL AND s.granted > 0 THEN
        INSERT INTO rate_limit_ephemeral_hold (
            id, prefix, key, units, ends_at, algorithm, max_count, span_us, refill, zone, fence)
        VALUES (hold, name, key, cost, clock + ttl_us, algorithm, max_count, span_us, refill,
            CASE WHEN algorithm = 5 THEN zone END, 0);
    END IF;
END
$$;

-- _rate_limit_hold_id returns an id for a new hold of a key. The id is random, except for its last four hex digits.
-- These are bits 0 to 15 of the number by which shardkey.Of finds the shard of the key. So a proxy finds the shard of a
-- hold.
CREATE FUNCTION _rate_limit_hold_id(key text) RETURNS uuid LANGUAGE plpgsql AS $$
BEGIN
    RETURN overlay(gen_random_uuid()::text PLACING substr(encode(sha256(convert_to(
        coalesce(substring(key COLLATE "C", '^[^{]*[{]([^}]+)[}]'), key),
        -- The bytes of a text in an SQL_ASCII database need not be UTF-8.
        CASE getdatabaseencoding() WHEN 'SQL_ASCII' THEN 'SQL_ASCII' ELSE 'UTF8' END)), 'hex'), 5, 4) FROM 33)::uuid;
END
$$;
