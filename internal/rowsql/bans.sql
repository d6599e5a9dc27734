-- This query returns the bans of a limiter that have begun and have not ended, the last to end first, with the
-- microseconds until each ends: NULL if it does not end.
--   $1  the limiter's name
--   $2  the maximum number of rows
SELECT coalesce(p.key, p.key_prefix, ''), p.key IS NULL, p.automatic,
    CASE WHEN p.valid_until < '9999-12-31 00:00:00Z'
        THEN (extract(epoch FROM p.valid_until - clock_timestamp()) * 1000000)::bigint END
FROM rate_limit_policy AS p
WHERE p.name = $1::text AND p.mode = 'deny' AND p.valid_from <= clock_timestamp()
    AND p.valid_until > clock_timestamp()
ORDER BY p.valid_until DESC, p.id
LIMIT $2::bigint
