-- Creates a function with which PL/Proxy asks one shard whether its role has the rights that a proxy needs.
--   %[1]s  the schema, and %[2]s the same in a literal
--   %[3]s  further conditions
CREATE FUNCTION %[1]s._rate_limit_check_shard(
    shard integer, shards integer, needed text[], OUT login text, OUT missing text[]
)
LANGUAGE plproxy
AS $$
    CLUSTER 'rate_limit_shards';
    RUN ON shard;
    SELECT current_user::text AS login, ARRAY(
        SELECT p.proname::text
        FROM pg_catalog.pg_proc AS p
        WHERE p.pronamespace = '%[2]s'::pg_catalog.regnamespace AND p.proname = ANY (needed)
            AND NOT pg_catalog.has_function_privilege(p.oid, 'EXECUTE')
        ORDER BY p.proname) AS missing
    WHERE %[3]s;
$$
