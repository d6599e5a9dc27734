-- This query returns the policies that have not ended, ordered by target, and then the last to begin first.
--   $1  the limiter's name, or NULL for all limiters
--   $2  whether to include bans that limiters have made
-- JSON needs times from the year 1 to the year 9999. Triggers refuse all other years, but can be off.
SELECT p.id, p.name, p.key, p.key_prefix, p.mode, p.policy,
    CASE WHEN p.valid_from >= '0001-01-01 00:00:00Z' THEN least(p.valid_from, '9999-12-31 00:00:00Z') END,
    CASE WHEN p.valid_until < '9999-12-31 00:00:00Z' THEN greatest(p.valid_until, '0001-01-01 00:00:00Z') END,
    p.comment, p.automatic, p.changed_by, least(greatest(p.changed_at, '0001-01-01 00:00:00Z'), '9999-12-31 00:00:00Z')
FROM rate_limit_policy AS p
WHERE ($1::text IS NULL OR p.name = $1::text) AND p.valid_until > clock_timestamp()
    AND ($2::boolean OR NOT p.automatic)
ORDER BY p.name, p.key_prefix IS NOT NULL, p.key_prefix, p.key IS NOT NULL, p.key, p.valid_from DESC, p.id DESC
