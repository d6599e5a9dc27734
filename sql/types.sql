-- This file has the types of the functions that decide, and short functions. Postgres inlines most of these functions
-- into their callers, so they cost nothing. Postgres does not inline a function that uses a costly argument twice: see
-- TestExpressionsAreInlined.

-- rate_limit_row is a row of the tables as an algorithm sees it, with the algorithm's decision.
CREATE TYPE rate_limit_row AS (
    tid tid,               -- the row's place in the table; NULL if there is no row
    algorithm smallint,
    count bigint,
    prev_count bigint,
    window_start bigint,
    credit bigint,
    scale bigint,
    expires_at bigint,     -- 0 if there is no row, or the row belongs to another algorithm
    since bigint,
    capacity bigint,
    refill bigint,
    returned bigint,
    log bigint[],
    held bigint,           -- the units of the live holds; NULL if there is none
    held_next bigint,      -- the earliest end of these holds
    held_until bigint,     -- the last end of these holds
    granted bigint,        -- how many requests were granted
    remaining bigint,      -- the largest cost that fits now
    retry_after_us bigint, -- microseconds until the denied requests may fit; 0 if they fit now; NULL if they never fit
    reset_after_us bigint, -- microseconds until the key is as good as new
    spent bigint,          -- how many of the granted units were paid with granted credit
    taken_at bigint,       -- bucket: the position of the last unit in the queue of missing tokens
    told_log bigint[],     -- log: the entries that determine a denial's retry_after_us, at most 64. Settlement of a
                           -- hold: how many units it has counted, 1 if the hold had ended, and when it was settled
    changed boolean,       -- whether the row must be written
    moved boolean,         -- whether the clock was set back, so that the row's times were set back too
    durable boolean        -- whether the row is in rate_limit_durable
);

-- _rate_limit_no_row returns the state of a key without a row. A row of another algorithm counts as no row,
-- but it keeps the holds.
CREATE FUNCTION _rate_limit_no_row(
    tid tid, algorithm smallint, held bigint, held_next bigint, held_until bigint
) RETURNS rate_limit_row LANGUAGE sql IMMUTABLE AS $$
    SELECT ROW(tid, algorithm, 0, 0, 0, 0, NULL, 0, NULL, NULL, NULL, NULL, NULL, held, held_next, held_until,
        0, 0, 0, 0, 0, NULL, NULL, false, false, NULL)::rate_limit_row
$$;

-- rate_limit_decision has the columns that rate_limit_all returns for each part of a request.
CREATE TYPE rate_limit_decision AS (
    ord bigint,             -- the part's number, counted from 1
    granted bigint,         -- this column and the next three are as in rate_limit_row
    remaining bigint,
    retry_after_us bigint,
    reset_after_us bigint,
    decided_at timestamptz, -- the time of the decision, from which retry_after_us and reset_after_us count
    -- These columns are the key's row after the decision.
    count bigint,
    prev_count bigint,
    window_start bigint,
    credit bigint,
    scale bigint,
    expires_at bigint,
    log bigint[],           -- the log entries that must leave before retry_after_us, a bucket's leases, or the answer
                            -- of a settlement: see told_log
    -- These columns are data that a refund of the last request needs.
    taken_since bigint,     -- the row's since
    taken_in bigint,        -- the row's window_start: the time of the window, the log entry or the bucket
    taken_at bigint,        -- the last unit's position in the bucket's queue: see TokenBucket.Refund in internal/model
    taken_spent bigint,     -- how many units were paid with granted credit
    held bigint             -- the units of the key's live holds after the decision
);

COMMENT ON TYPE rate_limit_decision IS
    'The decision for one key. sql/types.sql explains the columns.';

-- _rate_limit_now returns the database's time in microseconds since 1970, or now_us if a test sets it. date_part is
-- exact until 2106. (With an integer million, looking for the operator would take 6 % of a session's first call.)
CREATE FUNCTION _rate_limit_now(now_us bigint) RETURNS bigint LANGUAGE sql AS $$
    SELECT coalesce(now_us, (date_part('epoch', clock_timestamp()) * float8 '1e6')::bigint)
$$;

-- _rate_limit_set sets lock_timeout and synchronous_commit until the end of the transaction.
CREATE FUNCTION _rate_limit_set(lock_timeout_ms integer, synchronous_commit boolean) RETURNS text LANGUAGE sql AS $$
    SELECT concat(
        CASE WHEN lock_timeout_ms <> -1 THEN set_config('lock_timeout', lock_timeout_ms::text, true) END,
        CASE WHEN synchronous_commit IS NOT NULL
            THEN set_config('synchronous_commit', synchronous_commit::text, true) END)
$$;

-- _rate_limit_ceil_div returns a / b, rounded up, for a >= 0. The computation cannot overflow.
CREATE FUNCTION _rate_limit_ceil_div(a bigint, b bigint)
RETURNS bigint LANGUAGE sql IMMUTABLE AS $$ SELECT CASE WHEN a > 0 THEN (a - 1) / b + 1 ELSE 0 END $$;

-- _rate_limit_units returns cost * asked. _rate_limit_units returns NULL if the arguments are invalid or the product is
-- above the limit. The comparison divides, because the product could overflow.
CREATE FUNCTION _rate_limit_units(cost bigint, asked bigint, max_count bigint)
RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN cost BETWEEN 1 AND max_count AND asked BETWEEN 1 AND max_count / cost THEN cost * asked END
$$;

-- _rate_limit_units_of_one returns cost * count of a call's only key, or max_count + 1 if that is above the limit.
CREATE FUNCTION _rate_limit_units_of_one(costs bigint[], counts bigint[], max_count bigint)
RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
        WHEN cardinality(costs) = 1 AND cardinality(counts) = 1 AND costs[1] BETWEEN 1 AND max_count AND counts[1] >= 1
            THEN CASE WHEN counts[1] <= max_count / costs[1] THEN costs[1] * counts[1] ELSE max_count + 1 END END
$$;

-- _rate_limit_units_of_each returns cost * count of each key, or NULL if an argument is invalid.
CREATE FUNCTION _rate_limit_units_of_each(keys text[], costs bigint[], counts bigint[], max_count bigint)
RETURNS bigint[] LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    n integer := cardinality(keys);
    units bigint[];
BEGIN
    IF keys[1] IS NULL OR keys[n] IS NULL THEN -- NULL also if the array begins elsewhere
        RETURN NULL;
    ELSIF num_nonnulls(costs, counts) = 0 THEN
        RETURN array_fill(1::bigint, ARRAY[n]);
    ELSIF coalesce(cardinality(costs), n) <> n OR coalesce(cardinality(counts), n) <> n THEN
        RETURN NULL;
    END IF;
    units := ARRAY(
        SELECT _rate_limit_units(CASE WHEN costs IS NULL THEN 1::bigint ELSE costs[i] END,
            CASE WHEN counts IS NULL THEN 1::bigint ELSE counts[i] END, max_count)
        FROM generate_series(1, n) AS i
        ORDER BY i);
    RETURN CASE WHEN array_position(units, NULL) IS NULL THEN units END;
END
$$;

-- _rate_limit_keys_in_lock_order returns each valid key once, in lock order: longer keys first, then by bytes.
CREATE FUNCTION _rate_limit_keys_in_lock_order(keys text[], units_of bigint[])
RETURNS TABLE (key text, units bigint) LANGUAGE sql IMMUTABLE AS $$
    SELECT DISTINCT ON (octet_length(e.key), e.key COLLATE "C") e.key, e.units
    FROM unnest(keys, units_of) WITH ORDINALITY AS e (key, units, place)
    WHERE e.units IS NOT NULL AND octet_length(e.key) BETWEEN 1 AND 512
    ORDER BY octet_length(e.key) DESC, e.key COLLATE "C", e.place
$$;

-- _rate_limit_late raises an error that ends a statement after several waits for rows. lock_timeout counts the wait for
-- each row separately, so lock_timeout alone cannot end the statement.
CREATE FUNCTION _rate_limit_late() RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'rate_limit: too many rows are held, one after the other'
        USING ERRCODE = 'lock_not_available', HINT = 'Together they may take 25 times lock_timeout_ms.';
END
$$;

-- _rate_limit_give_up returns false, or raises an error if 25 times lock_timeout_ms have passed since clock.
CREATE FUNCTION _rate_limit_give_up(clock bigint, lock_timeout_ms integer, now_us bigint)
RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF lock_timeout_ms > 0 AND _rate_limit_now(now_us) > clock + lock_timeout_ms * 25000::bigint THEN
        RETURN _rate_limit_late();
    END IF;
    RETURN false;
END
$$;
