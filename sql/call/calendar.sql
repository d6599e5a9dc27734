SELECT ord, granted, remaining, retry_after_us, reset_after_us,
    (pg_catalog.date_part('epoch', decided_at) OPERATOR(pg_catalog.*) 1000000::double precision)::bigint,
    count, prev_count, window_start, credit, scale, expires_at,
    taken_spent, coalesce(taken_since, 0), 0::bigint
FROM rate_limit_calendar_window(
    $1::pg_catalog.text, $2::pg_catalog.text[], $14::bigint, $15::bigint, $16::pg_catalog.text,
    $3::bigint[], $4::bigint[], $5::boolean, $6::integer, $7::boolean, $8::pg_catalog.timestamptz,
    $9::bigint[], $10::bigint[], $11::bigint[], $12::bigint[], $13::boolean)
