-- The keys of a limiter, in order. A batch reads a range of the primary key.
--   $1  name
--   $2  the key after which to begin
--   $3  how many
SELECT key
FROM rate_limit_ephemeral
WHERE prefix = $1::text AND key > $2::text
ORDER BY key
LIMIT $3::bigint
