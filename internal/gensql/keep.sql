-- Remember who may execute the functions. access.sql revokes EXECUTE on a function that was replaced, because it cannot
-- tell such a function from a new one. A superuser could replace functions of another role, and twins.sql and
-- access.sql would pass over them. (access.sql explains why names in this block have a schema.)
DO $$
DECLARE
    path CONSTANT pg_catalog.text := pg_catalog.current_setting('search_path');
    schema CONSTANT pg_catalog.name := pg_catalog.current_schema();
    wrong pg_catalog.text;
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    wrong := (
        SELECT min(format('function %s belongs to %s, and not to %s',
            p.oid::regprocedure, p.proowner::regrole, current_user))
        FROM pg_proc AS p
        WHERE p.pronamespace = (SELECT n.oid FROM pg_namespace AS n WHERE n.nspname = schema)
            AND p.proowner <> (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user)
            AND p.proname IN (
'names'));
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION '%', wrong USING ERRCODE = 'insufficient_privilege', HINT = 'Migrate as the owner.';
    END IF;
    PERFORM set_config('rate_limit.grants', coalesce((
        SELECT json_agg(json_build_array(p.oid::regprocedure, format('GRANT EXECUTE ON FUNCTION %s TO %s%s',
            p.oid::regprocedure, CASE WHEN a.grantee = 0::oid THEN 'PUBLIC' ELSE a.grantee::regrole::text END,
            CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' END)))::text
        FROM pg_proc AS p
        CROSS JOIN aclexplode(p.proacl) AS a
        WHERE p.pronamespace = (SELECT n.oid FROM pg_namespace AS n WHERE n.nspname = schema)
            AND p.proowner = (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user)
            AND (starts_with(p.proname, 'rate_limit_') OR starts_with(p.proname, '_rate_limit_'))
            AND a.grantee <> p.proowner), '[]'), false);
    PERFORM pg_catalog.set_config('search_path', path, true);
END
$$;

