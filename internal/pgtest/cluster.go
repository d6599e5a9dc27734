package pgtest

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/shards"
	"github.com/pgratelimit/ratelimit/migrations"
)

const (
	// emptyTemplate is a database that every server has. emptyTemplate is empty, and nobody can connect to it.
	emptyTemplate = "template0"

	templatePrefix = "ratelimit_template_"
	testPrefix     = "ratelimit_test_"

	// templateLock is the advisory lock for creating the template. The migrations use another lock.
	templateLock int64 = 0x706774656d706c74 // "pgtemplt" in ASCII
)

// cluster is a server and its template. The server and the template are created when a test first needs them. If the
// creation fails, all tests get the same error.
type cluster struct {
	config func() pgserver.Config

	starting sync.Once
	startErr error
	server   *pgserver.Server
	admin    *pgxpool.Pool // connects to the database in the server's URL
	monitors bool          // whether the user of admin may SET ROLE pg_monitor
	copying  string        // how the server clones databases, as an option of CREATE DATABASE

	migrating  sync.Once
	migrateErr error
	template   string

	shards []*cluster // the shards' servers, if this is a proxy's server
	place  int        // the shard's place, if this is a shard's server
	of     int        // the number of shards, or 0 if this is not a shard's server
	source shards.Source
	tables string // for a shard's server: SQL that creates foreign tables on the proxy
}

// start starts the server once for all tests. start does not use the context of a test, because the other tests
// continue after that test.
func (c *cluster) start() error {
	c.starting.Do(func() {
		ctx := context.Background()
		server, err := startServer(ctx, c.config())
		if err != nil {
			c.startErr = err
			return
		}
		c.server = server

		config, err := pgxpool.ParseConfig(server.URL())
		if err == nil {
			config.MaxConns = 4
			c.admin, err = pgxpool.NewWithConfig(ctx, config)
		}
		if err == nil {
			// Without fsync, a copy of the files takes a quarter of the time of the default, which writes each block to
			// the WAL. Postgres 14 always copies files, and lacks this option.
			err = c.admin.QueryRow(ctx, `SELECT pg_has_role('pg_monitor', 'MEMBER'),
				CASE WHEN current_setting('server_version_num')::int >= 150000 AND current_setting('fsync') = 'off'
					THEN 'STRATEGY file_copy' ELSE '' END`).Scan(&c.monitors, &c.copying)
		}
		if err != nil {
			c.startErr = fmt.Errorf("pgtest: %w", err)
		}
	})
	return c.startErr
}

func (c *cluster) close() error {
	var err error
	for _, shard := range c.shards {
		err = errors.Join(err, shard.close())
	}
	if c.admin != nil {
		c.admin.Close()
	}
	if c.server == nil {
		return err
	}
	return errors.Join(err, c.server.Close())
}

// create creates a database with a new name, and returns the name.
func (c *cluster) create(ctx context.Context, template string) (string, error) {
	if err := c.start(); err != nil {
		return "", err
	}
	name := testPrefix + strings.ToLower(rand.Text())
	if c.of > 0 {
		name += fmt.Sprintf("_shard_%d", c.place)
	}
	return name, c.createDatabase(ctx, name, template)
}

func (c *cluster) createDatabase(ctx context.Context, name, template string) error {
	_, err := c.admin.Exec(ctx,
		fmt.Sprintf("CREATE DATABASE %s TEMPLATE %s ENCODING 'UTF8' %s", quote(name), quote(template), c.copying))
	if err != nil {
		return fmt.Errorf("pgtest: create database %s: %w", name, err)
	}
	return nil
}

// drop ends the sessions of a database and drops the database. drop returns no error if the database is missing.
func (c *cluster) drop(ctx context.Context, name string) error {
	if _, err := c.admin.Exec(ctx, fmt.Sprintf("DROP DATABASE IF EXISTS %s WITH (FORCE)", quote(name))); err != nil {
		return fmt.Errorf("pgtest: drop database %s: %w", name, err)
	}
	return nil
}

// migratedTemplate returns the name of the template. If the server does not have the template, migratedTemplate creates
// the template.
func (c *cluster) migratedTemplate() (string, error) {
	if err := c.start(); err != nil {
		return "", err
	}
	c.migrating.Do(func() { c.template, c.migrateErr = c.ensureTemplate(context.Background()) })
	return c.template, c.migrateErr
}

func (c *cluster) ensureTemplate(ctx context.Context) (_ string, err error) {
	name, err := templateName()
	if err != nil {
		return "", err
	}

	conn, err := c.admin.Acquire(ctx)
	if err != nil {
		return "", fmt.Errorf("pgtest: %w", err)
	}
	defer conn.Release()
	if _, err := conn.Exec(ctx, "SELECT pg_advisory_lock($1)", templateLock); err != nil {
		return "", fmt.Errorf("pgtest: lock the template: %w", err)
	}
	defer func() {
		_, unlockErr := conn.Exec(ctx, "SELECT pg_advisory_unlock($1)", templateLock)
		err = errors.Join(err, unlockErr)
	}()

	var exists bool
	if err := conn.QueryRow(ctx,
		"SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)", name).Scan(&exists); err != nil {
		return "", fmt.Errorf("pgtest: look for the template: %w", err)
	}
	if exists {
		return name, nil
	}

	// The template gets its name when it is complete, so a process that dies earlier leaves no template. Drop
	// incomplete templates and templates of other migrations.
	rows, err := conn.Query(ctx, `
		SELECT datname FROM pg_database
		WHERE datdba = current_user::regrole AND datname ~ $1`, "^"+templatePrefix+"[0-9a-f]{16}(_unfinished)?$")
	if err != nil {
		return "", fmt.Errorf("pgtest: look for old templates: %w", err)
	}
	old, err := pgx.CollectRows(rows, pgx.RowTo[string])
	for _, name := range old {
		err = errors.Join(err, c.drop(ctx, name))
	}
	if err != nil {
		return "", err
	}
	unfinished := name + "_unfinished"
	if err := c.createDatabase(ctx, unfinished, emptyTemplate); err != nil {
		return "", err
	}
	if err := c.fill(ctx, unfinished); err != nil {
		return "", errors.Join(err, c.drop(ctx, unfinished))
	}
	for _, change := range []string{
		"ALTER DATABASE %s ALLOW_CONNECTIONS false", // Postgres cannot clone a database that has connections
		"ALTER DATABASE %s RENAME TO " + quote(name),
	} {
		if _, err := conn.Exec(ctx, fmt.Sprintf(change, quote(unfinished))); err != nil {
			return "", fmt.Errorf("pgtest: finish the template: %w", err)
		}
	}
	return name, nil
}

// fill creates the objects that tests need in the template, and closes all connections to it.
func (c *cluster) fill(ctx context.Context, database string) error {
	url, err := withDatabase(c.server.URL(), database)
	if err != nil {
		return err
	}
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return fmt.Errorf("pgtest: %w", err)
	}
	defer pool.Close()
	if c.shards != nil {
		return c.install(ctx, pool)
	}
	if err := migrations.Up(ctx, pool); err != nil || c.of == 0 {
		return err
	}
	return c.own(ctx, pool)
}

// templateName returns a name with a hash of all files of the migrations.
func templateName() (string, error) {
	hash := sha256.New()
	err := fs.WalkDir(migrations.FS, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := fs.ReadFile(migrations.FS, path)
		fmt.Fprintf(hash, "%s %d\n%s", path, len(content), content)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("pgtest: read the migrations: %w", err)
	}
	return templatePrefix + hex.EncodeToString(hash.Sum(nil))[:16], nil
}

// withDatabase replaces the database in a connection string, which is a URL or a list of keywords and values.
func withDatabase(connString, database string) (string, error) {
	if !strings.HasPrefix(connString, "postgres://") && !strings.HasPrefix(connString, "postgresql://") {
		return connString + " dbname=" + database, nil // libpq uses the last dbname
	}

	parsed, err := url.Parse(connString)
	if err != nil {
		return "", errors.New("pgtest: the server's URL cannot be parsed") // err would contain the password
	}
	parsed.Path = "/" + database
	query := parsed.Query()
	query.Del("dbname") // dbname would override the path
	query.Del("database")
	parsed.RawQuery = strings.ReplaceAll(query.Encode(), "+", "%20") // libpq does not read a plus as a space
	return parsed.String(), nil
}

func quote(name string) string { return pgx.Identifier{name}.Sanitize() }
