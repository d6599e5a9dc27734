SELECT ord, coalesce(granted, -1), remaining, retry_after_us, reset_after_us,
    (pg_catalog.date_part('epoch', decided_at) OPERATOR(pg_catalog.*) 1000000::double precision)::bigint,
    count, prev_count, window_start, credit, coalesce(scale, 0), expires_at,
    taken_spent, coalesce(taken_since, 0), coalesce(taken_at, 0), log, held
FROM rate_limit_all(
    $1::integer[], $2::pg_catalog.text[], $3::pg_catalog.text[], $4::boolean[], $5::smallint[],
    $6::bigint[], $7::bigint[], $8::bigint[],
    $9::bigint[], $10::bigint[], $11::integer, $12::boolean, $13::pg_catalog.timestamptz,
    $14::bigint[], $15::bigint[], $16::bigint[], $17::bigint[], $18::boolean, $19::pg_catalog.text[],
    $20::bigint[], $21::boolean[], $22::bigint[], $23::pg_catalog.text[]::pg_catalog.uuid[], $24::bigint[])
