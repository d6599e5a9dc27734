package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit/internal/shards"
)

func (a *app) shardGrowCommand() *cobra.Command {
	var others []string
	var yes bool
	cmd := &cobra.Command{
		Use:   "grow CONNECTION...",
		Short: "Double the number of shards, while they decide",
		Long: `Doubles the number of a proxy's shards. It takes as many connection strings as there are shards now, of
databases that are migrated and empty. One after the other, each shard gives the half of its keys to a
new one, with all that they have taken, while both decide. Calls for that shard wait meanwhile for as
long as it takes to read its tables once. If it is interrupted, the same command goes on from there.

It needs what 'pgratelimit shard set' needs, and connects to all shards for some time, so their
connection strings must lead to Postgres itself rather than to a pooler. Proxies that are no standbys
of this one are named with --proxy.`,
		Example: `  pgratelimit shard grow "host=10.0.0.3 dbname=limits_2" "host=10.0.0.4 dbname=limits_3"`,
		Args:    func(_ *cobra.Command, args []string) error { return checkConnections(args) },
		RunE: action(func(ctx context.Context, args []string) error {
			return a.growShards(ctx, args, others, yes)
		}),
	}
	cmd.Flags().StringArrayVar(&others, "proxy", nil, "connection string (`URL`) of another proxy of the same shards")
	addYes(cmd, &yes)
	a.addTimeout(cmd)
	a.addJSON(cmd)
	return cmd
}

// growing is what growShards works on.
type growing struct {
	proxies []*app
	owners  []string // of the proxies' functions
	stores  []*app   // the old shards, then the new ones
	states  []shardState
	resumes bool // an earlier call has begun it
}

func (a *app) growShards(ctx context.Context, more, others []string, yes bool) error {
	g := growing{proxies: []*app{a}}
	for _, url := range others {
		other := *a
		other.databaseURL = url
		g.proxies = append(g.proxies, &other)
	}
	if err := g.read(ctx, more); err != nil {
		return err
	}
	if err := a.confirm(ctx, g.question(), yes); err != nil {
		return err
	}
	config := shards.GrowConfig{Schema: a.schema, Connections: more, Progress: func(place int, step shards.Step) error {
		if !a.json {
			fmt.Fprintf(a.stdout, "%s: %s\n", g.stores[place].shardName(), step)
		}
		return ctx.Err()
	}}
	var open []*pgx.Conn
	defer func() {
		for _, conn := range open {
			_ = conn.Close(context.WithoutCancel(ctx))
		}
	}()
	for i, store := range g.stores {
		conn, err := store.own(ctx, g.states[i].owner)
		if err != nil {
			return store.about(err)
		}
		open = append(open, conn)
		if i < len(more) {
			config.Old = append(config.Old, conn)
		} else {
			config.New = append(config.New, conn)
		}
	}
	for _, proxy := range g.proxies {
		conn, err := proxy.own(ctx, "")
		if err != nil {
			return err
		}
		open = append(open, conn)
		config.Proxies = append(config.Proxies, conn)
	}
	if err := g.try(ctx, config.Old[0]); err != nil {
		return err
	}
	if err := shards.Grow(ctx, config); err != nil {
		return fmt.Errorf("%w; the same command goes on from there", err)
	}
	return a.listShards(ctx)
}

// own returns a connection that acts as a role, if it is another one than that which logs in.
func (a *app) own(ctx context.Context, role string) (*pgx.Conn, error) {
	config, err := a.config()
	if err != nil {
		return nil, err
	}
	conn := config.ConnConfig
	if conn.ConnectTimeout == 0 {
		conn.ConnectTimeout = connectTimeout
	}
	conn.RuntimeParams["search_path"] = "pg_catalog, pg_temp"
	if role != "" && role != conn.User {
		conn.RuntimeParams["role"] = role // a pooler refuses that, and would give the role to others
	}
	return pgx.ConnectConfig(ctx, conn)
}

// read looks at all databases, and returns an error if something is wrong with one of them.
func (g *growing) read(ctx context.Context, more []string) error {
	n := len(more)
	var old []string
	for i, proxy := range g.proxies {
		if err := proxy.inShard(ctx, func(pool *pgxpool.Pool) error {
			t, err := proxy.readTarget(ctx, pool)
			if err != nil {
				return err
			}
			if t.connections == nil {
				return fmt.Errorf("database %s is no proxy of shards", printable(t.database))
			}
			resumes, err := t.grows(more)
			if err != nil {
				return err
			}
			if err := t.refuse(shards.Config{Schema: proxy.schema, Connections: t.connections}); err != nil {
				return err
			}
			g.resumes = g.resumes || resumes
			g.owners = append(g.owners, t.owner)
			if i == 0 {
				old = t.connections[:n]
			}
			return nil
		}); err != nil {
			if i > 0 {
				err = fmt.Errorf("--proxy %d: %w", i, err)
			}
			return err
		}
	}
	g.stores = g.proxies[0].each(append(append([]string{}, old...), more...))
	var err error
	g.states, err = readNewShards(ctx, g.stores, func(s *shardState) wantedShard {
		w := wantedShard{is: shardIs{Place: s.Place, Shards: 2 * n}, fresh: true, counts: g.resumes}
		if s.Place < n && (!g.resumes || s.Is == nil || s.Is.Shards == n) {
			w.is.Shards, w.fresh = n, false
		}
		return w
	})
	return err
}

// grows tells whether a proxy has begun to grow by these databases.
func (t *proxyTarget) grows(more []string) (bool, error) {
	n, has := len(more), len(t.connections)
	begun := has == 2*n
	for i := 0; begun && i < n; i++ {
		now := t.connections[n+i]
		begun = now == t.connections[i] || now == more[i]
	}
	for i := 0; !begun && has == 2*n && i < n; i++ {
		if t.connections[n+i] == t.connections[i] {
			return false, fmt.Errorf("database %s has begun to grow by other databases than these: name the same "+
				"ones, in the same order", printable(t.database))
		}
	}
	if !begun && has != n {
		return false, fmt.Errorf("database %s is a proxy of %d shards, which takes as many new ones, and these are %d",
			printable(t.database), has, n)
	}
	return begun, nil
}

func (g *growing) question() string {
	var text strings.Builder
	n := len(g.stores) / 2
	fmt.Fprintf(&text, "%d shards become %d, for %d proxies:\n", n, 2*n, len(g.proxies))
	for i, store := range g.stores[:n] {
		fmt.Fprintf(&text, "  %s gives half of its keys to shard %d: %s\n", store.shardName(), i+n,
			printable(g.stores[i+n].connection))
	}
	if g.resumes {
		fmt.Fprintln(&text, "This has been begun, and goes on.")
	}
	return text.String() + "Do it?"
}

var errTried = errors.New("all works")

// try has the PL/Proxy of each proxy ask all shards, and takes back what that changes.
func (g *growing) try(ctx context.Context, old *pgx.Conn) error {
	schema := g.proxies[0].schema
	source, err := shards.Read(ctx, old, schema)
	if err != nil {
		return err
	}
	config := shards.Config{Schema: schema}
	for _, store := range g.stores {
		config.Connections = append(config.Connections, store.connection)
	}
	for i, proxy := range g.proxies {
		if err := proxy.inShard(ctx, func(pool *pgxpool.Pool) error {
			return proxy.transaction(ctx, pool, pgx.ReadWrite, false, func(tx pgx.Tx) error {
				if err := shards.Install(ctx, tx, source, config); err != nil {
					return err
				}
				if err := tryShards(ctx, tx, g.stores, source, g.owners[i], false); err != nil {
					return err
				}
				return errTried
			})
		}); !errors.Is(err, errTried) {
			return fmt.Errorf("nothing was changed: %w", err)
		}
	}
	return nil
}
