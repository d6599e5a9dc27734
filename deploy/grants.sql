-- Grants each role in roles.sql its rights. Run it after each 'pgratelimit migrate up', as a member of
-- rate_limit_owner. The role that ran roles.sql is one:
--
--   psql "$DATABASE_URL" -v ON_ERROR_STOP=1 -f deploy/grants.sql

SET search_path = rate_limit;

-- The functions run with their owner's rights. So only rate_limit_policy_admin needs rights to write to a table.
GRANT EXECUTE ON FUNCTION rate_limit_take_fixed_window, rate_limit_take_sliding_window, rate_limit_take_token_bucket,
    rate_limit_take_sliding_log, rate_limit_take_calendar_window, rate_limit_take_all, rate_limit_all,
    rate_limit_allow, rate_limit_peek, rate_limit_charge, rate_limit_reserve, rate_limit_hold, rate_limit_settle,
    rate_limit_cancel, rate_limit_extend, rate_limit_find_hold, rate_limit_slots, rate_limit_acquire, rate_limit_renew,
    rate_limit_renew_all, rate_limit_release, rate_limit_reset, rate_limit_policies, rate_limit_ban,
    rate_limit_report
    TO rate_limit_app;
GRANT SELECT ON rate_limit_sweeper TO rate_limit_app; -- for metrics of the tables; this table contains no keys
GRANT EXECUTE ON FUNCTION rate_limit_sweep TO rate_limit_sweeper;
GRANT SELECT ON rate_limit_ephemeral, rate_limit_durable, rate_limit_ephemeral_hold, rate_limit_durable_hold,
    rate_limit_sweeper, rate_limit_policy, rate_limit_policy_history, rate_limit_shadow TO rate_limit_reader;
GRANT SELECT, INSERT, UPDATE, DELETE ON rate_limit_policy TO rate_limit_policy_admin;
GRANT SELECT ON rate_limit_policy_history, rate_limit_shadow TO rate_limit_policy_admin;
DO $$
BEGIN
    IF to_regclass('rate_limit_goose_version') IS NOT NULL THEN -- if 'pgratelimit migrate' or goose has migrated
        GRANT SELECT ON rate_limit_goose_version TO rate_limit_reader;
    END IF;
END
$$;

RESET search_path;
