-- Who may call the functions, and what the functions use. They run with their owner's rights, so an application needs
-- only EXECUTE on them. In return, nobody has EXECUTE without a grant, and the functions never run anything that others
-- can create:
--
--   - search_path is pg_catalog. Otherwise Postgres would prefer a function or operator that others create elsewhere
--     with exactly the argument types of a call to one of pg_catalog that needs a cast. (pg_temp is named last, because
--     otherwise it would come first.)
--   - Our own names have their schema. The schema is known only when this block runs, so it rewrites the bodies: each
--     rate_limit_ or _rate_limit_ in a body is the beginning of such a name. Calls of our own functions have all
--     arguments, with exactly the right types.
--
-- Plans do not depend on the session's settings either. JIT compilation would take longer than a decision. Without
-- index scans, TID scans and nested loops, Postgres would have to scan the whole table. (Each setting costs 0.1 us per
-- call.)
--
-- The internal functions use their callers' settings, because settings of their own would cost time.
--
-- A superuser may run this block, with a schema in search_path in which others can create. So until search_path is
-- pg_catalog, every name has its schema.
DO $$
DECLARE
    path CONSTANT pg_catalog.text := pg_catalog.current_setting('search_path');
    schema CONSTANT pg_catalog.name := pg_catalog.current_schema();
    fn pg_catalog.pg_proc;
    prefix pg_catalog.text;
    internal pg_catalog.text;
    signature pg_catalog.text;
    named pg_catalog.bool;
    grantee pg_catalog.oid;
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    PERFORM set_config('quote_all_identifiers', 'off', true); -- or definitions would be quoted differently
    -- The schema's name is also put into comments, which a line break would end.
    IF strpos(schema, chr(10)) > 0 OR strpos(schema, chr(13)) > 0 THEN
        RAISE EXCEPTION 'the name of the schema has a line break'
            USING ERRCODE = 'invalid_schema_name', HINT = 'Rename the schema, or migrate into another one.';
    END IF;
    prefix := format('%I.rate_limit_', schema);
    internal := format('%I._rate_limit_', schema);
    FOR fn IN
        SELECT p.*
        FROM pg_proc AS p
        WHERE p.pronamespace = (SELECT n.oid FROM pg_namespace AS n WHERE n.nspname = schema)
            AND p.proowner = (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user)
            AND (starts_with(p.proname, '_rate_limit_') OR p.proname IN (
                'rate_limit_take_fixed_window', 'rate_limit_take_sliding_window', 'rate_limit_take_token_bucket',
                'rate_limit_take_sliding_log', 'rate_limit_take_calendar_window', 'rate_limit_all',
                'rate_limit_take_all', 'rate_limit_reset', 'rate_limit_allow', 'rate_limit_peek', 'rate_limit_sweep',
                'rate_limit_policies', 'rate_limit_ban', 'rate_limit_report'))
    LOOP
        signature := fn.oid::regprocedure::text;
        -- An earlier migration may have done it. (A twin may be the copy of a body that already has the schema's name.)
        named := strpos(fn.prosrc, prefix) > 0 OR strpos(fn.prosrc, internal) > 0;
        IF NOT named OR fn.proacl IS NULL THEN
            EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', signature);
            -- ALTER DEFAULT PRIVILEGES may have granted others EXECUTE.
            FOR grantee IN
                SELECT DISTINCT a.grantee FROM aclexplode(fn.proacl) AS a WHERE a.grantee NOT IN (0, fn.proowner)
            LOOP
                EXECUTE format('REVOKE ALL ON FUNCTION %s FROM %s CASCADE', signature, grantee::regrole);
            END LOOP;
        END IF;
        IF NOT named THEN
            EXECUTE replace(pg_get_functiondef(fn.oid), '$function$' || fn.prosrc || '$function$',
                quote_literal(replace(replace(fn.prosrc, 'rate_limit_', prefix),
                    '_' || prefix, internal)));
        END IF;
        IF fn.prosecdef THEN
            EXECUTE format('ALTER FUNCTION %s SET search_path = pg_catalog, pg_temp', signature);
            EXECUTE format('ALTER FUNCTION %s SET jit = off', signature);
        END IF;
        -- This function checks whether rows exist itself, and does not leave that to an INSERT.
        IF 'enable_seqscan=off' = ANY (fn.proconfig) THEN
            EXECUTE format('ALTER FUNCTION %s SET enable_indexscan = on', signature);
            EXECUTE format('ALTER FUNCTION %s SET enable_tidscan = on', signature);
        END IF;
    END LOOP;
    PERFORM pg_catalog.set_config('search_path', path, true);
END
$$;
