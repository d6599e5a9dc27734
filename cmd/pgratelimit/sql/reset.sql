-- Resets a key, and returns how many rows that has removed.
--   $1 name, $2 key, $3 whether it is in rate_limit_durable
SELECT CASE WHEN rate_limit_reset($1::text, $2::text, $3::boolean, NULL::integer, NULL::boolean) THEN 1 ELSE 0 END
