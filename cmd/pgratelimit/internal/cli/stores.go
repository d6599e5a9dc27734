package cli

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/shards"
)

//go:embed sql/proxy.sql
var proxySQL string

// shardError is an error of a proxy's shard.
type shardError struct {
	shard string
	err   error
}

func (e *shardError) Error() string { return e.shard + ": " + e.err.Error() }
func (e *shardError) Unwrap() error { return e.err }

// Shards returns an App for each shard of a proxy, in the order of their places. Shards returns none if the database is
// not a proxy. A proxy and its shards use the same schema name.
func (db DB) Shards(ctx context.Context) (all []*App, err error) {
	err = db.Look(ctx, func(tx Tx) error {
		connections, err := readProxy(ctx, tx)
		if connections != nil {
			db.Schema = tx.Schema
		}
		all = db.Each(connections)
		return err
	})
	return all, err
}

// Each returns an App for each connection string.
func (a *App) Each(connections []string) (all []*App) {
	for place, connection := range connections {
		shard := *a
		shard.Place, shard.Connection = place, connection
		all = append(all, &shard)
	}
	return all
}

// readProxy returns the connection strings of a proxy's shards. readProxy returns none if the database is not a proxy.
func readProxy(ctx context.Context, tx Tx) ([]string, error) {
	var proxy bool
	var stranger string
	err := tx.QueryRow(ctx, proxySQL).Scan(&proxy, &stranger)
	switch {
	case errors.Is(err, pgx.ErrNoRows): // there is no such schema
		return nil, nil
	case err != nil || !proxy:
		return nil, err
	case stranger != "":
		return nil, fmt.Errorf("the foreign server %s belongs to %s, who owns neither the schema nor the database, so "+
			"this command could be led to a server of a stranger; drop it, and run 'pgratelimit shard set' as a "+
			"superuser", shards.Server, Printable(stranger))
	}
	return shards.Connections(ctx, tx)
}

// InFirst calls do for the database, or for the first shard of a proxy. Only the first shard has policies.
func (a *App) InFirst(ctx context.Context, do func(db DB) error) error {
	return a.WithPool(ctx, func(db DB) error {
		all, err := db.Shards(ctx)
		if err != nil {
			return err
		}
		if len(all) == 0 {
			return do(db)
		}
		db.Pool.Close()
		return all[0].WithPool(ctx, func(first DB) error {
			if err := first.Pool.Ping(ctx); err != nil {
				return first.About(err)
			}
			return do(first)
		})
	})
}

// InStores calls do for each database that has limits: this database, or the shards of a proxy.
func (a *App) InStores(ctx context.Context, do func(store DB) error) error {
	return a.WithPool(ctx, func(db DB) error {
		all, err := db.Shards(ctx)
		if err != nil {
			return err
		}
		if len(all) == 0 {
			return do(db)
		}
		db.Pool.Close()
		for i, shard := range all {
			// During a division, two places may have the same database.
			if slices.ContainsFunc(all[:i], func(other *App) bool { return other.Connection == shard.Connection }) {
				continue
			}
			if err := shard.WithPool(ctx, do); err != nil {
				return shard.About(err)
			}
		}
		return nil
	})
}

// About adds the shard's name to an error, if a is an App for a shard.
func (a *App) About(err error) error {
	if err == nil || a.Connection == "" {
		return err
	}
	return &shardError{a.ShardName(), err}
}

// ShardName returns a shard's place and database.
func (a *App) ShardName() string {
	database := "?"
	if config, err := pgconn.ParseConfig(a.Connection); err == nil {
		database = config.Database
	}
	return fmt.Sprintf("shard %d (%s)", a.Place, Printable(database))
}

// Config returns the connection settings for the database of --database-url, or for a shard with the same user.
func (a *App) Config() (*pgxpool.Config, error) {
	given, err := pgxpool.ParseConfig(a.DatabaseURL)
	if err != nil || a.Connection == "" {
		return given, err
	}
	user, password := given.ConnConfig.User, given.ConnConfig.Password
	config, err := pgxpool.ParseConfig(a.Connection + " user=" + KeywordValue(user))
	if err != nil {
		return nil, err
	}
	// The file ~/.pgpass may have another password for the shard.
	if own := config.ConnConfig.Password; own == "" || own == os.Getenv("PGPASSWORD") {
		config.ConnConfig.Password = password
	}
	// These keywords are for libpq. pgx would send them to the server as settings.
	maps.DeleteFunc(config.ConnConfig.RuntimeParams, func(name, _ string) bool {
		return strings.HasPrefix(name, "keepalives") || name == "tcp_user_timeout" || name == "gssencmode"
	})
	return config, nil
}

// KeywordValue quotes a value for a connection string.
func KeywordValue(value string) string {
	return "'" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(value) + "'"
}
