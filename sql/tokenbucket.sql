-- Token buckets. tokenbucket.go defines buckets. Tests compare these functions with internal/model/tokenbucket.go.

-- _rate_limit_valid_bucket tells whether the numbers of a bucket are in the range of exact arithmetic.
CREATE FUNCTION _rate_limit_valid_bucket(capacity bigint, refill bigint, every_us bigint)
RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT capacity >= 1 AND refill >= 1 AND every_us BETWEEN 1 AND 2251799813685248
        AND capacity <= 4611686018427387904 / every_us AND (capacity * every_us - 1) / refill < 2251799813685248
$$;

-- _rate_limit_bucket decides requests for a row. _rate_limit_fixed explains the arguments.
CREATE FUNCTION _rate_limit_bucket(
    s rate_limit_row, clock bigint, cost bigint, asked bigint, most bigint, capacity bigint, every_us bigint,
    refill bigint
) RETURNS rate_limit_row LANGUAGE plpgsql AS $$
DECLARE
    full_count CONSTANT bigint := capacity * every_us;
    fill_us CONSTANT bigint := (full_count - 1) / refill + 1;
    left_over bigint;        -- the tokens left, in 1/scale token; below 0 if the bucket owes
    most_owed bigint;        -- the most that the bucket may owe, in 1/every_us token; NULL if it does not owe
    t bigint;                -- the later time of clock and window_start
    moved boolean := false;  -- whether the clock was set back, so that the row's times were set back too
    room bigint;
BEGIN
    IF clock >= s.expires_at THEN
        s.count := 0;
        s.credit := 0;
        s.window_start := clock;
    ELSE
        -- Takes by another policy can no longer be refunded.
        IF s.scale <> every_us OR s.capacity <> capacity OR s.refill <> refill THEN
            s.since := greatest(s.since + 1, s.window_start, clock);
            s.returned := 0;
        END IF;
        left_over := s.capacity * s.scale - s.count;
        IF left_over < 0 THEN
            most_owed := _rate_limit_max_booked(capacity, every_us, refill) * every_us;
        END IF;
        IF s.scale <> every_us THEN -- round down; the product may need 128 bits
            left_over := CASE
                WHEN left_over < 0 THEN greatest(-div(s.scale - 1 - left_over::numeric * every_us, s.scale), -most_owed)
                ELSE least(div(left_over::numeric * every_us, s.scale), full_count) END;
        END IF;
        s.count := full_count - least(greatest(left_over, -most_owed), full_count);
        IF s.count = 0 AND s.credit = 0 THEN -- the capacity became smaller, so the row is as good as new
            s.window_start := clock;
            s.expires_at := clock;
        ELSIF s.window_start - clock > fill_us THEN
            s.window_start := clock;
            s.since := greatest(s.since + 1, clock);
            s.returned := 0;
            s.expires_at := clock + _rate_limit_ceil_div(
                CASE WHEN s.credit > 0 THEN greatest(full_count, s.count) ELSE s.count END, refill);
            moved := true;
            s.moved := true;
        END IF;
    END IF;
    s.scale := every_us;
    s.capacity := capacity;
    s.refill := refill;
    t := greatest(clock, s.window_start);
    -- The comparison divides, because the product would overflow after a long time.
    IF s.count > 0 AND t - s.window_start <= (s.count - 1) / refill THEN
        s.count := s.count - (t - s.window_start) * refill;
    ELSE -- the bucket is full
        s.count := 0;
        IF s.credit = 0 THEN -- the row is as good as new
            s.since := t;
            s.returned := 0;
        END IF;
    END IF;
    s.window_start := t;

    room := greatest(full_count - s.count, 0) / every_us;
    s.granted := CASE WHEN cost BETWEEN 1 AND capacity THEN least(most, (room + s.credit) / cost) ELSE 0 END;
    s.remaining := room + s.credit - s.granted * cost;
    s.spent := greatest(s.granted * cost - room, 0);
    IF s.granted > 0 THEN
        s.count := s.count + (s.granted * cost - s.spent) * every_us;
        s.credit := s.credit - s.spent;
        s.expires_at := t + _rate_limit_ceil_div(greatest(full_count, s.count), refill);
    END IF;

    s.retry_after_us := CASE
        WHEN s.granted = asked THEN 0
        WHEN cost > capacity THEN NULL
        WHEN s.remaining >= greatest(cost, 1) THEN 0
        ELSE least(s.expires_at, t + _rate_limit_ceil_div(
            (greatest(cost, 1) - s.credit) * every_us - (full_count - s.count), refill)) - clock END;
    s.reset_after_us := CASE
        WHEN s.credit > 0 THEN s.expires_at
        WHEN s.count > 0 THEN least(t + _rate_limit_ceil_div(s.count, refill), s.expires_at)
        ELSE clock END - clock;
    s.changed := s.granted > 0 OR (moved AND cost > 0 AND s.retry_after_us > 0) IS TRUE; -- otherwise nothing is written
    IF s.changed THEN
        s.expires_at := clock + s.reset_after_us;
    END IF;
    s.taken_at := s.returned + s.count;
    RETURN s;
END
$$;

-- _rate_limit_bucket_runs tells whether a bucket is not full at clock. _rate_limit_bucket_count returns its count.
CREATE FUNCTION _rate_limit_bucket_runs(count bigint, window_start bigint, clock bigint, refill bigint)
RETURNS boolean LANGUAGE sql IMMUTABLE AS $$ SELECT clock - window_start <= (count - 1) / refill $$;

CREATE FUNCTION _rate_limit_bucket_count(count bigint, window_start bigint, clock bigint, refill bigint)
RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN clock - window_start <= (count - 1) / refill
        THEN count - greatest(clock - window_start, 0) * refill ELSE 0 END
$$;

-- _rate_limit_bucket_fits tells whether units of count fit at clock, and the bucket does not become full for 10 ms.
CREATE FUNCTION _rate_limit_bucket_fits(
    algorithm smallint, count bigint, window_start bigint, credit bigint, scale bigint, capacity bigint, refill bigint,
    units bigint, clock bigint, full_count bigint, tokens bigint, inflow bigint, every_us bigint
) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT algorithm = 3 AND credit = 0 AND scale = every_us AND capacity = tokens AND refill = inflow
        AND count > 0 AND window_start - clock <= (full_count - 1) / inflow + 1
        AND CASE
            WHEN clock + 10000 - window_start <= (count - 1) / inflow
                THEN full_count - count + greatest(clock - window_start, 0) * inflow >= units
            ELSE clock - window_start > (count - 1) / inflow END
$$;

-- rate_limit_take_token_bucket has the parameters and the result of rate_limit_take_sliding_window, except:
--
--   capacity  the tokens in a full bucket; capacity * every_us may be up to 2^62
--   refill    the tokens that flow in evenly during every_us; at least 1
--   every_us  microseconds, from 1 to 2^51. Filling an empty bucket may take up to 2^51 microseconds (71 years)
CREATE FUNCTION rate_limit_take_token_bucket(
    name text, keys text[], capacity bigint, refill bigint, every_us bigint,
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
    full_count bigint; -- the count of an empty bucket; NULL if the policy is invalid
    units bigint;      -- the cost of all requests for the only key; NULL if an argument is invalid
    units_of bigint[]; -- the cost of all requests for each of several keys
    taken_keys text[];
    taken bigint[];
BEGIN
    IF durable THEN
        RETURN _rate_limit_take_token_bucket_durable(name, keys, capacity, refill, every_us, costs, counts, false,
            lock_timeout_ms, synchronous_commit, now_us); -- twins.sql makes this function
    END IF;
    ignored := _rate_limit_set(lock_timeout_ms, synchronous_commit);
    clock := _rate_limit_now(now_us);
    full_count := CASE WHEN _rate_limit_valid_bucket(capacity, refill, every_us) THEN capacity * every_us END;
    IF cardinality(keys) = 1 THEN
        units := CASE WHEN full_count IS NOT NULL AND octet_length(name) BETWEEN 1 AND 128
            AND octet_length(keys[1]) BETWEEN 1 AND 512 THEN 1 END;
        IF num_nonnulls(costs, counts) > 0 THEN
            units := units * _rate_limit_units_of_one(costs, counts, capacity);
        END IF;
        INSERT INTO rate_limit_ephemeral AS d
            (prefix, key, algorithm, count, scale, capacity, refill, since, returned, window_start,
                expires_at)
        SELECT name, keys[1], 3, units * every_us, every_us, capacity, refill, clock, 0, clock,
            clock + (units * every_us - 1) / refill + 1
        WHERE units <= capacity
        ON CONFLICT (prefix, key) DO UPDATE SET -- locks the row
            count = _rate_limit_bucket_count(d.count, d.window_start, clock, refill) + excluded.count,
            window_start = greatest(clock, d.window_start),
            since = CASE WHEN _rate_limit_bucket_runs(d.count, d.window_start, clock, refill)
                THEN d.since ELSE clock END,
            returned = CASE WHEN _rate_limit_bucket_runs(d.count, d.window_start, clock, refill)
                THEN d.returned ELSE 0 END,
            expires_at = greatest(clock, d.window_start) + (excluded.count - 1
                + _rate_limit_bucket_count(d.count, d.window_start, clock, refill)) / refill + 1
        WHERE _rate_limit_now(now_us) < clock + 10000
            AND d.held IS NULL
            AND _rate_limit_bucket_fits(d.algorithm, d.count, d.window_start, d.credit, d.scale, d.capacity,
                d.refill, excluded.count, clock, full_count, capacity, refill, every_us)
        RETURNING ARRAY[_rate_limit_now(now_us),
            d.count, d.prev_count, d.window_start, d.credit, d.scale, d.expires_at, d.since, d.returned]
        INTO taken;
        IF taken[1] BETWEEN clock AND clock + 10000 THEN
            RETURN taken;
        END IF;
    ELSE
        units_of := CASE WHEN full_count IS NOT NULL THEN _rate_limit_units_of_each(keys, costs, counts, capacity) END;
        WITH d AS (
            INSERT INTO rate_limit_ephemeral AS d
                (prefix, key, algorithm, count, scale, capacity, refill, since, returned, window_start,
                    expires_at)
            SELECT name, e.key, 3, e.units * every_us, every_us, capacity, refill, clock, 0, clock,
                clock + (e.units * every_us - 1) / refill + 1
            FROM _rate_limit_keys_in_lock_order(keys, units_of) AS e
            WHERE octet_length(name) BETWEEN 1 AND 128
            ON CONFLICT (prefix, key) DO UPDATE SET -- locks the row
                count = _rate_limit_bucket_count(d.count, d.window_start, clock, refill) + excluded.count,
                window_start = greatest(clock, d.window_start),
                since = CASE WHEN _rate_limit_bucket_runs(d.count, d.window_start, clock, refill)
                    THEN d.since ELSE clock END,
                returned = CASE WHEN _rate_limit_bucket_runs(d.count, d.window_start, clock, refill)
                    THEN d.returned ELSE 0 END,
                expires_at = greatest(clock, d.window_start) + (excluded.count - 1
                    + _rate_limit_bucket_count(d.count, d.window_start, clock, refill)) / refill + 1
            WHERE (_rate_limit_now(now_us) < clock + 10000 OR _rate_limit_give_up(clock, lock_timeout_ms, now_us))
                AND d.held IS NULL
                AND _rate_limit_bucket_fits(d.algorithm, d.count, d.window_start, d.credit, d.scale, d.capacity,
                    d.refill, excluded.count, clock, full_count, capacity, refill, every_us)
            RETURNING d.key, ARRAY[greatest(clock, least(clock + 10000, _rate_limit_now(now_us))),
                d.count, d.prev_count, d.window_start, d.credit, d.scale, d.expires_at, d.since, d.returned] AS told
        )
        SELECT array_agg(d.key), array_agg(d.told) INTO taken_keys, taken FROM d;
        IF taken_keys = keys AND _rate_limit_now(now_us) <= clock + 10000 THEN
            RETURN taken;
        END IF;
    END IF;
    RETURN _rate_limit_left_ephemeral(
        name, keys, 3::smallint, capacity, every_us, refill, NULL::text, costs, counts,
        lock_timeout_ms, now_us, num_nonnulls(units, units_of) = 1, clock, taken_keys, taken);
END
$$;

COMMENT ON FUNCTION rate_limit_take_token_bucket IS
    'Takes from token buckets. '
    'A bucket holds capacity tokens, starts full, and gets refill tokens, evenly, over every_us microseconds.
It takes the costs and counts of each key or denies them, '
    'and returns numbers for programs, which sql/sliding.sql explains. People call rate_limit_allow.
Example: SELECT rate_limit_take_token_bucket(''api'', ARRAY[''user:123''], 20, 5, 10000000) '
    'takes one token from a bucket of 20 that gets 5 more every 10 seconds.';
