-- This query returns the next keys of a limiter, in order. It reads a range of the primary key.
--   $1  the name in the rows
--   $2  the key after which to begin
--   $3  the maximum number of keys
SELECT key
FROM rate_limit_ephemeral
WHERE prefix = $1::text AND key > $2::text
ORDER BY key
LIMIT $3::bigint
