-- This query returns which algorithms wrote the rows of limiters in each table, as a sum of 1 << code. Expired rows
-- count as 1. The algorithms of live holds and slots are in the sum too. The query reads each table once, which takes a
-- third of a second for a million rows.
--   $1  the names in the rows
--   $2  the percentage of the blocks of rate_limit_ephemeral to read
--   $3  the percentage of the blocks of rate_limit_durable to read
WITH clock AS (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS now)
SELECT e.prefix, false, bit_or(CASE WHEN e.expires_at > (SELECT now FROM clock) THEN 1 << e.algorithm ELSE 1 END
    | CASE WHEN e.held_until > (SELECT now FROM clock) THEN (
        SELECT coalesce(bit_or(1 << h.algorithm), 0)
        FROM rate_limit_ephemeral_hold AS h
        WHERE h.key = e.key AND h.prefix = e.prefix AND h.status = 0) ELSE 0 END)
FROM rate_limit_ephemeral AS e TABLESAMPLE SYSTEM ($2::real)
WHERE e.prefix = ANY ($1::text[])
GROUP BY e.prefix
UNION ALL
SELECT d.prefix, true, bit_or(CASE WHEN d.expires_at > (SELECT now FROM clock) THEN 1 << d.algorithm ELSE 1 END
    | CASE WHEN d.held_until > (SELECT now FROM clock) THEN (
        SELECT coalesce(bit_or(1 << h.algorithm), 0)
        FROM rate_limit_durable_hold AS h
        WHERE h.key = d.key AND h.prefix = d.prefix AND h.status = 0) ELSE 0 END)
FROM rate_limit_durable AS d TABLESAMPLE SYSTEM ($3::real)
WHERE d.prefix = ANY ($1::text[])
GROUP BY d.prefix
