-- This query counts the rows of all limiters in a sample of the tables. The algorithms are a sum of 1 << code, with
-- those of live holds and slots. The units of holds that have ended count until the last hold of the row ends, or the
-- row changes. The last column is 0 if no row has an end: a row that has only had holds or slots has none without them.
--   $1  the percentage of the blocks of rate_limit_ephemeral to read
--   $2  the percentage of the blocks of rate_limit_durable to read
WITH clock AS (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS now)
SELECT l.name, l.prefix, bit_or(l.algorithms), count(*), count(*) FILTER (WHERE l.ends_at > (SELECT now FROM clock)),
    least(sum(l.held), 9223372036854775807)::bigint, sum(l.bytes), coalesce(min(nullif(l.ends_at, 0)), 0)
FROM (
    SELECT 'rate_limit_ephemeral' AS name, r.prefix,
        1 << r.algorithm | CASE WHEN r.held_until > (SELECT now FROM clock) THEN (
            SELECT coalesce(bit_or(1 << h.algorithm), 0)
            FROM rate_limit_ephemeral_hold AS h
            WHERE h.key = r.key AND h.prefix = r.prefix AND h.status = 0) ELSE 0 END AS algorithms,
        greatest(r.expires_at, r.held_until) AS ends_at,
        CASE WHEN r.held_until > (SELECT now FROM clock) THEN r.held ELSE 0 END AS held,
        pg_column_size(r.*) AS bytes
    FROM rate_limit_ephemeral AS r TABLESAMPLE SYSTEM ($1::real)
    UNION ALL
    SELECT 'rate_limit_durable', r.prefix,
        1 << r.algorithm | CASE WHEN r.held_until > (SELECT now FROM clock) THEN (
            SELECT coalesce(bit_or(1 << h.algorithm), 0)
            FROM rate_limit_durable_hold AS h
            WHERE h.key = r.key AND h.prefix = r.prefix AND h.status = 0) ELSE 0 END,
        greatest(r.expires_at, r.held_until),
        CASE WHEN r.held_until > (SELECT now FROM clock) THEN r.held ELSE 0 END,
        pg_column_size(r.*)
    FROM rate_limit_durable AS r TABLESAMPLE SYSTEM ($2::real)
) AS l
GROUP BY l.name, l.prefix
