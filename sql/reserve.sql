-- Reservations. A reservation books the tokens of a bucket if they will have flowed in within a given time. The bucket
-- owes them until then, so later requests come after the booking. Tests compare these functions with
-- internal/model/reserve.go.

-- _rate_limit_wrong_delay tells whether the arguments of a part that is a reservation do not go together.
CREATE FUNCTION _rate_limit_wrong_delay(
    delay_us bigint, cost bigint, asked bigint, algorithm smallint, charges boolean, hold uuid, differs boolean
) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT (NOT differs AND (delay_us IS NULL
        OR delay_us >= 0 AND coalesce(cost, 1) >= 1 AND coalesce(asked, 1) = 1 AND algorithm = 3
            AND charges IS NOT TRUE AND hold IS NULL)) IS NOT TRUE
$$;

-- _rate_limit_max_booked returns how many tokens a bucket can owe by reservations: those that flow in within 7 days, or
-- as many as by charges, if these are more. It is less at the edge of the exact range.
CREATE FUNCTION _rate_limit_max_booked(capacity bigint, every_us bigint, refill bigint)
RETURNS bigint LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN greatest(_rate_limit_max_owed(3::smallint, capacity, every_us, refill), least(
        2251799813685248 * least(refill, 2048) / every_us - capacity,
        604800000000 * least(refill, 4611686018427387904 / 604800000000) / every_us + 1));
END
$$;

-- _rate_limit_longest_delay returns delay_us, or the time in which all tokens that a bucket may owe flow in if that is
-- shorter. It returns NULL for NULL.
CREATE FUNCTION _rate_limit_longest_delay(delay_us bigint, capacity bigint, every_us bigint, refill bigint)
RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN delay_us IS NOT NULL
        THEN least(delay_us, _rate_limit_max_booked(capacity, every_us, refill) * every_us / refill) END
$$;

-- _rate_limit_most returns the most units that may be taken and held at once: the limit, and for a reservation the
-- tokens that flow in within delay_us. delay_us is at most _rate_limit_longest_delay.
CREATE FUNCTION _rate_limit_most(max_count bigint, span_us bigint, refill bigint, delay_us bigint)
RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT max_count + CASE WHEN delay_us IS NULL THEN 0 ELSE delay_us * refill / span_us END
$$;

-- _rate_limit_ready_after returns how long it takes until n tokens beside the held tokens have flowed in. It is NULL if
-- no bucket can owe so much. s is a bucket that is rolled forward.
CREATE FUNCTION _rate_limit_ready_after(s rate_limit_row, clock bigint, n bigint, held bigint)
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    by_credit CONSTANT bigint := least(held, s.credit); -- held units and granted credit cancel out
    left_over CONSTANT bigint := s.capacity * s.scale - s.count; -- in 1/scale token, as needed
    needed bigint;
BEGIN
    IF held - by_credit > s.capacity + _rate_limit_max_booked(s.capacity, s.scale, s.refill) - n THEN
        RETURN NULL;
    END IF;
    needed := greatest(n + (held - by_credit) - (s.credit - by_credit), 0) * s.scale;
    RETURN CASE WHEN needed <= greatest(left_over, 0) THEN 0
        ELSE s.window_start + _rate_limit_ceil_div(needed - left_over, s.refill) - clock END;
END
$$;

-- _rate_limit_reserve decides a reservation for the row of a bucket with its live holds. It writes nothing. delay_us is
-- at most _rate_limit_longest_delay. If the reservation is granted, retry_after_us is the time until the tokens have
-- flowed in. If retry_after_us is -1, the caller computes it by _rate_limit_earliest_ephemeral.
CREATE FUNCTION _rate_limit_reserve(
    s rate_limit_row, clock bigint, cost bigint, most bigint, capacity bigint, every_us bigint, refill bigint,
    delay_us bigint
) RETURNS rate_limit_row LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    longest CONSTANT bigint := clock + 86400000000; -- no hold ends later
    ready_us bigint;
BEGIN
    s.moved := false;
    s := _rate_limit_bucket(s, clock, 0::bigint, 1::bigint, 0::bigint, capacity, every_us, refill);
    IF cost <= capacity THEN
        ready_us := _rate_limit_ready_after(s, clock, cost, coalesce(s.held, 0));
    END IF;
    IF ready_us <= delay_us AND most = 1 THEN
        s := _rate_limit_count(s, 3::smallint, clock, cost, capacity, every_us, refill, NULL::text);
        s.granted := 1;
        s.retry_after_us := ready_us;
    ELSE
        s.retry_after_us := CASE WHEN cost > capacity THEN NULL WHEN ready_us <= delay_us THEN 0 ELSE -1 END;
        s.changed := (s.retry_after_us = -1 AND (s.moved OR s.held_until > longest)) IS TRUE;
    END IF;
    IF s.changed THEN
        s.held_next := least(s.held_next, CASE WHEN s.held IS NOT NULL THEN longest END);
        s.held_until := least(s.held_until, CASE WHEN s.held IS NOT NULL THEN longest END);
    END IF;
    s.told_log := NULL;
    s.remaining := greatest(s.remaining - coalesce(s.held, 0), 0);
    s.reset_after_us := greatest(s.reset_after_us, s.held_until - clock);
    RETURN s;
END
$$;
