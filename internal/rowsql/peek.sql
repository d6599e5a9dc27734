-- This query returns what keys of a limiter have left, and what is held. It takes nothing.
--   $1  the name in the rows, $2  the keys, $3  whether the keys are in rate_limit_durable
--   $4  the algorithm's code, $5  the limit, $6  the span in microseconds, $7  the refill
--   $8  the time from which durations count, which is the same for several calls
--   $9  the time zone, or ''
SELECT a.ord, a.remaining, a.held, coalesce(a.retry_after_us, 0), a.reset_after_us
FROM (SELECT ARRAY[cardinality($2::text[])] AS n) AS keys
CROSS JOIN LATERAL rate_limit_all(
    ARRAY(SELECT generate_series(1, cardinality($2::text[]))), array_fill($1::text, n), $2::text[],
    array_fill($3::boolean, n), array_fill($4::smallint, n),
    array_fill($5::bigint, n), array_fill($6::bigint, n), array_fill($7::bigint, n),
    array_fill(0::bigint, n), NULL::bigint[], NULL::integer, NULL::boolean, $8::timestamptz,
    NULL::bigint[], NULL::bigint[], NULL::bigint[], NULL::bigint[], false, array_fill($9::text, n),
    NULL::bigint[], NULL::boolean[], NULL::bigint[], NULL::uuid[],
    NULL::bigint[]) AS a
