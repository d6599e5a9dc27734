-- This query returns the policies that are in force now or later, with the ids of their rows.
SELECT p.name, p.policy, (array_agg(p.id ORDER BY p.id))[1:20]
FROM rate_limit_policy AS p
WHERE p.mode = 'enforce' AND p.policy IS NOT NULL AND p.valid_until > clock_timestamp()
GROUP BY p.name, p.policy
ORDER BY 1, 2
