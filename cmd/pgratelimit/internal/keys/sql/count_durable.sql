-- How many keys a limiter has in rate_limit_durable.
--   $1 name
SELECT count(*) FROM rate_limit_durable WHERE prefix = $1::text
