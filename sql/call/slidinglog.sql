SELECT ord, granted, remaining, retry_after_us, reset_after_us, decided_at, count, prev_count, window_start, credit, 0::bigint, expires_at,
    taken_spent, coalesce(taken_since, 0), 0::bigint, log
FROM rate_limit_sliding_log(
    $1::text, $2::text[], $14::bigint, $15::bigint,
    $3::bigint[], $4::bigint[], $5::boolean, $6::integer, $7::boolean, $8::timestamptz,
    $9::bigint[], $10::bigint[], $11::bigint[], $12::bigint[], $13::boolean)
