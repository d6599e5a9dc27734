-- This query resets keys of a limiter, and returns how many rows it removed.
--   $1  the names in a key's rows
--   $2  the keys
--   $3  whether the rows are in rate_limit_durable
--   $4  how long to wait for a locked row, in milliseconds; NULL waits without a limit
SELECT count(*)
FROM unnest($1::text[]) AS n (name)
CROSS JOIN unnest($2::text[]) AS k (key)
WHERE rate_limit_reset(n.name, k.key, $3::boolean, $4::integer, NULL::boolean)
