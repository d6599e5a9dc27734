SELECT slot::text, waiting, fence
FROM rate_limit_renew_all(
    $1::pg_catalog.text[]::pg_catalog.uuid[], $2::bigint, $3::integer, $4::boolean, $5::bigint,
    $6::bigint[])
