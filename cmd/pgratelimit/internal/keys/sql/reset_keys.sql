-- Resets keys, and returns how many rows that removed. It fails rather than wait for a row that somebody holds, because
-- others may wait for the rows before it.
--   $1 name, $2 keys, $3 whether they are in rate_limit_durable
SELECT count(*)
FROM unnest($2::text[]) AS k (key)
WHERE rate_limit_reset($1::text, k.key, $3::boolean, 1, NULL::boolean)
