-- An element of a request with its row, as it was found or as it is to be written. All of this is internal.
CREATE TYPE rate_limit_row AS (
    ord bigint,          -- the element's place in the request, from 1
    cost bigint,
    asked bigint,        -- how many requests of that cost
    tid tid,             -- where the row is; NULL if there is none
    count bigint,
    prev_count bigint,
    window_start bigint,
    credit bigint,
    scale bigint,
    expires_at bigint,   -- 0, long past, if there is no row or another algorithm wrote it
    since bigint,
    capacity bigint,
    refill bigint,
    returned bigint,
    log bigint[]         -- of a sliding window log; what is leased of a bucket; otherwise NULL
);

-- What the functions return for each element of a request.
CREATE TYPE rate_limit_decision AS (
    ord bigint,             -- the element's place in the request, from 1
    granted bigint,         -- how many of the asked requests were granted
    remaining bigint,       -- the largest cost that would be granted next
    retry_after_us bigint,  -- microseconds until the others can be granted; 0: all were; NULL: never
    reset_after_us bigint,  -- microseconds until the key is as good as new
    decided_at timestamptz, -- the database's clock at the decision, from which the two above count
    -- The key's state, as in the table.
    count bigint,
    prev_count bigint,
    window_start bigint,
    credit bigint,
    scale bigint,
    expires_at bigint,
    log bigint[],           -- only the entries that have to leave until retry_after_us; or what was leased of a bucket
    -- What a refund of the last request has to tell.
    taken_since bigint,     -- the row's since
    taken_in bigint,        -- its window_start: the window, the entry of the log or the time in the bucket's life
    taken_at bigint,        -- where its units end in the bucket's queue: see TokenBucket.refund in tokenbucket.go
    taken_spent bigint      -- how much of what these requests took came out of granted credit
);

COMMENT ON TYPE rate_limit_decision IS
    'What the rate_limit_ functions decided for one key. The comments on the functions explain it.';

-- _rate_limit_late ends a statement that has waited for too many rows in turn. lock_timeout alone would not do that,
-- because it counts anew for each row.
CREATE FUNCTION _rate_limit_late()
RETURNS boolean
LANGUAGE plpgsql
AS $$
BEGIN
    RAISE EXCEPTION 'rate_limit: too many rows are held, one after the other'
        USING ERRCODE = 'lock_not_available', HINT = 'Together they may take 25 times lock_timeout_ms.';
END
$$;

-- _rate_limit_give_up does so if the statement's first reading of the clock is too long ago; otherwise it is false. It
-- is called for rows that were waited for, so a statement that waits for none need not prepare its expressions.
CREATE FUNCTION _rate_limit_give_up(
    clock bigint,
    lock_timeout_ms integer,
    now_us bigint
)
RETURNS boolean
LANGUAGE plpgsql
AS $$
BEGIN
    IF lock_timeout_ms > 0 AND {{include "reading"}}
            > clock + lock_timeout_ms * 25000::bigint
    THEN
        RETURN _rate_limit_late();
    END IF;
    RETURN false;
END
$$;
