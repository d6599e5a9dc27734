-- This query returns the names of the tables to lock, and the same names quoted for SQL.
--   $1  the names to look for, in the order of locking
--   $2  whether to include tables that this role may not read
SELECT coalesce(array_agg(c.relname::text), '{}'), coalesce(
    array_agg(format('%I.%I', n.nspname, c.relname) ORDER BY array_position($1::text[], c.relname::text)), '{}')
FROM pg_class AS c
JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = current_setting('pgratelimit.schema')
    AND c.relname = ANY ($1::text[])
    AND ($2::boolean OR has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT'))
