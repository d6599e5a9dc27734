-- This query reads a random sample of the blocks of the tables of keys and holds. The result has, for each table with
-- rows, the number of rows, the number of rows that a sweep would keep, the bytes of all rows with their line pointers,
-- and their bytes in the TOAST table. Postgres moves the log of a row of more than 2,032 bytes to the TOAST table.
--   $1  the percentage of the blocks of rate_limit_ephemeral to read
--   $2  the percentage of the blocks of rate_limit_durable to read
--   $3  the percentage of the blocks of rate_limit_ephemeral_hold to read
--   $4  the percentage of the blocks of rate_limit_durable_hold to read
WITH clock AS (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS now)
SELECT r.name, count(*), count(*) FILTER (WHERE r.expires_at > (SELECT now FROM clock)),
    sum((CASE WHEN r.bytes + r.log > 2032 THEN r.bytes + 18 ELSE r.bytes + r.log END + 7) / 8 * 8 + 4),
    coalesce(sum(r.log) FILTER (WHERE r.bytes + r.log > 2032), 0)
FROM (
    SELECT 'rate_limit_ephemeral' AS name, greatest(expires_at, held_until) AS expires_at,
        coalesce(pg_column_size(log), 0) AS log,
        pg_column_size(ROW(prefix, key, algorithm, count, prev_count, window_start, credit, scale, expires_at,
            since, capacity, refill, returned, held, held_next, held_until)) AS bytes
    FROM rate_limit_ephemeral TABLESAMPLE SYSTEM ($1::real)
    UNION ALL
    SELECT 'rate_limit_durable', greatest(expires_at, held_until), coalesce(pg_column_size(log), 0),
        pg_column_size(ROW(prefix, key, algorithm, count, prev_count, window_start, credit, scale, expires_at,
            since, capacity, refill, returned, held, held_next, held_until))
    FROM rate_limit_durable TABLESAMPLE SYSTEM ($2::real)
    UNION ALL
    SELECT 'rate_limit_ephemeral_hold',
        CASE WHEN status = 2 THEN settled_at + 3600000000 ELSE ends_at + 86400000000 END, 0,
        pg_column_size(ROW(id, prefix, key, units, ends_at, status, used, late, settled_at, algorithm, max_count,
            span_us, refill, zone, holder, line_group, weight, made_at, fence))
    FROM rate_limit_ephemeral_hold TABLESAMPLE SYSTEM ($3::real)
    UNION ALL
    SELECT 'rate_limit_durable_hold',
        CASE WHEN status = 2 THEN settled_at + 3600000000 ELSE ends_at + 86400000000 END, 0,
        pg_column_size(ROW(id, prefix, key, units, ends_at, status, used, late, settled_at, algorithm, max_count,
            span_us, refill, zone, holder, line_group, weight, made_at, fence))
    FROM rate_limit_durable_hold TABLESAMPLE SYSTEM ($4::real)
) AS r
GROUP BY r.name
