-- The token bucket; tokenbucket.go holds its specification and its model, and the two read side by side.
--
--   name                the limiter's name, 1 to 128 bytes
--   keys                who asks, 1 to 512 bytes each; a key that stands several times is decided in that order
--   capacity            tokens in a full bucket; capacity * every_us may reach 2^62
--   refill              tokens that flow in, evenly, over every_us; at least 1
--   every_us            in microseconds, at least 1; to fill an empty bucket may take 2^51 microseconds (71 years)
--   costs               cost of one request, for each key; NULL means 1 each. A cost of 0 takes nothing and tells whether 1 would
--                       fit; a cost below 0 gives back, or grants, see taken_in; a cost above capacity is denied with
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
CREATE FUNCTION rate_limit_token_bucket(
    name text,
    keys text[],
    capacity bigint,
    refill bigint,
    every_us bigint,
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
    full_credit bigint;  -- credit of a full bucket
    need bigint;
BEGIN
    IF (capacity >= 1 AND refill >= 1 AND every_us >= 1 AND capacity <= 4611686018427387904 / every_us
            AND (capacity * every_us - 1) / refill < 2251799813685248) IS NOT TRUE THEN
        RAISE EXCEPTION 'rate_limit: capacity %, refill % and every_us % are outside the exact range', capacity, refill, every_us
            USING ERRCODE = 'invalid_parameter_value',
                HINT = 'All are at least 1, capacity * every_us is at most 2^62, and divided by refill it is at most 2^51.';
    END IF;
    full_credit := capacity * every_us;
    asked_rows := rate_limit_lock(name, keys, costs, counts, capacity, 3::smallint, durable, lock_timeout_ms, synchronous_commit, taken_in, skip_held);

    -- The clock is read with every lock held: read before, it could be older than the rows that a lock waited for.
    decided_at := coalesce(now, clock_timestamp());
    clock := (extract(epoch FROM decided_at) * 1000000)::bigint;

    FOREACH r IN ARRAY asked_rows LOOP
        -- Roll the row forward to the clock, unless it is the row of the element before: that goes on from its decision.
        IF (r.tid = s.tid) IS NOT TRUE THEN
            s := r;
            moved := false;
            IF clock >= s.expires_at THEN
                s.count := 0;
                s.credit := full_credit;
                s.window_start := clock;
            ELSE
                IF s.scale <> every_us OR s.capacity <> capacity OR s.refill <> refill THEN -- what was taken before stays taken
                    s.since := greatest(s.since + 1, s.window_start, clock);
                    s.returned := 0;
                END IF;
                IF s.scale <> every_us THEN
                    -- The policy has changed. Whole tokens are kept, and the part of one, rounded down; its product may
                    -- need 128 bits, which only numeric has, and this runs only until the next grant.
                    s.credit := CASE WHEN s.credit / s.scale >= capacity THEN full_credit
                        ELSE s.credit / s.scale * every_us + div((s.credit % s.scale)::numeric * every_us, s.scale)::bigint END;
                END IF;
                s.credit := least(s.credit, full_credit);
                IF s.credit = full_credit AND s.count = 0 THEN -- the capacity is lower now: as good as new
                    s.window_start := clock;
                    s.expires_at := clock;
                ELSIF s.window_start - clock > (full_credit - 1) / refill + 1 THEN
                    s.window_start := clock;
                    s.since := greatest(s.since + 1, clock);
                    s.returned := 0;
                    s.expires_at := clock + (full_credit - CASE WHEN s.count > 0 THEN 0 ELSE s.credit END - 1) / refill + 1;
                    moved := true;
                END IF;
            END IF;
            s.scale := every_us;
            s.capacity := capacity;
            s.refill := refill;
            t := greatest(clock, s.window_start);
            -- Asked by division, because the product overflows after a long time.
            IF s.credit < full_credit AND t - s.window_start <= (full_credit - s.credit - 1) / refill THEN
                s.credit := s.credit + (t - s.window_start) * refill;
            ELSE
                s.credit := full_credit;
                IF s.count = 0 THEN -- as good as new
                    s.since := t;
                    s.returned := 0;
                END IF;
            END IF;
            s.window_start := t;
        END IF;
        spent := 0;

        IF r.cost < 0 THEN
            -- By division, because the product could overflow.
            units := CASE WHEN r.asked > -(9223372036854775807 / r.cost) THEN 9223372036854775807 ELSE -r.asked * r.cost END;
            IF taken_in[r.ord] IS NULL THEN -- a grant
                changed := true;
                s.count := least(s.count + least(units, 2305843009213693952), 2305843009213693952);
                s.expires_at := t + (full_credit - 1) / refill + 1;
            ELSE
                -- What came out of credit goes back first, as credit, if the row is still the one that it came from.
                back := least(greatest(coalesce(taken_spent[r.ord], 0), 0), units);
                units := units - back;
                changed := coalesce(back > 0 AND s.since = taken_since[r.ord] AND s.count < 2305843009213693952 AND (s.count > 0 OR s.credit < full_credit), false);
                IF changed THEN
                    s.count := s.count + least(back, 2305843009213693952 - s.count);
                    s.expires_at := greatest(s.expires_at, t + (full_credit - 1) / refill + 1);
                END IF;
                -- Where the units are in the queue of missing tokens: see TokenBucket.refund in tokenbucket.go.
                IF s.since = taken_since[r.ord] AND taken_in[r.ord] BETWEEN 0 AND t AND s.credit < full_credit THEN
                    units := least(units, capacity) * every_us;
                    need := least(greatest(greatest(coalesce(taken_at[r.ord], 0), 0) - s.returned, units), full_credit);
                    back := CASE
                        WHEN t - taken_in[r.ord] <= need / refill THEN least(units, need - (t - taken_in[r.ord]) * refill, full_credit - s.credit)
                        ELSE 0
                    END;
                    changed := changed OR back > 0;
                    s.credit := s.credit + back;
                    s.returned := s.returned + back;
                    IF s.returned > 2305843009213693952 THEN -- lest the sum overflow
                        s.since := greatest(s.since + 1, t);
                        s.returned := 0;
                    END IF;
                END IF;
                IF changed AND s.credit = full_credit AND s.count = 0 THEN -- as good as new
                    t := clock;
                    s.window_start := clock;
                    s.since := clock;
                    s.returned := 0;
                END IF;
            END IF;
        END IF;
        remaining := s.credit / every_us + s.count;
        granted := CASE
            WHEN r.cost BETWEEN 1 AND capacity THEN least(r.asked, remaining / r.cost)
            WHEN r.cost < 0 THEN r.asked
            ELSE 0
        END;
        IF granted > 0 AND r.cost > 0 THEN
            IF s.count > 0 THEN -- for what there is no ordinary room
                spent := greatest(granted * r.cost - (remaining - s.count), 0);
                s.count := s.count - spent;
            END IF;
            s.credit := s.credit - (granted * r.cost - spent) * every_us;
            s.expires_at := t + (full_credit - 1) / refill + 1;
            remaining := remaining - granted * r.cost;
        END IF;

        IF granted = r.asked THEN
            retry_after_us := 0;
        ELSIF r.cost > capacity THEN
            retry_after_us := NULL;
        ELSIF remaining >= greatest(r.cost, 1) THEN
            retry_after_us := 0;
        ELSE
            need := (greatest(r.cost, 1) - s.count) * every_us - s.credit;
            retry_after_us := least(t + (need - 1) / refill + 1, s.expires_at) - clock;
        END IF;
        need := full_credit - s.credit;
        reset_after_us := CASE WHEN s.count > 0 THEN s.expires_at - clock WHEN need > 0 THEN least(t + (need - 1) / refill + 1, s.expires_at) - clock ELSE 0 END;

        -- A denial writes nothing, but for a row that the clock has left behind: unwritten, it would deny for ever.
        IF (granted > 0 AND (r.cost > 0 OR changed)) OR (moved AND r.cost BETWEEN 1 AND capacity) THEN
            IF written = 0 OR new_rows[written].tid <> s.tid THEN
                written := written + 1;
            END IF;
            s.expires_at := clock + reset_after_us;
            new_rows[written] := s;
        END IF;

        RETURN NEXT ROW(r.ord, granted, remaining, retry_after_us, reset_after_us, decided_at,
            s.count, s.prev_count, s.window_start, s.credit, s.scale, s.expires_at, NULL::bigint[],
            s.since, s.window_start, s.returned + full_credit - s.credit, spent);
    END LOOP;

    IF written > 0 THEN
        PERFORM rate_limit_write(new_rows, 3::smallint, durable);
    END IF;
END
$$;

COMMENT ON FUNCTION rate_limit_token_bucket IS 'Takes from token buckets, which hold capacity tokens, start full, and get refill tokens, evenly, over every_us microseconds.
It returns a row for each key: ord (its place in keys), granted (how many of the counts requests were granted), remaining (the largest cost that would be granted next), retry_after_us (microseconds until the others can be granted; 0: all were; NULL: never), reset_after_us (microseconds until the key is as good as new), decided_at (the database clock at the decision), and the state of the key then: count, prev_count, window_start, credit, scale and expires_at, as in the table. A denial is a row with granted = 0, never an error, and takes nothing. A refund is granted, whatever there was to give back. What is taken commits or rolls back with the transaction.
Example: SELECT * FROM rate_limit_token_bucket(''api'', ARRAY[''user:123''], 20, 5, 10000000) takes one token from a bucket of 20 that gets 5 more every 10 seconds.
Optional, by name: costs and counts for each key (1 each; a cost of 0 only looks, and one below 0 grants credit above the limit, or, with the taken_since, taken_in, taken_at and taken_spent of a decision that took, gives back what that take still counts, and each unit only once if the caller asks only once), durable => true for rate_limit_durable.';
