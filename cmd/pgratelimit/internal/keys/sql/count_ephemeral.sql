-- How many keys a limiter has in rate_limit_ephemeral.
--   $1 name
SELECT count(*) FROM rate_limit_ephemeral WHERE prefix = $1::text
