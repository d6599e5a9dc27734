-- The fixed window; fixed.go holds its specification and its model, and the two read side by side.
--
--   name                the limiter's name, 1 to 128 bytes
--   keys                who asks, 1 to 512 bytes each; a key that stands several times is decided in that order
--   max_count           the limit, in units of cost; max_count * window_us may reach 2^62
--   window_us           length of the window in microseconds, at most 2^51 (71 years)
--   costs               cost of one request, for each key; NULL means 1 each. A cost of 0 takes nothing and tells whether 1 would
--                       fit; a cost below 0 gives back, or grants, see taken_in; a cost above max_count is denied with
--                       a retry_after_us of NULL, which means never
--   counts              how many such requests are asked, for each key; NULL means 1 each
--   durable             whether the rows are in rate_limit_durable rather than in rate_limit_ephemeral
--   lock_timeout_ms     longest wait for one row, for this transaction; NULL leaves the session's lock_timeout
--   synchronous_commit  whether the commit of this transaction waits for the WAL; NULL leaves the session's setting
--   now                 replaces the clock, for tests
--   taken_since, taken_in, taken_at, taken_spent
--                       which take a cost below 0 gives back: what its decision returned under these names, for each key; NULL, of
--                       taken_in, if it gives nothing back but grants credit above the limit, of which a key holds up to 2^61
--   skip_held           whether to pass over keys whose row somebody's transaction has locked: no row comes back for them, and
--                       the others are decided. A key that such a transaction has just made is waited for still
CREATE FUNCTION rate_limit_fixed_window(
    name text,
    keys text[],
    max_count bigint,
    window_us bigint,
    costs bigint[] DEFAULT NULL,
    counts bigint[] DEFAULT NULL,
    durable boolean DEFAULT false,
    lock_timeout_ms integer DEFAULT NULL,
    synchronous_commit boolean DEFAULT NULL,
    now timestamptz DEFAULT NULL,
    taken_since bigint[] DEFAULT NULL,
    taken_in bigint[] DEFAULT NULL,
    taken_at bigint[] DEFAULT NULL,
    taken_spent bigint[] DEFAULT NULL,
    skip_held boolean DEFAULT false
)
RETURNS SETOF rate_limit_decision
LANGUAGE plpgsql
SECURITY DEFINER
SET enable_seqscan = off -- a plan must not depend on how small the table was when it was made
AS $$
#variable_conflict use_variable
DECLARE
    asked_rows rate_limit_row[];
    new_rows rate_limit_row[];
    written integer := 0;
    r rate_limit_row;  -- the element at hand, and its row as it was found
    s rate_limit_row;  -- that row's state now
    clock bigint;      -- the database's clock
    t bigint;          -- the time of the decision: the clock, or the row's own time where that lies ahead of it
    moved boolean;     -- the clock has jumped back, and the row with it
    changed boolean;   -- a refund or grant has done something
    back bigint;       -- what goes back
    units bigint;      -- what a refund is of, or a grant
    spent bigint;      -- how much of what is taken comes out of granted credit
    decided_at timestamptz;
    granted bigint;
    remaining bigint;
    retry_after_us bigint;
    reset_after_us bigint;
    ends bigint;       -- when the current window ends
BEGIN
    IF (max_count >= 1 AND window_us BETWEEN 1 AND 2251799813685248 AND max_count <= 4611686018427387904 / window_us) IS NOT TRUE THEN
        RAISE EXCEPTION 'rate_limit: max_count % and window_us % are outside the exact range', max_count, window_us
            USING ERRCODE = 'invalid_parameter_value',
                HINT = 'Both are at least 1, window_us is at most 2^51, and their product is at most 2^62.';
    END IF;
    asked_rows := rate_limit_lock(name, keys, costs, counts, max_count, 1::smallint, durable, lock_timeout_ms, synchronous_commit, taken_in, skip_held);

    -- The clock is read with every lock held: read before, it could be older than the rows that a lock waited for.
    decided_at := coalesce(now, clock_timestamp());
    clock := (extract(epoch FROM decided_at) * 1000000)::bigint;

    FOREACH r IN ARRAY asked_rows LOOP
        -- Roll the row forward to the clock, unless it is the row of the element before: that goes on from its decision.
        IF (r.tid = s.tid) IS NOT TRUE THEN
            s := r;
            moved := false;
            IF clock >= s.expires_at OR (s.count | s.credit) = 0 THEN
                s.count := 0;
                s.credit := 0;
                s.window_start := clock;
                s.since := NULL;
            ELSIF s.window_start - clock > window_us THEN
                s.window_start := clock;
                s.expires_at := clock + window_us;
                moved := true;
            END IF;
            t := greatest(clock, s.window_start);
            IF t - s.window_start >= window_us OR s.count = 0 THEN
                s.count := 0;
                s.window_start := t;
                s.since := CASE WHEN s.credit > 0 THEN s.since END;
            END IF;
        END IF;
        spent := 0;

        IF r.cost < 0 THEN
            -- By division, because the product could overflow.
            units := CASE WHEN r.asked > -(9223372036854775807 / r.cost) THEN 9223372036854775807 ELSE -r.asked * r.cost END;
            IF taken_in[r.ord] IS NULL THEN -- a grant
                changed := true;
                s.credit := least(s.credit + least(units, 2305843009213693952), 2305843009213693952);
                s.since := coalesce(s.since, t);
                s.expires_at := t + window_us;
            ELSE
                -- What came out of credit goes back first, as credit, if the row is still the one that it came from.
                back := least(greatest(coalesce(taken_spent[r.ord], 0), 0), units);
                units := units - back;
                changed := coalesce(back > 0 AND s.since = taken_since[r.ord] AND s.credit < 2305843009213693952, false);
                IF changed THEN
                    s.credit := s.credit + least(back, 2305843009213693952 - s.credit);
                    s.expires_at := greatest(s.expires_at, t + window_us);
                END IF;
                IF s.window_start = taken_in[r.ord] THEN
                    changed := changed OR (units > 0 AND s.count > 0);
                    s.count := s.count - least(units, s.count);
                END IF;
                IF s.count = 0 THEN
                    IF s.credit = 0 THEN -- as good as new
                        t := clock;
                        s.since := NULL;
                    END IF;
                    s.window_start := t;
                END IF;
            END IF;
        END IF;
        remaining := greatest(max_count - s.count, 0) + s.credit;
        granted := CASE
            WHEN r.cost BETWEEN 1 AND max_count THEN least(r.asked, remaining / r.cost)
            WHEN r.cost < 0 THEN r.asked
            ELSE 0
        END;
        IF granted > 0 AND r.cost > 0 THEN
            IF s.credit > 0 THEN -- for what there is no ordinary room
                spent := greatest(granted * r.cost - (remaining - s.credit), 0);
                s.credit := s.credit - spent;
            END IF;
            s.count := s.count + granted * r.cost - spent;
            s.expires_at := t + window_us;
            remaining := remaining - granted * r.cost;
        END IF;
        ends := least(s.window_start + window_us, s.expires_at);
        retry_after_us := CASE
            WHEN granted = r.asked OR (r.cost <= max_count AND remaining >= greatest(r.cost, 1)) THEN 0
            WHEN r.cost <= max_count THEN ends - clock
        END;
        reset_after_us := CASE WHEN s.credit > 0 THEN s.expires_at - clock WHEN s.count > 0 THEN ends - clock ELSE 0 END;

        -- A denial writes nothing, but for a row that the clock has left behind: unwritten, it would deny for ever.
        IF (granted > 0 AND (r.cost > 0 OR changed)) OR (moved AND r.cost BETWEEN 1 AND max_count) THEN
            IF written = 0 OR new_rows[written].tid <> s.tid THEN
                written := written + 1;
            END IF;
            s.expires_at := clock + reset_after_us;
            new_rows[written] := s;
        END IF;

        RETURN NEXT ROW(r.ord, granted, remaining, retry_after_us, reset_after_us, decided_at,
            s.count, s.prev_count, s.window_start, s.credit, NULL::bigint, s.expires_at, NULL::bigint[],
            s.since, s.window_start, NULL::bigint, spent);
    END LOOP;

    IF written > 0 THEN
        PERFORM rate_limit_write(new_rows, 1::smallint, durable);
    END IF;
END
$$;

COMMENT ON FUNCTION rate_limit_fixed_window IS 'Takes from fixed windows of window_us microseconds, each of which admits max_count. A window starts at the first request after the one before has ended.
It returns a row for each key: ord (its place in keys), granted (how many of the counts requests were granted), remaining (the largest cost that would be granted next), retry_after_us (microseconds until the others can be granted; 0: all were; NULL: never), reset_after_us (microseconds until the key is as good as new), decided_at (the database clock at the decision), and the state of the key then: count, prev_count, window_start, credit, scale and expires_at, as in the table. A denial is a row with granted = 0, never an error, and takes nothing. A refund is granted, whatever there was to give back. What is taken commits or rolls back with the transaction.
Example: SELECT * FROM rate_limit_fixed_window(''login'', ARRAY[''user:123''], 10, 60000000) takes one of 10 a minute.
Optional, by name: costs and counts for each key (1 each; a cost of 0 only looks, and one below 0 grants credit above the limit, or, with the taken_since, taken_in, taken_at and taken_spent of a decision that took, gives back what that take still counts, and each unit only once if the caller asks only once), durable => true for rate_limit_durable.';
