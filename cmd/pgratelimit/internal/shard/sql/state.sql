-- This query describes a database that is a shard, or will become a shard. It calls none of the limiter's functions.
--   $1  the advisory lock of the session that divides shards
SELECT
    -- The version of the migrations, or 0.
    coalesce((
        SELECT substring(p.prosrc, '[0-9]+')::bigint
        FROM pg_proc AS p
        WHERE p.pronamespace = n.oid AND p.proname = 'rate_limit_version' AND p.pronargs = 0
            AND durable.oid IS NOT NULL
    ), 0),
    pg_is_in_recovery() OR current_setting('default_transaction_read_only')::boolean,
    current_setting('server_encoding'),
    coalesce((
        SELECT sum(pg_stat_get_live_tuples(c.oid))
        FROM pg_class AS c
        WHERE c.relnamespace = n.oid AND c.relname IN ('rate_limit_ephemeral', 'rate_limit_durable')
    ), 0)::bigint,
    coalesce(pg_get_userbyid(durable.relowner)::text, ''),
    coalesce(pg_has_role(durable.relowner, 'MEMBER'), false),
    coalesce((
        SELECT c.relkind = 'r' AND has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')
        FROM pg_class AS c
        WHERE c.relnamespace = n.oid AND c.relname = 'rate_limit_shard'
    ), false),
    EXISTS (SELECT FROM pg_foreign_server AS s WHERE s.srvname = 'rate_limit_shards'),
    -- Whether the shard is being divided, or a division was interrupted.
    EXISTS (
        SELECT FROM pg_trigger AS t
        JOIN pg_class AS c ON c.oid = t.tgrelid
        WHERE c.relnamespace = n.oid AND c.relname IN ('rate_limit_ephemeral', 'rate_limit_durable')
            AND t.tgname IN ('rate_limit_note_deleted', 'rate_limit_note_truncated')
    ),
    -- The process id of the session that divides the shards now, or 0. Only the first shard has this lock.
    coalesce((
        SELECT l.pid
        FROM pg_locks AS l
        JOIN pg_database AS d ON d.oid = l.database
        WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND d.datname = current_database()
            AND l.classid::bigint << 32 | l.objid::bigint = $1::bigint
        LIMIT 1
    ), 0)
FROM (SELECT current_setting('pgratelimit.schema') AS nspname) AS wanted
LEFT JOIN pg_namespace AS n USING (nspname)
LEFT JOIN pg_class AS durable ON durable.relnamespace = n.oid AND durable.relname = 'rate_limit_durable'
