-- What is left to keys of a limiter, without taking.
--   $1 name, $2 keys, $3 whether they are in rate_limit_durable, $4 limit, $5 window in microseconds
SELECT ord, remaining, coalesce(retry_after_us, 0), reset_after_us
FROM rate_limit_sliding_log($1::text, $2::text[], $4::bigint, $5::bigint, array_fill(0::bigint, ARRAY[cardinality($2::text[])]),
    NULL::bigint[], $3::boolean, NULL::integer, NULL::boolean, NULL::timestamptz, NULL::bigint[], NULL::bigint[], NULL::bigint[], NULL::bigint[], false)
