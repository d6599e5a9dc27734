-- rate_limit_reset makes a key as good as new, whichever algorithm wrote its row, and tells whether there was a row.
-- Parameters as the algorithms take them.
CREATE FUNCTION rate_limit_reset(
    name text,
    key text,
    durable boolean DEFAULT false,
    lock_timeout_ms integer DEFAULT NULL,
    synchronous_commit boolean DEFAULT NULL
)
RETURNS boolean
LANGUAGE plpgsql
SECURITY DEFINER
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
DECLARE
    ignored text;
BEGIN
    IF lock_timeout_ms IS NOT NULL THEN
        ignored := set_config('lock_timeout', lock_timeout_ms::text, true);
    END IF;
    IF synchronous_commit IS NOT NULL THEN
        ignored := set_config('synchronous_commit', CASE WHEN synchronous_commit THEN 'on' ELSE 'off' END, true);
    END IF;
    -- That the table is locked, and not only the row, shows in the error: it comes from LOCK TABLE.
    IF durable THEN
        LOCK TABLE rate_limit_durable IN ROW EXCLUSIVE MODE;
        DELETE FROM rate_limit_durable AS r WHERE r.prefix = name AND r.key = key;
    ELSE
        LOCK TABLE rate_limit_ephemeral IN ROW EXCLUSIVE MODE;
        DELETE FROM rate_limit_ephemeral AS r WHERE r.prefix = name AND r.key = key;
    END IF;
    RETURN found;
END
$$;

COMMENT ON FUNCTION rate_limit_reset IS 'Makes a key as good as new, and tells whether it had been anything else.
Example: SELECT rate_limit_reset(''login'', ''user:123'')';
