-- The functions, in the schema of the tables.
--   $1  names of those that applications call
SELECT
    p.proname,
    p.prosrc,
    p.prosecdef,
    EXISTS (SELECT FROM unnest(p.proconfig) AS setting WHERE setting LIKE 'search_path=%'),
    p.proname = ANY ($1::text[]) AND NOT has_function_privilege(p.oid, 'EXECUTE'),
    EXISTS (SELECT FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) WHERE grantee = 0 AND privilege_type = 'EXECUTE'),
    NOT (
        has_schema_privilege(p.proowner, p.pronamespace, 'USAGE')
        AND has_table_privilege(p.proowner, 'rate_limit_ephemeral'::regclass, 'SELECT')
        AND has_table_privilege(p.proowner, 'rate_limit_ephemeral'::regclass, 'INSERT')
        AND has_table_privilege(p.proowner, 'rate_limit_ephemeral'::regclass, 'UPDATE')
        AND has_table_privilege(p.proowner, 'rate_limit_ephemeral'::regclass, 'DELETE')
        AND has_table_privilege(p.proowner, 'rate_limit_durable'::regclass, 'SELECT')
        AND has_table_privilege(p.proowner, 'rate_limit_durable'::regclass, 'INSERT')
        AND has_table_privilege(p.proowner, 'rate_limit_durable'::regclass, 'UPDATE')
        AND has_table_privilege(p.proowner, 'rate_limit_durable'::regclass, 'DELETE')
    )
FROM pg_proc AS p
WHERE p.pronamespace = (SELECT relnamespace FROM pg_class WHERE oid = 'rate_limit_ephemeral'::regclass)
    AND p.proname LIKE 'rate\_limit\_%'
