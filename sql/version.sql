-- rate_limit_version returns the schema's version. internal/gensql writes the number of each migration into this
-- function. Every role may call this function, so an application can check that no migration is missing.
CREATE FUNCTION rate_limit_version() RETURNS bigint LANGUAGE sql IMMUTABLE AS $$ SELECT 3::bigint $$;
COMMENT ON FUNCTION rate_limit_version() IS 'The number of the last migration that was applied.';
GRANT EXECUTE ON FUNCTION rate_limit_version() TO PUBLIC;
