-- The schema's version. internal/gensql puts the number of each migration here. Everybody may call it, so a role that
-- may only call the functions can see that no migration is missing.
CREATE FUNCTION rate_limit_version() RETURNS bigint LANGUAGE sql IMMUTABLE AS $$ SELECT 3::bigint $$;
COMMENT ON FUNCTION rate_limit_version() IS 'The number of the last migration that was applied.';
GRANT EXECUTE ON FUNCTION rate_limit_version() TO PUBLIC;
