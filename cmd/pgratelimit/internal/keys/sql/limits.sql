-- This query counts the rows of all limiters in a sample of the tables.
--   $1  the percentage of the blocks of rate_limit_ephemeral to read
--   $2  the percentage of the blocks of rate_limit_durable to read
WITH clock AS (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS now)
SELECT 'rate_limit_ephemeral', prefix, bit_or(1 << algorithm), count(*),
    count(*) FILTER (WHERE expires_at > (SELECT now FROM clock)), sum(pg_column_size(r.*)), min(expires_at)
FROM rate_limit_ephemeral AS r TABLESAMPLE SYSTEM ($1::real)
GROUP BY prefix
UNION ALL
SELECT 'rate_limit_durable', prefix, bit_or(1 << algorithm), count(*),
    count(*) FILTER (WHERE expires_at > (SELECT now FROM clock)), sum(pg_column_size(r.*)), min(expires_at)
FROM rate_limit_durable AS r TABLESAMPLE SYSTEM ($2::real)
GROUP BY prefix
