package shards

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

// Config is a proxy's configuration.
type Config struct {
	Schema      string   // the schema of the limiter's functions in all databases
	Connections []string // PL/Proxy's connection strings for the shards, in the order of their places
	User        string   // the user that PL/Proxy connects as; "" does not change the user
	Password    string
}

// DB is a connection, or a transaction that the caller commits.
type DB interface {
	Begin(ctx context.Context) (pgx.Tx, error)
}

// Install turns a database into a proxy of existing shards, or changes a proxy. The connection must be a superuser's.
func Install(ctx context.Context, db DB, source Source, c Config) error {
	return pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "CREATE EXTENSION IF NOT EXISTS plproxy"); err != nil {
			return err
		}
		// The role pg_database_owner (6171) cannot own the functions, because it cannot log in.
		var owner string
		if err := tx.QueryRow(ctx, `
SELECT pg_catalog.pg_get_userbyid(CASE WHEN n.nspowner = 6171 THEN d.datdba ELSE n.nspowner END)
FROM pg_catalog.pg_namespace AS n, pg_catalog.pg_database AS d
WHERE n.nspname = $1 AND d.datname = pg_catalog.current_database()`, c.Schema).Scan(&owner); err != nil {
			return fmt.Errorf("schema %q: %w", c.Schema, err)
		}
		text, err := source.Proxy(c.Schema, owner, len(c.Connections))
		if err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, text, pgx.QueryExecModeSimpleProtocol); err != nil {
			return err
		}
		return connect(ctx, tx, pgx.Identifier{owner}.Sanitize(), c)
	})
}

// connect gives PL/Proxy the shards' connection strings and the user, for calls by the functions' owner.
func connect(ctx context.Context, tx pgx.Tx, owner string, c Config) error {
	before, err := Connections(ctx, tx)
	if err != nil {
		return err
	}
	options := make([]string, 0, len(c.Connections)+len(before))
	for i, connection := range c.Connections {
		verb := ""
		if i < len(before) {
			verb = "SET "
		}
		options = append(options, fmt.Sprintf("%sp%d %s", verb, i, literal(connection)))
	}
	for i := len(c.Connections); i < len(before); i++ {
		options = append(options, fmt.Sprintf("DROP p%d", i))
	}
	verb := "ALTER SERVER " + Server
	if before == nil {
		verb = "CREATE SERVER " + Server + " FOREIGN DATA WRAPPER plproxy"
	}
	for _, statement := range []string{
		verb + " OPTIONS (" + strings.Join(options, ", ") + ")",
		"GRANT USAGE ON FOREIGN SERVER " + Server + " TO " + owner,
	} {
		if _, err := tx.Exec(ctx, statement, pgx.QueryExecModeSimpleProtocol); err != nil {
			return err
		}
	}
	if c.User == "" {
		return nil
	}
	return mapUser(ctx, tx, owner, c)
}

// unrecordedSQL keeps the next statements of the transaction out of the server's log and out of pg_stat_statements,
// which members of pg_read_all_stats can read. unrecordedSQL also sets settings of modules that may not be loaded.
const unrecordedSQL = `
SET LOCAL log_statement = 'none';
SET LOCAL log_min_duration_statement = -1;
SET LOCAL log_min_duration_sample = -1;
SET LOCAL log_min_error_statement = 'panic';
SET LOCAL log_error_verbosity = 'terse';
SET LOCAL log_parameter_max_length = 0;
SET LOCAL log_parameter_max_length_on_error = 0;
SET LOCAL pg_stat_statements.track = 'none';
SET LOCAL auto_explain.log_min_duration = -1;
SET LOCAL pgaudit.log = 'none'`

// mapSQL creates the user mapping. mapSQL reads the user and password from the transaction's settings.
const mapSQL = `
DO $$
DECLARE
    owner CONSTANT text := pg_catalog.current_setting('pgratelimit.shard_owner');
BEGIN
    EXECUTE pg_catalog.format('DROP USER MAPPING IF EXISTS FOR %s SERVER ` + Server + `', owner);
    EXECUTE pg_catalog.format('CREATE USER MAPPING FOR %s SERVER ` + Server + ` OPTIONS (user %L, password %L)', owner,
        pg_catalog.current_setting('pgratelimit.shard_user'), pg_catalog.current_setting('pgratelimit.shard_password'));
END
$$`

// mapUser sets the user and password for PL/Proxy. mapUser sends the password as an argument, because pg_stat_activity
// shows the text of statements.
func mapUser(ctx context.Context, tx pgx.Tx, owner string, c Config) error {
	if _, err := tx.Exec(ctx, unrecordedSQL, pgx.QueryExecModeSimpleProtocol); err != nil {
		return err
	}
	set := func(name, to string) error {
		_, err := tx.Exec(ctx, "SELECT pg_catalog.set_config($1, $2, true)", pgx.QueryExecModeExec,
			"pgratelimit.shard_"+name, to)
		return err
	}
	err := errors.Join(set("owner", owner), set("user", c.User), set("password", c.Password))
	if err == nil {
		_, err = tx.Exec(ctx, mapSQL, pgx.QueryExecModeSimpleProtocol)
	}
	if err == nil {
		err = set("password", "")
	}
	return err
}

// Connections returns the connection strings of a proxy's shards, in the order of their places. Connections returns nil
// if the database is not a proxy.
func Connections(ctx context.Context, tx pgx.Tx) ([]string, error) {
	var connections []string
	err := tx.QueryRow(ctx, `
SELECT ARRAY(
    SELECT pg_catalog.substr(o.option, pg_catalog.strpos(o.option, '=') + 1)
    FROM pg_catalog.unnest(s.srvoptions) AS o (option)
    WHERE o.option ~ '^p[0-9]+='
    ORDER BY pg_catalog.substring(o.option, '^p([0-9]+)=')::integer)
FROM pg_catalog.pg_foreign_server AS s WHERE s.srvname = $1`, Server).Scan(&connections)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	return connections, err
}

// Growth is the record of a division of the shards. A proxy stores the record, so that another process can continue the
// division.
type Growth struct {
	By      []string `json:"shards_grow_by"` // connection strings of the new shards, in order
	Proxies int      `json:"proxies"`
}

// noteGrowth stores a Growth as a comment of the foreign server, because PL/Proxy refuses unknown options.
func noteGrowth(ctx context.Context, proxy execer, g *Growth) error {
	text := "NULL"
	if g != nil {
		note, err := json.Marshal(g)
		if err != nil {
			return err
		}
		text = literal(string(note))
	}
	_, err := proxy.Exec(ctx, "COMMENT ON SERVER "+Server+" IS "+text, pgx.QueryExecModeSimpleProtocol)
	return err
}

// ReadGrowth returns a proxy's Growth, or nil if its shards are not being divided.
func ReadGrowth(ctx context.Context, tx pgx.Tx) (*Growth, error) {
	var note *string
	err := tx.QueryRow(ctx, "SELECT pg_catalog.obj_description(s.oid, 'pg_foreign_server') "+
		"FROM pg_catalog.pg_foreign_server AS s WHERE s.srvname = $1", Server).Scan(&note)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return nil, err
	}
	var g Growth
	if note != nil && json.Unmarshal([]byte(*note), &g) == nil && len(g.By) > 0 {
		return &g, nil
	}
	return nil, nil //nolint:nilnil // the comment is missing, or is not a Growth
}

// qualify replaces {schema} in a statement.
func qualify(sql, schema string) string {
	return strings.ReplaceAll(sql, "{schema}", pgx.Identifier{schema}.Sanitize())
}
