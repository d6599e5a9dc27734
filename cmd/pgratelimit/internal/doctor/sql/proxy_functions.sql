-- This query returns the functions of a proxy, and which roles may execute them.
SELECT
    p.proname::text,
    concat_ws(' ', l.lanname, CASE WHEN p.prosecdef THEN 'security definer' END),
    p.prosrc,
    p.oid::regprocedure::text,
    pg_get_function_arguments(p.oid),
    has_function_privilege(p.oid, 'EXECUTE'),
    EXISTS (
        SELECT FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner)))
        WHERE grantee = 0 AND privilege_type = 'EXECUTE'
    ),
    EXISTS (
        SELECT FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner)))
        WHERE grantee <> p.proowner AND privilege_type = 'EXECUTE'
    ) OR o.rolcanlogin
FROM pg_proc AS p
JOIN pg_namespace AS n ON n.oid = p.pronamespace
JOIN pg_language AS l ON l.oid = p.prolang
JOIN pg_roles AS o ON o.oid = p.proowner
WHERE n.nspname = current_setting('pgratelimit.schema') AND starts_with(ltrim(p.proname, '_'), 'rate_limit_')
ORDER BY p.proname
