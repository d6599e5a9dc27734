-- This query describes the server, and finds the tables.
WITH found AS (
    SELECT n.nspname, c.relname, c.relowner, has_schema_privilege(n.oid, 'USAGE') AS usable,
        has_table_privilege(c.oid, 'SELECT') AS readable
    FROM pg_class AS c
    JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE c.relname IN ('rate_limit_ephemeral', 'rate_limit_durable')
),
ours AS (
    SELECT f.*
    FROM found AS f
    WHERE f.nspname = current_setting('pgratelimit.schema')
),
policies AS (
    SELECT has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT') AS readable,
        has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'INSERT')
            AND has_table_privilege(c.oid, 'UPDATE') AND has_table_privilege(c.oid, 'DELETE') AS changeable
    FROM pg_class AS c
    JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE c.relname = 'rate_limit_policy' AND n.nspname = current_setting('pgratelimit.schema')
)
SELECT
    current_setting('server_version_num')::integer,
    current_setting('server_version'),
    pg_is_in_recovery(),
    current_setting('track_counts')::boolean,
    (SELECT s.source IN ('database', 'user', 'database user') FROM pg_settings AS s WHERE s.name = 'track_counts'),
    current_setting('autovacuum')::boolean,
    current_setting('autovacuum_freeze_max_age')::bigint,
    (SELECT count(*) FROM pg_stat_replication),
    quote_ident(current_database()),
    quote_ident(current_user),
    quote_ident(current_setting('pgratelimit.schema')),
    (SELECT count(*) FROM ours),
    (SELECT coalesce(bool_and(o.usable), true) FROM ours AS o),
    (SELECT coalesce(bool_and(o.readable), false) FROM ours AS o),
    -- Whether this role may read and change the policies. These columns are NULL if the table is missing.
    (SELECT p.readable FROM policies AS p),
    (SELECT p.changeable FROM policies AS p),
    -- rate_limit_ephemeral comes first, because another role cannot add a second table of this name.
    coalesce((SELECT pg_get_userbyid(o.relowner)::text FROM ours AS o ORDER BY o.relname DESC LIMIT 1), ''),
    -- If there are no tables, this role should create them: the schema's owner, if this role may act as the owner.
    coalesce(
        (SELECT quote_ident(pg_get_userbyid(o.relowner)) FROM ours AS o ORDER BY o.relname DESC LIMIT 1),
        (SELECT quote_ident(r.rolname)
            FROM pg_namespace AS n
            JOIN pg_database AS d ON d.datname = current_database()
            JOIN pg_roles AS r ON r.oid =
                CASE pg_get_userbyid(n.nspowner) WHEN 'pg_database_owner' THEN d.datdba ELSE n.nspowner END
            WHERE n.nspname = current_setting('pgratelimit.schema') AND pg_has_role(r.oid, 'MEMBER')),
        ''),
    ARRAY(SELECT DISTINCT quote_ident(f.nspname) FROM found AS f WHERE f.usable ORDER BY 1),
    ARRAY(SELECT DISTINCT quote_ident(f.nspname) FROM found AS f WHERE NOT f.usable ORDER BY 1)
