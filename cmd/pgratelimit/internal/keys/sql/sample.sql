-- This query returns random keys of a limiter, and the number of keys that it has chosen from.
--   $1  the name in the rows
--   $2  the percentage of the blocks to read
--   $3  the maximum number of keys
SELECT key, count(*) OVER ()
FROM rate_limit_ephemeral TABLESAMPLE SYSTEM ($2::real)
WHERE prefix = $1::text
ORDER BY random()
LIMIT $3::bigint
