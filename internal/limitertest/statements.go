package limitertest

import (
	"testing"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// TakingOf returns the name of the SQL function that takes units under a policy.
func TakingOf(policy ratelimit.Policy) string {
	return algorithm.ByCode(Model(policy).Rules[0].Numbers().Algorithm).Function
}

// StepOf returns the name of the SQL function that has a policy's rules.
func StepOf(policy ratelimit.Policy) string {
	names := [...]string{"", "fixed", "sliding", "bucket", "log", "calendar"}
	return "_rate_limit_" + names[Model(policy).Rules[0].Numbers().Algorithm]
}

// AlwaysArrays lets the functions for takes decide a single key with their statement for several keys.
func AlwaysArrays(t *testing.T, db pgtest.Executor) {
	t.Helper()
	for _, policy := range SlowPolicies(1) {
		if _, log := policy.(ratelimit.SlidingLog); !log {
			pgtest.RewriteTwins(t, db, TakingOf(policy), "IF cardinality(keys) = 1 THEN", "IF false THEN")
		}
	}
}

// NeverCheap lets the functions for takes decide by the rules of rate_limit_all, without their short statements.
func NeverCheap(t *testing.T, db pgtest.Executor) {
	t.Helper()
	for _, policy := range SlowPolicies(1) {
		pgtest.LeaveToRules(t, db, TakingOf(policy))
	}
}

// AlwaysAll lets the functions for takes leave everything to rate_limit_all.
func AlwaysAll(t *testing.T, db pgtest.Executor) {
	t.Helper()
	for _, policy := range SlowPolicies(1) {
		pgtest.LeaveToAll(t, db, TakingOf(policy))
	}
}

// Probe records, in the table probe, the settings of each statement that writes to a limiter's table.
func Probe(t *testing.T, db *pgtest.DB) {
	t.Helper()
	pgtest.Exec(t, db.Pool, `
		CREATE TABLE probe (operation text, synchronous_commit text, lock_timeout text);
		CREATE FUNCTION probe() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			INSERT INTO public.probe VALUES (tg_op, current_setting('synchronous_commit'), current_setting('lock_timeout'));
			RETURN NULL;
		END $$;
		CREATE TRIGGER probe AFTER INSERT OR UPDATE OR DELETE ON rate_limit_durable FOR EACH STATEMENT EXECUTE FUNCTION probe();
		CREATE TRIGGER probe AFTER INSERT OR UPDATE OR DELETE ON rate_limit_ephemeral FOR EACH STATEMENT EXECUTE FUNCTION probe()`)
}
