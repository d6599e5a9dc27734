-- The tables and their sizes, without and with the index.
SELECT relname, pg_relation_size(oid), pg_total_relation_size(oid)
FROM pg_class
WHERE reltype IN (pg_typeof(NULL::rate_limit_ephemeral), pg_typeof(NULL::rate_limit_durable))
ORDER BY relname DESC
