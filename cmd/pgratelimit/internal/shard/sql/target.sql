-- This query describes a database that is a proxy, or will become a proxy. $1  the schema
SELECT
    current_database(),
    quote_ident(current_user),
    (SELECT r.rolsuper FROM pg_roles AS r WHERE r.rolname = current_user),
    current_setting('server_version_num')::integer / 10000,
    EXISTS (SELECT FROM pg_available_extensions AS e WHERE e.name = 'plproxy'),
    current_setting('server_encoding'),
    pg_is_in_recovery(),
    n.oid IS NOT NULL,
    ARRAY(
        SELECT c.relname::text
        FROM pg_class AS c
        WHERE c.relnamespace = n.oid AND c.relkind <> 'c' AND starts_with(c.relname, 'rate_limit_')
        ORDER BY c.relname
    ),
    ARRAY(
        SELECT DISTINCT quote_ident(other.nspname)
        FROM pg_proc AS p
        JOIN pg_namespace AS other ON other.oid = p.pronamespace
        WHERE p.proname = 'rate_limit_shards' AND p.pronargs = 0 AND other.nspname <> wanted.nspname
        ORDER BY 1
    ),
    EXISTS (SELECT FROM pg_user_mappings AS m WHERE m.srvname = 'rate_limit_shards' AND m.umuser = owner.oid),
    coalesce(quote_ident(owner.rolname), '')
FROM (SELECT $1::text AS nspname) AS wanted
LEFT JOIN pg_namespace AS n USING (nspname)
JOIN pg_database AS d ON d.datname = current_database()
-- This role will own the functions. The role pg_database_owner (6171) cannot log in.
LEFT JOIN pg_roles AS owner ON owner.oid = CASE WHEN n.nspowner = 6171 THEN d.datdba ELSE n.nspowner END
