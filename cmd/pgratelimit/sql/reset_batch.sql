-- Resets keys of a limiter in the order given, and returns how many rows that has removed.
--   $1 name, $2 keys, $3 whether they are in rate_limit_durable
SELECT count(*)
FROM unnest($2::text[]) AS k (key)
WHERE rate_limit_reset($1::text, k.key, $3::boolean)
