-- Keys of a limiter, chosen at random, and how many there were to choose from.
--   $1  name
--   $2  percent of the blocks to read, chosen at random; 100 is all
--   $3  how many
SELECT key, count(*) OVER ()
FROM rate_limit_ephemeral TABLESAMPLE SYSTEM ($2::real)
WHERE prefix = $1::text
ORDER BY random()
LIMIT $3::bigint
