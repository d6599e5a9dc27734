-- How many bans there are that limiters have made and that have not ended.
--   $1 name of a limiter; NULL is all
SELECT count(*)
FROM rate_limit_policy AS p
WHERE ($1::text IS NULL OR p.name = $1::text) AND p.valid_until > clock_timestamp() AND p.automatic
