-- This query returns the policies for a key, for the keys with a prefix, or for all keys, in order of precedence. The
-- first policy that has begun and has not ended decides.
--   $1  the limiter's name
--   $2  the key, or NULL
--   $3  the prefix, or NULL; the result includes policies for shorter prefixes
--   $4  whether to include policies that have ended
-- JSON needs times from the year 1 to the year 9999. Triggers refuse all other years, but can be off.
SELECT p.id, p.name, p.key, p.key_prefix, p.mode, p.policy,
    CASE WHEN p.valid_from >= '0001-01-01 00:00:00Z' THEN least(p.valid_from, '9999-12-31 00:00:00Z') END,
    CASE WHEN p.valid_until < '9999-12-31 00:00:00Z' THEN greatest(p.valid_until, '0001-01-01 00:00:00Z') END,
    p.comment, p.automatic, p.changed_by, least(greatest(p.changed_at, '0001-01-01 00:00:00Z'), '9999-12-31 00:00:00Z')
FROM rate_limit_policy AS p
WHERE p.name = $1::text AND ($4::boolean OR p.valid_until > clock_timestamp()) AND (
    p.key = $2::text
    OR p.key IS NULL AND p.key_prefix = ANY (ARRAY(
        SELECT left(coalesce($2::text, $3::text), n)
        FROM generate_series(1, length(coalesce($2::text, $3::text))) AS n))
    OR p.key IS NULL AND p.key_prefix IS NULL)
ORDER BY p.key IS NULL, octet_length(p.key_prefix) DESC NULLS LAST, p.valid_from DESC, p.id DESC
