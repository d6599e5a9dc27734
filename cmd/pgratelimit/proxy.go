package main

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
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/shards"
)

//go:embed sql/shard/proxy.sql
var proxySQL string

// shardError is an error that concerns one shard of a proxy.
type shardError struct {
	shard string
	err   error
}

func (e *shardError) Error() string { return e.shard + ": " + e.err.Error() }
func (e *shardError) Unwrap() error { return e.err }

// shards returns one app for each shard, in the order of their places, or none if the database is no proxy. The tables
// and functions of a proxy and its shards are in schemas of one name.
func (a *app) shards(ctx context.Context, pool *pgxpool.Pool) ([]*app, error) {
	var connections []string
	if err := a.look(ctx, pool, func(tx pgx.Tx) (err error) {
		var schema string
		connections, schema, err = readProxy(ctx, tx)
		if connections != nil {
			a.schema = schema
		}
		return err
	}); err != nil {
		return nil, err
	}
	return a.each(connections), nil
}

// each returns an app for each connection string.
func (a *app) each(connections []string) (all []*app) {
	for place, connection := range connections {
		shard := *a
		shard.place, shard.connection = place, connection
		all = append(all, &shard)
	}
	return all
}

// readProxy returns the connection strings of a proxy's shards, and the schema of the functions. If the database is no
// proxy, there are none.
func readProxy(ctx context.Context, tx pgx.Tx) (connections []string, schema string, err error) {
	var proxy bool
	var stranger string
	err = tx.QueryRow(ctx, proxySQL).Scan(&proxy, &stranger)
	switch {
	case errors.Is(err, pgx.ErrNoRows): // there is no such schema
		return nil, "", nil
	case err != nil || !proxy:
		return nil, "", err
	case stranger != "":
		return nil, "", fmt.Errorf("the foreign server %s belongs to %s, who owns neither the schema nor the "+
			"database, so this command could be led to a server of a stranger; drop it, and run 'pgratelimit shard "+
			"set' as a superuser", shards.Server, printable(stranger))
	}
	if connections, err = shards.Connections(ctx, tx); err != nil {
		return nil, "", err
	}
	q, _ := tx.(qualified)
	return connections, q.schema, nil
}

// openFirst is open for what one database has for all, such as the policies: the first shard of a proxy.
func (a *app) openFirst(ctx context.Context) (*pgxpool.Pool, error) {
	pool, err := a.open(ctx)
	if err != nil {
		return nil, err
	}
	all, err := a.shards(ctx, pool)
	if err == nil && len(all) == 0 {
		return pool, nil
	}
	pool.Close()
	if err != nil {
		return nil, err
	}
	if pool, err = all[0].open(ctx); err != nil {
		return nil, err
	}
	if err := pool.Ping(ctx); err != nil {
		pool.Close()
		return nil, all[0].about(err)
	}
	return pool, nil
}

// inStores calls do for each database that holds limits: this one, or the shards of a proxy.
func (a *app) inStores(ctx context.Context, do func(store *app, pool *pgxpool.Pool) error) error {
	pool, err := a.open(ctx)
	if err != nil {
		return err
	}
	defer pool.Close()
	all, err := a.shards(ctx, pool)
	if err != nil {
		return err
	}
	if len(all) == 0 {
		return do(a, pool)
	}
	pool.Close()
	for i, shard := range all {
		// While shards are divided, two places may be one database.
		if slices.ContainsFunc(all[:i], func(other *app) bool { return other.connection == shard.connection }) {
			continue
		}
		pool, err := shard.open(ctx)
		if err == nil {
			err = do(shard, pool)
			pool.Close()
		}
		if err != nil {
			return shard.about(err)
		}
	}
	return nil
}

// about says which shard an error is about, if it is about one.
func (a *app) about(err error) error {
	if err == nil || a.connection == "" {
		return err
	}
	return &shardError{a.shardName(), err}
}

// shardName is what people call a shard: by its place and its database.
func (a *app) shardName() string {
	settings, _ := keywords(a.connection)
	return fmt.Sprintf("shard %d (%s)", a.place, printable(settings["dbname"]))
}

// config says how to connect: to the database of --database-url, or to a shard, as the same user.
func (a *app) config() (*pgxpool.Config, error) {
	given, err := pgxpool.ParseConfig(a.databaseURL)
	if err != nil || a.connection == "" {
		return given, err
	}
	user, password := given.ConnConfig.User, given.ConnConfig.Password
	config, err := pgxpool.ParseConfig(a.connection + " user=" + keywordValue(user))
	if err != nil {
		return nil, err
	}
	// ~/.pgpass may have another password for the shard.
	if own := config.ConnConfig.Password; own == "" || own == os.Getenv("PGPASSWORD") {
		config.ConnConfig.Password = password
	}
	// pgx takes these keywords of libpq for settings of the server.
	maps.DeleteFunc(config.ConnConfig.RuntimeParams, func(name, _ string) bool {
		return strings.HasPrefix(name, "keepalives") || name == "tcp_user_timeout" || name == "gssencmode"
	})
	return config, nil
}

// keywords reads a connection string that consists of keywords and values, as libpq does.
func keywords(connection string) (map[string]string, error) {
	settings := map[string]string{}
	for rest := strings.TrimLeft(connection, " \t\n\r\f\v"); rest != ""; {
		name, after, ok := strings.Cut(rest, "=")
		name, after = strings.TrimSpace(name), strings.TrimLeft(after, " \t\n\r\f\v")
		if !ok || name == "" || strings.ContainsAny(name, " \t\n\r\f\v") {
			return nil, errors.New(`it has to look like "host=10.0.0.1 dbname=limits_0"`)
		}
		value, end, quoted := strings.Builder{}, 0, strings.HasPrefix(after, "'")
		if quoted {
			end = 1
		}
		closed := !quoted
		for ; end < len(after); end++ {
			c := after[end]
			if quoted && c == '\'' {
				closed = true
				end++
				break
			}
			if !quoted && strings.IndexByte(" \t\n\r\f\v", c) >= 0 {
				break
			}
			if c == '\\' && end+1 < len(after) {
				end++
				c = after[end]
			}
			value.WriteByte(c)
		}
		if !closed {
			return nil, fmt.Errorf("the quote of %s is not closed", name)
		}
		settings[name] = value.String()
		rest = strings.TrimLeft(after[end:], " \t\n\r\f\v")
	}
	return settings, nil
}

// keywordValue writes a value as a connection string has it.
func keywordValue(value string) string {
	return "'" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(value) + "'"
}
