-- This query describes the tables of keys and holds with data from the catalogs and statistics. The query does not read
-- the tables. The last column has the indexes that the migrations do not make.
SELECT
    c.relname,
    c.relpersistence::text,
    pg_relation_size(c.oid),
    coalesce(pg_relation_size(nullif(c.reltoastrelid, 0)), 0),
    coalesce((
        SELECT o.option_value::bigint
        FROM pg_options_to_table(c.reloptions) AS o
        WHERE o.option_name = 'fillfactor'
    ), 100),
    coalesce(s.n_live_tup, 0),
    coalesce(s.n_dead_tup, 0),
    coalesce(s.n_tup_upd, 0),
    coalesce(s.n_tup_hot_upd, 0),
    greatest(s.last_autovacuum, s.last_vacuum),
    clock_timestamp(),
    age(c.relfrozenxid)::bigint,
    coalesce((
        SELECT o.option_value::boolean
        FROM pg_options_to_table(c.reloptions) AS o
        WHERE o.option_name = 'autovacuum_enabled'
    ), true),
    ARRAY(
        SELECT i.indexrelid::regclass::text
        FROM pg_index AS i
        JOIN pg_class AS ic ON ic.oid = i.indexrelid
        WHERE i.indrelid = c.oid AND NOT i.indisunique AND NOT i.indisexclusion -- unique indexes may refuse rows
            AND ic.relname <> ALL (ARRAY[c.relname || '_live', c.relname || '_line'])
        ORDER BY 1
    )
FROM pg_class AS c
LEFT JOIN pg_stat_all_tables AS s ON s.relid = c.oid
JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = current_setting('pgratelimit.schema') AND c.relkind = 'r'
    AND c.relname IN ('rate_limit_ephemeral', 'rate_limit_durable', 'rate_limit_ephemeral_hold',
        'rate_limit_durable_hold')
ORDER BY c.relname LIKE '%hold', c.relname DESC
