-- What the database has been migrated to. internal/gensql puts its number into each migration. Everybody may ask, so
-- a role that may only call the functions can see that there is nothing left to migrate.
CREATE FUNCTION rate_limit_version() RETURNS bigint LANGUAGE sql IMMUTABLE AS $$ SELECT 3::bigint $$;
COMMENT ON FUNCTION rate_limit_version() IS 'The number of the last migration that was applied.';
GRANT EXECUTE ON FUNCTION rate_limit_version() TO PUBLIC;
