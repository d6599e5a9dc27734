-- What concerns a proxy about the database that is one, or is to be one.
SELECT
    current_database(),
    quote_ident(current_user),
    (SELECT r.rolsuper FROM pg_roles AS r WHERE r.rolname = current_user),
    current_setting('server_version_num')::integer / 10000,
    EXISTS (SELECT FROM pg_available_extensions AS e WHERE e.name = 'plproxy'),
    current_setting('server_encoding'),
    pg_is_in_recovery(),
    EXISTS (SELECT FROM pg_namespace AS n WHERE n.nspname = $1::text),
    ARRAY(
        SELECT c.relname::text
        FROM pg_class AS c
        JOIN pg_namespace AS n ON n.oid = c.relnamespace
        WHERE n.nspname = $1::text AND c.relkind <> 'c' AND starts_with(c.relname, 'rate_limit_')
        ORDER BY c.relname
    ),
    ARRAY(
        SELECT DISTINCT quote_ident(n.nspname)
        FROM pg_proc AS p
        JOIN pg_namespace AS n ON n.oid = p.pronamespace
        WHERE p.proname = 'rate_limit_shards' AND p.pronargs = 0 AND n.nspname <> $1::text
        ORDER BY 1
    ),
    EXISTS (
        SELECT FROM pg_user_mappings AS m
        JOIN pg_namespace AS n ON n.nspowner = m.umuser
        WHERE m.srvname = 'rate_limit_shards' AND n.nspname = $1::text
    ),
    (SELECT quote_ident(pg_get_userbyid(n.nspowner)) FROM pg_namespace AS n WHERE n.nspname = $1::text)
