-- rate_limit_reset makes a key as good as new, for every algorithm, and ends its holds, slots and tickets. It returns
-- whether the key had a row.
-- rate_limit_take_sliding_window explains the parameters.
CREATE FUNCTION rate_limit_reset(
    name text, key text, durable boolean DEFAULT false, lock_timeout_ms integer DEFAULT NULL,
    synchronous_commit boolean DEFAULT NULL
) RETURNS boolean
LANGUAGE plpgsql
SECURITY DEFINER
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
DECLARE
    ignored text := _rate_limit_set(lock_timeout_ms, synchronous_commit);
    held bigint;
    existed boolean;
BEGIN
    IF octet_length(name) > 128 OR octet_length(key) > 512 THEN -- lengths in the database's encoding
        RAISE EXCEPTION 'rate_limit: % is too long', CASE WHEN octet_length(name) > 128 THEN 'name' ELSE 'key' END
            USING ERRCODE = 'invalid_parameter_value', HINT = 'A name has 1 to 128 bytes, and a key 1 to 512.',
                COLUMN = CASE WHEN octet_length(name) > 128 THEN 'name' ELSE 'key' END;
    END IF;
    -- LOCK TABLE comes first, so that an error shows whether the table or a row was locked.
    IF durable THEN
        LOCK TABLE rate_limit_durable IN ROW EXCLUSIVE MODE;
        DELETE FROM rate_limit_durable AS r WHERE r.prefix = name AND r.key = key RETURNING r.held INTO held;
        existed := found;
        IF held IS NOT NULL THEN
            UPDATE rate_limit_durable_hold AS h SET status = 1 WHERE h.key = key AND h.prefix = name AND h.status = 0;
        END IF;
        DELETE FROM rate_limit_durable_hold AS h WHERE h.key = key AND h.prefix = name AND h.status = 3;
    ELSE
        LOCK TABLE rate_limit_ephemeral IN ROW EXCLUSIVE MODE;
        DELETE FROM rate_limit_ephemeral AS r WHERE r.prefix = name AND r.key = key RETURNING r.held INTO held;
        existed := found;
        IF held IS NOT NULL THEN
            UPDATE rate_limit_ephemeral_hold AS h SET status = 1 WHERE h.key = key AND h.prefix = name AND h.status = 0;
        END IF;
        DELETE FROM rate_limit_ephemeral_hold AS h WHERE h.key = key AND h.prefix = name AND h.status = 3;
    END IF;
    RETURN existed;
END
$$;

COMMENT ON FUNCTION rate_limit_reset IS 'Makes a key as good as new, and returns whether it had a row. Its holds
and slots end, and nobody waits for one any more.
A policy of several parts has a row for each part. Reset the key for name/2, name/3 and so on too.
Example: SELECT rate_limit_reset(''login'', ''user:123'')';
