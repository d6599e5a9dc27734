-- This file has the functions for policies in the database. A row of rate_limit_policy is a policy for one key, for all
-- keys with a prefix, or for all keys. A limiter of the Go package uses the rows if its Config.Policies is set. People
-- change the table with psql or with 'pgratelimit policy'. Triggers check and record each change.
--
-- The policy of a key is the row for the exact key, else the row for the longest prefix, else the row for all keys,
-- else the policy in the code. Of several rows for the same target, the row that began last counts, and of these the
-- row with the highest id. Rows that have not begun or have ended do not count. Rows of the mode shadow are looked up
-- separately in the same order.

-- _rate_limit_check_policy refuses a row that limiters could not read. The trigger runs before the constraints, because
-- a constraint's message shows the row, and keys are personal data.
CREATE FUNCTION _rate_limit_check_policy() RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
AS $$
DECLARE
    year_1 CONSTANT timestamptz := timestamptz '0001-01-01 00:00:00Z';
    year_9999 CONSTANT timestamptz := timestamptz '9999-12-31 00:00:00Z';
    wrong text;
    hint text;
    parts record;
BEGIN
    IF TG_OP = 'TRUNCATE' THEN
        RAISE EXCEPTION 'rate_limit: the table of policies cannot be truncated'
            USING ERRCODE = 'feature_not_supported',
                HINT = 'DELETE its rows. Then every process learns of it, and the history tells who did it.';
    END IF;
    SELECT c.name, c.hint INTO wrong, hint
    FROM (VALUES
        -- 0 means that there is no row. In many languages, numbers in JSON are not exact above 2^53.
        ('id', NEW.id = OLD.id OR TG_OP = 'INSERT' AND NEW.id BETWEEN 1 AND 9007199254740992,
            'It comes by itself, from 1 to 9007199254740992 (2^53), and stays, because processes know the row by it.'),
        ('name', octet_length(NEW.name) BETWEEN 1 AND 128, 'It is the name of a limiter, of 1 to 128 bytes.'),
        ('key', coalesce(octet_length(NEW.key) BETWEEN 1 AND 512, true),
            'A key has 1 to 512 bytes. NULL stands for no single key.'),
        ('key_prefix', NEW.key_prefix IS NULL OR NEW.key IS NULL AND octet_length(NEW.key_prefix) BETWEEN 1 AND 512,
            'It has 1 to 512 bytes, and key is NULL then. If both are NULL, the policy is for everybody.'),
        ('mode', NEW.mode IN ('enforce', 'shadow', 'off', 'deny'),
            'It is enforce, shadow, off (allow, and count nothing) or deny.'),
        ('policy', (NEW.mode IN ('enforce', 'shadow')) = (NEW.policy IS NOT NULL),
            'enforce and shadow need one, such as sliding 100/1m. off and deny have none.'),
        ('valid_from', NEW.valid_from = '-infinity' OR NEW.valid_from >= year_1 AND NEW.valid_from < year_9999,
            'It is a time from the year 1 on and before 9999-12-31 (UTC), or -infinity.'),
        ('valid_until', NEW.valid_until > NEW.valid_from AND NEW.valid_until >= year_1
            AND (NEW.valid_until = 'infinity' OR NEW.valid_until < year_9999),
            'It comes after valid_from, from the year 1 on and before 9999-12-31 (UTC). '
            'Without an end it is infinity.'),
        ('comment', NEW.comment ~ '[^[:space:]]', 'It is required: say why, for whoever reads this next.'),
        ('automatic', NEW.automatic IS NOT NULL, 'It is true for bans that limiters have made, and false otherwise.')
    ) AS c (name, fits, hint)
    WHERE c.fits IS NOT TRUE
    LIMIT 1;
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION 'rate_limit: column % of the policy is not valid', wrong
            USING ERRCODE = 'invalid_parameter_value', HINT = hint, COLUMN = wrong;
    END IF;
    IF NEW.policy IS NOT NULL THEN
        SELECT * INTO parts FROM _rate_limit_read_policy(NEW.policy COLLATE "C"); -- raises an error if it is invalid
        IF NEW.mode = 'shadow' AND 6 = ANY (parts.algorithms) THEN
            RAISE EXCEPTION 'rate_limit: column mode of the policy is not valid'
                USING ERRCODE = 'invalid_parameter_value', COLUMN = 'mode',
                    HINT = 'A policy with slots, such as concurrent 5, cannot be a shadow, because nobody would '
                        'release the slots that it gives.';
        END IF;
        IF (octet_length(NEW.name) + CASE WHEN cardinality(parts.algorithms) > 1 THEN 2 ELSE 0 END
            + CASE WHEN NEW.mode = 'shadow' THEN 7 ELSE 0 END > 128)
        THEN
            RAISE EXCEPTION 'rate_limit: column name of the policy is not valid'
                USING ERRCODE = 'invalid_parameter_value', COLUMN = 'name',
                    HINT = 'A policy of several parts adds 2 bytes to the name, and the mode shadow 7. Together '
                        'they are at most 128.';
        END IF;
        BEGIN
            PERFORM timestamptz 'epoch' AT TIME ZONE z.zone FROM unnest(parts.zones) AS z (zone)
            WHERE z.zone <> 'epoch';
        EXCEPTION WHEN invalid_parameter_value THEN
            RAISE EXCEPTION 'rate_limit: the server does not know the time zone of the policy'
                USING ERRCODE = 'invalid_parameter_value', COLUMN = 'policy',
                    HINT = 'pg_timezone_names lists those that it knows. Without a zone it is UTC.';
        END;
    END IF;
    NEW.changed_by := session_user;
    NEW.changed_at := clock_timestamp();
    RETURN NEW;
END
$$;

-- _rate_limit_note_policy writes the history and notifies listeners. Before a statement changes rows, this trigger
-- locks the history until the transaction ends. So the numbers of the history ascend in the order of the commits, and a
-- reader that continues after the last number it has read misses nothing. The lock comes before row locks, so that
-- statements that change policies cannot deadlock with each other.
--
-- The trigger ignores rows from logical replication, because the history is replicated too, and a number assigned here
-- could conflict with a number that arrives later. Processes find such rows when they read all rows from time to time.
CREATE FUNCTION _rate_limit_note_policy() RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET enable_seqscan = off
AS $$
DECLARE
    ids regclass;
    versions regclass;
    -- Numbers above this were written without the check. There must be room below 2^53 for the next ids.
    most CONSTANT bigint := 4503599627370496; -- 2^52
    id bigint;
    version bigint;
BEGIN
    IF TG_LEVEL = 'STATEMENT' THEN
        LOCK TABLE rate_limit_policy_history IN SHARE UPDATE EXCLUSIVE MODE;
        -- Logical replication copies rows and does not advance the sequences. Ids in the history must not be used
        -- again.
        ids := pg_get_serial_sequence(format('%I.%I', TG_TABLE_SCHEMA, TG_TABLE_NAME), 'id');
        versions := pg_get_serial_sequence(format('%I.%I', TG_TABLE_SCHEMA, TG_TABLE_NAME || '_history'), 'version');
        id := (SELECT max(p.id) FROM rate_limit_policy AS p WHERE p.id <= most);
        version := (SELECT max(h.version) FROM rate_limit_policy_history AS h WHERE h.version <= most);
        IF id > coalesce(pg_sequence_last_value(ids), 0) OR version > coalesce(pg_sequence_last_value(versions), 0) THEN
            PERFORM setval(ids, greatest(pg_sequence_last_value(ids), id,
                (SELECT max(h.policy_id) FROM rate_limit_policy_history AS h WHERE h.policy_id <= most)));
            PERFORM setval(versions, greatest(pg_sequence_last_value(versions), version));
        END IF;
        RETURN NULL;
    END IF;
    INSERT INTO rate_limit_policy_history (at, by, action, policy_id, before, after)
    VALUES (clock_timestamp(), session_user, lower(TG_OP), CASE TG_OP WHEN 'DELETE' THEN OLD.id ELSE NEW.id END,
        CASE WHEN TG_OP <> 'INSERT' THEN to_jsonb(OLD) END, CASE WHEN TG_OP <> 'DELETE' THEN to_jsonb(NEW) END);
    IF TG_OP <> 'INSERT' THEN
        -- The counts belong to the old policy. Lock the rows in the same order as rate_limit_report.
        PERFORM FROM rate_limit_shadow AS s WHERE s.policy_id = OLD.id ORDER BY s.key FOR UPDATE;
        DELETE FROM rate_limit_shadow AS s WHERE s.policy_id = OLD.id;
    END IF;
    PERFORM pg_notify('rate_limit', 'policies');
    RETURN NULL;
END
$$;

-- rate_limit_policies returns the policies that have changed since a process last called it, one row for each policy.
-- If no policy has changed, the result is one row whose id is NULL.
--
--   known, known_us      version and changed_us of the previous result. NULL returns all policies that have not ended.
--                        (After a restore, another change may have the same version, but not the same time.)
--   version, changed_us  the number and time of the last change. The result may also have later changes that committed
--                        meanwhile. The next result has these changes again
--   complete             whether the result has all policies; otherwise it has only changes
--   removed              whether the row was deleted; if so, all columns except its id are NULL
--   clock_us, from_us, until_us
--                        the database's clock, valid_from and valid_until, in microseconds since 1970 UTC. NULL means
--                        infinite, or after the year 9999
--   row_changed_us       when the row was last changed, for rate_limit_report
CREATE FUNCTION rate_limit_policies(
    known bigint DEFAULT NULL, known_us bigint DEFAULT NULL,
    OUT version bigint, OUT changed_us bigint, OUT complete boolean, OUT clock_us bigint,
    OUT id bigint, OUT removed boolean, OUT name text, OUT key text, OUT key_prefix text, OUT mode text,
    OUT policy text, OUT from_us bigint, OUT until_us bigint, OUT automatic boolean, OUT row_changed_us bigint
) RETURNS SETOF record
LANGUAGE plpgsql
SECURITY DEFINER
SET enable_nestloop = on
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
DECLARE
    clock timestamptz;
    far CONSTANT timestamptz := timestamptz '9999-12-31 00:00:00Z'; -- later times may not fit into microseconds
BEGIN
    SELECT h.version, (extract(epoch FROM h.at) * 1000000)::bigint INTO version, changed_us
    FROM rate_limit_policy_history AS h
    ORDER BY h.version DESC LIMIT 1;
    version := coalesce(version, 0);
    changed_us := coalesce(changed_us, 0);
    -- Read the clock after the version. Otherwise a policy that begins now could seem to begin later.
    clock := clock_timestamp();
    clock_us := (extract(epoch FROM clock) * 1000000)::bigint;
    complete := known IS NULL;
    IF known = version AND coalesce(known_us, changed_us) = changed_us THEN
        RETURN NEXT;
        RETURN;
    END IF;
    -- Return all policies if the history does not have the known change. The history may have been shortened, or the
    -- database replaced. The history never has version 0.
    complete := NOT EXISTS (
        SELECT FROM rate_limit_policy_history AS h
        WHERE h.version = known AND (known_us IS NULL OR (extract(epoch FROM h.at) * 1000000)::bigint = known_us));
    -- Policies that people wrote come first, because a process may not have room for all policies.
    RETURN QUERY
    SELECT version, changed_us, complete, clock_us, c.id, p.id IS NULL,
        p.name, p.key, p.key_prefix, p.mode, p.policy,
        CASE WHEN p.valid_from > '-infinity' THEN (extract(epoch FROM least(p.valid_from, far)) * 1000000)::bigint END,
        CASE WHEN p.valid_until < far
            THEN (extract(epoch FROM greatest(p.valid_until, timestamptz 'epoch')) * 1000000)::bigint END,
        p.automatic, (extract(epoch FROM p.changed_at) * 1000000)::bigint
    FROM (
        SELECT p.id FROM rate_limit_policy AS p WHERE complete AND p.valid_until > clock
        UNION ALL
        SELECT DISTINCT h.policy_id FROM rate_limit_policy_history AS h WHERE NOT complete AND h.version > known
    ) AS c
    LEFT JOIN LATERAL ( -- the planner must use the index, whatever it estimates
        SELECT p.* FROM rate_limit_policy AS p WHERE p.id = c.id OFFSET 0
    ) AS p ON true
    ORDER BY p.automatic, p.valid_until DESC, c.id;
    IF NOT found THEN
        RETURN NEXT;
    END IF;
END
$$;

COMMENT ON FUNCTION rate_limit_policies IS
    'Returns the policies that have changed since the version in known, or all policies if known is NULL. '
    'Processes listen on the channel rate_limit, or call this from time to time.
Example: SELECT * FROM rate_limit_policies()';

-- rate_limit_ban denies all requests of a key for a time, as the COMMENT below explains. If the key is already banned,
-- the ban does not change. lock_timeout_ms limits the wait for other changes of policies. NULL keeps lock_timeout.
CREATE FUNCTION rate_limit_ban(
    name text, key text, first interval, longest interval, forgiven_after interval, comment text,
    lock_timeout_ms integer DEFAULT NULL, OUT ends timestamptz, OUT made boolean
)
LANGUAGE plpgsql
SECURITY DEFINER
SET enable_nestloop = on
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
DECLARE
    clock timestamptz;
    last record;
    in_force record;
    lasts interval;
    ended bigint[];
    ignored text := _rate_limit_set(lock_timeout_ms, NULL::boolean);
BEGIN
    IF name IS NULL OR key IS NULL THEN
        RAISE EXCEPTION 'rate_limit: % is NULL', CASE WHEN name IS NULL THEN 'name' ELSE 'key' END
            USING ERRCODE = 'invalid_parameter_value', HINT = 'A ban is for one key of one limiter.';
    END IF;
    IF (first > interval '0' AND longest >= first AND forgiven_after >= interval '0') IS NOT TRUE THEN
        RAISE EXCEPTION 'rate_limit: a ban cannot last that long'
            USING ERRCODE = 'invalid_parameter_value',
                HINT = 'first is above 0, longest is at least first, and forgiven_after is not negative.';
    END IF;
    -- From here on, no other session can ban the key.
    LOCK TABLE rate_limit_policy_history IN SHARE UPDATE EXCLUSIVE MODE;
    clock := clock_timestamp();
    SELECT p.mode, p.valid_until INTO in_force
    FROM rate_limit_policy AS p
    WHERE p.name = name COLLATE "C" AND p.key = key COLLATE "C" AND p.mode <> 'shadow'
        AND p.valid_from <= clock AND p.valid_until > clock
    ORDER BY p.valid_from DESC, p.id DESC LIMIT 1;
    made := (in_force.mode = 'deny') IS NOT TRUE;
    IF NOT made THEN
        ends := in_force.valid_until;
        RETURN;
    END IF;
    SELECT p.id, p.valid_from, p.valid_until INTO last
    FROM rate_limit_policy AS p
    WHERE p.name = name COLLATE "C" AND p.key = key COLLATE "C" AND p.mode = 'deny' AND p.automatic
    ORDER BY p.valid_until DESC LIMIT 1;
    -- Compute in seconds, because days differ in length.
    lasts := CASE WHEN last.valid_until + forgiven_after > clock
            AND isfinite(last.valid_from) AND isfinite(last.valid_until)
        THEN greatest(least(
            extract(epoch FROM last.valid_until - last.valid_from)::double precision * interval '2 seconds', longest),
            first)
        ELSE first END;
    ends := clock + lasts;
    -- Ended bans are kept until they are forgiven. Each new ban deletes some forgiven bans, so that forgiven bans do
    -- not accumulate. The deletion skips locked rows, because the sessions that lock them may be waiting for this
    -- transaction.
    ended := ARRAY(
        SELECT p.id FROM rate_limit_policy AS p
        WHERE p.name = name COLLATE "C" AND p.automatic AND p.valid_until < clock - forgiven_after
        ORDER BY p.valid_until LIMIT 10
        FOR UPDATE SKIP LOCKED)
        || ARRAY(SELECT p.id FROM rate_limit_policy AS p WHERE p.id = last.id FOR UPDATE SKIP LOCKED);
    DELETE FROM rate_limit_policy AS p WHERE p.id = ANY (ended);
    INSERT INTO rate_limit_policy AS p (name, key, mode, valid_from, valid_until, comment, automatic)
    VALUES (name, key, 'deny', clock, ends, comment, true);
END
$$;

COMMENT ON FUNCTION rate_limit_ban IS
    'Denies all requests of a key for the time first, or for twice the length of its last ban, at most for longest. '
    'If forgiven_after has passed since the last ban, the next ban lasts for first again. '
    'Returns when the ban ends, and whether it is new.
Example: SELECT * FROM rate_limit_ban(''login'', ''user:123'', ''1 hour'', ''1 week'', ''1 day'', ''too many'')';

-- rate_limit_report adds a process's counts to rate_limit_shadow, at most 10^12 each. The arrays have an element for
-- each row. changed_us is row_changed_us of the policy that the process has counted for. Counts of a policy that has
-- changed since are skipped, and so are rows with a negative number.
CREATE FUNCTION rate_limit_report(
    policy_ids bigint[], changed_us bigint[], keys text[], decided bigint[], denied bigint[], would_deny bigint[]
) RETURNS void
LANGUAGE plpgsql
SECURITY DEFINER
SET enable_nestloop = on
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
DECLARE
    clock timestamptz := clock_timestamp();
    most CONSTANT bigint := 1000000000000; -- far more than a process can decide between two reports, in 10 seconds
    id bigint;
    surplus tid[];
BEGIN
    -- A session that changes a policy locks its row and then deletes its counts. A report skips locked policies, so
    -- that it cannot deadlock with a session that changes a policy.
    WITH policy AS MATERIALIZED (
        SELECT p.id, p.changed_at FROM rate_limit_policy AS p
        WHERE p.id = ANY (policy_ids) AND p.mode = 'shadow'
        FOR SHARE SKIP LOCKED
    )
    INSERT INTO rate_limit_shadow AS s (policy_id, key, decided, denied, would_deny, first_at, last_at)
    SELECT e.policy_id, e.key,
        least(e.decided, most), least(e.denied, most), least(e.would_deny, most), clock, clock
    FROM unnest(policy_ids, changed_us, keys, decided, denied, would_deny)
        AS e (policy_id, changed_us, key, decided, denied, would_deny)
    WHERE e.decided >= 0 AND e.denied >= 0 AND e.would_deny >= 0
        AND EXISTS (
            SELECT FROM policy AS p
            WHERE p.id = e.policy_id AND (extract(epoch FROM p.changed_at) * 1000000)::bigint = e.changed_us)
        AND octet_length(e.key) <= 512
    ORDER BY e.policy_id, e.key COLLATE "C"
    -- The sums stop at the largest bigint. With an overflow, one report could make all later reports fail.
    ON CONFLICT (policy_id, key) DO UPDATE SET
        decided = s.decided + least(excluded.decided, 9223372036854775807 - s.decided),
        denied = s.denied + least(excluded.denied, 9223372036854775807 - s.denied),
        would_deny = s.would_deny + least(excluded.would_deny, 9223372036854775807 - s.would_deny),
        last_at = excluded.last_at;
    FOR id IN SELECT DISTINCT e FROM unnest(policy_ids) AS e ORDER BY e LOOP
        -- Locking the surplus rows cannot cause a deadlock, because SKIP LOCKED does not wait.
        surplus := ARRAY(
            SELECT s.ctid FROM rate_limit_shadow AS s
            WHERE s.policy_id = id AND s.key IN (
                SELECT d.key FROM rate_limit_shadow AS d
                WHERE d.policy_id = id AND d.key <> ''
                ORDER BY d.would_deny DESC, d.key OFFSET 1000)
            FOR UPDATE SKIP LOCKED);
        DELETE FROM rate_limit_shadow AS s WHERE s.ctid = ANY (surplus);
    END LOOP;
END
$$;

COMMENT ON FUNCTION rate_limit_report IS
    'Adds a process''s counts to rate_limit_shadow. An empty key means all keys together. '
    'changed_us is row_changed_us of rate_limit_policies. Counts of a policy that has changed since are skipped.
Example: SELECT rate_limit_report(ARRAY[1], ARRAY[1796000000000000], ARRAY[''''], ARRAY[100], ARRAY[0], ARRAY[5])';
