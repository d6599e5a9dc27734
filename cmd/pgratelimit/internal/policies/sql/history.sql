-- This query returns the changes of policies, the last change first, with the row before and after each change.
--   $1  the limiter's name, or NULL for all limiters
--   $2  the key or NULL, $3  the prefix or NULL, $4  whether to return only policies for all keys
--   $5  the maximum number of changes
-- JSON needs times from the year 1 to the year 9999. Triggers refuse all other years, but can be off.
SELECT h.version, least(greatest(h.at, '0001-01-01 00:00:00Z'), '9999-12-31 00:00:00Z'), h.by, h.action,
    CASE WHEN b.id IS NOT NULL THEN jsonb_strip_nulls(to_jsonb(b) || jsonb_build_object(
        'valid_from', CASE WHEN b.valid_from >= '0001-01-01 00:00:00Z'
            THEN least(b.valid_from, '9999-12-31 00:00:00Z') END,
        'valid_until', CASE WHEN b.valid_until < '9999-12-31 00:00:00Z'
            THEN greatest(b.valid_until, '0001-01-01 00:00:00Z') END,
        'changed_at', CASE WHEN b.changed_at < '9999-12-31 00:00:00Z'
            THEN greatest(b.changed_at, '0001-01-01 00:00:00Z') END)) END,
    CASE WHEN a.id IS NOT NULL THEN jsonb_strip_nulls(to_jsonb(a) || jsonb_build_object(
        'valid_from', CASE WHEN a.valid_from >= '0001-01-01 00:00:00Z'
            THEN least(a.valid_from, '9999-12-31 00:00:00Z') END,
        'valid_until', CASE WHEN a.valid_until < '9999-12-31 00:00:00Z'
            THEN greatest(a.valid_until, '0001-01-01 00:00:00Z') END,
        'changed_at', CASE WHEN a.changed_at < '9999-12-31 00:00:00Z'
            THEN greatest(a.changed_at, '0001-01-01 00:00:00Z') END)) END
FROM rate_limit_policy_history AS h
CROSS JOIN LATERAL jsonb_populate_record(NULL::rate_limit_policy, h.before) AS b
CROSS JOIN LATERAL jsonb_populate_record(NULL::rate_limit_policy, h.after) AS a
WHERE ($1::text IS NULL OR $1::text IN (b.name, a.name))
    AND ($2::text IS NULL OR $2::text IN (b.key, a.key))
    AND ($3::text IS NULL OR $3::text IN (b.key_prefix, a.key_prefix))
    AND (NOT $4::boolean OR b.name IS NOT NULL AND b.key IS NULL AND b.key_prefix IS NULL
        OR a.name IS NOT NULL AND a.key IS NULL AND a.key_prefix IS NULL)
ORDER BY h.version DESC
LIMIT $5::bigint
