-- Which algorithms wrote the rows of limiters, of those that have not expired: 1 << code, added up. It looks at the
-- first thousand keys in each table.
--   $1 names
SELECT l.name, bit_or(1 << r.algorithm)
FROM unnest($1::text[]) AS l (name)
CROSS JOIN LATERAL (
    (SELECT e.algorithm, e.expires_at FROM rate_limit_ephemeral AS e WHERE e.prefix = l.name ORDER BY e.key LIMIT 1000)
    UNION ALL
    (SELECT d.algorithm, d.expires_at FROM rate_limit_durable AS d WHERE d.prefix = l.name ORDER BY d.key LIMIT 1000)
) AS r
WHERE r.expires_at > (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
GROUP BY l.name
