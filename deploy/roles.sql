-- Creates five roles, each with only the rights that it needs, and a schema. Run it once in each database, as a
-- superuser, or as the database's owner with CREATEROLE and the right to grant pg_read_all_stats:
--
--   psql "$DATABASE_URL" -v ON_ERROR_STOP=1 -f deploy/roles.sql
--   PGOPTIONS='-c role=rate_limit_owner' pgratelimit migrate up --database-url "$DATABASE_URL" --schema rate_limit
--   psql "$DATABASE_URL" -v ON_ERROR_STOP=1 -f deploy/grants.sql
--
-- None of these roles can log in. Make your login roles their members: GRANT rate_limit_app TO my_application. Set the
-- schema in your connections, with ClientConfig.Schema, --schema, or search_path in the connection string.
--
-- Roles belong to all databases of a server, so roles that exist already are used here too:
--   rate_limit_owner         migrates, and owns the tables and functions
--   rate_limit_app           the application: takes, peeks and resets, reads policies, and bans
--   rate_limit_sweeper       sweeps
--   rate_limit_reader        a person on call or a dashboard: runs limits, slots and doctor, and reads policies. As a
--                            member of rate_limit_app too, also top, reset --all and slots release
--   rate_limit_policy_admin  changes policies: policy set, ban and so on. The history shows the member that made a change

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

GRANT rate_limit_owner TO CURRENT_USER; -- only a superuser could use role=rate_limit_owner above without this
CREATE SCHEMA rate_limit AUTHORIZATION rate_limit_owner;
-- A role that may create functions in the schema could add functions that are called instead of ours. In this schema
-- only the owner may create functions. If you use another schema, revoke this right from all other roles. PostgreSQL 14
-- lets every role create in the schema public, and so do databases upgraded from it:
--   REVOKE CREATE ON SCHEMA public FROM PUBLIC;
-- The schema's owner can replace the objects in it, so it should be the role that migrates.
GRANT USAGE ON SCHEMA rate_limit TO rate_limit_app, rate_limit_sweeper, rate_limit_reader,
    rate_limit_policy_admin;

-- With this right, doctor sees which sessions hold up VACUUM. A role with it can also read all statements in
-- pg_stat_activity and pg_stat_statements, so set passwords with the password command of psql.
GRANT pg_read_all_stats TO rate_limit_reader;
