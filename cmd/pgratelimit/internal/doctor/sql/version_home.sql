-- This query returns the first schema of search_path, and the owner of the function rate_limit_version in it.
SELECT n.nspname, pg_catalog.pg_get_userbyid(p.proowner)
FROM pg_catalog.pg_namespace AS n
JOIN pg_catalog.pg_proc AS p ON p.pronamespace OPERATOR(pg_catalog.=) n.oid
    AND p.proname OPERATOR(pg_catalog.=) 'rate_limit_version'
WHERE n.nspname OPERATOR(pg_catalog.=) pg_catalog.current_schema()
