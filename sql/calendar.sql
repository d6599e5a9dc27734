-- Calendar windows. calendar.go defines calendar windows. Tests compare these functions with the model in
-- internal/model/calendar.go.

-- _rate_limit_valid_calendar tells whether the numbers of a calendar window are in the range of exact arithmetic, and
-- whether zone looks like a time zone. The zone epoch stands for windows of any length that are aligned to 1970 in UTC.
CREATE FUNCTION _rate_limit_valid_calendar(max_count bigint, window_us bigint, zone text)
RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT max_count BETWEEN 1 AND 4611686018427387904
        AND CASE WHEN zone = 'epoch'
            THEN window_us BETWEEN 1 AND 2251799813685248
            ELSE window_us IN (60000000, 3600000000, 86400000000, 604800000000, 2678400000000)
                AND octet_length(zone) <= 64
                AND zone COLLATE "C" ~ '^(UTC|[A-Z][A-Za-z_-]*(/[A-Z][A-Za-z_-]*)+)$'
                AND zone COLLATE "C" !~* '^(right|posix)/' END
$$;

-- _rate_limit_window_end returns the end of the calendar window at the time clock, by date_trunc. The time is cut to
-- whole seconds, because time zones change their offset at whole seconds.
CREATE FUNCTION _rate_limit_window_end(clock bigint, window_us bigint, zone text)
RETURNS bigint LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_variable
DECLARE
    unit CONSTANT text := CASE window_us WHEN 60000000 THEN 'minute' WHEN 3600000000 THEN 'hour'
        WHEN 86400000000 THEN 'day' WHEN 604800000000 THEN 'week' ELSE 'month' END;
    instant timestamptz;
    begins timestamptz;
    later timestamptz;
    ends timestamptz;
BEGIN
    IF zone = 'epoch' THEN
        RETURN clock - clock % window_us + window_us;
    END IF;
    instant := timestamptz 'epoch' + clock / 1000000 * interval '1 second';
    begins := date_trunc(unit, instant, zone);
    -- date_trunc of a time in the next window is the end of this window. Windows of days and more differ in length by
    -- less than half a window. A minute or an hour ends early only if the offset changes.
    later := begins + CASE WHEN window_us < 86400000000 THEN window_us - 1000000 ELSE window_us / 2 * 3 END
        * interval '1 microsecond';
    ends := date_trunc(unit, later, zone);
    IF begins > instant THEN -- midnight occurs twice, or is skipped
        ends := begins;
    ELSIF ends <= instant THEN
        ends := begins + window_us * interval '1 microsecond';
    END IF;
    IF ends <= instant THEN
        RAISE EXCEPTION 'rate_limit: what the server knows of the time zone is not right'
            USING ERRCODE = 'invalid_parameter_value', COLUMN = 'zone',
                HINT = 'Its files may count leap seconds, as those in the folder right do. Take another zone.';
    END IF;
    RETURN extract(epoch FROM ends)::bigint * 1000000;
END
$$;

-- _rate_limit_calendar decides requests for a row. See _rate_limit_fixed. scale is the length of the row's window.
CREATE FUNCTION _rate_limit_calendar(
    s rate_limit_row, clock bigint, cost bigint, asked bigint, most bigint, max_count bigint, window_us bigint,
    zone text
) RETURNS rate_limit_row LANGUAGE plpgsql AS $$
DECLARE
    t bigint;                -- the later time of clock and window_start
    moved boolean := false;  -- whether the clock was set back, so that the row's times were set back too
    room bigint;
    ends bigint;
BEGIN
    IF s.scale > 2 * window_us THEN -- the row counts a window of a longer unit
        s.count := 0;
    END IF;
    IF clock >= s.expires_at OR s.count = 0 AND s.credit = 0 THEN -- as good as new
        s.count := 0;
        s.credit := 0;
        s.window_start := clock;
        s.since := NULL;
    ELSIF s.window_start - clock > window_us THEN -- the clock was set back, so the usage counts from now on
        s.window_start := clock;
        s.scale := window_us;
        s.expires_at := clock + CASE WHEN s.credit > 0 THEN 2 ELSE 1 END * window_us;
        moved := true;
        s.moved := true;
    END IF;
    t := greatest(clock, s.window_start);
    IF s.count = 0 OR t - s.window_start >= s.scale THEN -- a new window begins
        s.count := 0;
        s.window_start := t;
        s.scale := _rate_limit_window_end(t, window_us, zone) - t;
        s.since := CASE WHEN s.credit > 0 THEN s.since END;
    END IF;

    room := greatest(max_count - s.count, 0);
    s.granted := CASE WHEN cost BETWEEN 1 AND max_count THEN least(most, (room + s.credit) / cost) ELSE 0 END;
    s.remaining := room + s.credit - s.granted * cost;
    s.spent := greatest(s.granted * cost - room, 0);
    IF s.granted > 0 THEN
        s.count := s.count + s.granted * cost - s.spent;
        s.credit := s.credit - s.spent;
        s.expires_at := t + 2 * window_us;
    END IF;

    ends := least(s.window_start + s.scale, s.expires_at);
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

-- _rate_limit_calendar_fits tells whether a row has room for units for the next 10 ms, in its window or a new one.
CREATE FUNCTION _rate_limit_calendar_fits(
    algorithm smallint, count bigint, window_start bigint, scale bigint, expires_at bigint, since bigint,
    units bigint, clock bigint, max_count bigint, window_us bigint
) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT algorithm = 5 AND since IS NULL AND window_start - clock <= window_us
        AND (clock >= expires_at
            OR clock + 10000 < expires_at AND expires_at = window_start + scale AND scale <= 2 * window_us
                AND units <= max_count - count)
$$;

-- rate_limit_take_calendar_window has the parameters and the result of rate_limit_take_sliding_window, except:
--
--   max_count  the limit, in units of cost, at most 2^62
--   window_us  60000000 for windows of a minute, 3600000000 for an hour, 86400000000 for a day, 604800000000 for a
--              week, 2678400000000 for a month
--   zone       the time zone: UTC, or a name with a slash, such as Europe/Berlin. With epoch, window_us is any number
--              from 1 to 2^51, and windows begin at multiples of it since 1970 in UTC
CREATE FUNCTION rate_limit_take_calendar_window(
    name text, keys text[], max_count bigint, window_us bigint, zone text,
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
    window_end bigint; -- the end of a window that begins now; NULL if the policy is invalid
    lasts boolean;     -- whether a new window lasts longer than 10 ms: see _rate_limit_calendar_fits
    units bigint;      -- the cost of all requests for the only key; NULL if an argument is invalid
    units_of bigint[]; -- the cost of all requests for each of several keys
    taken_keys text[];
    taken bigint[];
BEGIN
    IF durable THEN
        RETURN _rate_limit_take_calendar_window_durable(name, keys, max_count, window_us, zone, costs, counts, false,
            lock_timeout_ms, synchronous_commit, now_us); -- twins.sql makes this function
    END IF;
    ignored := _rate_limit_set(lock_timeout_ms, synchronous_commit);
    clock := _rate_limit_now(now_us);
    window_end := CASE WHEN _rate_limit_valid_calendar(max_count, window_us, zone)
        THEN _rate_limit_window_end(clock, window_us, zone) END;
    lasts := clock + 10000 < window_end;
    IF cardinality(keys) = 1 THEN
        units := CASE WHEN lasts AND octet_length(name) BETWEEN 1 AND 128
            AND octet_length(keys[1]) BETWEEN 1 AND 512 THEN 1 END;
        IF num_nonnulls(costs, counts) > 0 THEN
            units := units * _rate_limit_units_of_one(costs, counts, max_count);
        END IF;
        INSERT INTO rate_limit_ephemeral AS d
            (prefix, key, algorithm, count, window_start, scale, expires_at)
        SELECT name, keys[1], 5, units, clock, window_end - clock, window_end
        WHERE units <= max_count
        ON CONFLICT (prefix, key) DO UPDATE SET -- locks the row
            count = CASE WHEN clock < d.expires_at THEN d.count ELSE 0 END + excluded.count,
            window_start = CASE WHEN clock < d.expires_at THEN d.window_start ELSE clock END,
            scale = CASE WHEN clock < d.expires_at THEN d.scale ELSE excluded.scale END,
            expires_at = CASE WHEN clock < d.expires_at THEN d.expires_at ELSE excluded.expires_at END
        WHERE _rate_limit_now(now_us) < clock + 10000
            AND d.held IS NULL
            AND _rate_limit_calendar_fits(d.algorithm, d.count, d.window_start, d.scale, d.expires_at, d.since,
                excluded.count, clock, max_count, window_us)
        RETURNING ARRAY[_rate_limit_now(now_us),
            d.count, d.prev_count, d.window_start, d.credit, d.scale, d.expires_at, d.since, d.returned]
        INTO taken;
        IF taken[1] BETWEEN clock AND clock + 10000 THEN
            RETURN taken;
        END IF;
    ELSE
        units_of := CASE WHEN lasts THEN _rate_limit_units_of_each(keys, costs, counts, max_count) END;
        WITH d AS (
            INSERT INTO rate_limit_ephemeral AS d
                (prefix, key, algorithm, count, window_start, scale, expires_at)
            SELECT name, e.key, 5, e.units, clock, window_end - clock, window_end
            FROM _rate_limit_keys_in_lock_order(keys, units_of) AS e
            WHERE octet_length(name) BETWEEN 1 AND 128
            ON CONFLICT (prefix, key) DO UPDATE SET -- locks the row
                count = CASE WHEN clock < d.expires_at THEN d.count ELSE 0 END + excluded.count,
                window_start = CASE WHEN clock < d.expires_at THEN d.window_start ELSE clock END,
                scale = CASE WHEN clock < d.expires_at THEN d.scale ELSE excluded.scale END,
                expires_at = CASE WHEN clock < d.expires_at THEN d.expires_at ELSE excluded.expires_at END
            WHERE (_rate_limit_now(now_us) < clock + 10000 OR _rate_limit_give_up(clock, lock_timeout_ms, now_us))
                AND d.held IS NULL
                AND _rate_limit_calendar_fits(d.algorithm, d.count, d.window_start, d.scale, d.expires_at, d.since,
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
        name, keys, 5::smallint, max_count, window_us, 0::bigint, zone, costs, counts,
        lock_timeout_ms, now_us, num_nonnulls(units, units_of) = 1, clock, taken_keys, taken);
END
$$;

COMMENT ON FUNCTION rate_limit_take_calendar_window IS
    'Takes from the minutes, hours, days, weeks or months of a time zone, '
    'each of which admits max_count.
It takes the costs and counts of each key or denies them, '
    'and returns numbers for programs, which sql/sliding.sql explains. People call rate_limit_allow.
Example: SELECT rate_limit_take_calendar_window(''mail'', ARRAY[''user:123''], 1000, 2678400000000, ''Europe/Berlin'') '
    'takes one of 1000 a month.';
