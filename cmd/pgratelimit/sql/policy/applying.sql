-- The policies for a key, or for the keys with a prefix, or for everybody, best first. Those for a key that have begun
-- and not ended decide in this order.
--   $1 name of the limiter
--   $2 key, or NULL
--   $3 prefix, or NULL; prefixes of it are for its keys too
--   $4 whether those that have ended are wanted too
SELECT p.id, p.name, p.key, p.key_prefix, p.mode, p.policy, nullif(p.valid_from, '-infinity'),
    nullif(p.valid_until, 'infinity'), p.comment, p.automatic, p.changed_by, p.changed_at
FROM rate_limit_policy AS p
WHERE p.name = $1::text AND ($4::boolean OR p.valid_until > clock_timestamp()) AND (
    p.key = $2::text
    OR p.key IS NULL AND p.key_prefix = ANY (ARRAY(
        SELECT left(coalesce($2::text, $3::text), n)
        FROM generate_series(1, length(coalesce($2::text, $3::text))) AS n))
    OR p.key IS NULL AND p.key_prefix IS NULL)
ORDER BY p.key IS NULL, octet_length(p.key_prefix) DESC NULLS LAST, p.valid_from DESC, p.id DESC
