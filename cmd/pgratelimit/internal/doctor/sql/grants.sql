-- This query returns the rights that roles other than the owner have on the limiter's tables, sequences and functions.
-- Each row has the object and a statement that grants the right again.
--   $1  the schema
--   $2  the owner
SELECT o.name, format('GRANT %s ON %s %s TO %s%s', a.privilege_type, o.kind, o.name,
    CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END,
    CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' END)
FROM (
    SELECT CASE c.relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, c.oid::regclass::text, c.relacl, c.relowner
    FROM pg_class AS c
    WHERE c.relnamespace = (SELECT n.oid FROM pg_namespace AS n WHERE n.nspname = $1::text) AND c.relkind IN ('r', 'S')
        AND starts_with(c.relname, 'rate_limit_')
    UNION ALL
    SELECT 'FUNCTION', p.oid::regprocedure::text, p.proacl, p.proowner
    FROM pg_proc AS p
    WHERE p.pronamespace = (SELECT n.oid FROM pg_namespace AS n WHERE n.nspname = $1::text)
        AND starts_with(ltrim(p.proname, '_'), 'rate_limit_')
) AS o (kind, name, acl, owner)
CROSS JOIN aclexplode(o.acl) AS a
WHERE o.owner = (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = $2::text) AND a.grantee <> o.owner
