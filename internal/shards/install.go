package shards

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

// Config is what a proxy has to know.
type Config struct {
	Schema      string   // of the functions, in all databases alike
	Connections []string // of PL/Proxy to the shards, in the order of their places
	User        string   // as whom PL/Proxy connects; "" leaves it as it is
	Password    string
}

// DB is a connection, or a transaction that the caller commits.
type DB interface {
	Begin(ctx context.Context) (pgx.Tx, error)
}

// Own makes a migrated database the shard of a place.
func Own(ctx context.Context, db DB, schema string, place, shards int) error {
	text, err := Shard(schema)
	if err != nil {
		return err
	}
	return pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, text, pgx.QueryExecModeSimpleProtocol); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, "INSERT INTO "+pgx.Identifier{schema}.Sanitize()+
			".rate_limit_shard (place, shards) VALUES ($1, $2) ON CONFLICT DO NOTHING", place, shards)
		return err
	})
}

// Install makes a database a proxy of shards that there are, or changes the one that it is. The connection is a
// superuser's.
func Install(ctx context.Context, db DB, source Source, c Config) error {
	text, err := source.Proxy(c.Schema, len(c.Connections))
	if err != nil {
		return err
	}
	return pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		// PL/Proxy is wherever it has been created.
		if _, err := tx.Exec(ctx, "CREATE EXTENSION IF NOT EXISTS plproxy"); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, text, pgx.QueryExecModeSimpleProtocol); err != nil {
			return err
		}
		return connect(ctx, tx, c)
	})
}

// connect names the shards to PL/Proxy.
func connect(ctx context.Context, tx pgx.Tx, c Config) error {
	before, err := Connections(ctx, tx)
	if err != nil {
		return err
	}
	var owner string
	if err := tx.QueryRow(ctx, `
SELECT pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(n.nspowner))
FROM pg_catalog.pg_namespace AS n WHERE n.nspname = $1`, c.Schema).Scan(&owner); err != nil {
		return fmt.Errorf("schema %q: %w", c.Schema, err)
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
	statements := []string{
		verb + " OPTIONS (" + strings.Join(options, ", ") + ")",
		"GRANT USAGE ON FOREIGN SERVER " + Server + " TO " + owner,
	}
	if c.User != "" {
		statements = append(statements,
			"DROP USER MAPPING IF EXISTS FOR "+owner+" SERVER "+Server,
			"CREATE USER MAPPING FOR "+owner+" SERVER "+Server+
				" OPTIONS (user "+literal(c.User)+", password "+literal(c.Password)+")")
	}
	for _, statement := range statements {
		if _, err := tx.Exec(ctx, statement, pgx.QueryExecModeSimpleProtocol); err != nil {
			return err
		}
	}
	return nil
}

// Connections returns the connection strings of a proxy's shards, in the order of their places, or nil if the database
// is no proxy.
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
