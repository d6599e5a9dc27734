-- This query groups equal policies. The result has the number of rows, and how many of the rows have a problem.
SELECT p.mode, p.policy, count(*),
    count(*) FILTER (WHERE p.valid_until > clock_timestamp()),
    count(*) FILTER (WHERE p.valid_until <= clock_timestamp() AND NOT p.automatic),
    coalesce((array_agg(p.id ORDER BY p.id) FILTER (WHERE of_nobody.yes))[1:20], '{}'),
    (array_agg(p.id ORDER BY p.id))[1:20]
FROM rate_limit_policy AS p
CROSS JOIN LATERAL (
    SELECT octet_length(p.name) NOT BETWEEN 1 AND 128 OR octet_length(p.key) NOT BETWEEN 1 AND 512
        OR octet_length(p.key_prefix) NOT BETWEEN 1 AND 512 OR p.key IS NOT NULL AND p.key_prefix IS NOT NULL AS yes
) AS of_nobody
GROUP BY p.mode, p.policy
ORDER BY 1, 2
