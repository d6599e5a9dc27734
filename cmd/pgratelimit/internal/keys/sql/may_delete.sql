-- Whether the role may lock and delete rows itself, without rate_limit_reset.
--   $1  the table
SELECT has_table_privilege(c.oid, 'UPDATE') AND has_table_privilege(c.oid, 'DELETE')
FROM pg_class AS c
JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = current_setting('pgratelimit.schema') AND c.relname = $1::text
