-- This statement removes policies.
--   $1  the ids of their rows
DELETE FROM rate_limit_policy AS p WHERE p.id = ANY ($1::bigint[])
