-- This query returns the live holds of a limiter, the largest first, with the microseconds until each ends.
--   $1  the names in the rows
--   $2  the maximum number of rows
WITH clock AS (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS now)
SELECT h.key, h.units, h.ends_at - (SELECT now FROM clock)
FROM rate_limit_ephemeral_hold AS h
WHERE h.prefix = ANY ($1::text[]) AND h.status = 0 AND h.fence = 0 AND h.ends_at > (SELECT now FROM clock)
ORDER BY h.units DESC, h.key
LIMIT $2::bigint
