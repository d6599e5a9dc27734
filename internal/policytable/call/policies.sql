SELECT version, changed_us, complete, clock_us, id, coalesce(removed, false),
    coalesce(name, ''::pg_catalog.text), key, key_prefix,
    coalesce(mode, ''::pg_catalog.text), coalesce(policy, ''::pg_catalog.text), from_us, until_us,
    coalesce(automatic, false), coalesce(row_changed_us, 0::bigint)
FROM rate_limit_policies($1::bigint, $2::bigint)
