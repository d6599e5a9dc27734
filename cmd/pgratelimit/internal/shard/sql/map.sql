-- This query reads the number of shards and the version from the text of a proxy's functions. The query does not call
-- the functions.
SELECT
    coalesce(max(substring(p.prosrc, '[0-9]+')::bigint) FILTER (WHERE p.proname = 'rate_limit_shards'), 0),
    coalesce(max(substring(p.prosrc, '[0-9]+')::bigint) FILTER (WHERE p.proname = 'rate_limit_version'), 0)
FROM pg_proc AS p
JOIN pg_namespace AS n ON n.oid = p.pronamespace
WHERE n.nspname = current_setting('pgratelimit.schema') AND p.pronargs = 0
    AND p.proname IN ('rate_limit_shards', 'rate_limit_version')
