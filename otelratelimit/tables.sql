-- The size of each table, its live rows, how many rows were ever deleted, and the seconds since a sweep last reached
-- the end of all tables. The only table that is read is rate_limit_sweeper, which has one row. The rest are
-- statistics.
SELECT t.name,
    pg_catalog.pg_total_relation_size(t.id),
    pg_catalog.pg_stat_get_live_tuples(t.id),
    pg_catalog.pg_stat_get_tuples_deleted(t.id),
    (SELECT pg_catalog.date_part('epoch',
            pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) w.completed_at)
        FROM rate_limit_sweeper AS w)
FROM (
    SELECT pg_catalog.substr(y.typname::pg_catalog.text, 12) AS name, y.typrelid AS id -- without rate_limit_
    FROM pg_catalog.pg_type AS y
    WHERE y.oid OPERATOR(pg_catalog.=) pg_catalog.pg_typeof(NULL::rate_limit_ephemeral)
        OR y.oid OPERATOR(pg_catalog.=) pg_catalog.pg_typeof(NULL::rate_limit_durable)
        OR y.oid OPERATOR(pg_catalog.=) pg_catalog.pg_typeof(NULL::rate_limit_ephemeral_hold)
        OR y.oid OPERATOR(pg_catalog.=) pg_catalog.pg_typeof(NULL::rate_limit_durable_hold)
) AS t
