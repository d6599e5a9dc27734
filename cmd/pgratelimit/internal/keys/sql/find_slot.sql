-- This query returns the limiter's name and the key in the row of a slot or a place in a line. It may have ended.
--   $1  the id
SELECT h.prefix, h.key
FROM rate_limit_ephemeral_hold AS h
WHERE h.id = $1::uuid
