-- The server, as far as it concerns the limiters.
SELECT
    current_setting('server_version_num')::integer,
    current_setting('server_version'),
    pg_is_in_recovery(),
    current_setting('track_counts')::boolean,
    current_setting('autovacuum')::boolean,
    current_setting('autovacuum_freeze_max_age')::bigint,
    (SELECT count(*) FROM pg_stat_replication),
    2 = (
        SELECT count(*)
        FROM pg_class AS c
        JOIN pg_namespace AS n ON n.oid = c.relnamespace
        WHERE n.nspname = current_setting('pgratelimit.schema') AND c.relname IN ('rate_limit_ephemeral', 'rate_limit_durable')
            AND has_schema_privilege(n.oid, 'USAGE')
    ),
    quote_ident(current_setting('pgratelimit.schema'))
