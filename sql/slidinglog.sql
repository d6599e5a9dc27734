-- Sliding window logs. slidinglog.go defines logs. Tests compare these functions with internal/model/slidinglog.go.

-- _rate_limit_valid_log tells whether the numbers of a log are in the range of exact arithmetic.
CREATE FUNCTION _rate_limit_valid_log(max_count bigint, window_us bigint) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT max_count BETWEEN 1 AND 1000 AND window_us BETWEEN 1 AND 2251799813685248
$$;

-- _rate_limit_entry_age returns a log entry's age at the time t, modulo 2^53, because its time has 54 bits.
CREATE FUNCTION _rate_limit_entry_age(entry bigint, t bigint)
RETURNS bigint LANGUAGE sql IMMUTABLE AS $$ SELECT (t - (entry >> 10)) & 9007199254740991 $$;

-- _rate_limit_log_with returns a log with units that are counted at the time t. A charge may need several entries,
-- because an entry has at most 1000 units.
CREATE FUNCTION _rate_limit_log_with(log bigint[], t bigint, units bigint)
RETURNS bigint[] LANGUAGE plpgsql IMMUTABLE AS $$
#variable_conflict use_variable
DECLARE
    n integer := coalesce(cardinality(log), 0);
BEGIN
    IF _rate_limit_entry_age(log[n], t) = 0 THEN -- the newest entry has the time t
        units := units + (log[n] & 1023);
        n := n - 1;
    END IF;
    log := log[1:n];
    WHILE units > 0 LOOP
        log := log || ARRAY[(t << 10) | least(units, 1000)];
        units := units - 1000;
    END LOOP;
    RETURN log;
END
$$;

-- _rate_limit_log decides requests for a row. See _rate_limit_fixed. A log entry is time * 1024 + units.
CREATE FUNCTION _rate_limit_log(
    s rate_limit_row, clock bigint, cost bigint, asked bigint, most bigint, max_count bigint, window_us bigint
) RETURNS rate_limit_row LANGUAGE plpgsql AS $$
DECLARE
    t bigint;                -- the later time of clock and window_start
    moved boolean := false;  -- whether the clock was set back, so that the row's times were set back too
    n integer := 0;          -- a number of log entries
    room bigint;
    units bigint;
    log bigint[];
BEGIN
    IF clock >= s.expires_at OR s.count = 0 AND s.credit = 0 THEN -- as good as new
        s.count := 0;
        s.credit := 0;
        s.window_start := clock;
        s.since := NULL;
        s.log := NULL;
    ELSIF s.window_start - clock > window_us THEN -- the clock was set back, so the usage counts from now on
        s.log := ARRAY(
            SELECT (((e.entry >> 10) - s.window_start + clock) << 10) | (e.entry & 1023)
            FROM unnest(s.log) WITH ORDINALITY AS e (entry, place)
            ORDER BY e.place);
        s.window_start := clock;
        s.expires_at := clock + window_us;
        moved := true;
        s.moved := true;
    END IF;
    t := greatest(clock, s.window_start);
    log := s.log;
    WHILE n < cardinality(log) AND _rate_limit_entry_age(log[n + 1], t) >= window_us LOOP -- the oldest entries leave
        n := n + 1;
        s.count := s.count - (log[n] & 1023);
    END LOOP;
    IF n > 0 THEN
        log := log[n + 1:];
    END IF;
    IF s.count = 0 THEN
        s.window_start := t;
        s.since := CASE WHEN s.credit > 0 THEN s.since END;
    END IF;

    room := greatest(max_count - s.count, 0);
    s.granted := CASE WHEN cost BETWEEN 1 AND max_count THEN least(most, (room + s.credit) / cost) ELSE 0 END;
    s.remaining := room + s.credit - s.granted * cost;
    s.spent := greatest(s.granted * cost - room, 0);
    IF s.granted > 0 THEN
        units := s.granted * cost - s.spent;
        s.count := s.count + units;
        s.credit := s.credit - s.spent;
        s.expires_at := t + window_us;
        IF units > 0 THEN
            n := coalesce(cardinality(log), 0);
            IF _rate_limit_entry_age(log[n], t) = 0 THEN -- the newest entry has the time t
                units := units + (log[n] & 1023);
                n := n - 1;
            END IF;
            log := log[1:n] || ARRAY[(t << 10) | units];
            s.window_start := t;
        END IF;
    END IF;
    s.log := log;

    s.retry_after_us := CASE
        WHEN s.granted = asked THEN 0
        WHEN cost > max_count THEN NULL
        WHEN s.remaining >= greatest(cost, 1) THEN 0 END;
    n := 0;
    -- The request fits as soon as enough of the oldest entries have left.
    IF s.retry_after_us IS NULL AND cost <= max_count THEN
        units := s.count - s.credit + greatest(cost, 1) - max_count;
        WHILE units > 0 LOOP
            n := n + 1;
            units := units - (log[n] & 1023);
        END LOOP;
        s.retry_after_us := least(t + window_us - _rate_limit_entry_age(log[n], t), s.expires_at) - clock;
    END IF;
    s.reset_after_us := CASE
        WHEN s.credit > 0 THEN s.expires_at
        WHEN s.count > 0 THEN least(s.window_start + window_us, s.expires_at)
        ELSE clock END - clock;
    s.changed := s.granted > 0 OR (moved AND cost > 0 AND s.retry_after_us > 0) IS TRUE; -- otherwise nothing is written
    IF s.changed THEN
        s.expires_at := clock + s.reset_after_us;
    END IF;
    s.told_log := CASE WHEN n > 0 THEN log[1:least(n, 64)] END; -- MaxDenialEntries in Go is also 64
    RETURN s;
END
$$;

-- rate_limit_take_sliding_log has the parameters and the result of rate_limit_take_sliding_window, but max_count is at
-- most 1000. rate_limit_take_sliding_log leaves all decisions to _rate_limit_left_ephemeral.
CREATE FUNCTION rate_limit_take_sliding_log(
    name text, keys text[], max_count bigint, window_us bigint,
    costs bigint[] DEFAULT NULL, counts bigint[] DEFAULT NULL, durable boolean DEFAULT false,
    lock_timeout_ms integer DEFAULT NULL, synchronous_commit boolean DEFAULT NULL, now_us bigint DEFAULT NULL
) RETURNS bigint[]
LANGUAGE plpgsql
SECURITY DEFINER
SET plan_cache_mode = force_generic_plan -- otherwise each of a session's first five calls would plan its statement
AS $$
#variable_conflict use_variable
DECLARE
    ignored text := _rate_limit_set(lock_timeout_ms, synchronous_commit);
    units bigint := CASE WHEN cardinality(keys) = 1 AND _rate_limit_valid_log(max_count, window_us) THEN 1 END;
BEGIN
    IF num_nonnulls(costs, counts) > 0 THEN
        units := units * _rate_limit_units_of_one(costs, counts, max_count);
    END IF;
    IF durable THEN
        RETURN _rate_limit_left_durable(
            name, keys, 4::smallint, max_count, window_us, 0::bigint, NULL::text, costs, counts,
            lock_timeout_ms, now_us, units IS NOT NULL, NULL::bigint, NULL::text[], NULL::bigint[]);
    END IF;
    RETURN _rate_limit_left_ephemeral(
        name, keys, 4::smallint, max_count, window_us, 0::bigint, NULL::text, costs, counts,
        lock_timeout_ms, now_us, units IS NOT NULL, NULL::bigint, NULL::text[], NULL::bigint[]);
END
$$;

COMMENT ON FUNCTION rate_limit_take_sliding_log IS
    'Takes from sliding windows of window_us microseconds, any of which admits max_count, '
    'at most 1000. It is exact, because it keeps a log of all takes in the window.
It takes the costs and counts of each key or denies them, '
    'and returns numbers for programs, which sql/sliding.sql explains. People call rate_limit_allow.
Example: SELECT rate_limit_take_sliding_log(''login'', ARRAY[''user:123''], 10, 60000000) takes one of 10 a minute.';
