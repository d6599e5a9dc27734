SELECT ord, granted, remaining, retry_after_us, coalesce(reset_after_us, 0),
    (pg_catalog.date_part('epoch', decided_at) OPERATOR(pg_catalog.*) 1000000::double precision)::bigint,
    0, 0, 0, 0, 0, 0, 0, 0, 0, log, coalesce(held, 0)
FROM rate_limit_slots(
    $1::pg_catalog.text[], $2::pg_catalog.text[], $3::boolean[], $4::bigint[], $5::bigint[], $6::bigint[],
    $7::pg_catalog.text[]::pg_catalog.uuid[], $8::pg_catalog.text[]::pg_catalog.jsonb[],
    $9::integer, $10::boolean, $11::pg_catalog.timestamptz, $12::boolean)
