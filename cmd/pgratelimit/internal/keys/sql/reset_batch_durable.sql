-- Resets keys of a limiter in rate_limit_durable, except those whose rows are held, and returns the ones that it has
-- reset. It waits for no row, so the order in which it locks them does not matter.
--   $1 name, $2 keys
WITH free AS MATERIALIZED (
    SELECT ctid
    FROM rate_limit_durable
    WHERE prefix = $1::text AND key = ANY ($2::text[])
    FOR UPDATE SKIP LOCKED
)
DELETE FROM rate_limit_durable
WHERE ctid = ANY (ARRAY(SELECT ctid FROM free))
RETURNING key
