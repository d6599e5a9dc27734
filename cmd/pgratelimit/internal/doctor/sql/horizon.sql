-- This query finds the session or prepared transaction that holds up VACUUM longest. The last column tells whether this
-- role can see the transactions of other roles.
SELECT held.seconds, held.what, held.mend, pg_has_role('pg_read_all_stats', 'USAGE')
FROM (
    SELECT extract(epoch FROM clock_timestamp() - xact_start)::bigint AS seconds,
        format('session %s (%s, %s)',
            pid, coalesce(nullif(application_name, ''), 'no application_name'), state) AS what,
        format('as its role or a superuser, end it, which rolls back what it has not committed: '
            '`SELECT pg_terminate_backend(%s)`', pid) AS mend
    FROM pg_stat_activity
    WHERE pid <> pg_backend_pid() AND xact_start IS NOT NULL AND backend_type = 'client backend'
        AND (datname = current_database() OR datname IS NULL)
    UNION ALL
    SELECT extract(epoch FROM clock_timestamp() - prepared)::bigint,
        format('prepared transaction %L', gid),
        format('`ROLLBACK PREPARED %L`, which loses what it has done, or COMMIT PREPARED', gid)
    FROM pg_prepared_xacts
    WHERE database = current_database()
    UNION ALL
    SELECT 0, NULL, NULL
    ORDER BY 1 DESC
    LIMIT 1
) AS held
