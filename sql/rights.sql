-- Revoke the rights that ALTER DEFAULT PRIVILEGES has granted on the tables that this migration creates. Keys are
-- personal data, and setval would break the sequence of ids. Run deploy/grants.sql later. On older tables, keep SELECT
-- and the rights to change policies. Revoke all other rights: a role with the right TRIGGER on a table can run code
-- with the rights of every role that writes to the table. (access.sql explains why names in this block have a schema.)
DO $$
DECLARE
    path CONSTANT pg_catalog.text := pg_catalog.current_setting('search_path');
    schema CONSTANT pg_catalog.name := pg_catalog.current_schema();
    relation pg_catalog.text;
    grantee pg_catalog.oid;
    rights pg_catalog.text;
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    FOR relation, grantee, rights IN
        SELECT concat(CASE c.relkind WHEN 'S' THEN 'SEQUENCE ' ELSE 'TABLE ' END, c.oid::regclass), a.grantee,
            string_agg(DISTINCT a.privilege_type, ', ')
        FROM pg_class AS t
        JOIN pg_class AS c ON c.oid = t.oid OR c.relkind = 'S' AND EXISTS ( -- sequences of identity columns
            SELECT FROM pg_depend AS d
            WHERE d.objid = c.oid AND d.refobjid = t.oid AND d.deptype IN ('a', 'i')
                AND d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_class'::regclass)
        CROSS JOIN aclexplode(c.relacl) AS a
        WHERE t.relnamespace = (SELECT n.oid FROM pg_namespace AS n WHERE n.nspname = schema)
            AND t.relowner = (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user)
            AND t.relname IN (
                'rate_limit_ephemeral', 'rate_limit_durable', 'rate_limit_ephemeral_hold', 'rate_limit_durable_hold',
                'rate_limit_sweeper', 'rate_limit_goose_version',
                'rate_limit_policy', 'rate_limit_policy_history', 'rate_limit_shadow')
            AND a.grantee <> c.relowner
            -- Revoke all rights on tables of this transaction. goose creates its table before the first migration.
            AND (t.xmin = pg_current_xact_id()::xid OR t.relname = 'rate_limit_goose_version' AND NOT EXISTS (
                    SELECT FROM pg_proc AS p WHERE p.pronamespace = t.relnamespace AND p.proname = 'rate_limit_version')
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
