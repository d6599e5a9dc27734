-- This block sets the rights and settings of the functions. The functions have their owner's rights, so an application
-- only needs EXECUTE on them. No role has EXECUTE without a grant. The functions run no code that other roles can
-- create:
--
--   - search_path is pg_catalog. In another schema, a role could create a function or operator with exactly the
--     argument types of a call. Postgres would prefer that function to a function of pg_catalog that needs a cast.
--     (pg_temp comes last, because it would come first if it was not named.)
--   - Names of the limiter's objects have their schema. Only this block knows the schema, so it inserts the schema
--     before each rate_limit_ and _rate_limit_ in a function's body. Calls of the limiter's functions have all
--     arguments, with exactly the right types.
--
-- Plans do not depend on the session's settings. Compiling with JIT would take longer than a decision. Without index
-- scans, TID scans and nested loops, Postgres would scan the whole table. (Each setting costs 0.1 us per call.)
--
-- Internal functions run with the settings of their callers, because each setting of a function costs time.
--
-- A superuser may run this block, and search_path may have a schema where other roles can create objects. So every name
-- in this block has its schema until search_path is pg_catalog.
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
    PERFORM set_config('quote_all_identifiers', 'off', true); -- otherwise more names may be quoted
    -- Comments in the bodies get the schema's name too, and a line break in the name would end such a comment.
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
                'rate_limit_take_all', 'rate_limit_reset', 'rate_limit_allow', 'rate_limit_peek', 'rate_limit_charge',
                'rate_limit_reserve', 'rate_limit_hold', 'rate_limit_settle', 'rate_limit_cancel', 'rate_limit_extend',
                'rate_limit_find_hold', 'rate_limit_slots', 'rate_limit_acquire', 'rate_limit_renew',
                'rate_limit_renew_all', 'rate_limit_release', 'rate_limit_sweep', 'rate_limit_policies',
                'rate_limit_ban', 'rate_limit_report'))
    LOOP
        signature := fn.oid::regprocedure::text;
        -- An earlier migration may have inserted the schema. (A twin has the schema that its original already had.)
        named := strpos(fn.prosrc, prefix) > 0 OR strpos(fn.prosrc, internal) > 0;
        IF NOT named OR fn.proacl IS NULL THEN
            EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', signature);
            -- Revoke EXECUTE from roles that ALTER DEFAULT PRIVILEGES has granted it to.
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
        -- Functions with enable_seqscan = off search for rows by key or ctid.
        IF 'enable_seqscan=off' = ANY (fn.proconfig) THEN
            EXECUTE format('ALTER FUNCTION %s SET enable_indexscan = on', signature);
            EXECUTE format('ALTER FUNCTION %s SET enable_tidscan = on', signature);
        END IF;
    END LOOP;
    PERFORM pg_catalog.set_config('search_path', path, true);
END
$$;
