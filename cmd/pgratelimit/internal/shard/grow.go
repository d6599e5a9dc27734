package shard

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit/internal/lockholders"
	"github.com/pgratelimit/ratelimit/internal/shards"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

func shardGrowCommand(a *cli.App) *cobra.Command {
	var others []string
	var undo, yes bool
	cmd := &cobra.Command{
		Use:   "grow [CONNECTION...]",
		Short: "Double the number of shards, while they decide",
		Long: `Doubles the number of a proxy's shards. Give as many connection strings as there are shards now. The new
databases must be migrated and empty. One shard after the other gives half of its keys to a new shard,
with all counts, while both decide. Calls for this shard wait while its tables are read once. After an
interruption, the same command continues, even without the connection strings, because the proxy has
stored them. Until a shard has given up keys, --undo takes everything back.

The command needs the same rights as 'pgratelimit shard set'. It stays connected to all shards, so the
connection strings must lead to Postgres itself, and not to a pooler. Use --proxy to name each other
proxy, except for standbys of this proxy.`,
		Example: `  pgratelimit shard grow "host=10.0.0.3 dbname=limits_2" \
      "host=10.0.0.4 dbname=limits_3"
  pgratelimit shard grow   # goes on`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			return checkConnections(args)
		},
		RunE: a.OnDatabase(func(ctx context.Context, db cli.DB, args []string) error {
			if err := growShards(ctx, a, args, others, undo, yes); err != nil {
				return err
			}
			return listShards(ctx, db)
		}),
	}
	cmd.Flags().StringArrayVar(&others, "proxy", nil, "connection string (`URL`) of another proxy of the same shards")
	cmd.Flags().BoolVar(&undo, "undo", false, "take back what was begun, if no key has moved yet")
	cli.AddYes(cmd, &yes)
	return a.Finish(cmd)
}

// growing is the state of a call of growShards.
type growing struct {
	proxies []*cli.App
	owners  []string       // the owners of the proxies' functions
	states  []*State       // the old shards, then the new shards
	growth  *shards.Growth // the record on the first proxy, if an earlier call was interrupted
}

func growShards(ctx context.Context, a *cli.App, more, others []string, undo, yes bool) error {
	g := growing{proxies: []*cli.App{a}}
	for _, url := range others {
		other := *a
		other.DatabaseURL = url
		g.proxies = append(g.proxies, &other)
	}
	if err := g.Read(ctx, more, undo); err != nil {
		return err
	}
	if g.growth != nil && g.growth.Proxies > len(g.proxies) {
		fmt.Fprintf(a.Stderr, "warning: the growth began with %d proxies, and you have named %d: through a proxy "+
			"that you do not name with --proxy, calls for moved keys fail\n", g.growth.Proxies, len(g.proxies))
	}
	if err := a.Confirm(ctx, g.question(undo), yes); err != nil {
		return err
	}
	config := shards.GrowConfig{Schema: a.Schema, Progress: func(place int, step shards.Step) error {
		if !a.JSON {
			fmt.Fprintf(a.Stdout, "%s: %s\n", g.states[place].Name, step)
		}
		return ctx.Err()
	}}
	var ends []func()
	defer func() {
		for _, end := range ends {
			end()
		}
	}()
	open := func(to *cli.App, role string) (*pgx.Conn, error) {
		conn, err := own(ctx, to, role)
		if err == nil {
			ends = append(ends, lockholders.Watch(ctx, conn, conn.PgConn().PID()),
				func() { _ = conn.Close(context.WithoutCancel(ctx)) })
		}
		return conn, err
	}
	n := len(g.states) / 2
	for i, s := range g.states {
		conn, err := open(s.Store, s.owner)
		switch {
		case err != nil && undo && i >= n:
			fmt.Fprintf(a.Stderr, "warning: %s: it cannot be reached, so copies of rows may stay there: %s\n",
				s.Name, cli.OneLine(err))
		case err != nil:
			return s.Store.About(err)
		case i < n:
			config.Old = append(config.Old, conn)
		default:
			config.New = append(config.New, conn)
			config.Connections = append(config.Connections, s.Connection)
		}
	}
	for _, proxy := range g.proxies {
		conn, err := open(proxy, "")
		if err != nil {
			return err
		}
		config.Proxies = append(config.Proxies, conn)
	}
	if undo {
		err := shards.Undo(ctx, config)
		if errors.Is(err, shards.ErrMoved) {
			return fmt.Errorf("%w; %s goes on with it", err, a.Command("shard grow"))
		}
		return err
	}
	if err := g.try(ctx, config.Old[0]); err != nil {
		return err
	}
	if err := shards.Grow(ctx, config); err != nil {
		return fmt.Errorf("%w; the same command goes on from there", err)
	}
	return nil
}

// own returns a connection that has switched to a role.
func own(ctx context.Context, a *cli.App, role string) (*pgx.Conn, error) {
	config, err := a.Config()
	if err != nil {
		return nil, err
	}
	conn := config.ConnConfig
	if conn.ConnectTimeout == 0 {
		conn.ConnectTimeout = cli.ConnectTimeout
	}
	cli.NameSession(conn, "pgratelimit")
	conn.RuntimeParams["search_path"] = "pg_catalog, pg_temp"
	if role != "" && role != conn.User {
		conn.RuntimeParams["role"] = role // a pooler refuses this, so no other client can get the session
	}
	return pgx.ConnectConfig(ctx, conn)
}

// Read reads all databases. Read returns an error if a database has a problem.
func (g *growing) Read(ctx context.Context, more []string, undo bool) error {
	var old []string
	for i, proxy := range g.proxies {
		if err := proxy.WithPool(ctx, func(db cli.DB) error {
			t, err := ReadTarget(ctx, db)
			if err != nil {
				return err
			}
			if t.Connections == nil {
				return fmt.Errorf("database %s is no proxy of shards", cli.Printable(t.database))
			}
			if i == 0 {
				if more, err = t.growsBy(more, undo); err != nil {
					return err
				}
				g.growth = t.growth
			}
			if err := t.grows(more); err != nil {
				return err
			}
			if i == 0 {
				old = t.Connections[:len(more)]
			}
			g.owners = append(g.owners, t.owner)
			return t.refuse(shards.Config{Schema: proxy.Schema, Connections: t.Connections})
		}); err != nil {
			if i > 0 {
				err = fmt.Errorf("--proxy %d: %w", i, err)
			}
			return err
		}
	}
	stores := g.proxies[0].Each(slices.Concat(old, more))
	if undo {
		return g.readStores(ctx, stores)
	}
	var err error
	g.states, err = readNewShards(ctx, stores, func(s *State, shards int) wantedShard {
		w := wantedShard{is: Identity{Place: s.Place, Shards: shards}, fresh: true, copies: true}
		if n := shards / 2; s.Place < n && (s.Is == nil || s.Is.Shards == n) {
			w.is.Shards, w.fresh = n, false
		}
		return w
	})
	return err
}

// readStores reads the owners of the tables. A lost shard is no error, because it may be the reason for --undo.
func (g *growing) readStores(ctx context.Context, stores []*cli.App) error {
	for i, store := range stores {
		g.states = append(g.states, NewState(store))
		if err := g.states[i].readStore(ctx); err != nil && i < len(stores)/2 {
			return store.About(err)
		}
	}
	return ctx.Err()
}

// growsBy returns the connection strings of the new shards, from the argument more or from an interrupted call.
func (t *Target) growsBy(more []string, undo bool) ([]string, error) {
	switch {
	case undo && t.growth == nil:
		return nil, errors.New("nothing is to be undone: the shards of this proxy are not being divided")
	case len(more) > 0:
		return more, nil
	case t.growth == nil:
		return nil, cli.Usage(fmt.Errorf("name as many new databases as there are shards: %d", len(t.Connections)))
	}
	return t.growth.By, nil
}

// grows returns an error if the proxy has not begun to grow by these databases, and cannot begin.
func (t *Target) grows(more []string) error {
	n, has := len(more), len(t.Connections)
	begun := has == 2*n
	for i := 0; begun && i < n; i++ {
		now := t.Connections[n+i]
		begun = now == t.Connections[i] || now == more[i]
	}
	switch {
	case t.growth != nil && !slices.Equal(t.growth.By, more):
		return fmt.Errorf("database %s has begun to grow by other databases than these: name the same ones, in the "+
			"same order, or none", cli.Printable(t.database))
	case !begun && has != n:
		return fmt.Errorf("database %s is a proxy of %s, which takes as many new databases, and this names %d",
			cli.Printable(t.database), cli.Count(has, "shard"), n)
	}
	return nil
}

func (g *growing) question(undo bool) string {
	var text strings.Builder
	n := len(g.states) / 2
	if undo {
		return fmt.Sprintf("This takes %s back to %s, with all counts. The copies in the new databases are deleted. "+
			"Do it?", cli.Count(len(g.proxies), "proxy"), cli.Count(n, "shard"))
	}
	fmt.Fprintf(&text, "This makes %s of %d, for %s:\n", cli.Count(2*n, "shard"), n, cli.Count(len(g.proxies), "proxy"))
	for i, s := range g.states[:n] {
		fmt.Fprintf(&text, "  %s gives half of its keys to shard %d: %s\n", s.Name, i+n,
			cli.Printable(g.states[i+n].Connection))
	}
	if g.growth != nil {
		fmt.Fprintln(&text, "This has been begun, and goes on.")
	}
	return text.String() + "Do it?"
}

var errTried = errors.New("all works")

// try queries all shards from each proxy through PL/Proxy, in a transaction that it rolls back.
func (g *growing) try(ctx context.Context, old *pgx.Conn) error {
	schema := g.proxies[0].Schema
	source, err := shards.Read(ctx, old, schema)
	if err != nil {
		return err
	}
	config := shards.Config{Schema: schema}
	for _, s := range g.states {
		config.Connections = append(config.Connections, s.Connection)
	}
	for i, proxy := range g.proxies {
		if err := proxy.WithPool(ctx, func(db cli.DB) error {
			return db.Transaction(ctx, pgx.ReadWrite, cli.AccessShare, true, func(tx cli.Tx) error {
				if err := shards.Install(ctx, tx, source, config); err != nil {
					return err
				}
				return cmp.Or(tryShards(ctx, tx, g.states, source, g.owners[i], false), errTried)
			})
		}); !errors.Is(err, errTried) {
			return fmt.Errorf("nothing was changed: %w", err)
		}
	}
	return nil
}
