package shards_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/shards"
)

// On some platforms, new tables have row security and grants. Callers must still be able to read rate_limit_shard, and
// must not be able to read keys.
func TestShardOfAHardenedDatabase(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, `
		CREATE FUNCTION harden() RETURNS event_trigger LANGUAGE plpgsql AS $$
		DECLARE made record;
		BEGIN
			FOR made IN SELECT * FROM pg_event_trigger_ddl_commands() WHERE object_type = 'table' LOOP
				EXECUTE format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', made.object_identity);
			END LOOP;
		END $$;
		CREATE EVENT TRIGGER harden ON ddl_command_end WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION harden();
		ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO pg_monitor, PUBLIC`)
	for range 2 {
		require.NoError(t, shards.Own(t.Context(), connect(t, db), "public",
			shards.Identity{Place: 1, Shards: 2, Cluster: "test"}))
		require.True(t, pgtest.Scalar[bool](t, db.Pool, "SELECT relrowsecurity FROM pg_class WHERE relname = 'rate_limit_shard_deleted'"))
		require.Equal(t, "{rate_limit_shard:-:SELECT}", pgtest.Scalar[string](t, db.Pool, `
			SELECT array_agg(concat_ws(':', relname, grantee::regrole, privilege_type))::text
			FROM pg_class, aclexplode(relacl) WHERE relname LIKE 'rate_limit_shard%' AND relkind = 'r' AND grantee <> relowner`))
		pgtest.Exec(t, db.Pool, "SET ROLE pg_monitor; SELECT _rate_limit_own_shard(1, 2); RESET ROLE")
	}
}
