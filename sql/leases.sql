-- rate_limit_report_leases replaces what rate_limit_lease says of a process. The arrays have an element for each key,
-- and none if the process holds nothing any more. Of other processes, it deletes some rows that ended a minute ago or
-- more.
--
--   process                who reports, in 1 to 128 bytes
--   names, keys, durables  limiters, keys, and in which table they are
--   held                   how many units are left. Elements for the same key are added up, and the 100 keys with the
--                          most are kept
--   ends_in_us             when they end, in microseconds from now
CREATE FUNCTION rate_limit_report_leases(
    process text, names text[], keys text[], durables boolean[], held bigint[], ends_in_us bigint[]
) RETURNS void
LANGUAGE plpgsql
SECURITY DEFINER
SET enable_nestloop = on
SET enable_seqscan = off
SET lock_timeout = '100ms' -- for a table that somebody alters; the next report comes soon
AS $$
#variable_conflict use_variable
DECLARE
    clock timestamptz := clock_timestamp();
    ended tid[];
BEGIN
    IF (octet_length(process) BETWEEN 1 AND 128) IS NOT TRUE THEN
        RAISE EXCEPTION 'rate_limit: process must have 1 to 128 bytes'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'It tells processes apart: the host and the process id.';
    END IF;
    DELETE FROM rate_limit_lease AS l WHERE l.process = process COLLATE "C";
    INSERT INTO rate_limit_lease AS l (process, name, key, durable, held, ends_at, reported_at)
    SELECT process, e.name, e.key, e.durable, least(e.held, 9223372036854775807)::bigint,
        clock + e.ends_in_us * interval '1 microsecond', clock
    FROM (
        SELECT e.name, e.key, e.durable, sum(e.held) AS held, max(e.ends_in_us) AS ends_in_us
        FROM unnest(names, keys, durables, held, ends_in_us) AS e (name, key, durable, held, ends_in_us)
        WHERE octet_length(e.name) BETWEEN 1 AND 128 AND octet_length(e.key) BETWEEN 1 AND 512
            AND e.durable IS NOT NULL
            AND e.held > 0 AND e.ends_in_us BETWEEN 1 AND 9223372036854775 -- the longest duration of Go
        GROUP BY e.name, e.key, e.durable
        ORDER BY sum(e.held) DESC, e.name COLLATE "C", e.key COLLATE "C", e.durable
        LIMIT 100
    ) AS e
    ORDER BY e.name COLLATE "C", e.key COLLATE "C", e.durable -- two reports of one process must not deadlock
    ON CONFLICT DO NOTHING; -- of another report by the same process
    -- It waits for no row that somebody else is deleting.
    ended := ARRAY(
        SELECT l.ctid FROM rate_limit_lease AS l
        WHERE l.ends_at < clock - interval '1 minute'
        ORDER BY l.ends_at LIMIT 100
        FOR UPDATE SKIP LOCKED);
    DELETE FROM rate_limit_lease AS l WHERE l.ctid = ANY (ended);
END
$$;

COMMENT ON FUNCTION rate_limit_report_leases IS
    'Replaces what rate_limit_lease says of a process. Elements for the same key are added up. '
    'It also deletes some rows of other processes that ended a minute ago or more.
Example: SELECT rate_limit_report_leases(''host/1'', ARRAY[''api''], ARRAY[''user:123''], ARRAY[false], ARRAY[50], '
    'ARRAY[20000000])';
