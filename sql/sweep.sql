-- rate_limit_sweep deletes expired rows, a limited number in each call. The package cleanup calls rate_limit_sweep
-- repeatedly, each time in a short transaction. pg_cron calls rate_limit_sweep once a minute, with the larger defaults.
--
--   max_rows       how many rows this call may delete. The rows stay locked until the call commits
--   max_pages      how many pages of 8 kB this call may read
--   names          the limiters that still exist. All rows of other limiters are deleted, expired or not. NULL means
--                  that only expired rows are deleted
--   sweeper        the caller's id. A pass through the tables may take several calls, and belongs to one sweeper. For
--                  other sweepers, skipped is true until the pass has ended, or has had no call for 10 s. NULL means
--                  that this call is a whole pass
--   at_most_every  the shortest time between the end of a pass and the next pass. Until then, skipped is true
--   now            the time in tests; otherwise NULL
--
-- Sweeping changes no decision, because an expired row means the same as no row. After locking a row, the sweeper
-- checks again whether the row has expired. A call that waits for the lock finds no row, and makes the row again. The
-- sweeper does not see rows that are being made, and skips locked rows.
--
-- Holds are deleted an hour after they were settled, or a day after their end.
--
-- synchronous_commit is off until the transaction ends. A row that comes back after a crash is still expired.
--
-- Rows are kept for a minute after they have expired. So if the clock is set back by up to a minute, no decision
-- changes. If the clock is set back by more, the keys of rows that were deleted too early are as good as new, once. The
-- minute also keeps rows of keys that soon return, because an UPDATE is cheaper than an INSERT.
--
-- The sweeper reads the tables in their order on disk by ranges of ctid (a TID range scan, from Postgres 14 on), so it
-- needs no index. A pass continues where the previous call stopped, even if another sweeper made that call.
-- rate_limit_sweeper stores the place and the sweeper. Advisory locks would not work through PgBouncer in transaction
-- mode: a session's lock can be lost or left behind, and a transaction's lock is free between two calls.
CREATE FUNCTION rate_limit_sweep(
    max_rows integer DEFAULT 50000, max_pages integer DEFAULT 50000, names text[] DEFAULT NULL,
    sweeper text DEFAULT NULL, at_most_every interval DEFAULT NULL, now timestamptz DEFAULT NULL,
    OUT skipped boolean, OUT complete boolean, OUT scanned bigint, OUT deleted bigint, OUT page bigint, OUT pages bigint
)
LANGUAGE plpgsql
SECURITY DEFINER
SET enable_nestloop = on
SET enable_seqscan = off -- a plan for a small table must not scan the whole table after it has grown
SET lock_timeout = '1s'  -- for tables that are being altered; the sweeper does not wait for rows
AS $$
#variable_conflict use_variable
DECLARE
    s rate_limit_sweeper;
    clock timestamptz;
    page_bytes bigint := current_setting('block_size')::bigint;
    expired bigint; -- rows that expired before this time are deleted
    sizes bigint[]; -- the sizes of the four tables, in pages
    place integer;  -- the current table's place in sizes
    size bigint;    -- the size of the current table, in pages
    first tid;      -- the sweeper reads next from first to past
    past tid;
    past_page bigint;
    tids tid[];     -- the rows between first and past to delete
    room bigint;    -- how many rows may still be deleted
    n bigint;
    ignored text;
BEGIN
    IF (max_rows >= 1 AND max_pages >= 1 AND coalesce(cardinality(names) >= 1, true)) IS NOT TRUE THEN
        RAISE EXCEPTION 'rate_limit: %', CASE
                WHEN (max_rows >= 1) IS NOT TRUE THEN 'max_rows must be at least 1'
                WHEN (max_pages >= 1) IS NOT TRUE THEN 'max_pages must be at least 1'
                ELSE 'names must have at least 1 element' END
            USING ERRCODE = 'invalid_parameter_value', HINT = 'NULL instead of names spares the rows of every limiter.';
    END IF;
    ignored := set_config('synchronous_commit', 'off', true);
    SELECT false, 0, 0, 0, 0 INTO complete, scanned, deleted, page, pages;
    -- Without this check, each INSERT would wait for the session that has locked the row.
    IF NOT EXISTS (SELECT FROM rate_limit_sweeper AS w WHERE w.one) THEN
        INSERT INTO rate_limit_sweeper DEFAULT VALUES ON CONFLICT (one) DO NOTHING;
    END IF;
    SELECT * INTO s FROM rate_limit_sweeper AS w WHERE w.one FOR UPDATE SKIP LOCKED;
    clock := coalesce(now, clock_timestamp()); -- after the lock; an earlier reading could be older than the row
    -- BETWEEN prevents that a clock that is set back makes a turn longer.
    skipped := (NOT found
        OR s.held_by IS DISTINCT FROM sweeper AND clock BETWEEN s.held_at AND s.held_at + interval '10 seconds'
        OR NOT s.durable AND NOT s.holds AND s.next_page = 0
            AND clock BETWEEN s.completed_at AND s.completed_at + at_most_every) IS TRUE;
    IF skipped THEN
        RETURN;
    END IF;

    WHILE NOT complete AND scanned < max_pages AND deleted < max_rows LOOP
        sizes := ARRAY(
            SELECT pg_relation_size(y.typrelid) / page_bytes
            FROM unnest(ARRAY[pg_typeof(NULL::rate_limit_ephemeral), pg_typeof(NULL::rate_limit_ephemeral_hold),
                pg_typeof(NULL::rate_limit_durable), pg_typeof(NULL::rate_limit_durable_hold)])
                WITH ORDINALITY AS e (type, place)
            JOIN pg_type AS y ON y.oid = e.type
            ORDER BY e.place);
        place := CASE WHEN s.durable THEN 3 ELSE 1 END + CASE WHEN s.holds THEN 1 ELSE 0 END;
        size := sizes[place];
        s.next_page := least(s.next_page, size);
        past_page := least(s.next_page + max_pages - scanned, size);
        first := format('(%s,0)', s.next_page)::tid;
        past := format('(%s,0)', past_page)::tid;
        room := max_rows - deleted;

        expired := (extract(epoch FROM coalesce(now, clock_timestamp()) - interval '1 minute') * 1000000)::bigint;
        IF s.holds THEN
            -- A live hold is in the sum in its key's row, so it stays until a write to the row notes its end.
            -- If somebody has deleted the row, nothing notes the end.
            IF s.durable THEN
                SELECT array_agg(e.tid) INTO tids
                FROM (
                    SELECT h.ctid AS tid
                    FROM rate_limit_durable_hold AS h
                    WHERE h.ctid >= first AND h.ctid < past
                        AND (_rate_limit_forgotten(h.status, h.ends_at, h.settled_at, expired)
                            OR h.prefix <> ALL (names))
                        AND (h.status <> 0 OR NOT EXISTS (SELECT FROM rate_limit_durable AS d
                            WHERE d.key = h.key AND d.prefix = h.prefix AND d.held IS NOT NULL))
                    LIMIT room
                    FOR UPDATE SKIP LOCKED
                ) AS e;
                DELETE FROM rate_limit_durable_hold AS h WHERE h.ctid = ANY (tids);
            ELSE
                SELECT array_agg(e.tid) INTO tids
                FROM (
                    SELECT h.ctid AS tid
                    FROM rate_limit_ephemeral_hold AS h
                    WHERE h.ctid >= first AND h.ctid < past
                        AND (_rate_limit_forgotten(h.status, h.ends_at, h.settled_at, expired)
                            OR h.prefix <> ALL (names))
                        AND (h.status <> 0 OR NOT EXISTS (SELECT FROM rate_limit_ephemeral AS d
                            WHERE d.key = h.key AND d.prefix = h.prefix AND d.held IS NOT NULL))
                    LIMIT room
                    FOR UPDATE SKIP LOCKED
                ) AS e;
                DELETE FROM rate_limit_ephemeral_hold AS h WHERE h.ctid = ANY (tids);
            END IF;
            GET DIAGNOSTICS n = ROW_COUNT;
        ELSIF NOT s.durable THEN
            SELECT array_agg(e.tid) INTO tids
            FROM (
                SELECT d.ctid AS tid
                FROM rate_limit_ephemeral AS d
                WHERE d.ctid >= first AND d.ctid < past
                    AND (d.expires_at <= expired AND (d.held_until <= expired) IS NOT FALSE OR d.prefix <> ALL (names))
                LIMIT room
                FOR UPDATE SKIP LOCKED
            ) AS e;
            expired := (extract(epoch FROM coalesce(now, clock_timestamp()) - interval '1 minute') * 1000000)::bigint;
            WITH gone AS (
                DELETE FROM rate_limit_ephemeral AS d
                WHERE d.ctid = ANY (tids) AND (d.expires_at <= expired AND (d.held_until <= expired) IS NOT FALSE
                    OR d.prefix <> ALL (names))
                RETURNING d.prefix, d.key, d.held
            ), ended AS (
                UPDATE rate_limit_ephemeral_hold AS h SET status = 1
                FROM gone AS g
                WHERE g.held IS NOT NULL AND h.key = g.key AND h.prefix = g.prefix AND h.status = 0
            )
            SELECT count(*) INTO n FROM gone;
        ELSE
            SELECT array_agg(e.tid) INTO tids
            FROM (
                SELECT d.ctid AS tid
                FROM rate_limit_durable AS d
                WHERE d.ctid >= first AND d.ctid < past
                    AND (d.expires_at <= expired AND (d.held_until <= expired) IS NOT FALSE OR d.prefix <> ALL (names))
                LIMIT room
                FOR UPDATE SKIP LOCKED
            ) AS e;
            expired := (extract(epoch FROM coalesce(now, clock_timestamp()) - interval '1 minute') * 1000000)::bigint;
            WITH gone AS (
                DELETE FROM rate_limit_durable AS d
                WHERE d.ctid = ANY (tids) AND (d.expires_at <= expired AND (d.held_until <= expired) IS NOT FALSE
                    OR d.prefix <> ALL (names))
                RETURNING d.prefix, d.key, d.held
            ), ended AS (
                UPDATE rate_limit_durable_hold AS h SET status = 1
                FROM gone AS g
                WHERE g.held IS NOT NULL AND h.key = g.key AND h.prefix = g.prefix AND h.status = 0
            )
            SELECT count(*) INTO n FROM gone;
        END IF;
        deleted := deleted + n;

        IF cardinality(tids) = room THEN -- the last page may have more rows to delete
            past_page := least((tids[room]::text::point)[0]::bigint, past_page);
            scanned := scanned + past_page - s.next_page;
            s.next_page := past_page;
            EXIT;
        END IF;
        scanned := scanned + past_page - s.next_page;
        s.next_page := past_page;
        IF past_page = size THEN
            -- Go on with the next table that has pages.
            place := (SELECT min(e.place) FROM unnest(sizes) WITH ORDINALITY AS e (size, place)
                WHERE e.place > place AND e.size > 0);
            complete := place IS NULL;
            s.durable := NOT complete AND place > 2;
            s.holds := NOT complete AND place IN (2, 4);
            s.next_page := 0;
        END IF;
    END LOOP;

    pages := (SELECT sum(e.size) FROM unnest(sizes) AS e (size));
    page := CASE WHEN complete THEN pages ELSE s.next_page + (
        SELECT coalesce(sum(e.size), 0) FROM unnest(sizes) WITH ORDINALITY AS e (size, place)
        WHERE e.place < CASE WHEN s.durable THEN 3 ELSE 1 END + CASE WHEN s.holds THEN 1 ELSE 0 END) END;
    clock := coalesce(now, clock_timestamp());
    UPDATE rate_limit_sweeper AS w
    SET durable = s.durable, holds = s.holds, next_page = s.next_page,
        held_by = CASE WHEN NOT complete THEN sweeper END,
        held_at = CASE WHEN NOT complete AND sweeper IS NOT NULL THEN clock END,
        completed_at = CASE WHEN complete THEN clock ELSE w.completed_at END
    WHERE w.one;
END
$$;

COMMENT ON FUNCTION rate_limit_sweep IS
    'Deletes rows that expired a minute ago or more, and holds that were settled an hour ago '
    'or ended a day ago, or more: '
    'at most max_rows of them, from at most max_pages pages. '
    'The next call continues where this one stopped. It does not wait for rows, and changes no decision.
It returns skipped (another sweeper is at work, so nothing was done), '
    'complete (it reached the end of all tables), scanned (how many pages it read), deleted (how many rows), '
    'and page and pages (the page that it has reached, and the number of pages).
Example: SELECT * FROM rate_limit_sweep()
With pg_cron, every minute: SELECT cron.schedule(''rate_limit_sweep'', ''* * * * *'', ''SELECT rate_limit_sweep()'')
names => ARRAY[''login'', ''api''] deletes the rows of all other limiters too, EXPIRED OR NOT.';
