-- How many keys a limiter has.
--   $1  name
SELECT count(*) FROM rate_limit_ephemeral WHERE prefix = $1::text
