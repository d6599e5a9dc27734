-- This query finds what platforms and operators have added to the limiter's tables: row-level security, audit triggers,
-- and grants to roles that are not in deploy/grants.sql. Each row has a severity, the addition, and its removal.
WITH ours AS (
    SELECT c.*, c.oid::regclass::text AS name
    FROM pg_class AS c
    JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE n.nspname = current_setting('pgratelimit.schema') AND c.relkind = 'r'
        AND c.relname IN ('rate_limit_ephemeral', 'rate_limit_durable', 'rate_limit_ephemeral_hold',
            'rate_limit_durable_hold', 'rate_limit_sweeper', 'rate_limit_goose_version', 'rate_limit_policy',
            'rate_limit_policy_history', 'rate_limit_shadow', 'rate_limit_shard', 'rate_limit_shard_deleted')
),
-- Other roles must not read keys, which are personal data, or set sequences back. strangers.sql reports TRIGGER.
granted AS (
    SELECT coalesce(quote_ident(r.rolname), 'PUBLIC') AS role,
        string_agg(DISTINCT c.oid::regclass::text, ', ' ORDER BY c.oid::regclass::text) AS names
    FROM ours AS o
    JOIN pg_class AS c ON c.oid = o.oid OR c.relkind = 'S' AND EXISTS (
        SELECT FROM pg_depend AS d
        WHERE d.objid = c.oid AND d.refobjid = o.oid AND d.deptype IN ('a', 'i')
            AND d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_class'::regclass)
    CROSS JOIN LATERAL (
        SELECT c.relacl AS acl
        UNION ALL SELECT t.attacl FROM pg_attribute AS t WHERE t.attrelid = c.oid AND t.attacl IS NOT NULL
    ) AS l
    CROSS JOIN aclexplode(l.acl) AS a
    LEFT JOIN pg_roles AS r ON r.oid = a.grantee
    WHERE a.grantee <> c.relowner AND a.privilege_type <> 'TRIGGER'
        AND (r.rolsuper OR pg_has_role(r.oid, c.relowner, 'MEMBER')) IS NOT TRUE
        AND NOT (a.privilege_type = 'SELECT' AND (c.relkind = 'S'
            OR c.relname IN ('rate_limit_sweeper', 'rate_limit_goose_version', 'rate_limit_shard'))) -- without keys
        AND (r.rolname = 'rate_limit_reader' AND a.privilege_type = 'SELECT'
            OR r.rolname = 'rate_limit_policy_admin' AND (a.privilege_type = 'SELECT'
                OR c.relname = 'rate_limit_policy' AND a.privilege_type IN ('INSERT', 'UPDATE', 'DELETE'))) IS NOT TRUE
    GROUP BY r.rolname
),
-- blind has roles that have rights on a table, but do not see its rows.
blind AS (
    SELECT o.name, string_agg(DISTINCT coalesce(quote_ident(r.rolname), 'everybody'), ', ') AS roles
    FROM ours AS o
    CROSS JOIN LATERAL (
        SELECT a.grantee FROM aclexplode(o.relacl) AS a
        UNION SELECT m.oid FROM pg_roles AS m
        WHERE m.rolname = current_user AND has_table_privilege(o.oid, 'SELECT, INSERT, UPDATE, DELETE')
    ) AS a
    LEFT JOIN pg_roles AS r ON r.oid = a.grantee
    WHERE o.relrowsecurity AND NOT EXISTS (SELECT FROM pg_policy AS p WHERE p.polrelid = o.oid)
        AND (r.rolsuper OR r.rolbypassrls OR pg_has_role(r.oid, o.relowner, 'USAGE')) IS NOT TRUE
    GROUP BY o.name
)
SELECT 'problem', format('row-level security is forced upon the owner of %s, so calls fail', o.name),
    format('`ALTER TABLE %s NO FORCE ROW LEVEL SECURITY`', o.name)
FROM ours AS o
WHERE o.relforcerowsecurity
UNION ALL
SELECT 'problem', format('%s has the policy %I of row-level security, which others may run', o.name, p.polname),
    format('`DROP POLICY %I ON %s`', p.polname, o.name)
FROM ours AS o
JOIN pg_policy AS p ON p.polrelid = o.oid
UNION ALL
SELECT 'warning', format('row-level security hides the rows of %s from %s', b.name, b.roles),
    format('`ALTER TABLE %s DISABLE ROW LEVEL SECURITY`', b.name)
FROM blind AS b
UNION ALL
SELECT 'warning', format('%s has rights on %s, which deploy/grants.sql gives to no such role',
        CASE g.role WHEN 'PUBLIC' THEN 'everybody' ELSE g.role END, g.names),
    format('unless somebody means it, `REVOKE ALL ON %s FROM %s`', g.names, g.role)
FROM granted AS g
UNION ALL
SELECT 'warning', format('each take that changes %s also runs the trigger %I, which calls %s', o.name, t.tgname,
        t.tgfoid::regprocedure),
    format('if nobody needs it, `DROP TRIGGER %I ON %s`', t.tgname, o.name)
FROM ours AS o
JOIN pg_trigger AS t ON t.tgrelid = o.oid
JOIN pg_proc AS p ON p.oid = t.tgfoid
WHERE o.relname IN ('rate_limit_ephemeral', 'rate_limit_durable', 'rate_limit_ephemeral_hold',
        'rate_limit_durable_hold')
    AND NOT t.tgisinternal
    AND NOT starts_with(ltrim(p.proname, '_'), 'rate_limit_')
UNION ALL
SELECT 'ok', format('row-level security is on for %s. It does not bind the owner, as whom the functions run, so an '
    'application''s role needs nothing but EXECUTE. A role that reads or changes a table itself would find no rows',
    string_agg(o.name, ', ' ORDER BY o.name)), ''
FROM ours AS o
WHERE o.relrowsecurity
HAVING count(*) > 0
ORDER BY 1 DESC, 2
