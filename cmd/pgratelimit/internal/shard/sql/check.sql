-- This statement creates a function that PL/Proxy uses to ask a shard whether the proxy's role has all rights it needs.
--   %[1]s  the schema, %[2]s  the schema as a literal
--   %[3]s  additional conditions
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
