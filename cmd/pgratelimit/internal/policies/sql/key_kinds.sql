-- This query returns which algorithms wrote the live rows of a key and its live holds and slots, as a sum of 1 << code.
--   $1  the names in the key's rows, $2  the key
WITH clock AS (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS now)
SELECT e.prefix, false, CASE WHEN e.expires_at > (SELECT now FROM clock) THEN 1 << e.algorithm ELSE 0 END
    | CASE WHEN e.held_until > (SELECT now FROM clock) THEN (
        SELECT coalesce(bit_or(1 << h.algorithm), 0)
        FROM rate_limit_ephemeral_hold AS h
        WHERE h.key = e.key AND h.prefix = e.prefix AND h.status = 0) ELSE 0 END
FROM rate_limit_ephemeral AS e
WHERE e.key = $2::text AND e.prefix = ANY ($1::text[])
    AND greatest(e.expires_at, e.held_until) > (SELECT now FROM clock)
UNION ALL
SELECT d.prefix, true, CASE WHEN d.expires_at > (SELECT now FROM clock) THEN 1 << d.algorithm ELSE 0 END
    | CASE WHEN d.held_until > (SELECT now FROM clock) THEN (
        SELECT coalesce(bit_or(1 << h.algorithm), 0)
        FROM rate_limit_durable_hold AS h
        WHERE h.key = d.key AND h.prefix = d.prefix AND h.status = 0) ELSE 0 END
FROM rate_limit_durable AS d
WHERE d.key = $2::text AND d.prefix = ANY ($1::text[])
    AND greatest(d.expires_at, d.held_until) > (SELECT now FROM clock)
