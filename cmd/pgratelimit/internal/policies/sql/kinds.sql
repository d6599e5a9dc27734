-- Which algorithms wrote the rows of limiters, for each table: 1 << code, added up. All that have expired count as 1.
-- It reads each table once, for however many limiters: a third of a second for a million rows.
--   $1 names
--   $2 percent of the blocks of rate_limit_ephemeral to read, chosen at random; 100 is all
--   $3 of rate_limit_durable
WITH clock AS (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS now)
SELECT e.prefix, false, bit_or(CASE WHEN e.expires_at > (SELECT now FROM clock) THEN 1 << e.algorithm ELSE 1 END)
FROM rate_limit_ephemeral AS e TABLESAMPLE SYSTEM ($2::real)
WHERE e.prefix = ANY ($1::text[])
GROUP BY e.prefix
UNION ALL
SELECT d.prefix, true, bit_or(CASE WHEN d.expires_at > (SELECT now FROM clock) THEN 1 << d.algorithm ELSE 1 END)
FROM rate_limit_durable AS d TABLESAMPLE SYSTEM ($3::real)
WHERE d.prefix = ANY ($1::text[])
GROUP BY d.prefix
