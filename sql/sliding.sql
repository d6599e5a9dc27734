-- Sliding windows. sliding.go defines sliding windows. Tests compare these functions with the model in
-- internal/model/sliding.go.

-- _rate_limit_sliding decides requests for a row. _rate_limit_fixed explains the arguments.
CREATE FUNCTION _rate_limit_sliding(
    s rate_limit_row, clock bigint, cost bigint, asked bigint, most bigint, max_count bigint, window_us bigint
) RETURNS rate_limit_row LANGUAGE plpgsql AS $$
DECLARE
    t bigint;                -- the later time of clock and window_start
    moved boolean := false;  -- whether the clock was set back, so that the row's times were set back too
    rest bigint;             -- the rest of this window; the previous window counts for rest / window_us
    room bigint;
    free bigint;
BEGIN
    IF clock >= s.expires_at OR s.count = 0 AND s.prev_count = 0 AND s.credit = 0 THEN -- as good as new
        s.count := 0;
        s.prev_count := 0;
        s.credit := 0;
        s.window_start := clock;
        s.since := NULL;
    ELSIF s.window_start - clock > window_us THEN -- the clock was set back, so the usage counts from now on
        s.window_start := clock;
        s.expires_at := clock + CASE WHEN s.count > 0 OR s.credit > 0 THEN 2 ELSE 1 END * window_us;
        moved := true;
        s.moved := true;
    END IF;
    t := greatest(clock, s.window_start);
    IF t - s.window_start >= 2 * window_us
        OR s.count = 0 AND (s.prev_count = 0 OR t - s.window_start >= window_us)
    THEN -- a new window begins
        s.count := 0;
        s.prev_count := 0;
        s.window_start := t;
        s.since := CASE WHEN s.credit > 0 THEN s.since END;
    ELSIF t - s.window_start >= window_us THEN -- the next window has begun
        s.prev_count := s.count;
        s.count := 0;
        s.window_start := s.window_start + window_us;
    END IF;

    -- The previous window counts for prev_count * rest / window_us units, rounded up.
    rest := s.window_start + window_us - t;
    room := greatest(max_count - s.count - CASE
        WHEN s.prev_count = 0 THEN 0
        WHEN rest > max_count * window_us / s.prev_count THEN max_count -- the product below could overflow
        ELSE _rate_limit_ceil_div(s.prev_count * rest, window_us) END, 0);
    s.granted := CASE WHEN cost BETWEEN 1 AND max_count THEN least(most, (room + s.credit) / cost) ELSE 0 END;
    s.remaining := room + s.credit - s.granted * cost;
    s.spent := greatest(s.granted * cost - room, 0);
    IF s.granted > 0 THEN
        s.count := s.count + s.granted * cost - s.spent;
        s.credit := s.credit - s.spent;
        s.expires_at := t + 2 * window_us;
    END IF;

    free := greatest(cost, 1) - s.credit; -- how many units must become free
    s.retry_after_us := CASE
        WHEN s.granted = asked THEN 0
        WHEN cost > max_count THEN NULL
        WHEN s.remaining >= greatest(cost, 1) THEN 0
        -- The units fit into this window as soon as prev_count * rest has fallen to the free part of max_count *
        -- window_us,
        WHEN free <= max_count - s.count
            THEN least(t + rest - (max_count - s.count - free) * window_us / s.prev_count, s.expires_at) - clock
        -- or into the next window, where prev_count has the value that count has now.
        ELSE least(t + rest + window_us - (max_count - free) * window_us / s.count, s.expires_at) - clock END;
    s.reset_after_us := CASE
        WHEN s.credit > 0 THEN s.expires_at
        WHEN s.count > 0 THEN least(s.window_start + 2 * window_us, s.expires_at)
        WHEN s.prev_count > 0 THEN least(s.window_start + window_us, s.expires_at)
        ELSE clock END - clock;
    s.changed := s.granted > 0 OR (moved AND cost > 0 AND s.retry_after_us > 0) IS TRUE; -- otherwise nothing is written
    IF s.changed THEN
        s.expires_at := clock + s.reset_after_us;
    END IF;
    RETURN s;
END
$$;

-- _rate_limit_sliding_fits tells whether a row has room for units during the next 10 ms. The units may be in the row's
-- window, in the next window if it has begun, or in a new window.
CREATE FUNCTION _rate_limit_sliding_fits(
    algorithm smallint, count bigint, prev_count bigint, window_start bigint, expires_at bigint, since bigint,
    units bigint, clock bigint, ended bigint, max_count bigint, window_us bigint
) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT algorithm = 2 AND since IS NULL AND CASE
        WHEN expires_at <= clock THEN window_start <= ended
        WHEN expires_at - window_start <> 2 * window_us THEN false
        WHEN window_start <= ended THEN clock + 10000 < expires_at AND count BETWEEN 1 AND max_count
            AND units <= max_count - (count * (expires_at - clock) + window_us - 1) / window_us
        ELSE abs(window_start - clock) < window_us - 10000 AND prev_count <= max_count
            AND units <= max_count - count
                - (prev_count * least(window_start - ended, window_us) + window_us - 1) / window_us
        END
$$;

-- rate_limit_take_sliding_window decides requests that take from one key each. The Go package calls it.
--
--   name                the limiter's name, 1 to 128 bytes
--   keys                the keys, 1 to 512 bytes each
--   max_count           the limit, in units of cost; max_count * window_us may be up to 2^62
--   window_us           the length of the window in microseconds, up to 2^51 (71 years)
--   costs, counts       for each key, the cost of one request and the number of requests; NULL means 1 for each key
--   durable             true for rows in rate_limit_durable, false for rows in rate_limit_ephemeral
--   lock_timeout_ms     the transaction's lock_timeout; NULL keeps the session's lock_timeout. -1 keeps it too. It says
--                       that the call is part of a caller's transaction, as with WithTx. A proxy for shards refuses -1,
--                       because it cannot roll back what a shard has committed
--   synchronous_commit  the transaction's synchronous_commit; NULL keeps the session's setting
--   now_us              the time in tests, in microseconds since 1970 UTC; otherwise NULL
--
-- The result is one array, because a result with columns would cost more than the decision. It begins with nine numbers
-- for each key whose requests were all granted at once, in the order of the keys: the time of the decision, and the
-- row's count, prev_count, window_start, credit, scale, expires_at, since and returned. decisionOfTake in
-- internal/engine computes the remaining units from these numbers. For each other key, sixteen numbers follow: its
-- place in keys, what rate_limit_all returns from granted to expires_at, its taken_spent, taken_since and taken_at, and
-- held.
-- The log of a single key comes last. (The array may have two dimensions. unnest returns the same numbers.)
--
-- One statement takes from existing rows and makes missing rows. There is a statement for a single key, and one for
-- several keys. _rate_limit_left_ephemeral decides less common cases.
--
-- The function reads the clock before a row is locked, and again after it is locked. The decision uses the first
-- reading. The decision is valid if it would be the same at any time in the next 10 ms and if the second reading is in
-- these 10 ms. If the decision is not valid, _rate_limit_left_ephemeral decides. The time of the decision is the second
-- reading. A new window or bucket begins at the first reading, because no other call can have used it since then.
--
-- ON CONFLICT also locks rows that have no room, so that all rows are locked in order.
CREATE FUNCTION rate_limit_take_sliding_window(
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
    ended bigint;      -- windows that began at this time or before have ended; NULL if the policy is invalid
    units bigint;      -- the cost of all requests for the only key; NULL if an argument is invalid
    units_of bigint[]; -- the cost of all requests for each of several keys
    taken_keys text[];
    taken bigint[];
BEGIN
    IF durable THEN
        RETURN _rate_limit_take_sliding_window_durable(name, keys, max_count, window_us, costs, counts, false,
            lock_timeout_ms, synchronous_commit, now_us); -- twins.sql makes this function
    END IF;
    ignored := _rate_limit_set(lock_timeout_ms, synchronous_commit);
    clock := _rate_limit_now(now_us);
    ended := CASE WHEN _rate_limit_valid_window(max_count, window_us) THEN clock - window_us END;
    IF cardinality(keys) = 1 THEN
        units := CASE WHEN ended IS NOT NULL AND octet_length(name) BETWEEN 1 AND 128
            AND octet_length(keys[1]) BETWEEN 1 AND 512 THEN 1 END;
        IF num_nonnulls(costs, counts) > 0 THEN
            units := units * _rate_limit_units_of_one(costs, counts, max_count);
        END IF;
        INSERT INTO rate_limit_ephemeral AS d
            (prefix, key, algorithm, count, window_start, expires_at)
        SELECT name, keys[1], 2, units, clock, clock + 2 * window_us
        WHERE units <= max_count
        ON CONFLICT (prefix, key) DO UPDATE SET -- locks the row
            count = CASE WHEN d.window_start > ended THEN d.count ELSE 0 END + excluded.count,
            prev_count = CASE WHEN d.window_start > ended THEN d.prev_count
                WHEN d.expires_at > clock THEN d.count ELSE 0 END,
            window_start = CASE WHEN d.window_start > ended THEN d.window_start
                WHEN d.expires_at > clock THEN d.window_start + window_us ELSE clock END,
            expires_at = CASE WHEN d.window_start > ended THEN d.expires_at
                WHEN d.expires_at > clock THEN d.expires_at + window_us ELSE excluded.expires_at END
        WHERE _rate_limit_now(now_us) < clock + 10000
            AND d.held IS NULL
            AND _rate_limit_sliding_fits(d.algorithm, d.count, d.prev_count, d.window_start, d.expires_at, d.since,
                excluded.count, clock, ended, max_count, window_us)
        RETURNING ARRAY[_rate_limit_now(now_us),
            d.count, d.prev_count, d.window_start, d.credit, d.scale, d.expires_at, d.since, d.returned]
        INTO taken;
        IF taken[1] BETWEEN clock AND clock + 10000 THEN
            RETURN taken;
        END IF;
    ELSE
        units_of := CASE WHEN ended IS NOT NULL THEN _rate_limit_units_of_each(keys, costs, counts, max_count) END;
        WITH d AS (
            INSERT INTO rate_limit_ephemeral AS d
                (prefix, key, algorithm, count, window_start, expires_at)
            SELECT name, e.key, 2, e.units, clock, clock + 2 * window_us
            FROM _rate_limit_keys_in_lock_order(keys, units_of) AS e
            WHERE octet_length(name) BETWEEN 1 AND 128
            ON CONFLICT (prefix, key) DO UPDATE SET -- locks the row
                count = CASE WHEN d.window_start > ended THEN d.count ELSE 0 END + excluded.count,
                prev_count = CASE WHEN d.window_start > ended THEN d.prev_count
                    WHEN d.expires_at > clock THEN d.count ELSE 0 END,
                window_start = CASE WHEN d.window_start > ended THEN d.window_start
                    WHEN d.expires_at > clock THEN d.window_start + window_us ELSE clock END,
                expires_at = CASE WHEN d.window_start > ended THEN d.expires_at
                    WHEN d.expires_at > clock THEN d.expires_at + window_us ELSE excluded.expires_at END
            WHERE (_rate_limit_now(now_us) < clock + 10000 OR _rate_limit_give_up(clock, lock_timeout_ms, now_us))
                AND d.held IS NULL
                AND _rate_limit_sliding_fits(d.algorithm, d.count, d.prev_count, d.window_start, d.expires_at, d.since,
                    excluded.count, clock, ended, max_count, window_us)
            RETURNING d.key, ARRAY[greatest(clock, least(clock + 10000, _rate_limit_now(now_us))),
                d.count, d.prev_count, d.window_start, d.credit, d.scale, d.expires_at, d.since, d.returned] AS told
        )
        SELECT array_agg(d.key), array_agg(d.told) INTO taken_keys, taken FROM d;
        IF taken_keys = keys AND _rate_limit_now(now_us) <= clock + 10000 THEN
            RETURN taken;
        END IF;
    END IF;
    RETURN _rate_limit_left_ephemeral(
        name, keys, 2::smallint, max_count, window_us, 0::bigint, NULL::text, costs, counts,
        lock_timeout_ms, now_us, num_nonnulls(units, units_of) = 1, clock, taken_keys, taken);
END
$$;

COMMENT ON FUNCTION rate_limit_take_sliding_window IS
    'Takes from sliding windows of window_us microseconds, each of which admits max_count. '
    'The usage of a window is estimated from two counters: '
    'the previous window counts for the share that the sliding window still covers.
It takes the costs and counts of each key or denies them, '
    'and returns numbers for programs, which sql/sliding.sql explains. People call rate_limit_allow.
Example: SELECT rate_limit_take_sliding_window(''login'', ARRAY[''user:123''], 10, 60000000) takes one of 10 a minute.';
