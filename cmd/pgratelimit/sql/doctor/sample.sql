-- What is in a random sample of the tables' blocks: the table, its rows, the live ones, and the bytes of all rows with their
-- line pointers.
--   $1  percent of the blocks of rate_limit_ephemeral to read; 100 is all
--   $2  of rate_limit_durable
WITH clock AS (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS now)
SELECT 'rate_limit_ephemeral', count(*), count(*) FILTER (WHERE expires_at > (SELECT now FROM clock)),
    coalesce(sum(pg_column_size(r.*) + 4), 0)
FROM rate_limit_ephemeral AS r TABLESAMPLE SYSTEM ($1::real)
UNION ALL
SELECT 'rate_limit_durable', count(*), count(*) FILTER (WHERE expires_at > (SELECT now FROM clock)),
    coalesce(sum(pg_column_size(r.*) + 4), 0)
FROM rate_limit_durable AS r TABLESAMPLE SYSTEM ($2::real)
