-- Who has the lock that a session waits for: sessions, and transactions that were prepared. The text of a prepared
-- transaction's name is its owner's, and may be anything.
--   $1  the process id of the session that waits, or 0
--   $2  an advisory lock that somebody asks for again and again rather than wait for it, or NULL
WITH blocking AS (
    SELECT unnest(pg_blocking_pids($1::integer)) AS pid
    UNION
    SELECT l.pid
    FROM pg_locks AS l
    WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
        AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
        AND l.classid::bigint << 32 | l.objid::bigint = $2::bigint
)
SELECT b.pid, '', coalesce(a.application_name, ''), coalesce(a.state, ''), coalesce(a.xact_start, a.state_change)
FROM blocking AS b
LEFT JOIN pg_stat_activity AS a ON a.pid = b.pid
WHERE b.pid > 0 AND b.pid <> $1::integer
UNION
SELECT 0, p.gid, '', 'prepared', p.prepared
FROM pg_locks AS w
JOIN pg_locks AS h ON h.pid IS NULL AND h.granted
    AND (h.locktype, h.database, h.relation, h.page, h.tuple, h.transactionid, h.classid, h.objid, h.objsubid)
        IS NOT DISTINCT FROM
        (w.locktype, w.database, w.relation, w.page, w.tuple, w.transactionid, w.classid, w.objid, w.objsubid)
JOIN pg_locks AS x ON x.locktype = 'transactionid' AND x.virtualtransaction = h.virtualtransaction AND x.pid IS NULL
JOIN pg_prepared_xacts AS p ON p.transaction = x.transactionid
WHERE w.pid = $1::integer AND NOT w.granted
ORDER BY 5, 1, 2
