-- Makes five roles, each with no more rights than it needs, and a schema. Run it once in each database, as a superuser,
-- or as the owner of the database with CREATEROLE and the right to grant pg_read_all_stats:
--
--   psql "$DATABASE_URL" -v ON_ERROR_STOP=1 -f deploy/roles.sql
--   PGOPTIONS='-c role=rate_limit_owner' pgratelimit migrate up --database-url "$DATABASE_URL" --schema rate_limit
--   psql "$DATABASE_URL" -v ON_ERROR_STOP=1 -f deploy/grants.sql
--
-- None of these roles logs in. Make the roles that do their members: GRANT rate_limit_app TO my_application. Whoever
-- connects names the schema, by ClientConfig.Schema, --schema, or search_path in the connection string.
--
-- Roles belong to all databases of a server, so those that another database has brought are used here too:
--   rate_limit_owner         migrates, and owns what the migrations make
--   rate_limit_app           the application: takes, peeks and resets, reads policies, and bans
--   rate_limit_sweeper       sweeps
--   rate_limit_reader        a person on call or a dashboard: runs limits and doctor, and reads policies. As a member of
--                            rate_limit_app too, also top and reset --all
--   rate_limit_policy_admin  changes policies: policy set, ban and so on. The history tells which of its members did

DO $$
DECLARE
    role pg_catalog.text;
BEGIN
    FOREACH role IN ARRAY ARRAY['rate_limit_owner', 'rate_limit_app', 'rate_limit_sweeper', 'rate_limit_reader',
        'rate_limit_policy_admin'] LOOP
        IF pg_catalog.to_regrole(role) IS NULL THEN
            EXECUTE pg_catalog.format('CREATE ROLE %I NOLOGIN', role);
        END IF;
    END LOOP;
END
$$;

GRANT rate_limit_owner TO CURRENT_USER; -- a superuser could use role=rate_limit_owner above without it
CREATE SCHEMA rate_limit AUTHORIZATION rate_limit_owner;
-- Whoever may create in the schema could put functions there that somebody calls in the place of ours. In this schema
-- only its owner may create. If you put the functions into another schema, take that right from others. In public,
-- PostgreSQL 14 and databases that come from it let everybody create:
--   REVOKE CREATE ON SCHEMA public FROM PUBLIC;
-- The owner of the schema can replace what is in it, so the role that migrates should own it.
GRANT USAGE ON SCHEMA rate_limit TO rate_limit_app, rate_limit_sweeper, rate_limit_reader,
    rate_limit_policy_admin;

-- For doctor to see what holds VACUUM up. Whoever has it also reads the texts of all statements, in pg_stat_activity and
-- pg_stat_statements, so set passwords with the password command of psql.
GRANT pg_read_all_stats TO rate_limit_reader;
