-- This query counts the keys of a limiter.
--   $1  the name in the rows
SELECT count(*) FROM rate_limit_ephemeral WHERE prefix = $1::text
