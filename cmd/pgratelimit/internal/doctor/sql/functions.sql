-- This query returns which roles may execute the limiter's functions. Functions that do not belong to the tables' owner
-- are left out, because no role should get rights on these functions.
SELECT
    p.proname,
    has_function_privilege(p.oid, 'EXECUTE'),
    -- The functions that only shards have run with their caller's rights, or are never called.
    coalesce(p.proargnames[1] <> 'shard', true)
        AND p.proname NOT IN ('_rate_limit_shard', '_rate_limit_note_deleted') AND EXISTS (
        SELECT FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner)))
        WHERE grantee = 0 AND privilege_type = 'EXECUTE'
    ),
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
    ),
    NOT o.rolcanlogin AND NOT EXISTS (
        SELECT FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner)))
        WHERE grantee <> p.proowner AND privilege_type = 'EXECUTE'
    )
FROM pg_proc AS p
JOIN pg_roles AS o ON o.oid = p.proowner
JOIN pg_class AS e ON e.reltype = pg_typeof(NULL::rate_limit_ephemeral)
JOIN pg_class AS d ON d.reltype = pg_typeof(NULL::rate_limit_durable)
WHERE p.pronamespace = e.relnamespace AND p.proowner = e.relowner AND starts_with(ltrim(p.proname, '_'), 'rate_limit_')
ORDER BY p.proname
