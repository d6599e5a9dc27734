-- The policies for a key, or for the keys with a prefix, or for everybody, best first. Those for a key that have begun
-- and not ended decide in this order.
--   $1 name of the limiter
--   $2 key, or NULL
--   $3 prefix, or NULL; prefixes of it are for its keys too
--   $4 whether those that have ended are wanted too
-- Times are from the year 1 to the year 9999, which JSON needs, also of a row that came around the triggers.
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
