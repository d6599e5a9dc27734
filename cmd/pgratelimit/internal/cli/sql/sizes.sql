-- This query returns the sizes of the tables, without and with their indexes. If the tables are missing, the query
-- fails with the same error as other commands.
SELECT relname, pg_relation_size(oid), pg_total_relation_size(oid)
FROM pg_class
WHERE NOT EXISTS (SELECT FROM rate_limit_ephemeral WHERE false)
    AND reltype IN (pg_typeof(NULL::rate_limit_ephemeral), pg_typeof(NULL::rate_limit_durable))
ORDER BY relname DESC
