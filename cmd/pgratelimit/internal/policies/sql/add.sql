-- This statement adds a policy, and returns its row.
--   $1  the limiter's name, $2  the key or NULL, $3  the prefix or NULL, $4  the mode, $5  the policy or NULL
--   $6  the beginning, $7  the end; NULL means that the policy does not end
--   $8  the comment
INSERT INTO rate_limit_policy AS p (name, key, key_prefix, mode, policy, valid_from, valid_until, comment)
VALUES ($1::text, $2::text, $3::text, $4::text, $5::text, $6::timestamptz,
    coalesce($7::timestamptz, 'infinity'), $8::text)
RETURNING p.id, p.name, p.key, p.key_prefix, p.mode, p.policy, nullif(p.valid_from, '-infinity'),
    nullif(p.valid_until, 'infinity'), p.comment, p.automatic, p.changed_by, p.changed_at
