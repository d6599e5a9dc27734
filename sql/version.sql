-- What the database has been migrated to: internal/gensql puts the number in, in each migration. Everybody may ask, since a role
-- that may do nothing but call the functions can see by it that there is nothing left to migrate.
CREATE OR REPLACE FUNCTION rate_limit_version()
RETURNS bigint
LANGUAGE sql
IMMUTABLE
AS $$ SELECT {version}::bigint $$;

COMMENT ON FUNCTION rate_limit_version() IS 'The number of the last migration that was applied.';

GRANT EXECUTE ON FUNCTION rate_limit_version() TO PUBLIC;
