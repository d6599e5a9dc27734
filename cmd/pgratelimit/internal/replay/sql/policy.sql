-- This query returns the policy in force of the limiter $1, for keys that have no policy of their own.
SELECT p.policy FROM rate_limit_policy AS p
WHERE p.name = $1 AND p.key IS NULL AND p.key_prefix IS NULL AND p.mode = 'enforce' AND p.policy IS NOT NULL
    AND p.valid_from <= clock_timestamp() AND p.valid_until > clock_timestamp()
ORDER BY p.valid_from DESC, p.id DESC
LIMIT 1
