-- This query counts the bans that limiters have made and that have not ended, and returns the time.
--   $1  the limiter's name, or NULL for all limiters
SELECT count(*), clock_timestamp()
FROM rate_limit_policy AS p
WHERE ($1::text IS NULL OR p.name = $1::text) AND p.valid_until > clock_timestamp() AND p.automatic
