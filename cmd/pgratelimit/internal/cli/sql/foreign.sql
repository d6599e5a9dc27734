-- This query looks for objects in the schema that have names of the limiter's objects but differ from the migrations'
-- objects. Such an object may be a view, a table with triggers, rules or row-level security of other roles, or a
-- function with its caller's rights. A correct object counts too if its owner is not trusted and could change the
-- object before it is used. The result has a description of the object, and a statement that removes the difference.
--
-- Platforms add harmless things to every table: row-level security without a policy, which does not restrict the owner,
-- and AFTER triggers for auditing. A trigger is harmless if the owner of its function has this role's rights. It is
-- also harmless if the function runs as its owner, who is trusted, or if this role changes no rows: then the limiter's
-- functions change rows as the functions' owner. Deferred triggers run at the end of the transaction as this role.
--
-- This query must not run such an object, because this role may be a superuser, and other roles may create objects in
-- the schemas of search_path. Trusted roles are the owners of the schema and of the database, and all roles that have
-- this role's rights. A function only counts if its argument types are those that the limiter calls it with.
--   $1  whether the command calls functions
--   $2  the tables that are locked, so that they cannot be replaced
--   $3  whether this role changes rows itself, and not by calls of functions
WITH schema AS (
    SELECT n.oid, n.nspname, n.nspowner, d.datdba, me.oid AS me
    FROM pg_namespace AS n
    JOIN pg_database AS d ON d.datname = current_database()
    JOIN pg_roles AS me ON me.rolname = current_user
    WHERE n.nspname = current_setting('pgratelimit.schema')
),
trusted AS (
    SELECT r.oid
    FROM pg_roles AS r
    CROSS JOIN schema AS n
    WHERE pg_has_role(r.oid, n.me, 'USAGE') OR pg_has_role(r.oid, n.nspowner, 'USAGE')
        OR pg_has_role(r.oid, n.datdba, 'USAGE')
)
SELECT concat(
        format(CASE WHEN found.odd THEN '%s %I.%I is not what the migrations make'
            ELSE '%s %I.%I belongs to %I, who owns neither the schema nor the database' END,
            CASE c.relkind WHEN 'r' THEN 'table' WHEN 'v' THEN 'view' ELSE 'relation' END,
            n.nspname, c.relname, pg_get_userbyid(c.relowner)),
        ': ' || added.what),
    added.mend
FROM pg_class AS c
JOIN schema AS n ON n.oid = c.relnamespace
LEFT JOIN LATERAL (
    SELECT 'row-level security is forced upon its owner' AS what,
        format('`ALTER TABLE %s NO FORCE ROW LEVEL SECURITY`', c.oid::regclass) AS mend
    WHERE c.relforcerowsecurity AND $1::boolean
    UNION ALL
    SELECT format('it has the policy %I of row-level security', p.polname),
        format('`DROP POLICY %I ON %s`', p.polname, c.oid::regclass)
    FROM pg_policy AS p
    WHERE p.polrelid = c.oid AND ($1::boolean OR row_security_active(c.oid))
    UNION ALL
    -- pg_class.relhasrules and relhastriggers stay true until VACUUM, even if no rule or trigger remains.
    SELECT format('it has the rule %I', w.rulename), format('`DROP RULE %I ON %s`', w.rulename, c.oid::regclass)
    FROM pg_rewrite AS w
    WHERE w.ev_class = c.oid AND w.rulename <> '_RETURN' -- every view has this rule
    UNION ALL
    SELECT format('trigger %I runs %s of %I', t.tgname, p.oid::regprocedure, pg_get_userbyid(p.proowner)),
        CASE WHEN NOT t.tgisinternal THEN format('`DROP TRIGGER %I ON %s`', t.tgname, c.oid::regclass) END
    FROM pg_trigger AS t
    JOIN pg_proc AS p ON p.oid = t.tgfoid
    WHERE t.tgrelid = c.oid AND CASE
        WHEN t.tgisinternal THEN c.relname <> 'rate_limit_policy'
        WHEN p.pronamespace = n.oid AND p.proname = ANY (CASE WHEN c.relname = 'rate_limit_policy'
                THEN ARRAY['_rate_limit_check_policy', '_rate_limit_note_policy']
                ELSE ARRAY['_rate_limit_note_deleted'] END) -- while the shard is divided
            THEN $1::boolean AND (NOT p.prosecdef OR p.proowner NOT IN (SELECT t.oid FROM trusted AS t))
        -- A BEFORE (2) or INSTEAD OF (64) trigger can change the row that is written.
        ELSE t.tgtype & 66 <> 0 OR NOT (pg_has_role(p.proowner, n.me, 'USAGE')
            OR (p.prosecdef OR NOT ($3::boolean OR t.tgdeferrable))
                AND p.proowner IN (SELECT t.oid FROM trusted AS t)) END
    ORDER BY 1
    LIMIT 1
) AS added ON true
CROSS JOIN LATERAL (SELECT c.relkind <> 'r' OR added.what IS NOT NULL AS odd) AS found
WHERE c.relname IN ('rate_limit_ephemeral', 'rate_limit_durable', 'rate_limit_ephemeral_hold',
        'rate_limit_durable_hold', 'rate_limit_sweeper', 'rate_limit_goose_version', 'rate_limit_policy',
        'rate_limit_policy_history', 'rate_limit_shadow', 'rate_limit_shard', 'rate_limit_shard_deleted')
    AND (found.odd OR ($1::boolean OR c.relname IN ('rate_limit_ephemeral', 'rate_limit_durable',
            'rate_limit_ephemeral_hold', 'rate_limit_durable_hold'))
        AND c.relname <> ALL ($2::text[]) AND c.relname <> 'rate_limit_goose_version'
        AND c.relowner NOT IN (SELECT t.oid FROM trusted AS t))
UNION ALL
SELECT format(CASE WHEN p.prosecdef THEN 'function %s belongs to %I, who owns neither the schema nor the database'
    ELSE 'function %s is not what the migrations make' END, p.oid::regprocedure, pg_get_userbyid(p.proowner)), NULL
FROM pg_proc AS p
JOIN schema AS n ON n.oid = p.pronamespace
WHERE (p.proname, oidvectortypes(p.proargtypes)) IN (
        ('rate_limit_take_fixed_window',
            'text, text[], bigint, bigint, bigint[], bigint[], boolean, integer, boolean, bigint'),
        ('rate_limit_take_sliding_window',
            'text, text[], bigint, bigint, bigint[], bigint[], boolean, integer, boolean, bigint'),
        ('rate_limit_take_sliding_log',
            'text, text[], bigint, bigint, bigint[], bigint[], boolean, integer, boolean, bigint'),
        ('rate_limit_take_calendar_window',
            'text, text[], bigint, bigint, text, bigint[], bigint[], boolean, integer, boolean, bigint'),
        ('rate_limit_take_token_bucket',
            'text, text[], bigint, bigint, bigint, bigint[], bigint[], boolean, integer, boolean, bigint'),
        ('rate_limit_all',
            'integer[], text[], text[], boolean[], smallint[], bigint[], bigint[], bigint[], bigint[], bigint[], '
            'integer, boolean, timestamp with time zone, bigint[], bigint[], bigint[], bigint[], boolean, text[], '
            'bigint[], boolean[], bigint[], uuid[], bigint[]'),
        ('rate_limit_take_all',
            'text[], text[], boolean, smallint[], bigint[], bigint[], bigint[], text[], bigint[], integer[], '
            'integer[], bigint[], bigint[], integer, boolean, bigint'),
        ('rate_limit_hold', 'text, text, text, bigint, interval, boolean'),
        ('rate_limit_find_hold', 'text, timestamp with time zone'),
        ('rate_limit_settle', 'text, bigint, text'),
        ('rate_limit_extend', 'text, interval'),
        ('rate_limit_slots',
            'text[], text[], boolean[], bigint[], bigint[], bigint[], uuid[], jsonb[], integer, boolean, '
            'timestamp with time zone, boolean'),
        ('rate_limit_acquire', 'text, text, text, bigint, interval, boolean, text, boolean'),
        ('rate_limit_renew_all', 'uuid[], bigint, integer, boolean, bigint, bigint[]'),
        ('rate_limit_renew', 'uuid, interval'),
        ('rate_limit_release', 'uuid'),
        ('rate_limit_reset', 'text, text, boolean, integer, boolean'),
        ('rate_limit_sweep', 'integer, integer, text[], text, interval, timestamp with time zone'))
    AND (NOT p.prosecdef OR p.proowner NOT IN (SELECT t.oid FROM trusted AS t)) AND $1::boolean
LIMIT 1
