-- This query shows how soon the server will refuse statements that need a new transaction id (54000). The result has,
-- for each kind of id, the database with the oldest ids, the ids' age, the age at which autovacuum starts, and the
-- transaction or slot that holds up VACUUM most, with its age and a statement that ends it.
WITH holder AS (
    SELECT h.*
    FROM (
        SELECT greatest(age(a.backend_xid), age(a.backend_xmin)) AS age,
            format('%s %s (%s, %s)', CASE a.backend_type WHEN 'client backend' THEN 'session' ELSE a.backend_type END,
                a.pid, coalesce(nullif(a.application_name, ''), 'no application_name'), a.state) AS what,
            format('`SELECT pg_terminate_backend(%s)`', a.pid) AS mend
        FROM pg_stat_activity AS a
        WHERE a.pid <> pg_backend_pid()
        UNION ALL
        SELECT age(x.transaction), format('prepared transaction %L of database %I', x.gid, x.database),
            format('`ROLLBACK PREPARED %L` in database %I', x.gid, x.database)
        FROM pg_prepared_xacts AS x
        UNION ALL
        SELECT greatest(age(s.xmin), age(s.catalog_xmin)), format('replication slot %I', s.slot_name),
            format('`SELECT pg_drop_replication_slot(%L)`, unless its receiver still comes', s.slot_name)
        FROM pg_replication_slots AS s
        UNION ALL
        SELECT 0, '', ''
    ) AS h
    WHERE h.age IS NOT NULL
    ORDER BY h.age DESC
    LIMIT 1
)
SELECT i.kind, i.database, i.age, i.autovacuum, h.age, h.what, h.mend
FROM (
    (SELECT 'transaction ids' AS kind, quote_ident(d.datname) AS database, age(d.datfrozenxid)::bigint AS age,
        current_setting('autovacuum_freeze_max_age')::bigint AS autovacuum
    FROM pg_database AS d
    ORDER BY 3 DESC, d.datname <> current_database()
    LIMIT 1)
    UNION ALL
    (SELECT 'multixact ids', quote_ident(d.datname), mxid_age(d.datminmxid)::bigint,
        current_setting('autovacuum_multixact_freeze_max_age')::bigint
    FROM pg_database AS d
    ORDER BY 3 DESC, d.datname <> current_database()
    LIMIT 1)
) AS i
CROSS JOIN holder AS h
ORDER BY i.kind DESC
