-- The changes of policies, the last one first, with the row before and after each.
--   $1 name of a limiter; NULL is all
--   $2 key, or NULL, $3 prefix, or NULL, $4 whether only those for everybody are wanted
--   $5 how many
SELECT h.version, h.at, h.by, h.action,
    b.id, b.name, b.key, b.key_prefix, b.mode, b.policy, nullif(b.valid_from, '-infinity'),
    nullif(b.valid_until, 'infinity'), b.comment, b.automatic, b.changed_by, b.changed_at,
    a.id, a.name, a.key, a.key_prefix, a.mode, a.policy, nullif(a.valid_from, '-infinity'),
    nullif(a.valid_until, 'infinity'), a.comment, a.automatic, a.changed_by, a.changed_at
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
