-- The functions, in the schema of the tables, and others of their names.
--   $1  names of those that applications call
SELECT
    p.proname,
    p.prosrc,
    p.prosecdef,
    coalesce('search_path=pg_catalog, pg_temp' = ANY (p.proconfig) AND 'jit=off' = ANY (p.proconfig), false),
    p.proname = ANY ($1::text[]) AND NOT has_function_privilege(p.oid, 'EXECUTE'),
    EXISTS (SELECT FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) WHERE grantee = 0 AND privilege_type = 'EXECUTE'),
    NOT (
        has_schema_privilege(p.proowner, p.pronamespace, 'USAGE')
        AND has_table_privilege(p.proowner, e.oid, 'SELECT')
        AND has_table_privilege(p.proowner, e.oid, 'INSERT')
        AND has_table_privilege(p.proowner, e.oid, 'UPDATE')
        AND has_table_privilege(p.proowner, e.oid, 'DELETE')
        AND has_table_privilege(p.proowner, d.oid, 'SELECT')
        AND has_table_privilege(p.proowner, d.oid, 'INSERT')
        AND has_table_privilege(p.proowner, d.oid, 'UPDATE')
        AND has_table_privilege(p.proowner, d.oid, 'DELETE')
    )
FROM pg_proc AS p
JOIN pg_class AS e ON e.reltype = pg_typeof(NULL::rate_limit_ephemeral)
JOIN pg_class AS d ON d.reltype = pg_typeof(NULL::rate_limit_durable)
WHERE p.pronamespace = e.relnamespace AND starts_with(p.proname, 'rate_limit_')
ORDER BY p.proname
