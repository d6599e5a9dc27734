-- This query returns the live slots of a limiter and the places in its lines, ordered by key. The fifth column is the
-- place in the line of the key, and 0 for a slot. The last columns are the time, the number of all slots and their
-- units, and the number of all places and their units.
--   $1  the names in the rows
--   $2  the key; NULL for all keys
--   $3  the maximum number of rows
WITH clock AS (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS now),
live AS (
    SELECT h.*, 0 AS place
    FROM rate_limit_ephemeral_hold AS h
    WHERE h.prefix = ANY ($1::text[]) AND ($2::text IS NULL OR h.key = $2::text)
        AND h.status = 0 AND h.fence > 0 AND h.ends_at > (SELECT now FROM clock)
        -- If somebody has deleted the row of the key, its slots have ended.
        AND EXISTS (SELECT FROM rate_limit_ephemeral AS k
            WHERE k.key = h.key AND k.prefix = h.prefix AND k.held IS NOT NULL)
    UNION ALL
    SELECT h.*, row_number() OVER (PARTITION BY h.key, h.prefix ORDER BY h.fence)
    FROM rate_limit_ephemeral_hold AS h
    WHERE h.prefix = ANY ($1::text[]) AND ($2::text IS NULL OR h.key = $2::text)
        AND h.status = 3 AND h.ends_at > (SELECT now FROM clock)
)
SELECT l.id::text, l.prefix, l.key, l.status = 3, l.place, l.units, coalesce(l.holder, ''), l.line_group, l.weight,
    l.made_at, l.ends_at, l.fence, (SELECT now FROM clock),
    count(*) FILTER (WHERE l.status = 0) OVER (), coalesce(sum(l.units) FILTER (WHERE l.status = 0) OVER (), 0)::bigint,
    count(*) FILTER (WHERE l.status = 3) OVER (), coalesce(sum(l.units) FILTER (WHERE l.status = 3) OVER (), 0)::bigint
FROM live AS l
ORDER BY l.key, l.prefix, l.status, l.fence
LIMIT $3::bigint
