-- The tables that hold limits and that this role may read.
SELECT coalesce(array_agg(format('%I.%I', n.nspname, c.relname)), '{}')
FROM pg_class AS c
JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = current_setting('pgratelimit.schema') AND c.relname IN ('rate_limit_ephemeral', 'rate_limit_durable')
    AND has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')
