-- This query returns the reported decisions of the shadow policies of a limiter.
--   $1  the limiter's name
--   $2  the maximum number of keys per policy; those that the policy would have denied most often come first
SELECT p.id, p.key, p.key_prefix, p.policy, coalesce(s.decided, 0), coalesce(s.denied, 0), coalesce(s.would_deny, 0),
    least(greatest(p.valid_from, p.changed_at, '0001-01-01 00:00:00Z'), '9999-12-31 00:00:00Z'), s.last_at,
    most.keys
FROM rate_limit_policy AS p
LEFT JOIN rate_limit_shadow AS s ON s.policy_id = p.id AND s.key = ''
CROSS JOIN LATERAL (
    SELECT coalesce(jsonb_agg(k ORDER BY k.would_deny DESC, k.key), '[]') AS keys
    FROM (
        SELECT k.key, k.would_deny, k.denied
        FROM rate_limit_shadow AS k
        WHERE k.policy_id = p.id AND k.key <> ''
        ORDER BY k.would_deny DESC, k.key
        LIMIT $2::bigint
    ) AS k
) AS most
WHERE p.name = $1::text AND p.mode = 'shadow'
ORDER BY p.key_prefix IS NOT NULL, p.key_prefix, p.key IS NOT NULL, p.key, p.id
