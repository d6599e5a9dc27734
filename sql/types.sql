-- The types of the functions that decide, and expressions with a name. The planner puts such an expression in where it
-- is called, so it costs nothing. It does not do so if an argument is costly and used twice: TestExpressionsAreInlined.

-- A row of the tables as an algorithm sees it, and behind that what the algorithm decided about it.
CREATE TYPE rate_limit_row AS (
    tid tid,               -- where the row is; NULL if there is none
    algorithm smallint,
    count bigint,
    prev_count bigint,
    window_start bigint,
    credit bigint,
    scale bigint,
    expires_at bigint,     -- 0, long past, if there is no row or another algorithm wrote it
    since bigint,
    capacity bigint,
    refill bigint,
    returned bigint,
    log bigint[],
    granted bigint,        -- how many of the asked requests were granted
    remaining bigint,      -- the largest cost that would be granted next
    retry_after_us bigint, -- microseconds until the others can be granted; 0: there is room; NULL: never
    reset_after_us bigint, -- microseconds until the key is as good as new
    spent bigint,          -- how much of what was taken came out of granted credit
    taken_at bigint,       -- bucket: where its units end in the queue of missing tokens
    told_log bigint[],     -- log: the entries that a denial waits for, at most 64
    changed boolean,       -- the row has to be written
    durable boolean        -- into rate_limit_durable
);

-- No row, or one of another algorithm, which counts as no row.
CREATE FUNCTION _rate_limit_no_row(tid tid, algorithm smallint) RETURNS rate_limit_row LANGUAGE sql IMMUTABLE AS $$
    SELECT ROW(tid, algorithm, 0, 0, 0, 0, NULL, 0, NULL, NULL, NULL, NULL, NULL,
        0, 0, 0, 0, 0, NULL, NULL, false, NULL)::rate_limit_row
$$;

-- What rate_limit_all returns for each part.
CREATE TYPE rate_limit_decision AS (
    ord bigint,             -- the part's place in the request, from 1
    granted bigint,         -- these four as in rate_limit_row
    remaining bigint,
    retry_after_us bigint,
    reset_after_us bigint,
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
    taken_at bigint,        -- where its units end in the bucket's queue: see TokenBucket.Refund in internal/model
    taken_spent bigint      -- how much of what these requests took came out of granted credit
);

COMMENT ON TYPE rate_limit_decision IS
    'What the rate_limit_ functions decided for one key. The comments on the functions explain it.';

-- The database's clock in microseconds since 1970, unless a test replaces it. date_part is exact until 2106. (If the
-- million were an integer, Postgres would look through all operators: 6 % of a session's first call.)
CREATE FUNCTION _rate_limit_now(now_us bigint) RETURNS bigint LANGUAGE sql AS $$
    SELECT coalesce(now_us, (date_part('epoch', clock_timestamp()) * float8 '1e6')::bigint)
$$;

-- The settings of this transaction; see the functions whose names begin with rate_limit_take_.
CREATE FUNCTION _rate_limit_set(lock_timeout_ms integer, synchronous_commit boolean) RETURNS text LANGUAGE sql AS $$
    SELECT concat(
        CASE WHEN lock_timeout_ms <> -1 THEN set_config('lock_timeout', lock_timeout_ms::text, true) END,
        CASE WHEN synchronous_commit IS NOT NULL
            THEN set_config('synchronous_commit', synchronous_commit::text, true) END)
$$;

-- a / b rounded up, for a >= 0. It cannot overflow.
CREATE FUNCTION _rate_limit_ceil_div(a bigint, b bigint)
RETURNS bigint LANGUAGE sql IMMUTABLE AS $$ SELECT CASE WHEN a > 0 THEN (a - 1) / b + 1 ELSE 0 END $$;

-- What is asked for a key, or NULL if that is not valid or more than the limit. It divides, because the product could
-- overflow.
CREATE FUNCTION _rate_limit_units(cost bigint, asked bigint, max_count bigint)
RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN cost BETWEEN 1 AND max_count AND asked BETWEEN 1 AND max_count / cost THEN cost * asked END
$$;

-- The same for the only key of a call, but more than the limit if that is what is asked.
CREATE FUNCTION _rate_limit_units_of_one(costs bigint[], counts bigint[], max_count bigint)
RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
        WHEN cardinality(costs) = 1 AND cardinality(counts) = 1 AND costs[1] BETWEEN 1 AND max_count AND counts[1] >= 1
            THEN CASE WHEN counts[1] <= max_count / costs[1] THEN costs[1] * counts[1] ELSE max_count + 1 END END
$$;

-- The same for each of several keys, or NULL if something is not valid.
CREATE FUNCTION _rate_limit_units_of_each(keys text[], costs bigint[], counts bigint[], max_count bigint)
RETURNS bigint[] LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    n integer := cardinality(keys);
    units bigint[];
BEGIN
    IF keys[1] IS NULL OR keys[n] IS NULL THEN -- or they are not counted from 1
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

-- The keys that are valid, each once, in the order of locking: longer ones first, then by bytes.
CREATE FUNCTION _rate_limit_in_order(keys text[], units_of bigint[])
RETURNS TABLE (key text, units bigint) LANGUAGE sql IMMUTABLE AS $$
    SELECT DISTINCT ON (octet_length(e.key), e.key COLLATE "C") e.key, e.units
    FROM unnest(keys, units_of) WITH ORDINALITY AS e (key, units, place)
    WHERE e.units IS NOT NULL AND octet_length(e.key) BETWEEN 1 AND 512
    ORDER BY octet_length(e.key) DESC, e.key COLLATE "C", e.place
$$;

-- _rate_limit_late ends a statement that has waited for too many rows in turn. lock_timeout alone would not do that,
-- because it counts anew for each row.
CREATE FUNCTION _rate_limit_late() RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'rate_limit: too many rows are held, one after the other'
        USING ERRCODE = 'lock_not_available', HINT = 'Together they may take 25 times lock_timeout_ms.';
END
$$;

-- _rate_limit_give_up does so if a statement that began then has waited for too long; otherwise it is false.
CREATE FUNCTION _rate_limit_give_up(clock bigint, lock_timeout_ms integer, now_us bigint)
RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF lock_timeout_ms > 0 AND _rate_limit_now(now_us) > clock + lock_timeout_ms * 25000::bigint THEN
        RETURN _rate_limit_late();
    END IF;
    RETURN false;
END
$$;
