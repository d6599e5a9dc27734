-- What processes hold by leases, as they have reported it.
--   $1 name of the limiter; NULL for all
--   $2 key; NULL for all
--   $3 how many rows, those with the most first
SELECT l.name, l.key, l.durable, l.process, l.held,
    (extract(epoch FROM l.ends_at - clock.now) * 1000000)::bigint, l.ends_at, l.reported_at
FROM (SELECT clock_timestamp() AS now OFFSET 0) AS clock
JOIN rate_limit_lease AS l ON l.ends_at > clock.now
WHERE ($1::text IS NULL OR l.name = $1::text) AND ($2::text IS NULL OR l.key = $2::text)
ORDER BY l.held DESC, l.name, l.key, l.durable, l.process
LIMIT $3::bigint
