-- The types of the functions that decide, and short expressions. The planner inlines such an expression into its
-- caller, so it costs nothing. It cannot do so if a costly argument is used twice: TestExpressionsAreInlined.

-- A row of the tables as an algorithm sees it, followed by the algorithm's decision.
CREATE TYPE rate_limit_row AS (
    tid tid,               -- the row's place in the table; NULL if there is no row
    algorithm smallint,
    count bigint,
    prev_count bigint,
    window_start bigint,
    credit bigint,
    scale bigint,
    expires_at bigint,     -- 0 (long past) if there is no row, or it belongs to another algorithm
    since bigint,
    capacity bigint,
    refill bigint,
    returned bigint,
    log bigint[],
    granted bigint,        -- how many of the requests were granted
    remaining bigint,      -- the largest cost that would be granted next
    retry_after_us bigint, -- microseconds until the others can be granted; 0 if there is room; NULL if never
    reset_after_us bigint, -- microseconds until the key is as good as new
    spent bigint,          -- how many of the units taken came out of granted credit
    taken_at bigint,       -- bucket: where its units end in the queue of missing tokens
    told_log bigint[],     -- log: the entries that determine a denial's retry_after_us, at most 64
    changed boolean,       -- the row has to be written
    durable boolean        -- into rate_limit_durable
);

-- No row. Another algorithm's row counts as none.
CREATE FUNCTION _rate_limit_no_row(tid tid, algorithm smallint) RETURNS rate_limit_row LANGUAGE sql IMMUTABLE AS $$
    SELECT ROW(tid, algorithm, 0, 0, 0, 0, NULL, 0, NULL, NULL, NULL, NULL, NULL,
        0, 0, 0, 0, 0, NULL, NULL, false, NULL)::rate_limit_row
$$;

-- The columns that rate_limit_all returns for each part.
CREATE TYPE rate_limit_decision AS (
    ord bigint,             -- the part's place in the request, counted from 1
    granted bigint,         -- these four are as in rate_limit_row
    remaining bigint,
    retry_after_us bigint,
    reset_after_us bigint,
    decided_at timestamptz, -- the database's clock at the decision; the two columns above count from it
    -- The key's state, as in the table.
    count bigint,
    prev_count bigint,
    window_start bigint,
    credit bigint,
    scale bigint,
    expires_at bigint,
    log bigint[],           -- only the entries that have to leave until retry_after_us; or a bucket's leases
    -- Data that a refund of the last request needs.
    taken_since bigint,     -- the row's since
    taken_in bigint,        -- the row's window_start: the window, the log's entry or the bucket's time
    taken_at bigint,        -- where its units end in the bucket's queue: see TokenBucket.Refund in internal/model
    taken_spent bigint      -- how many units of these requests came out of granted credit
);

COMMENT ON TYPE rate_limit_decision IS
    'What the rate_limit_ functions decided for one key. The comments on the functions explain it.';

-- The database's clock in microseconds since 1970, unless a test replaces it. date_part is exact until 2106. (With an
-- integer million, Postgres would look through all operators, for 6 % of a session's first call.)
CREATE FUNCTION _rate_limit_now(now_us bigint) RETURNS bigint LANGUAGE sql AS $$
    SELECT coalesce(now_us, (date_part('epoch', clock_timestamp()) * float8 '1e6')::bigint)
$$;

-- The transaction's settings; see the rate_limit_take_ functions.
CREATE FUNCTION _rate_limit_set(lock_timeout_ms integer, synchronous_commit boolean) RETURNS text LANGUAGE sql AS $$
    SELECT concat(
        CASE WHEN lock_timeout_ms <> -1 THEN set_config('lock_timeout', lock_timeout_ms::text, true) END,
        CASE WHEN synchronous_commit IS NOT NULL
            THEN set_config('synchronous_commit', synchronous_commit::text, true) END)
$$;

-- a / b rounded up, for a >= 0. It cannot overflow.
CREATE FUNCTION _rate_limit_ceil_div(a bigint, b bigint)
RETURNS bigint LANGUAGE sql IMMUTABLE AS $$ SELECT CASE WHEN a > 0 THEN (a - 1) / b + 1 ELSE 0 END $$;

-- The units for a key, or NULL if the arguments are invalid or ask for more than the limit. It divides, because the
-- product could overflow.
CREATE FUNCTION _rate_limit_units(cost bigint, asked bigint, max_count bigint)
RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN cost BETWEEN 1 AND max_count AND asked BETWEEN 1 AND max_count / cost THEN cost * asked END
$$;

-- The same for a call's only key, but it may return more than the limit.
CREATE FUNCTION _rate_limit_units_of_one(costs bigint[], counts bigint[], max_count bigint)
RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
        WHEN cardinality(costs) = 1 AND cardinality(counts) = 1 AND costs[1] BETWEEN 1 AND max_count AND counts[1] >= 1
            THEN CASE WHEN counts[1] <= max_count / costs[1] THEN costs[1] * counts[1] ELSE max_count + 1 END END
$$;

-- The same for each of several keys, or NULL if something is invalid.
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

-- The valid keys in the order of locking, each once: longer ones first, then by bytes.
CREATE FUNCTION _rate_limit_in_order(keys text[], units_of bigint[])
RETURNS TABLE (key text, units bigint) LANGUAGE sql IMMUTABLE AS $$
    SELECT DISTINCT ON (octet_length(e.key), e.key COLLATE "C") e.key, e.units
    FROM unnest(keys, units_of) WITH ORDINALITY AS e (key, units, place)
    WHERE e.units IS NOT NULL AND octet_length(e.key) BETWEEN 1 AND 512
    ORDER BY octet_length(e.key) DESC, e.key COLLATE "C", e.place
$$;

-- _rate_limit_late ends a statement that has waited too long in total. lock_timeout alone cannot do that, because it
-- begins again for each row.
CREATE FUNCTION _rate_limit_late() RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'rate_limit: too many rows are held, one after the other'
        USING ERRCODE = 'lock_not_available', HINT = 'Together they may take 25 times lock_timeout_ms.';
END
$$;

-- _rate_limit_give_up calls it if a statement that began at the given time has waited too long; otherwise it returns
-- false.
CREATE FUNCTION _rate_limit_give_up(clock bigint, lock_timeout_ms integer, now_us bigint)
RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF lock_timeout_ms > 0 AND _rate_limit_now(now_us) > clock + lock_timeout_ms * 25000::bigint THEN
        RETURN _rate_limit_late();
    END IF;
    RETURN false;
END
$$;
