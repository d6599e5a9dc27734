-- This query returns whether the database has counts, and whether it has policies.
SELECT EXISTS (SELECT FROM rate_limit_ephemeral) OR EXISTS (SELECT FROM rate_limit_durable),
    EXISTS (SELECT FROM rate_limit_policy)
