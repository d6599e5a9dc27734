-- Resets a key, and returns how many rows that removed.
--   $1 names of its rows, $2 key, $3 whether it is in rate_limit_durable
SELECT count(*)
FROM unnest($1::text[]) AS n (name)
WHERE rate_limit_reset(n.name, $2::text, $3::boolean, NULL::integer, NULL::boolean)
