-- What has a name of ours in the schema, and is not of the kind that the migrations make: a view, a table with triggers or rules, or a
-- function that would run with the rights of whoever calls it. Nothing of it may be run: whoever looks after the limiters may be a
-- superuser, and others may create there, or in a schema that search_path names before ours. Of functions, those count that a call of
-- ours means: with the very same types.
--   $1  whether functions are called
SELECT format('%s %I.%I', CASE c.relkind WHEN 'r' THEN 'table' WHEN 'v' THEN 'view' ELSE 'relation' END, n.nspname, c.relname)
FROM pg_class AS c
JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = current_setting('pgratelimit.schema')
    AND c.relname IN ('rate_limit_ephemeral', 'rate_limit_durable', 'rate_limit_sweeper', 'rate_limit_goose_version')
    AND (c.relkind <> 'r' OR c.relhastriggers OR c.relhasrules OR c.relrowsecurity)
UNION ALL
SELECT format('function %s', p.oid::regprocedure)
FROM pg_proc AS p
JOIN pg_namespace AS n ON n.oid = p.pronamespace
WHERE n.nspname = current_setting('pgratelimit.schema')
    AND (p.proname, oidvectortypes(p.proargtypes)) IN (
        ('rate_limit_fixed_window', 'text, text[], bigint, bigint, bigint[], bigint[], boolean, integer, boolean, timestamp with time zone, bigint[], bigint[], bigint[], bigint[], boolean'),
        ('rate_limit_sliding_window', 'text, text[], bigint, bigint, bigint[], bigint[], boolean, integer, boolean, timestamp with time zone, bigint[], bigint[], bigint[], bigint[], boolean'),
        ('rate_limit_sliding_log', 'text, text[], bigint, bigint, bigint[], bigint[], boolean, integer, boolean, timestamp with time zone, bigint[], bigint[], bigint[], bigint[], boolean'),
        ('rate_limit_token_bucket', 'text, text[], bigint, bigint, bigint, bigint[], bigint[], boolean, integer, boolean, timestamp with time zone, bigint[], bigint[], bigint[], bigint[], boolean'),
        ('rate_limit_all', 'integer[], text[], text[], boolean[], smallint[], bigint[], bigint[], bigint[], bigint[], bigint[], integer, boolean, timestamp with time zone, bigint[], bigint[], bigint[], bigint[], boolean'),
        ('rate_limit_reset', 'text, text, boolean, integer, boolean'),
        ('rate_limit_sweep', 'integer, integer, text[], text, interval, timestamp with time zone'))
    AND NOT p.prosecdef AND $1::boolean
LIMIT 1
