-- The triggers of rate_limit_policy; their functions are in policies.sql.
CREATE TRIGGER rate_limit_policy_check BEFORE INSERT OR UPDATE ON rate_limit_policy
FOR EACH ROW EXECUTE FUNCTION _rate_limit_check_policy();

CREATE TRIGGER rate_limit_policy_keep BEFORE TRUNCATE ON rate_limit_policy
FOR EACH STATEMENT EXECUTE FUNCTION _rate_limit_check_policy();

CREATE TRIGGER rate_limit_policy_turn BEFORE INSERT OR UPDATE OR DELETE ON rate_limit_policy
FOR EACH STATEMENT EXECUTE FUNCTION _rate_limit_note_policy();

CREATE TRIGGER rate_limit_policy_note AFTER INSERT OR UPDATE OR DELETE ON rate_limit_policy
FOR EACH ROW EXECUTE FUNCTION _rate_limit_note_policy();
