-- The policies that have not ended, those for the same together, and of these, the one that began last first.
--   $1 name of a limiter; NULL is all
--   $2 whether bans that limiters have made are wanted too
SELECT p.id, p.name, p.key, p.key_prefix, p.mode, p.policy, nullif(p.valid_from, '-infinity'),
    nullif(p.valid_until, 'infinity'), p.comment, p.automatic, p.changed_by, p.changed_at
FROM rate_limit_policy AS p
WHERE ($1::text IS NULL OR p.name = $1::text) AND p.valid_until > clock_timestamp()
    AND ($2::boolean OR NOT p.automatic)
ORDER BY p.name, p.key_prefix IS NOT NULL, p.key_prefix, p.key IS NOT NULL, p.key, p.valid_from DESC, p.id DESC
