-- What processes have taken ahead for their leases, as they report it (Lease in Go). It is for people. No decision
-- reads it, and whatever it says, the limit holds. So it is unlogged, and a crash of the server empties it.
CREATE UNLOGGED TABLE rate_limit_lease (
    process     text COLLATE "C" NOT NULL,
    name        text COLLATE "C" NOT NULL,
    key         text COLLATE "C" NOT NULL,
    durable     boolean NOT NULL,
    held        bigint NOT NULL,
    ends_at     timestamptz NOT NULL,
    reported_at timestamptz NOT NULL,
    CONSTRAINT rate_limit_lease_pkey PRIMARY KEY (process, name, key, durable)
);

-- For the rows that processes have left behind.
CREATE INDEX rate_limit_lease_ends_at ON rate_limit_lease (ends_at);

COMMENT ON TABLE rate_limit_lease IS
    'What processes hold by leases, as they report it every 10 seconds: of each process, up to 100 rows with the most. '
    'The rows of a process that has died stay until another one reports, a minute or more after they have ended.';
COMMENT ON COLUMN rate_limit_lease.process IS
    'Who: the host, the process id there, and a number for each client in it.';
COMMENT ON COLUMN rate_limit_lease.name IS 'Name of the limiter.';
COMMENT ON COLUMN rate_limit_lease.key IS 'Of which key.';
COMMENT ON COLUMN rate_limit_lease.durable IS
    'Where the key is: in rate_limit_durable if true, in rate_limit_ephemeral if false.';
COMMENT ON COLUMN rate_limit_lease.held IS 'How many units it had taken ahead, and not spent, when it reported.';
COMMENT ON COLUMN rate_limit_lease.ends_at IS 'When the lease ends. Nothing of it is spent later.';
COMMENT ON COLUMN rate_limit_lease.reported_at IS 'When the report came.';

-- rate_limit_report_leases replaces what rate_limit_lease says of a process. The arrays have an element for each key,
-- and none if the process holds nothing any more. Of other processes, it deletes some rows that ended a minute ago or
-- more.
--
--   process      who reports, in 1 to 128 bytes
--   names, keys  limiters and keys
--   durables     in which table
--   held         how many units are left. Elements for the same key are added up, and the 100 keys with the most are
--                kept
--   ends_in_us   when they end, in microseconds from now
CREATE FUNCTION rate_limit_report_leases(
    process text,
    names text[],
    keys text[],
    durables boolean[],
    held bigint[],
    ends_in_us bigint[]
)
RETURNS void
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
