-- This query prepares a transaction. The result has the process id of the session, and the schema of the tables and
-- functions, or '' if there is none. search_path becomes pg_catalog, because this role may be a superuser, and other
-- roles may create objects in the schemas of search_path.
--   $1  statement_timeout in milliseconds
--   $2  the schema; if it is '', look for the schema in search_path
SELECT
    found.schema,
    pg_catalog.pg_backend_pid(),
    pg_catalog.set_config('statement_timeout', $1::pg_catalog.text, true),
    pg_catalog.set_config('pgratelimit.schema', found.schema, true),
    pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true),
    pg_catalog.set_config('timezone', 'UTC', true),
    pg_catalog.set_config('row_security', 'off', true) -- rows that row-level security hides cause an error
FROM (
    SELECT CASE WHEN $2::pg_catalog.text OPERATOR(pg_catalog.<>) '' THEN $2::pg_catalog.text ELSE coalesce((
        SELECT n.nspname::pg_catalog.text
        FROM pg_catalog.pg_class AS c
        JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace
        WHERE c.oid OPERATOR(pg_catalog.=) coalesce(
            pg_catalog.to_regclass('rate_limit_ephemeral'), pg_catalog.to_regclass('rate_limit_durable'))
    ), (
        SELECT n.nspname::pg_catalog.text -- the schema of a proxy, which has no tables
        FROM pg_catalog.pg_proc AS p
        JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) p.pronamespace
        WHERE p.oid OPERATOR(pg_catalog.=) pg_catalog.to_regprocedure('rate_limit_shards()')
    ), '') END AS schema
    OFFSET 0
) AS found
