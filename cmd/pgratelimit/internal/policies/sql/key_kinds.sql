-- This query returns which algorithms wrote the live rows of a key, as 1 << code.
--   $1  the names in the key's rows, $2  the key
WITH clock AS (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS now)
SELECT e.prefix, false, 1 << e.algorithm
FROM rate_limit_ephemeral AS e
WHERE e.key = $2::text AND e.prefix = ANY ($1::text[]) AND e.expires_at > (SELECT now FROM clock)
UNION ALL
SELECT d.prefix, true, 1 << d.algorithm
FROM rate_limit_durable AS d
WHERE d.key = $2::text AND d.prefix = ANY ($1::text[]) AND d.expires_at > (SELECT now FROM clock)
