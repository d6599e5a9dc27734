-- Resets keys of a limiter, and returns how many rows it removed.
--   $1  the names of a key's rows
--   $2  the keys
--   $3  whether the rows are in rate_limit_durable
--   $4  how many milliseconds to wait for a row that somebody holds; NULL is without an end
SELECT count(*)
FROM unnest($1::text[]) AS n (name)
CROSS JOIN unnest($2::text[]) AS k (key)
WHERE rate_limit_reset(n.name, k.key, $3::boolean, $4::integer, NULL::boolean)
