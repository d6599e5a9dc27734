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
    NOT has_schema_privilege(p.proowner, p.pronamespace, 'USAGE') OR EXISTS (
        SELECT FROM pg_class AS c
        CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS r (privilege)
        WHERE c.reltype IN (pg_typeof(NULL::rate_limit_ephemeral), pg_typeof(NULL::rate_limit_durable),
                pg_typeof(NULL::rate_limit_ephemeral_hold), pg_typeof(NULL::rate_limit_durable_hold))
            AND NOT has_table_privilege(p.proowner, c.oid, r.privilege)
    ),
    NOT o.rolcanlogin AND NOT EXISTS (
        SELECT FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner)))
        WHERE grantee <> p.proowner AND privilege_type = 'EXECUTE'
    )
FROM pg_proc AS p
JOIN pg_roles AS o ON o.oid = p.proowner
JOIN pg_class AS e ON e.reltype = pg_typeof(NULL::rate_limit_ephemeral)
WHERE p.pronamespace = e.relnamespace AND p.proowner = e.relowner AND starts_with(ltrim(p.proname, '_'), 'rate_limit_')
ORDER BY p.proname
