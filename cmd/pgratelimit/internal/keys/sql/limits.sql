-- This query counts the rows of all limiters in a sample of the tables. The units of holds that have ended count until
-- the last hold of the row ends, or the row changes.
--   $1  the percentage of the blocks of rate_limit_ephemeral to read
--   $2  the percentage of the blocks of rate_limit_durable to read
WITH clock AS (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS now)
SELECT 'rate_limit_ephemeral', prefix, bit_or(1 << algorithm), count(*),
    count(*) FILTER (WHERE greatest(expires_at, held_until) > (SELECT now FROM clock)),
    least(coalesce(sum(held) FILTER (WHERE held_until > (SELECT now FROM clock)), 0), 9223372036854775807)::bigint,
    sum(pg_column_size(r.*)), min(greatest(expires_at, held_until))
FROM rate_limit_ephemeral AS r TABLESAMPLE SYSTEM ($1::real)
GROUP BY prefix
UNION ALL
SELECT 'rate_limit_durable', prefix, bit_or(1 << algorithm), count(*),
    count(*) FILTER (WHERE greatest(expires_at, held_until) > (SELECT now FROM clock)),
    least(coalesce(sum(held) FILTER (WHERE held_until > (SELECT now FROM clock)), 0), 9223372036854775807)::bigint,
    sum(pg_column_size(r.*)), min(greatest(expires_at, held_until))
FROM rate_limit_durable AS r TABLESAMPLE SYSTEM ($2::real)
GROUP BY prefix
