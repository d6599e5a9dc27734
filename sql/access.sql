-- Who may call, and what the functions see. They run with their owner's rights, so that an application needs nothing but
-- EXECUTE on them; so nobody has that unless it is granted, and nothing that others can create is ever run by them:
--
--   - search_path is pg_catalog. What others create elsewhere, with the very types that a call has, would be preferred to
--     a function or operator of pg_catalog that has to be cast for. (pg_temp is named last: unnamed, it would come first.)
--   - Names of ours are written with their schema. That is known here and not before, so the bodies are rewritten: each
--     rate_limit_ in one is the beginning of such a name. A call of ours has all arguments, of exactly the right types.
--
-- Nor does a plan depend on the settings of the session: JIT would compile for longer than a decision takes, and without index
-- and TID scans or nested loops nothing but a scan of the table would be left. (Each setting costs a call 0.1 us.)
--
-- The internal functions run with the settings of those that call them, and are faster without their own.
--
-- What runs here may have the rights of a superuser, and search_path may name a schema where others create. So this block is
-- written with care too: until search_path is pg_catalog, every name has its schema.
DO $$
DECLARE
    path CONSTANT pg_catalog.text := pg_catalog.current_setting('search_path');
    schema CONSTANT pg_catalog.name := pg_catalog.current_schema();
    fn pg_catalog.pg_proc;
    prefix pg_catalog.text;
    signature pg_catalog.text;
    relation pg_catalog.regclass;
    grantee pg_catalog.oid;
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    prefix := format('%I.rate_limit_', schema);
    FOR fn IN
        SELECT p.*
        FROM pg_proc AS p
        WHERE p.pronamespace = (SELECT n.oid FROM pg_namespace AS n WHERE n.nspname = schema)
            AND p.proowner = (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user)
            AND p.proname IN ('rate_limit_late', 'rate_limit_fixed_window', 'rate_limit_sliding_window',
                'rate_limit_token_bucket', 'rate_limit_sliding_log', 'rate_limit_all', 'rate_limit_reset', 'rate_limit_sweep')
    LOOP
        signature := fn.oid::regprocedure::text;
        IF strpos(fn.prosrc, prefix) = 0 THEN -- a migration before this one may have done it
            EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', signature);
            -- What ALTER DEFAULT PRIVILEGES has granted.
            FOR grantee IN SELECT DISTINCT a.grantee FROM aclexplode(fn.proacl) AS a WHERE a.grantee NOT IN (0, fn.proowner) LOOP
                EXECUTE format('REVOKE ALL ON FUNCTION %s FROM %s CASCADE', signature, grantee::regrole);
            END LOOP;
            EXECUTE replace(pg_get_functiondef(fn.oid), '$function$' || fn.prosrc || '$function$',
                quote_literal(replace(fn.prosrc, 'rate_limit_', prefix)));
        END IF;
        IF fn.prosecdef THEN
            EXECUTE format('ALTER FUNCTION %s SET search_path = pg_catalog, pg_temp', signature);
            EXECUTE format('ALTER FUNCTION %s SET jit = off', signature);
        END IF;
        IF 'enable_seqscan=off' = ANY (fn.proconfig) THEN -- those that look rows up, and do not only leave it to an INSERT
            EXECUTE format('ALTER FUNCTION %s SET enable_indexscan = on', signature);
            EXECUTE format('ALTER FUNCTION %s SET enable_tidscan = on', signature);
        END IF;
    END LOOP;
    -- Whoever has the right TRIGGER on a table has code run with the rights of those who write to it. Nobody needs more than SELECT.
    FOR relation, grantee IN
        SELECT DISTINCT c.oid::regclass, a.grantee
        FROM pg_class AS c
        CROSS JOIN aclexplode(c.relacl) AS a
        WHERE c.relnamespace = (SELECT n.oid FROM pg_namespace AS n WHERE n.nspname = schema)
            AND c.relowner = (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user)
            AND c.relname IN ('rate_limit_ephemeral', 'rate_limit_durable', 'rate_limit_sweeper', 'rate_limit_goose_version')
            AND a.grantee <> c.relowner AND a.privilege_type <> 'SELECT'
    LOOP
        EXECUTE format('REVOKE INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER ON TABLE %s FROM %s CASCADE', relation,
            CASE WHEN grantee = 0::oid THEN 'PUBLIC' ELSE grantee::regrole::text END);
    END LOOP;
    PERFORM pg_catalog.set_config('search_path', path, true);
END
$$;
