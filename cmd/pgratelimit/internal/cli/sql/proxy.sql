-- This query returns whether the schema has the functions of a proxy, and an untrusted role that could have made the
-- foreign server. The foreign server could lead this command, with its password, to another server.
SELECT
    EXISTS (
        SELECT FROM pg_proc AS p
        WHERE p.pronamespace = n.oid AND p.proname = 'rate_limit_shards' AND p.pronargs = 0
            AND NOT EXISTS (
                SELECT FROM pg_class AS c WHERE c.relnamespace = n.oid AND c.relname = 'rate_limit_ephemeral')
    ),
    coalesce((
        SELECT r.rolname::text
        FROM pg_foreign_server AS s
        JOIN pg_roles AS r ON r.oid = s.srvowner
        JOIN pg_roles AS me ON me.rolname = current_user
        WHERE s.srvname = 'rate_limit_shards' AND NOT pg_has_role(r.oid, me.oid, 'USAGE')
            AND NOT pg_has_role(r.oid, n.nspowner, 'USAGE') AND NOT pg_has_role(r.oid, d.datdba, 'USAGE')
    ), '')
FROM pg_namespace AS n
JOIN pg_database AS d ON d.datname = current_database()
WHERE n.nspname = current_setting('pgratelimit.schema')
