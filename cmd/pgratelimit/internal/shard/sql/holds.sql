-- Whether there are counts, and policies.
SELECT EXISTS (SELECT FROM rate_limit_ephemeral) OR EXISTS (SELECT FROM rate_limit_durable),
    EXISTS (SELECT FROM rate_limit_policy)
