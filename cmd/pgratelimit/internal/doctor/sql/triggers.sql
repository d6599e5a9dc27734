-- This query returns the limiter's triggers on rate_limit_policy that are disabled, or that run for replicated rows.
SELECT t.tgname::text, format('ALTER TABLE %s ENABLE TRIGGER %I', t.tgrelid::regclass, t.tgname), t.tgenabled = 'A'
FROM pg_trigger AS t
JOIN pg_class AS c ON c.oid = t.tgrelid
WHERE c.reltype = pg_typeof(NULL::rate_limit_policy) AND starts_with(t.tgname, 'rate_limit_') AND t.tgenabled <> 'O'
ORDER BY t.tgname
