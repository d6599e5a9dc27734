-- Takes from a key's limit, or gives back what a receipt says. There is a row for each policy of the limit.
--   $1 names of the rows, $2 key, $3 whether they are in rate_limit_durable
--   $4 algorithms, $5 limits, $6 spans in microseconds, $7 refills, as of the policies
--   $8 cost; below 0 it gives back
--   $9 taken_since, $10 taken_in, $11 taken_at, $12 taken_spent, of the take that is given back; else NULL
--   $13 time zones of the policies; empty for those without one
SELECT a.granted > 0, a.remaining, coalesce(a.retry_after_us, 0), a.reset_after_us, a.decided_at,
    a.taken_since, a.taken_in, a.taken_at, a.taken_spent
FROM (SELECT ARRAY[cardinality($1::text[])] AS n) AS parts
CROSS JOIN LATERAL rate_limit_all(
    array_fill(1, n), $1::text[], array_fill($2::text, n), array_fill($3::boolean, n),
    $4::smallint[], $5::bigint[], $6::bigint[], $7::bigint[],
    array_fill($8::bigint, n), NULL::bigint[], NULL::integer, NULL::boolean, NULL::timestamptz,
    $9::bigint[], $10::bigint[], $11::bigint[], $12::bigint[], false, $13::text[], NULL::bigint[]) AS a
ORDER BY a.ord
