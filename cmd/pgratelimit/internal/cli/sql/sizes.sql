-- The tables and their sizes, without and with the index. Without the tables, it fails with the same error as all other
-- commands.
SELECT relname, pg_relation_size(oid), pg_total_relation_size(oid)
FROM pg_class
WHERE NOT EXISTS (SELECT FROM rate_limit_ephemeral WHERE false)
    AND reltype IN (pg_typeof(NULL::rate_limit_ephemeral), pg_typeof(NULL::rate_limit_durable))
ORDER BY relname DESC
