-- Removes policies.
--   $1 their ids
DELETE FROM rate_limit_policy AS p WHERE p.id = ANY ($1::bigint[])
