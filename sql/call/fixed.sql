SELECT ord, granted, remaining, retry_after_us, reset_after_us, decided_at, count, prev_count, window_start, credit, scale, expires_at
FROM rate_limit_fixed_window(
    $1::text, $2::text[], $9::bigint, $10::bigint,
    $3::bigint[], $4::bigint[], $5::boolean, $6::integer, $7::boolean, $8::timestamptz)
