-- Looks for a thing in the schema that has a name of ours but is not of the kind that the migrations make: a view, a
-- table with triggers or rules of others, or a function that would run with its caller's rights. A thing of the right
-- kind counts too if its owner could change that before it is used.
--
-- Nothing of it may be run. This role may be a superuser, and others may create in the schema, or in one that
-- search_path names before ours. Trusted are the owners of the schema and of the database, and every role with the
-- rights of this one. Only functions that a call of ours would run count: those with exactly the same types.
--   $1  whether functions are called
--   $2  the tables that are locked, and so stay what they are
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
SELECT format(CASE WHEN found.odd THEN '%s %I.%I is not what the migrations make'
    ELSE '%s %I.%I belongs to %I, who owns neither the schema nor the database' END,
    CASE c.relkind WHEN 'r' THEN 'table' WHEN 'v' THEN 'view' ELSE 'relation' END,
    n.nspname, c.relname, pg_get_userbyid(c.relowner))
FROM pg_class AS c
JOIN schema AS n ON n.oid = c.relnamespace
CROSS JOIN LATERAL (
    -- relhastriggers would stay true after the last one is gone, until VACUUM comes.
    SELECT c.relkind <> 'r' OR c.relhasrules OR c.relrowsecurity
        OR EXISTS (
            SELECT FROM pg_trigger AS t
            JOIN pg_proc AS p ON p.oid = t.tgfoid
            WHERE t.tgrelid = c.oid AND CASE WHEN t.tgisinternal THEN c.relname <> 'rate_limit_policy' ELSE
                p.pronamespace <> n.oid
                OR p.proname <> ALL (CASE WHEN c.relname = 'rate_limit_policy'
                    THEN ARRAY['_rate_limit_check_policy', '_rate_limit_note_policy']
                    ELSE ARRAY['_rate_limit_note_deleted'] END) -- while a shard is divided
                OR $1::boolean AND (NOT p.prosecdef OR p.proowner NOT IN (SELECT t.oid FROM trusted AS t)) END) AS odd
) AS found
WHERE c.relname IN ('rate_limit_ephemeral', 'rate_limit_durable', 'rate_limit_sweeper', 'rate_limit_goose_version',
        'rate_limit_policy', 'rate_limit_policy_history', 'rate_limit_shadow', 'rate_limit_lease', 'rate_limit_shard',
        'rate_limit_shard_deleted')
    AND (found.odd OR ($1::boolean OR c.relname IN ('rate_limit_ephemeral', 'rate_limit_durable'))
        AND c.relname <> ALL ($2::text[]) AND c.relname <> 'rate_limit_goose_version'
        AND c.relowner NOT IN (SELECT t.oid FROM trusted AS t))
UNION ALL
SELECT format(CASE WHEN p.prosecdef THEN 'function %s belongs to %I, who owns neither the schema nor the database'
    ELSE 'function %s is not what the migrations make' END, p.oid::regprocedure, pg_get_userbyid(p.proowner))
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
            'bigint[]'),
        ('rate_limit_take_all',
            'text[], text[], boolean, smallint[], bigint[], bigint[], bigint[], text[], bigint[], integer[], '
            'integer[], bigint[], bigint[], integer, boolean, bigint'),
        ('rate_limit_reset', 'text, text, boolean, integer, boolean'),
        ('rate_limit_sweep', 'integer, integer, text[], text, interval, timestamp with time zone'))
    AND (NOT p.prosecdef OR p.proowner NOT IN (SELECT t.oid FROM trusted AS t)) AND $1::boolean
LIMIT 1
