-- This query makes a hold.
--   $1  the limiter, $2  the key, $3  the policy
--   $4  how much to hold, $5  for how long, $6  whether the limiter's rows are in rate_limit_durable
SELECT allowed, coalesce(hold, ''), remaining, (extract(epoch FROM retry_after) * 1000000)::bigint,
    (extract(epoch FROM reset_after) * 1000000)::bigint
FROM rate_limit_hold($1::text, $2::text, $3::text, $4::bigint, $5::interval, $6::boolean)
