// Package shard has the commands that distribute limits to several databases behind a proxy.
package shard

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

func Command(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "shard",
		Short: "Spread the limits over several databases, behind a proxy",
		Long: `Spreads the limits over several databases, the shards. Applications connect to another database, the
proxy. The functions of the proxy pass each call on to the shards of its keys with PL/Proxy.
docs/operating.md says how to set up a proxy. The database of --database-url is the proxy. All other
commands also work with a proxy, and use all shards.`,
		Args: cli.KnownCommand,
		RunE: cli.MissingCommand,
	}
	cmd.AddCommand(shardSetCommand(a), shardListCommand(a), shardGrowCommand(a))
	return cmd
}

func shardListCommand(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the shards of a proxy, and what is wrong with each",
		Long: `Lists the shards of a proxy. The list has, for each shard, the place in the shard's database, the
version of the migrations, an estimate of the number of rows, how far the shard's clock is ahead of the
proxy's clock, and what is wrong. If anything is wrong, the exit code is 1. The command connects to each
shard by the proxy's connection string, as the user of --database-url.`,
		Example: `  pgratelimit shard list
  pgratelimit shard list --json`,
		Args: cobra.NoArgs,
		RunE: a.OnDatabase(func(ctx context.Context, db cli.DB, _ []string) error { return listShards(ctx, db) }),
	}
	return a.Finish(cmd)
}

// listShards prints the shards. listShards returns an error if a shard has a problem.
func listShards(ctx context.Context, db cli.DB) error {
	_, states, err := States(ctx, db)
	if err == nil && states == nil {
		err = errors.New("the database is no proxy of shards, or its schema is another one (--schema); " +
			"'pgratelimit shard set' makes a proxy")
	}
	if err != nil {
		return err
	}
	wrong := 0
	for _, s := range states {
		if len(s.Wrong) > 0 {
			wrong++
		}
	}
	if err := db.Print(states, func(w io.Writer) { printShards(w, states) }); err != nil {
		return err
	}
	if wrong > 0 {
		return fmt.Errorf("something is wrong with %d of %s", wrong, cli.Count(len(states), "shard"))
	}
	return nil
}

func printShards(w io.Writer, states []*State) {
	fmt.Fprintln(w, "PLACE\tCONNECTION\tIS\tVERSION\tROWS\tCLOCK")
	for _, s := range states {
		if !s.Reached {
			fmt.Fprintf(w, "%d\t%s\t?\t?\t?\t?\n", s.Place, cli.Printable(s.Connection))
			continue
		}
		is := s.Is.String()
		if s.ReadOnly {
			is += ", read-only"
		}
		fmt.Fprintf(w, "%d\t%s\t%s\t%d\t~%d\t%+d ms\n",
			s.Place, cli.Printable(s.Connection), is, s.Version, s.Rows, s.Ahead())
	}
	for _, s := range states {
		for _, f := range s.Wrong {
			fmt.Fprintf(w, "\n%s %s\n→ %s\n", s.Name, cli.Printable(f.Found), f.Do)
		}
	}
}

// checkConnections returns an error for connection strings that PL/Proxy cannot use, or that show a password.
func checkConnections(connections []string) error {
	if n := len(connections); n == 0 || n&(n-1) != 0 {
		return cli.Usage(fmt.Errorf("the number of shards is %d, and must be a power of two: 1, 2, 4, 8 and so on", n))
	}
	for place, connection := range connections {
		refuse := func(why string) error {
			return cli.Usage(fmt.Errorf("connection string of shard %d: %s", place, why))
		}
		if strings.HasPrefix(connection, "postgres://") || strings.HasPrefix(connection, "postgresql://") {
			return refuse(`it is a URL, and PL/Proxy needs keywords: "host=10.0.0.1 dbname=limits_0"`)
		}
		shard := cli.App{Connection: connection}
		if _, err := shard.Config(); err != nil {
			return refuse(`it has to look like "host=10.0.0.1 dbname=limits_0": ` + cli.OneLine(err))
		}
		// The connection string comes last, so that its values win.
		says, err := pgconn.ParseConfig("user='not given' password='not given' dbname='' " + connection)
		switch {
		case err != nil:
			return refuse(cli.OneLine(err))
		case says.User != "not given" || says.Password != "not given" || strings.Contains(connection, "sslpassword"):
			return refuse("user and password do not belong in it, because everybody can read it in the proxy's " +
				"database: --user names the role, and " + PasswordVariable + " has the password")
		case says.Database == "":
			return refuse("dbname is missing, and errors name the shard by it")
		}
	}
	return nil
}
