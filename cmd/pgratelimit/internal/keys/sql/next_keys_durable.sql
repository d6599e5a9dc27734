-- The keys of a limiter in rate_limit_durable, in order. A batch reads a range of the primary key, and passes over
-- the keys of other limiters.
--   $1 name, $2 key after which to begin, $3 how many
SELECT key
FROM rate_limit_durable
WHERE prefix = $1::text AND key > $2::text
ORDER BY key
LIMIT $3::bigint
