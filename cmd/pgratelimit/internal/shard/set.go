package shard

import (
	"context"
	"crypto/rand"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit/internal/shards"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

// PasswordVariable has the password of PL/Proxy's role on the shards. Other users could see a password in an argument.
const PasswordVariable = "PGRATELIMIT_SHARD_PASSWORD"

var (
	//go:embed sql/target.sql
	targetSQL string
	//go:embed sql/twin.sql
	twinSQL string
	//go:embed sql/check.sql
	checkShardSQL string
)

func shardSetCommand(a *cli.App) *cobra.Command {
	var user string
	var yes bool
	cmd := &cobra.Command{
		Use:   "set CONNECTION...",
		Short: "Make the database a proxy of shards, or change that proxy",
		Long: `Makes the database a proxy of the shards with these connection strings, in the order of their places. If
the database is already a proxy, it gets these connection strings, this role and password, and the
functions of this release. The command needs a superuser on the proxy, and the extension plproxy. The
number of shards must be a power of two; 'pgratelimit shard grow' doubles it. A database that already
has limits can become the only shard, and then grow. Migrate all shards first, in a schema of the same
name.

PL/Proxy connects to the shards as --user, with the password in the environment variable
PGRATELIMIT_SHARD_PASSWORD. This role needs the rights of rate_limit_app and rate_limit_sweeper on each
shard, as deploy/grants.sql grants them. The command connects to the shards as the user of
--database-url, who must be a member of the role that owns the tables. The command tests everything
before it changes the proxy. If a test fails, the proxy does not change.`,
		Example: `  pgratelimit shard set --user proxy "host=10.0.0.1 dbname=limits_0" \
      "host=10.0.0.2 dbname=limits_1"`,
		Args: func(_ *cobra.Command, args []string) error { return checkConnections(args) },
		RunE: a.OnDatabase(func(ctx context.Context, db cli.DB, args []string) error {
			password, given := os.LookupEnv(PasswordVariable)
			if given && user == "" {
				return cli.Usage(errors.New(PasswordVariable + " is the password of --user, which is missing"))
			}
			config := shards.Config{Connections: args, User: user, Password: password}
			if err := setShards(ctx, db, config, yes); err != nil {
				return err
			}
			return listShards(ctx, db)
		}),
	}
	cmd.Flags().StringVar(&user, "user", "", "PL/Proxy's `role` on the shards (default: that of the existing proxy)")
	cli.AddYes(cmd, &yes)
	return a.Finish(cmd)
}

func setShards(ctx context.Context, db cli.DB, config shards.Config, yes bool) error {
	target, err := ReadTarget(ctx, db)
	if err != nil {
		return err
	}
	config.Schema = db.Schema
	if err := target.refuse(config); err != nil {
		return err
	}
	states, err := readNewShards(ctx, db.Each(config.Connections), target.want)
	if err != nil {
		return err
	}
	cluster, err := target.cluster(states)
	if err != nil {
		return err
	}
	forgets := target.forgets(states)
	if err := db.Confirm(ctx, target.question(states, config)+forgets+"Do it?", yes); err != nil {
		return err
	}
	if yes && !db.JSON {
		fmt.Fprint(db.Stdout, forgets)
	}
	source, err := ReadSource(ctx, states[0].Store)
	if err != nil {
		return err
	}
	// After an interruption, Intend's record allows the same command to continue.
	for _, s := range states {
		if s.Is == nil {
			if err := s.asOwner(ctx, func(conn *pgx.Conn) error {
				return shards.Intend(ctx, conn, config.Schema, cluster)
			}); err != nil {
				return err
			}
		}
	}
	for i, s := range states {
		if target.growth == nil {
			if err := s.asOwner(ctx, func(conn *pgx.Conn) error {
				is := shards.Identity{Place: i, Shards: len(states), Cluster: cluster}
				return shards.Own(ctx, conn, config.Schema, is)
			}); err != nil {
				return err
			}
		}
	}
	// This transaction accepts functions of other roles, because it may have to replace them.
	if err := db.Transaction(ctx, pgx.ReadWrite, cli.AccessShare, true, func(tx cli.Tx) error {
		if err := shards.Install(ctx, tx, source, config); err != nil {
			return err
		}
		// During a division, some keys may not belong to any shard.
		return tryShards(ctx, tx, states, source, target.owner, target.growth == nil)
	}); err != nil {
		return fmt.Errorf("the proxy stays as it was: %w", err)
	}
	return nil
}

// ReadSource reads from a shard what its proxy needs to call the shard's functions.
func ReadSource(ctx context.Context, store *cli.App) (source shards.Source, err error) {
	err = store.LookOnce(ctx, func(tx cli.Tx) (err error) {
		source, err = shards.Read(ctx, tx.Conn(), store.Schema)
		return err
	})
	return source, store.About(err)
}

// asOwner calls do in a transaction on a shard, as the owner of the shard's tables.
func (s *State) asOwner(ctx context.Context, do func(conn *pgx.Conn) error) error {
	return s.Store.About(s.Store.WithPool(ctx, func(db cli.DB) error {
		return db.Write(ctx, func(tx cli.Tx) error {
			if _, err := tx.Tx.Exec(ctx, "SET LOCAL ROLE "+pgx.Identifier{s.owner}.Sanitize()); err != nil {
				return err
			}
			return do(tx.Conn())
		})
	}))
}

// Target is a database that is a proxy, or will become a proxy.
type Target struct {
	database, role string
	superuser      bool
	major          int // the major version of Postgres
	Available      bool
	encoding       string
	standby        bool
	schemaThere    bool
	Tables         []string // tables in the schema that have names of the limiter's tables
	elsewhere      []string // schemas that have the functions of another proxy
	mapped         bool     // whether PL/Proxy has a user mapping
	owner          string   // the functions' owner, quoted for SQL
	Connections    []string // nil if the database is not a proxy
	growth         *shards.Growth
}

// ReadTarget reads a Target. ReadTarget sets App.Schema to the proxy's schema, or to the first schema of search_path.
func ReadTarget(ctx context.Context, db cli.DB) (t Target, err error) {
	if db.Schema == "" {
		if err := db.Look(ctx, func(tx cli.Tx) error {
			db.Schema = tx.Schema
			return nil
		}); err != nil {
			return t, err
		}
	}
	if db.Schema == "" {
		row := db.Pool.QueryRow(ctx, "SELECT coalesce(pg_catalog.current_schema(), '')")
		if err := row.Scan(&db.Schema); err != nil {
			return t, err
		}
	}
	err = db.Look(ctx, func(tx cli.Tx) error {
		if err := tx.QueryRow(ctx, targetSQL, db.Schema).Scan(&t.database, &t.role, &t.superuser, &t.major,
			&t.Available, &t.encoding, &t.standby, &t.schemaThere, &t.Tables, &t.elsewhere, &t.mapped,
			&t.owner); err != nil {
			return err
		}
		if t.Connections, err = shards.Connections(ctx, tx); err == nil {
			t.growth, err = shards.ReadGrowth(ctx, tx)
		}
		return err
	})
	return t, err
}

// want returns the state that 'shard set' requires of a database. During a division, each database must keep its role.
func (t *Target) want(s *State, n int) wantedShard {
	w := wantedShard{is: Identity{Place: s.Place, Shards: n}, fresh: true, counts: n == 1}
	w.had = s.Place < len(t.Connections) && t.Connections[s.Place] == s.Connection
	if t.growth == nil {
		return w
	}
	half := n / 2
	w.fresh, w.still = false, t.Connections[s.Place] == t.Connections[s.Place%half]
	if w.still && (s.Is == nil || s.Is.Shards == half) {
		w.is.Shards = half
	}
	if w.still {
		w.is.Place %= half
	}
	return w
}

// keepsGrowing tells whether, with these connection strings, the same new places would still lead to their old shards.
func (t *Target) keepsGrowing(connections []string) bool {
	half := len(t.Connections) / 2
	for i := range half {
		if len(connections) != 2*half ||
			(connections[half+i] == connections[i]) != (t.Connections[half+i] == t.Connections[i]) {
			return false
		}
	}
	return true
}

// refuse returns why the database cannot be a proxy of these shards.
func (t *Target) refuse(config shards.Config) error {
	n := len(t.Connections)
	switch {
	case t.standby:
		return errors.New("the database is a standby; make its primary the proxy, and the standby will be one too")
	case !t.schemaThere:
		return fmt.Errorf("there is no schema %s; run deploy/roles.sql in the proxy's database, or name another one "+
			"with --schema", cli.Printable(config.Schema))
	case len(t.Tables) > 0:
		return fmt.Errorf("the database has limits itself: %s in schema %s; a proxy has none, so use another "+
			"database, and this one can be a shard", cli.Printable(strings.Join(t.Tables, ", ")), cli.Printable(
			config.Schema))
	case len(t.elsewhere) > 0:
		return fmt.Errorf("the database is a proxy already, in schema %s; name that with --schema, or use another "+
			"database", strings.Join(t.elsewhere, ", "))
	case t.encoding != "UTF8":
		return fmt.Errorf("the database has the encoding %s, and a proxy needs UTF8; make it anew: "+
			"CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0", t.encoding)
	case !t.superuser:
		return fmt.Errorf("role %s is no superuser, and PL/Proxy is an untrusted language, whose functions only "+
			"superusers make; run this as one", t.role)
	case !t.Available:
		return fmt.Errorf("the server has no PL/Proxy; install it on the host of the proxy's server (Debian: "+
			"postgresql-%d-plproxy)", t.major)
	case t.growth != nil && !t.keepsGrowing(config.Connections):
		a := cli.App{Schema: config.Schema}
		return fmt.Errorf("the shards of this proxy are being divided: %s goes on with that, and if no key has moved "+
			"yet, %s takes it back; `pgratelimit shard list` tells how far it is", a.Command("shard grow"),
			a.Command("shard grow --undo"))
	case n > 0 && n != len(config.Connections):
		return fmt.Errorf("the proxy has %s, and this names %d; 'pgratelimit shard grow' doubles the number of "+
			"shards, with the keys moved, also for a proxy that was not there when they were", cli.Count(n, "shard"),
			len(config.Connections))
	case config.User == "" && !t.mapped:
		return cli.Usage(errors.New("--user is missing: PL/Proxy's role on the shards; " +
			PasswordVariable + " has its password"))
	}
	return nil
}

// cluster returns the name of the cluster, which is new if only fresh databases become shards. A fresh database may
// replace a shard only if this proxy has all other shards. Otherwise, another proxy may still use the replaced shard.
// After an interrupted 'shard set', a database with the mark of [shards.Intend] is not fresh.
func (t *Target) cluster(states []*State) (string, error) {
	name := clusterOf(states)
	var others, fresh *State
	for i, s := range states {
		switch {
		case s.Is == nil && s.division != shards.Intended+name:
			fresh = s
		case s.Is != nil && (i >= len(t.Connections) || t.Connections[i] != s.Connection):
			others = s
		}
	}
	if fresh != nil && others != nil {
		return "", fmt.Errorf("%s is no shard yet, and %s is one, of databases that this proxy does not have: name "+
			"those, as `pgratelimit shard list` of another proxy tells them; if no proxy has %[2]s any more, "+
			"`DROP TABLE rate_limit_shard` in it makes it no shard: its counts stay, and calls of a proxy that still "+
			"uses it fail", fresh.Name, others.Name)
	}
	if fresh != nil {
		return rand.Text(), nil
	}
	return name, nil
}

// question describes the planned changes.
func (t *Target) question(states []*State, config shards.Config) string {
	var text strings.Builder
	what := "becomes a proxy"
	if t.Connections != nil {
		what = "stays a proxy, with new functions,"
	}
	fmt.Fprintf(&text, "Database %s %s of these shards, in schema %s:\n",
		cli.Printable(t.database), what, cli.Printable(config.Schema))
	for i, s := range states {
		fmt.Fprintf(&text, "  %d  %s", i, cli.Printable(s.Connection))
		if i < len(t.Connections) && t.Connections[i] != s.Connection {
			fmt.Fprintf(&text, ", before: %s", cli.Printable(t.Connections[i]))
		}
		if s.Is == nil {
			fmt.Fprintf(&text, ", which becomes shard %d of %d", i, len(states))
		}
		fmt.Fprintln(&text)
	}
	if config.User != "" {
		with := "with the password of " + PasswordVariable
		if config.Password == "" {
			with = "without a password"
		}
		fmt.Fprintf(&text, "PL/Proxy connects to them as %s, %s.\n", cli.Printable(config.User), with)
	}
	return text.String()
}

// forgets says what is lost when a database replaces a shard.
func (t *Target) forgets(states []*State) string {
	var text strings.Builder
	for i, s := range states {
		if s.Is != nil || i >= len(t.Connections) || t.Connections[i] == s.Connection {
			continue
		}
		what := "the counts"
		if i == 0 {
			what = "the counts, and all policies and bans,"
		}
		fmt.Fprintf(&text, "%s takes the place of another database: %s that are there are forgotten.\n", s.Name, what)
	}
	return text.String()
}
