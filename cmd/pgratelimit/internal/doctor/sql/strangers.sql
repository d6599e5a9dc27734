-- This query finds roles that could create an object in the schema that is taken for one of the limiter's objects, or
-- that have created one. Each row has the problem and a statement that fixes it. The owner of rate_limit_ephemeral is
-- trusted, because another role that can create objects can add a function with a name of the limiter's functions, but
-- cannot add a second table of this name.
WITH schema AS (
    SELECT n.oid, n.nspowner, n.nspacl, quote_ident(n.nspname) AS name,
        CASE pg_get_userbyid(n.nspowner) WHEN 'pg_database_owner' THEN d.datdba ELSE n.nspowner END AS owner
    FROM pg_namespace AS n
    JOIN pg_database AS d ON d.datname = current_database()
    WHERE n.nspname = current_setting('pgratelimit.schema')
),
owner AS (
    SELECT r.oid, quote_ident(r.rolname) AS name
    FROM pg_class AS c
    JOIN pg_roles AS r ON r.oid = c.relowner
    WHERE c.reltype = pg_typeof(NULL::rate_limit_ephemeral)
)
SELECT
    format('%s may create in schema %s', coalesce(quote_ident(r.rolname), 'everybody'), s.name),
    format('`REVOKE CREATE ON SCHEMA %s FROM %s`', s.name, coalesce(quote_ident(r.rolname), 'PUBLIC'))
FROM schema AS s
CROSS JOIN owner AS o
CROSS JOIN aclexplode(coalesce(s.nspacl, acldefault('n', s.nspowner))) AS a
LEFT JOIN pg_roles AS r ON r.oid = a.grantee
WHERE a.privilege_type = 'CREATE' AND a.grantee <> s.nspowner AND a.grantee <> o.oid
    AND (a.grantee = 0 OR NOT r.rolsuper AND NOT pg_has_role(a.grantee, o.oid, 'MEMBER'))
UNION ALL
SELECT
    format('schema %s belongs to %I, who may put tables of their own in the place of those of %s',
        s.name, r.rolname, o.name),
    -- If the objects do not belong to the schema's owner, the statement gives all objects to the schema's owner.
    CASE WHEN pg_has_role(o.oid, r.oid, 'MEMBER') THEN format('`DO $$ DECLARE ours text; BEGIN FOR ours IN '
        'SELECT format(''TABLE %%s'', c.oid::regclass) FROM pg_class AS c WHERE c.relnamespace = %1$L::regnamespace '
            'AND c.relowner = %2$L::regrole AND c.relkind = ''r'' AND starts_with(c.relname, ''rate_limit_'') '
        'UNION ALL SELECT format(''TYPE %%s'', c.reltype::regtype) FROM pg_class AS c '
            'WHERE c.relnamespace = %1$L::regnamespace AND c.relowner = %2$L::regrole AND c.relkind = ''c'' '
            'AND starts_with(c.relname, ''rate_limit_'') '
        'UNION ALL SELECT format(''FUNCTION %%s'', p.oid::regprocedure) FROM pg_proc AS p '
            'WHERE p.pronamespace = %1$L::regnamespace AND p.proowner = %2$L::regrole '
            'AND starts_with(ltrim(p.proname, ''_''), ''rate_limit_'') '
        'LOOP EXECUTE format(''ALTER %%s OWNER TO %%s'', ours, %3$L); END LOOP; END $$`',
        s.name, o.name, quote_ident(r.rolname))
    ELSE format('`ALTER SCHEMA %s OWNER TO %s`', s.name, o.name) END
FROM schema AS s
CROSS JOIN owner AS o
JOIN pg_roles AS r ON r.oid = s.owner
WHERE r.oid <> o.oid AND NOT r.rolsuper AND NOT pg_has_role(r.oid, o.oid, 'MEMBER')
UNION ALL
SELECT
    format('%s %s.%I belongs to %I, and not to %s, as rate_limit_ephemeral does',
        CASE c.relkind WHEN 'r' THEN 'table' ELSE 'relation' END, s.name, c.relname,
        pg_get_userbyid(c.relowner), o.name),
    format('if you have made it, `ALTER TABLE %s.%I OWNER TO %s`, and else drop it', s.name, c.relname, o.name)
FROM schema AS s
CROSS JOIN owner AS o
JOIN pg_class AS c ON c.relnamespace = s.oid AND c.relowner <> o.oid
WHERE c.relname IN ('rate_limit_ephemeral', 'rate_limit_durable', 'rate_limit_ephemeral_hold',
        'rate_limit_durable_hold', 'rate_limit_sweeper', 'rate_limit_goose_version', 'rate_limit_policy',
        'rate_limit_policy_history', 'rate_limit_shadow', 'rate_limit_shard', 'rate_limit_shard_deleted')
UNION ALL
SELECT
    format('function %s belongs to %I, and not to %s, as the tables do',
        p.oid::regprocedure, pg_get_userbyid(p.proowner), o.name),
    format('`DROP FUNCTION %s`, whatever its body is', p.oid::regprocedure)
FROM schema AS s
CROSS JOIN owner AS o
JOIN pg_proc AS p ON p.pronamespace = s.oid AND p.proowner <> o.oid
WHERE starts_with(ltrim(p.proname, '_'), 'rate_limit_')
UNION ALL
SELECT
    format('%s may put triggers on %s, which run with the rights of %s',
        coalesce(quote_ident(r.rolname), 'everybody'), c.oid::regclass, o.name),
    format('`REVOKE TRIGGER ON TABLE %s FROM %s`', c.oid::regclass, coalesce(quote_ident(r.rolname), 'PUBLIC'))
FROM schema AS s
CROSS JOIN owner AS o
JOIN pg_class AS c ON c.relnamespace = s.oid AND c.relowner = o.oid
CROSS JOIN aclexplode(c.relacl) AS a
LEFT JOIN pg_roles AS r ON r.oid = a.grantee
WHERE c.relname IN ('rate_limit_ephemeral', 'rate_limit_durable', 'rate_limit_ephemeral_hold',
        'rate_limit_durable_hold', 'rate_limit_sweeper', 'rate_limit_goose_version', 'rate_limit_policy',
        'rate_limit_policy_history', 'rate_limit_shadow', 'rate_limit_shard', 'rate_limit_shard_deleted')
    AND a.privilege_type = 'TRIGGER' AND a.grantee <> o.oid
ORDER BY 1
