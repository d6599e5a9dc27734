-- Who may call, and what the functions see. They run with their owner's rights, so an application needs nothing but
-- EXECUTE on them. In return, nobody has EXECUTE unless it is granted, and the functions never run anything that others
-- can create:
--
--   - search_path is pg_catalog. Otherwise a function or operator that others create elsewhere with exactly the types
--     of a call would be preferred to one of pg_catalog that needs a cast. (pg_temp is named last, because it would
--     come first if it were not named.)
--   - Names of ours are written with their schema. The schema is not known before this block runs, so it rewrites the
--     bodies: each rate_limit_ or _rate_limit_ in a body is the beginning of such a name. A call of ours has all
--     arguments, of exactly the right types.
--
-- Nor does a plan depend on the settings of the session. JIT would compile for longer than a decision takes. Without
-- index scans, TID scans and nested loops, only a scan of the table would be left. (Each setting costs a call 0.1 us.)
--
-- The internal functions run with the settings of their callers, and are faster without their own.
--
-- This block may run with the rights of a superuser, and search_path may name a schema in which others create. So it is
-- written with care too: until search_path is pg_catalog, every name has its schema.
DO $$
DECLARE
    path CONSTANT pg_catalog.text := pg_catalog.current_setting('search_path');
    schema CONSTANT pg_catalog.name := pg_catalog.current_schema();
    fn pg_catalog.pg_proc;
    prefix pg_catalog.text;
    internal pg_catalog.text;
    signature pg_catalog.text;
    relation pg_catalog.text;
    grantee pg_catalog.oid;
    rights pg_catalog.text;
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    -- The schema's name is put into comments too, which end with the line.
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
            AND p.proname IN (
                {{define "deciding"}}{{range .}}'{{.Function}}', '{{.Left}}', {{end}}
                    {{- "'rate_limit_all', 'rate_limit_take_all'"}}{{end -}}
                {{fold 16 (include "deciding" .Algorithms)}},
                'rate_limit_allow', 'rate_limit_peek', 'rate_limit_reset', 'rate_limit_sweep',
                'rate_limit_policies', 'rate_limit_ban', 'rate_limit_report', 'rate_limit_report_leases',
                '_rate_limit_check_policy', '_rate_limit_note_policy',
                '_rate_limit_late', '_rate_limit_give_up',
                '_rate_limit_read_policy', '_rate_limit_ask', '_rate_limit_window_end')
    LOOP
        signature := fn.oid::regprocedure::text;
        -- A migration before this one may have done it.
        IF strpos(fn.prosrc, prefix) = 0 AND strpos(fn.prosrc, internal) = 0 THEN
            EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', signature);
            -- ALTER DEFAULT PRIVILEGES may have granted it to others.
            FOR grantee IN
                SELECT DISTINCT a.grantee FROM aclexplode(fn.proacl) AS a WHERE a.grantee NOT IN (0, fn.proowner)
            LOOP
                EXECUTE format('REVOKE ALL ON FUNCTION %s FROM %s CASCADE', signature, grantee::regrole);
            END LOOP;
            EXECUTE replace(pg_get_functiondef(fn.oid), '$function$' || fn.prosrc || '$function$',
                quote_literal(replace(replace(fn.prosrc, 'rate_limit_', prefix),
                    '_' || prefix, internal)));
        END IF;
        IF fn.prosecdef THEN
            EXECUTE format('ALTER FUNCTION %s SET search_path = pg_catalog, pg_temp', signature);
            EXECUTE format('ALTER FUNCTION %s SET jit = off', signature);
        END IF;
        -- This function looks rows up itself, rather than leave it to an INSERT.
        IF 'enable_seqscan=off' = ANY (fn.proconfig) THEN
            EXECUTE format('ALTER FUNCTION %s SET enable_indexscan = on', signature);
            EXECUTE format('ALTER FUNCTION %s SET enable_tidscan = on', signature);
        END IF;
    END LOOP;
    -- Only the owner has rights on what this migration has made, whatever ALTER DEFAULT PRIVILEGES says: keys are
    -- personal data, and a setval breaks what takes its numbers from the sequence. deploy/grants.sql grants rights
    -- afterwards. On older tables, SELECT stays, and so do the rights to change policies. Nobody needs more: whoever
    -- has the right TRIGGER on a table can have code run with the rights of those who write to it.
    FOR relation, grantee, rights IN
        SELECT concat(CASE c.relkind WHEN 'S' THEN 'SEQUENCE ' ELSE 'TABLE ' END, c.oid::regclass), a.grantee,
            string_agg(DISTINCT a.privilege_type, ', ')
        FROM pg_class AS t
        JOIN pg_class AS c ON c.oid = t.oid OR c.relkind = 'S' AND EXISTS ( -- of a column
            SELECT FROM pg_depend AS d
            WHERE d.objid = c.oid AND d.refobjid = t.oid AND d.deptype IN ('a', 'i')
                AND d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_class'::regclass)
        CROSS JOIN aclexplode(c.relacl) AS a
        WHERE t.relnamespace = (SELECT n.oid FROM pg_namespace AS n WHERE n.nspname = schema)
            AND t.relowner = (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user)
            AND t.relname IN (
                'rate_limit_ephemeral', 'rate_limit_durable', 'rate_limit_sweeper', 'rate_limit_goose_version',
                'rate_limit_policy', 'rate_limit_policy_history', 'rate_limit_shadow', 'rate_limit_lease')
            AND a.grantee <> c.relowner
            AND (t.relname = ANY ('{ {{- join .Made -}} }')
                OR a.privilege_type <> 'SELECT'
                    AND (c.relname <> 'rate_limit_policy' OR a.privilege_type NOT IN ('INSERT', 'UPDATE', 'DELETE')))
        GROUP BY c.oid, a.grantee
    LOOP
        EXECUTE format('REVOKE %s ON %s FROM %s CASCADE', rights, relation,
            CASE WHEN grantee = 0::oid THEN 'PUBLIC' ELSE grantee::regrole::text END);
    END LOOP;
    PERFORM pg_catalog.set_config('search_path', path, true);
END
$$;
