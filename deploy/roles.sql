-- Four roles, so that nobody can do more than it needs, and a schema. As a superuser, or as the owner of the database with
-- CREATEROLE and the right to grant pg_read_all_stats, once:
--
--   psql "$DATABASE_URL" -f deploy/roles.sql
--   pgratelimit migrate up --database-url "$DATABASE_URL&role=rate_limit_owner" --schema rate_limit
--   psql "$DATABASE_URL" -f deploy/grants.sql
--
-- None of them logs in. Make those who do members: GRANT rate_limit_app TO my_application. Everybody names the schema, by
-- Config.Schema, --schema, or search_path in the connection string.

CREATE ROLE rate_limit_owner NOLOGIN;   -- migrates, and owns what that makes
CREATE ROLE rate_limit_app NOLOGIN;     -- the application: takes, peeks and resets
CREATE ROLE rate_limit_sweeper NOLOGIN; -- sweeps
CREATE ROLE rate_limit_reader NOLOGIN;  -- a person on call or a dashboard: limits, doctor; with rate_limit_app top and reset --all, too

GRANT rate_limit_owner TO CURRENT_USER; -- for role=rate_limit_owner above, unless it is a superuser
CREATE SCHEMA rate_limit AUTHORIZATION rate_limit_owner;
-- In a schema where others may create, they could put functions beside ours that somebody calls by mistake. Nobody may here. If the
-- functions are in another schema, such as public (where PostgreSQL 14 and databases that come from it let everybody create):
--   REVOKE CREATE ON SCHEMA public FROM PUBLIC;
GRANT USAGE ON SCHEMA rate_limit TO rate_limit_app, rate_limit_sweeper, rate_limit_reader;

GRANT pg_read_all_stats TO rate_limit_reader; -- for doctor to see what holds VACUUM up
