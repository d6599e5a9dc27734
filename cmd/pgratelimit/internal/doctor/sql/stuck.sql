-- This query looks for keys of which nobody may get a slot for long. Such a key has no unit left or has a line, and
-- each of its slots is past half of the time from its request to its end, and still lasts for long. The query looks for
-- slots that last for long in a sample of the tables, and then at all slots of their keys. The result has the limiter's
-- name, the number of its keys of this kind, how many wait in their lines, and when the first of the slots ends, in
-- seconds from now.
--   $1  how long a slot must still last, in microseconds
--   $2  the percentage of the blocks of rate_limit_ephemeral_hold to read
--   $3  the percentage of the blocks of rate_limit_durable_hold to read
WITH clock AS (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS now),
live AS (
    SELECT false AS durable, h.*
    FROM (
        SELECT DISTINCT s.prefix, s.key
        FROM rate_limit_ephemeral_hold AS s TABLESAMPLE SYSTEM ($2::real)
        WHERE s.fence > 0 AND s.status = 0 AND s.ends_at > (SELECT now FROM clock) + $1::bigint
    ) AS c
    JOIN rate_limit_ephemeral AS k ON k.key = c.key AND k.prefix = c.prefix AND k.held IS NOT NULL
    JOIN rate_limit_ephemeral_hold AS h ON h.key = c.key AND h.prefix = c.prefix
    UNION ALL
    SELECT true, h.*
    FROM (
        SELECT DISTINCT s.prefix, s.key
        FROM rate_limit_durable_hold AS s TABLESAMPLE SYSTEM ($3::real)
        WHERE s.fence > 0 AND s.status = 0 AND s.ends_at > (SELECT now FROM clock) + $1::bigint
    ) AS c
    JOIN rate_limit_durable AS k ON k.key = c.key AND k.prefix = c.prefix AND k.held IS NOT NULL
    JOIN rate_limit_durable_hold AS h ON h.key = c.key AND h.prefix = c.prefix
),
keys AS (
    SELECT l.prefix, count(*) FILTER (WHERE l.status = 3) AS waiting,
        min(l.ends_at) FILTER (WHERE l.status = 0) - (SELECT now FROM clock) AS first_after
    FROM live AS l
    WHERE l.fence > 0 AND l.status IN (0, 3) AND l.ends_at > (SELECT now FROM clock)
    GROUP BY l.durable, l.prefix, l.key
    HAVING bool_and(l.ends_at - (SELECT now FROM clock) < (SELECT now FROM clock) - l.made_at)
            FILTER (WHERE l.status = 0)
        AND min(l.ends_at) FILTER (WHERE l.status = 0) > (SELECT now FROM clock) + $1::bigint
        AND sum(l.units) >= (array_agg(l.max_count ORDER BY l.fence DESC))[1] -- a line is for more than is free
)
SELECT k.prefix, count(*), sum(k.waiting)::bigint, (min(k.first_after) / 1000000)::bigint
FROM keys AS k
GROUP BY k.prefix
ORDER BY k.prefix
