package main

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

// hardening enables row-level security and audits changes of each new table, as some platforms do.
const hardening = `
	CREATE SCHEMA platform;
	CREATE TABLE platform.log (who text, what text);
	CREATE FUNCTION platform.audit() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
		AS 'BEGIN INSERT INTO platform.log VALUES (session_user, TG_TABLE_NAME); RETURN NULL; END';
	CREATE FUNCTION platform.harden() RETURNS event_trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
	DECLARE made record;
	BEGIN
		FOR made IN SELECT * FROM pg_event_trigger_ddl_commands() WHERE object_type = 'table' AND schema_name = 'limits' LOOP
			EXECUTE format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY, REPLICA IDENTITY FULL', made.object_identity);
			EXECUTE format('COMMENT ON TABLE %s IS %L', made.object_identity, 'hardened');
			EXECUTE format('CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON %s FOR EACH ROW
				EXECUTE FUNCTION platform.audit()', made.object_identity);
			EXECUTE format('CREATE TRIGGER audit_all AFTER TRUNCATE ON %s EXECUTE FUNCTION platform.audit()', made.object_identity);
		END LOOP;
	END $$;
	CREATE EVENT TRIGGER harden ON ddl_command_end WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION platform.harden();
	CREATE PUBLICATION everything FOR ALL TABLES;
	CREATE SCHEMA limits;
	ALTER DEFAULT PRIVILEGES GRANT SELECT ON TABLES TO pg_read_all_stats;
	ALTER DEFAULT PRIVILEGES GRANT USAGE ON TYPES TO pg_read_all_stats;
	GRANT USAGE ON SCHEMA limits TO pg_monitor, pg_read_all_data`

// Every command works in a hardened database, whether a superuser or the owner runs it.
func TestThoroughHardenedDatabase(t *testing.T) {
	t.Parallel()

	for _, owner := range []string{"", "pg_monitor"} {
		for _, late := range []bool{false, true} { // whether the tables exist before the platform hardens the database
			db := pgtest.Empty(t)
			pgtest.Exec(t, db.Pool, "REVOKE CREATE ON SCHEMA public FROM PUBLIC; "+hardening)
			url := urlWith(t, db, "search_path=limits")
			if owner != "" {
				pgtest.Exec(t, db.Pool, "ALTER SCHEMA limits OWNER TO "+owner)
				url = urlWith(t, db, "search_path=limits&role="+owner)
			}
			if late {
				pgtest.Exec(t, db.Pool, "ALTER EVENT TRIGGER harden DISABLE")
				invoke(t, url, "migrate", "up").done(t)
				pgtest.Exec(t, db.Pool, `DO $$ DECLARE name text; BEGIN
					FOR name IN SELECT oid::regclass FROM pg_class WHERE relkind = 'r' AND relnamespace = 'limits'::regnamespace LOOP
						EXECUTE format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', name);
					END LOOP; END $$`)
			}
			for _, args := range append([][]string{{"migrate", "up"}}, asking()...) {
				if args[0] == "doctor" && owner != "" { // this role cannot log in
					pgtest.Exec(t, db.Pool, "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA limits TO pg_signal_backend")
				}
				o := invoke(t, url, args...)
				if releases(args) {
					o.complains(t, exitFailed, "there is no such slot")
					continue
				}
				require.Zero(t, o.code, "%s %v, late: %v: %s%s", owner, args, late, o.stdout, o.stderr)
				if args[0] == "migrate" {
					invoke(t, url, "migrate", "up").done(t)
				}
			}
			found := examined(t, url)["additions"]
			require.Contains(t, found.Found, "row-level security is on for limits.rate_limit_durable, ")
			require.Contains(t, found.Found, "an application's role needs nothing but EXECUTE")
			if late {
				require.Equal(t, cli.Fine, found.Level)
				continue
			}
			require.Equal(t, cli.Warning, found.Level)
			require.Contains(t, found.Do, "`DROP TRIGGER audit ON limits.rate_limit_ephemeral`")
			require.True(t, pgtest.Scalar[bool](t, db.Pool, "SELECT count(*) > 0 FROM platform.log WHERE what = 'rate_limit_policy'"))

			// Another tool has migrated the database, and Up adopts its migrations.
			pgtest.Exec(t, db.Pool, "DROP TABLE limits.rate_limit_goose_version")
			pool := db.OwnerPool(t, func(config *pgxpool.Config) {
				config.ConnConfig.RuntimeParams["search_path"] = "limits"
				if owner != "" {
					config.ConnConfig.RuntimeParams["role"] = owner
				}
			})
			require.NoError(t, migrations.Up(t.Context(), pool))
			require.NoError(t, migrations.DownTo(t.Context(), pool, 0))
		}
	}
}

// An audit trigger runs with the rights of the role that changes rows. Commands still work if they only read, or change
// rows by functions that run as the owner. Commands that would change rows as another role are refused.
func TestThoroughAuditByTheOwner(t *testing.T) {
	t.Parallel()

	for _, level := range []string{"ROW", "STATEMENT"} {
		db := pgtest.New(t)
		pgtest.Exec(t, db.Pool, `REVOKE CREATE ON SCHEMA public FROM PUBLIC; CREATE SCHEMA audit AUTHORIZATION pg_database_owner;
			ALTER SCHEMA public OWNER TO pg_monitor; CREATE TABLE audit.log (who text, what text);
			CREATE FUNCTION audit.note() RETURNS trigger LANGUAGE plpgsql
				AS 'BEGIN INSERT INTO audit.log VALUES (current_user, TG_TABLE_NAME); RETURN NULL; END';
			GRANT USAGE ON SCHEMA audit TO pg_monitor, pg_read_all_data; GRANT INSERT ON audit.log TO pg_monitor;
			ALTER FUNCTION audit.note OWNER TO pg_monitor;
			DO $$ DECLARE name text; BEGIN
				FOR name IN SELECT oid::regclass FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace LOOP
					EXECUTE format('ALTER TABLE %s OWNER TO pg_monitor', name);
					EXECUTE format('CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON %s FOR EACH `+level+`
						EXECUTE FUNCTION audit.note()', name);
				END LOOP;
				FOR name IN SELECT oid::regprocedure FROM pg_proc WHERE pronamespace = 'public'::regnamespace LOOP
					EXECUTE format('ALTER FUNCTION %s OWNER TO pg_monitor', name);
					EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO pg_read_all_data', name);
				END LOOP;
			END $$;
			GRANT SELECT, INSERT, UPDATE, DELETE ON rate_limit_policy TO pg_read_all_data`)
		for _, role := range []string{"", "pg_monitor", "pg_read_all_data"} {
			url := urlWith(t, db, "")
			if role != "" {
				url = urlWith(t, db, "role="+role)
			}
			for _, args := range asking()[3:] {
				o := invoke(t, url, args...)
				writes := args[0] == "policy" && (args[1] == "set" || args[1] == "unset") || args[0] == "ban" || args[0] == "unban"
				switch {
				case role != "pg_monitor" && writes:
					o.complains(t, exitFailed, "trigger audit runs audit.note() of pg_monitor")
				case args[0] == "doctor":
					require.NotContains(t, o.stdout+o.stderr, "is not what the migrations make")
				case releases(args):
					o.complains(t, exitFailed, "there is no such slot")
				default:
					require.Zero(t, o.code, "%s %v: %s%s", role, args, o.stdout, o.stderr)
				}
			}
		}
		require.Equal(t, "pg_monitor", pgtest.Scalar[string](t, db.Pool, "SELECT string_agg(DISTINCT who, ',') FROM audit.log"))
		// Deferred triggers would run as the caller.
		pgtest.Exec(t, db.Pool, `CREATE CONSTRAINT TRIGGER late AFTER INSERT ON rate_limit_ephemeral
			DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION audit.note()`)
		invoke(t, db.URL, "sweep").complains(t, exitFailed, "trigger late runs audit.note() of pg_monitor")
	}
}

// If row-level security hides all rows from a role, the command says so.
func TestRoleThatRowSecurityBinds(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, "REVOKE CREATE ON SCHEMA public FROM PUBLIC; SELECT rate_limit_allow('login', 'a', 'fixed 1/365d')")
	url := urlWith(t, db, "role=pg_read_all_data")
	require.Contains(t, invoke(t, url, "limits").done(t), "login")
	pgtest.Exec(t, db.Pool, `ALTER TABLE rate_limit_ephemeral ENABLE ROW LEVEL SECURITY;
		ALTER TABLE rate_limit_policy ENABLE ROW LEVEL SECURITY`)
	for _, args := range [][]string{{"limits"}, {"policy", "list"}} {
		invoke(t, url, args...).complains(t, exitFailed, "row-level security", "'pgratelimit doctor' says what to do")
	}
	found := examined(t, url)["additions"]
	require.Equal(t, cli.Warning, found.Level)
	require.Contains(t, found.Found, "hides the rows of public.rate_limit_policy from pg_read_all_data")
	follow(t, db, strings.ReplaceAll(found.Do, "as postgres: ", ""))
	require.Contains(t, invoke(t, url, "limits").done(t), "login")
}
