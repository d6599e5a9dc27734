-- What each of the roles of roles.sql may do. Run it after each 'pgratelimit migrate up', as the owner of the database:
--
--   psql "$DATABASE_URL" -f deploy/grants.sql

SET search_path = rate_limit;

-- The functions do the rest with the rights of their owner; nobody else reaches the tables.
GRANT EXECUTE ON FUNCTION rate_limit_fixed_window, rate_limit_sliding_window, rate_limit_token_bucket, rate_limit_sliding_log, rate_limit_all, rate_limit_reset TO rate_limit_app;
GRANT EXECUTE ON FUNCTION rate_limit_sweep TO rate_limit_sweeper;
GRANT SELECT ON rate_limit_ephemeral, rate_limit_durable, rate_limit_sweeper TO rate_limit_reader;
GRANT SELECT ON rate_limit_goose_version TO rate_limit_reader; -- if 'pgratelimit migrate' or goose has migrated

RESET search_path;
