-- Fixed windows. fixed.go defines fixed windows. Tests compare these functions with the model in
-- internal/model/fixed.go.

-- _rate_limit_valid_window tells whether the numbers of a fixed or sliding window are in the range of exact arithmetic.
CREATE FUNCTION _rate_limit_valid_window(max_count bigint, window_us bigint)
RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT max_count >= 1 AND window_us BETWEEN 1 AND 2251799813685248
        AND max_count <= 4611686018427387904 / window_us
$$;

-- _rate_limit_fixed decides requests of a cost for the row s. _rate_limit_fixed returns the row at the time clock, with
-- the granted units taken. asked is the number of requests. most is how many of these requests the other rows have room
-- for. If cost is 0, nothing is taken.
CREATE FUNCTION _rate_limit_fixed(
    s rate_limit_row, clock bigint, cost bigint, asked bigint, most bigint, max_count bigint, window_us bigint
) RETURNS rate_limit_row LANGUAGE plpgsql AS $$
DECLARE
    t bigint;                -- the later time of clock and window_start
    moved boolean := false;  -- whether the clock was set back, so that the row's times were set back too
    room bigint;
    ends bigint;
BEGIN
    IF clock >= s.expires_at OR s.count = 0 AND s.credit = 0 THEN -- as good as new
        s.count := 0;
        s.credit := 0;
        s.window_start := clock;
        s.since := NULL;
    ELSIF s.window_start - clock > window_us THEN -- the clock was set back, so the usage counts from now on
        s.window_start := clock;
        s.expires_at := clock + window_us;
        moved := true;
        s.moved := true;
    END IF;
    t := greatest(clock, s.window_start);
    IF s.count = 0 OR t - s.window_start >= window_us THEN -- a new window begins
        s.count := 0;
        s.window_start := t;
        s.since := CASE WHEN s.credit > 0 THEN s.since END;
    END IF;

    room := greatest(max_count - s.count, 0);
    s.granted := CASE WHEN cost BETWEEN 1 AND max_count THEN least(most, (room + s.credit) / cost) ELSE 0 END;
    s.remaining := room + s.credit - s.granted * cost;
    s.spent := greatest(s.granted * cost - room, 0);
    IF s.granted > 0 THEN
        s.count := s.count + s.granted * cost - s.spent;
        s.credit := s.credit - s.spent;
        s.expires_at := t + window_us;
    END IF;

    ends := least(s.window_start + window_us, s.expires_at);
    s.retry_after_us := CASE
        WHEN s.granted = asked THEN 0
        WHEN cost > max_count THEN NULL
        WHEN s.remaining >= greatest(cost, 1) THEN 0
        ELSE ends - clock END;
    s.reset_after_us := CASE WHEN s.credit > 0 THEN s.expires_at WHEN s.count > 0 THEN ends ELSE clock END - clock;
    s.changed := s.granted > 0 OR (moved AND cost > 0 AND s.retry_after_us > 0) IS TRUE; -- otherwise nothing is written
    IF s.changed THEN
        s.expires_at := clock + s.reset_after_us;
    END IF;
    RETURN s;
END
$$;

-- _rate_limit_fixed_fits tells whether a row has room for units for the next 10 ms, in its window or a new window.
CREATE FUNCTION _rate_limit_fixed_fits(
    algorithm smallint, count bigint, window_start bigint, expires_at bigint, since bigint,
    units bigint, clock bigint, max_count bigint, window_us bigint
) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT algorithm = 1 AND since IS NULL AND window_start - clock <= window_us
        AND (clock >= expires_at
            OR clock + 10000 < expires_at AND expires_at = window_start + window_us AND units <= max_count - count)
$$;

-- rate_limit_take_fixed_window has the parameters and the result of rate_limit_take_sliding_window.
CREATE FUNCTION rate_limit_take_fixed_window(
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
    ignored text;
    clock bigint;
    valid boolean;     -- whether the policy is valid
    units bigint;      -- the cost of all requests for the only key; NULL if an argument is invalid
    units_of bigint[]; -- the cost of all requests for each of several keys
    taken_keys text[];
    taken bigint[];
BEGIN
    IF durable THEN
        RETURN _rate_limit_take_fixed_window_durable(name, keys, max_count, window_us, costs, counts, false,
            lock_timeout_ms, synchronous_commit, now_us); -- twins.sql makes this function
    END IF;
    ignored := _rate_limit_set(lock_timeout_ms, synchronous_commit);
    clock := _rate_limit_now(now_us);
    valid := _rate_limit_valid_window(max_count, window_us);
    IF cardinality(keys) = 1 THEN
        units := CASE WHEN valid AND octet_length(name) BETWEEN 1 AND 128
            AND octet_length(keys[1]) BETWEEN 1 AND 512 THEN 1 END;
        IF num_nonnulls(costs, counts) > 0 THEN
            units := units * _rate_limit_units_of_one(costs, counts, max_count);
        END IF;
        INSERT INTO rate_limit_ephemeral AS d
            (prefix, key, algorithm, count, window_start, expires_at)
        SELECT name, keys[1], 1, units, clock, clock + window_us
        WHERE units <= max_count
        ON CONFLICT (prefix, key) DO UPDATE SET -- locks the row
            count = CASE WHEN clock < d.expires_at THEN d.count ELSE 0 END + excluded.count,
            window_start = CASE WHEN clock < d.expires_at THEN d.window_start ELSE clock END,
            expires_at = CASE WHEN clock < d.expires_at THEN d.expires_at ELSE excluded.expires_at END
        WHERE _rate_limit_now(now_us) < clock + 10000
            AND d.held IS NULL
            AND _rate_limit_fixed_fits(d.algorithm, d.count, d.window_start, d.expires_at, d.since,
                excluded.count, clock, max_count, window_us)
        RETURNING ARRAY[_rate_limit_now(now_us),
            d.count, d.prev_count, d.window_start, d.credit, d.scale, d.expires_at, d.since, d.returned]
        INTO taken;
        IF taken[1] BETWEEN clock AND clock + 10000 THEN
            RETURN taken;
        END IF;
    ELSE
        units_of := CASE WHEN valid THEN _rate_limit_units_of_each(keys, costs, counts, max_count) END;
        WITH d AS (
            INSERT INTO rate_limit_ephemeral AS d
                (prefix, key, algorithm, count, window_start, expires_at)
            SELECT name, e.key, 1, e.units, clock, clock + window_us
            FROM _rate_limit_keys_in_lock_order(keys, units_of) AS e
            WHERE octet_length(name) BETWEEN 1 AND 128
            ON CONFLICT (prefix, key) DO UPDATE SET -- locks the row
                count = CASE WHEN clock < d.expires_at THEN d.count ELSE 0 END + excluded.count,
                window_start = CASE WHEN clock < d.expires_at THEN d.window_start ELSE clock END,
                expires_at = CASE WHEN clock < d.expires_at THEN d.expires_at ELSE excluded.expires_at END
            WHERE (_rate_limit_now(now_us) < clock + 10000 OR _rate_limit_give_up(clock, lock_timeout_ms, now_us))
                AND d.held IS NULL
                AND _rate_limit_fixed_fits(d.algorithm, d.count, d.window_start, d.expires_at, d.since,
                    excluded.count, clock, max_count, window_us)
            RETURNING d.key, ARRAY[greatest(clock, least(clock + 10000, _rate_limit_now(now_us))),
                d.count, d.prev_count, d.window_start, d.credit, d.scale, d.expires_at, d.since, d.returned] AS told
        )
        SELECT array_agg(d.key), array_agg(d.told) INTO taken_keys, taken FROM d;
        IF taken_keys = keys AND _rate_limit_now(now_us) <= clock + 10000 THEN
            RETURN taken;
        END IF;
    END IF;
    RETURN _rate_limit_left_ephemeral(
        name, keys, 1::smallint, max_count, window_us, 0::bigint, NULL::text, costs, counts,
        lock_timeout_ms, now_us, num_nonnulls(units, units_of) = 1, clock, taken_keys, taken);
END
$$;

COMMENT ON FUNCTION rate_limit_take_fixed_window IS
    'Takes from fixed windows of window_us microseconds, each of which admits max_count. '
    'A window starts at the first request after the previous window.
It takes the costs and counts of each key or denies them, '
    'and returns numbers for programs, which sql/sliding.sql explains. People call rate_limit_allow.
Example: SELECT rate_limit_take_fixed_window(''login'', ARRAY[''user:123''], 10, 60000000) takes one of 10 a minute.';
