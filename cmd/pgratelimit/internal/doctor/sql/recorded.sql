-- This query counts the recorded statements that contain the password of the shards' role. Statements whose text this
-- role may not see do not count.
--   %[1]s  the schema of pg_stat_statements
SELECT count(*) FROM %[1]s.pg_stat_statements
WHERE query ~* '(create|alter)[[:space:]]+user[[:space:]]+mapping[[:space:]].*[[:space:]]'
  'rate_limit_shards[[:space:]].*password'
