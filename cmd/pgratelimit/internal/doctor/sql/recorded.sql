-- This query counts the recorded statements that contain the password of the shards' role. It counts only statements
-- whose text this role may see.
--   %[1]s  the schema of pg_stat_statements
SELECT count(*) FROM %[1]s.pg_stat_statements
WHERE query ~* '(create|alter)[[:space:]]+user[[:space:]]+mapping[[:space:]].*[[:space:]]'
  'rate_limit_shards[[:space:]].*password'
