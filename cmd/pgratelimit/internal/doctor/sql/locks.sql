-- This query returns the sessions and prepared transactions that have a lock on the limiter's tables, or the advisory
-- lock of the migrations, and since when. The last columns are the locked object, and whether the lock blocks all
-- sessions or all writers. The time of other roles' sessions is only visible to members of pg_read_all_stats. Sessions
-- without a time are left out.
--   $1  the schema
--   $2  the minimum age of a lock in seconds
--   $3  the advisory lock of the migrations
WITH held AS (
    SELECT l.pid, l.virtualtransaction,
        string_agg(DISTINCT coalesce(l.mode || ' on ' || c.relname, 'the lock of migrations'), ', ') AS what,
        bool_or(l.mode = 'AccessExclusiveLock' AND c.oid IS NOT NULL) AS closed,
        bool_or(l.mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock') AND c.oid IS NOT NULL) AS stopped
    FROM pg_locks AS l
    JOIN pg_database AS d ON d.oid = l.database AND d.datname = current_database()
    LEFT JOIN pg_class AS c ON l.locktype = 'relation' AND c.oid = l.relation AND c.relkind = 'r'
        AND starts_with(c.relname, 'rate_limit_')
        AND c.relnamespace = (SELECT n.oid FROM pg_namespace AS n WHERE n.nspname = $1::text)
    WHERE l.granted AND (c.oid IS NOT NULL OR l.locktype = 'advisory' AND l.objsubid = 1
        AND l.classid::bigint << 32 | l.objid::bigint = $3::bigint)
    GROUP BY l.pid, l.virtualtransaction
)
SELECT coalesce(h.pid, 0), coalesce(p.gid, ''), coalesce(a.application_name, ''), coalesce(a.state, ''),
    coalesce(a.xact_start, a.state_change, p.prepared), h.what, h.closed, h.stopped
FROM held AS h
LEFT JOIN pg_stat_activity AS a ON a.pid = h.pid
LEFT JOIN pg_locks AS x ON h.pid IS NULL AND x.pid IS NULL AND x.locktype = 'transactionid'
    AND x.virtualtransaction = h.virtualtransaction
LEFT JOIN pg_prepared_xacts AS p ON p.transaction = x.transactionid
WHERE h.pid IS DISTINCT FROM pg_backend_pid() AND coalesce(a.backend_type, 'client backend') = 'client backend'
    AND coalesce(a.xact_start, a.state_change, p.prepared) <= clock_timestamp() - make_interval(secs => $2::float8)
ORDER BY 5, 1, 2
