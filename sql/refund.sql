-- Refunds, granted credit, and the leases of buckets.

-- _rate_limit_fixed_refund gives units back to a row of a fixed or calendar window, if the window in which they were
-- taken has not ended. rolled is the row at the present time.
CREATE FUNCTION _rate_limit_fixed_refund(s rate_limit_row, rolled rate_limit_row, units bigint, taken_in bigint)
RETURNS rate_limit_row LANGUAGE plpgsql AS $$
DECLARE
    back bigint := CASE WHEN taken_in = s.window_start AND taken_in = rolled.window_start
        THEN least(units, rolled.count) ELSE 0 END;
BEGIN
    s.count := s.count - back;
    s.changed := back > 0;
    RETURN s;
END
$$;

-- _rate_limit_sliding_refund gives units back to a row if they were taken in the row's window or in the previous
-- window. rolled is the row at the present time. rolled may be one window later than s.
CREATE FUNCTION _rate_limit_sliding_refund(
    s rate_limit_row, rolled rate_limit_row, units bigint, taken_in bigint, window_us bigint
) RETURNS rate_limit_row LANGUAGE plpgsql AS $$
DECLARE
    later bigint := rolled.window_start - s.window_start;
    back bigint := 0;
BEGIN
    IF later = 0 AND taken_in = s.window_start THEN
        back := least(units, rolled.count);
        s.count := s.count - back;
    ELSIF later = 0 AND taken_in = s.window_start - window_us THEN
        back := least(units, rolled.prev_count);
        s.prev_count := s.prev_count - back;
    ELSIF later = window_us AND taken_in = s.window_start THEN
        back := least(units, rolled.prev_count);
        s.count := s.count - back;
    END IF;
    s.changed := back > 0;
    RETURN s;
END
$$;

-- _rate_limit_log_refund gives units back to the log entries that count them, if they are still in the log. (Only a
-- charge needs several entries.) Entries that have left the log do not come back, even if the clock is set back.
CREATE FUNCTION _rate_limit_log_refund(
    s rate_limit_row, rolled rate_limit_row, clock bigint, units bigint, taken_in bigint, window_us bigint
) RETURNS rate_limit_row LANGUAGE plpgsql AS $$
DECLARE
    t bigint := greatest(clock, rolled.window_start);
    place integer; -- the first entry that counts the units
    back bigint;
    n integer;
BEGIN
    SELECT min(e.place), least(units, sum(e.entry & 1023)) INTO place, back
    FROM unnest(rolled.log) WITH ORDINALITY AS e (entry, place)
    WHERE (e.entry >> 10) << 10 = taken_in << 10;
    s.changed := (place > 0 AND back > 0) IS TRUE
        AND s.window_start - clock <= window_us; -- false if the clock was set back by a window
    IF NOT s.changed THEN
        RETURN s;
    END IF;
    IF clock < t THEN
        s.log := rolled.log;
        s.count := rolled.count;
    END IF;
    place := place + cardinality(s.log) - cardinality(rolled.log);
    s.count := s.count - back;
    WHILE back >= s.log[place] & 1023 LOOP
        back := back - (s.log[place] & 1023);
        s.log := s.log[1:place - 1] || s.log[place + 1:];
    END LOOP;
    IF back > 0 THEN
        s.log[place] := s.log[place] - back;
    END IF;
    n := cardinality(s.log);
    IF n > 0 THEN
        s.window_start := t - _rate_limit_entry_age(s.log[n], t);
    END IF;
    RETURN s;
END
$$;

-- _rate_limit_bucket_leases returns the start of the current period, the tokens leased in it, and the tokens leased in
-- the previous period. A period is 1/128 of the time in which the bucket fills. No lease lasts longer than a period.
CREATE FUNCTION _rate_limit_bucket_leases(log bigint[], t bigint, period bigint)
RETURNS bigint[] LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
        WHEN log IS NULL OR t - log[1] >= 2 * period THEN ARRAY[t, 0, 0]
        WHEN t - log[1] >= period THEN ARRAY[t, 0, log[2]]
        ELSE ARRAY[least(log[1], t), log[2], log[3]] END
$$;

-- _rate_limit_bucket_lend returns the row's log with the last units leased, or with fewer if the bucket has no room for
-- so many leases. See TokenBucket.Lend in internal/model.
CREATE FUNCTION _rate_limit_bucket_lend(s rate_limit_row, units bigint) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    period bigint := ((s.capacity * s.scale - 1) / s.refill + 1) / 128;
    leases bigint[] := _rate_limit_bucket_leases(s.log, s.window_start, period);
    held bigint := least(leases[2] + leases[3], s.capacity) * s.scale;
    more bigint := least(units, 2305843009213693952 - leases[2],
        (s.count - held - period * s.refill) / s.scale);
BEGIN
    IF more > 0 THEN
        leases[2] := leases[2] + more;
        RETURN leases;
    END IF;
    RETURN s.log;
END
$$;

-- _rate_limit_bucket_refund gives back units that have not flowed in again yet, and units from granted credit.
-- _rate_limit_bucket_refund leaves room for leases that have not ended. TokenBucket.Refund in internal/model explains
-- why.
CREATE FUNCTION _rate_limit_bucket_refund(
    s rate_limit_row, rolled rate_limit_row, clock bigint, units bigint, spent bigint, ended bigint,
    taken_since bigint, taken_in bigint, taken_at bigint
) RETURNS rate_limit_row LANGUAGE plpgsql AS $$
DECLARE
    t bigint := rolled.window_start;
    fill_us bigint := (rolled.capacity * rolled.scale - 1) / rolled.refill + 1;
    period bigint := fill_us / 128;
    leases bigint[];
    kept bigint := 0;  -- the part of the bucket that stays empty for leases
    need bigint;       -- the position of the units in the queue of missing tokens
    back bigint := 0;
    last boolean := false; -- whether the units leave from the end of the queue
BEGIN
    IF s.window_start - clock > fill_us -- the clock was set back
        OR (s.scale, s.capacity, s.refill) IS DISTINCT FROM (rolled.scale, rolled.capacity, rolled.refill)
        OR rolled.since IS DISTINCT FROM taken_since OR rolled.count = 0 AND rolled.credit = 0
    THEN
        s.changed := false;
        RETURN s;
    END IF;
    spent := least(spent, 2305843009213693952 - s.credit);
    IF spent > 0 THEN
        s.credit := s.credit + spent;
        s.expires_at := greatest(s.expires_at, t + fill_us);
    END IF;
    IF taken_in BETWEEN 0 AND t THEN
        leases := _rate_limit_bucket_leases(s.log, t, period);
        IF t - taken_in >= period THEN
            NULL; -- the lease of these units may no longer count
        ELSIF taken_in >= leases[1] THEN
            leases[2] := greatest(leases[2] - ended, 0);
        ELSE
            leases[3] := greatest(leases[3] - ended, 0);
        END IF;
        IF leases[2] + leases[3] > 0 THEN
            kept := least(leases[2] + leases[3], rolled.capacity) * rolled.scale + period * rolled.refill;
        END IF;
        units := least(units, rolled.capacity + _rate_limit_max_owed(
            3::smallint, rolled.capacity, rolled.scale, rolled.refill)) * rolled.scale;
        need := greatest(taken_at - s.returned, units);
        IF t - taken_in <= need / rolled.refill THEN
            need := need - (t - taken_in) * rolled.refill;
            last := rolled.count <= need;
            -- While the bucket owes, only what joined the queue last is given back.
            IF last OR rolled.count <= rolled.capacity * rolled.scale THEN
                back := greatest(least(units, need, rolled.count - kept), 0);
            END IF;
        END IF;
        IF spent > 0 OR back > 0 THEN
            s.log := CASE WHEN leases[2] + leases[3] > 0 THEN leases END;
        END IF;
    END IF;
    s.count := s.count - back;
    IF back = rolled.count AND s.credit = 0 THEN -- the row is as good as new
        s.count := 0;
    END IF;
    IF NOT last THEN
        s.returned := s.returned + back;
    END IF;
    IF s.returned > 2305843009213693952 THEN -- prevent an overflow of the sum
        s.since := greatest(s.since + 1, t);
        s.returned := 0;
    END IF;
    s.changed := spent > 0 OR back > 0;
    RETURN s;
END
$$;

-- _rate_limit_give gives units back to a row, or grants credit up to 2^61. _rate_limit_give returns the row to write.
-- Only the units change. The row keeps its times, because limiters with other policies may still count usage that this
-- policy does not count. The row ends earlier only if no unit in the row counts.
CREATE FUNCTION _rate_limit_give(
    s rate_limit_row, algorithm smallint, clock bigint, units bigint, grants boolean, ended bigint,
    taken_since bigint, taken_in bigint, taken_at bigint, taken_spent bigint,
    max_count bigint, span_us bigint, refill bigint, zone text
) RETURNS rate_limit_row LANGUAGE plpgsql AS $$
DECLARE
    most CONSTANT bigint := 2305843009213693952; -- 2^61
    rolled rate_limit_row := _rate_limit_step(
        s, algorithm, clock, 0::bigint, 1::bigint, 0::bigint, max_count, span_us, refill, zone);
    spent bigint := least(greatest(coalesce(taken_spent, 0), 0), units); -- units from credit, which go back first
    since bigint := rolled.since;
    until bigint; -- credit lasts until this time
BEGIN
    IF grants OR spent > 0 THEN
        until := greatest(clock, rolled.window_start)
            + _rate_limit_lasts(algorithm, rolled.count, max_count, span_us, refill);
    END IF;
    IF grants THEN
        s := rolled;
        s.credit := least(s.credit + least(units, most), most);
        s.since := coalesce(s.since, greatest(clock, s.window_start));
        s.expires_at := until;
        s.changed := true;
        RETURN s;
    END IF;
    units := units - spent;
    IF algorithm = 3 THEN
        s := _rate_limit_bucket_refund(s, rolled, clock, units, spent, greatest(coalesce(ended, 0), 0),
            taken_since, taken_in, greatest(coalesce(taken_at, 0), 0));
    ELSE
        IF algorithm = 2 THEN
            s := _rate_limit_sliding_refund(s, rolled, units, taken_in, span_us);
        ELSIF algorithm = 4 THEN
            s := _rate_limit_log_refund(s, rolled, clock, units, taken_in, span_us);
        ELSE
            s := _rate_limit_fixed_refund(s, rolled, units, taken_in);
        END IF;
        spent := least(spent, most - rolled.credit);
        IF spent > 0 AND since = taken_since THEN -- the credit came from this row
            s.credit := s.credit + spent;
            s.expires_at := greatest(s.expires_at, until);
            s.changed := true;
        END IF;
    END IF;
    IF s.changed AND s.count = 0 AND s.prev_count = 0 THEN
        rolled := _rate_limit_step(
            s, algorithm, clock, 0::bigint, 1::bigint, 0::bigint, max_count, span_us, refill, zone);
        IF rolled.reset_after_us = 0 THEN -- as good as new
            s := rolled;
            s.expires_at := clock;
            s.changed := true;
        END IF;
    END IF;
    RETURN s;
END
$$;
