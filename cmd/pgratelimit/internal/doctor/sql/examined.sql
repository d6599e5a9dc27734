-- This query describes the database of a proxy.
SELECT
    coalesce((SELECT e.extversion FROM pg_extension AS e WHERE e.extname = 'plproxy'), ''),
    current_setting('server_version_num')::integer / 10000,
    current_setting('server_encoding'),
    owner.rolname::text,
    coalesce((
        SELECT has_server_privilege(owner.oid, s.oid, 'USAGE')
        FROM pg_foreign_server AS s
        WHERE s.srvname = 'rate_limit_shards'
    ), false),
    EXISTS (SELECT FROM pg_user_mappings AS m WHERE m.srvname = 'rate_limit_shards' AND m.umuser = owner.oid),
    coalesce((
        SELECT quote_ident(en.nspname)
        FROM pg_extension AS e
        JOIN pg_namespace AS en ON en.oid = e.extnamespace
        WHERE e.extname = 'pg_stat_statements'
    ), '')
FROM pg_proc AS p
JOIN pg_namespace AS n ON n.oid = p.pronamespace
JOIN pg_roles AS owner ON owner.oid = p.proowner
WHERE n.nspname = current_setting('pgratelimit.schema') AND p.proname = 'rate_limit_shards' AND p.pronargs = 0
