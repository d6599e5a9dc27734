-- The tables of ours that this role may read: their names, and the same as SQL has them.
SELECT coalesce(array_agg(c.relname::text), '{}'), coalesce(array_agg(format('%I.%I', n.nspname, c.relname)), '{}')
FROM pg_class AS c
JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = current_setting('pgratelimit.schema')
    AND c.relname IN ('rate_limit_ephemeral', 'rate_limit_durable', 'rate_limit_policy')
    AND has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')
