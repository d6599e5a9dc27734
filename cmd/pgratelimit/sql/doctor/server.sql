-- The server, as far as it concerns the limiters.
SELECT
    current_setting('server_version_num')::integer,
    current_setting('server_version'),
    pg_is_in_recovery(),
    current_setting('track_counts')::boolean,
    current_setting('autovacuum')::boolean,
    current_setting('autovacuum_freeze_max_age')::bigint,
    (SELECT count(*) FROM pg_stat_replication),
    to_regclass('rate_limit_ephemeral') IS NOT NULL AND to_regclass('rate_limit_durable') IS NOT NULL,
    coalesce((SELECT relnamespace::regnamespace::text FROM pg_class WHERE oid = to_regclass('rate_limit_ephemeral')), '')
