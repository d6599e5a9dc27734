// Command pgratelimit operates rate limits in Postgres. pgratelimit --help lists the commands.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/pgratelimit/ratelimit/internal/lockholders"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/demo"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/doctor"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/keys"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/policies"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/replay"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/serve"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/shard"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/upkeep"
)

// These are the exit codes.
const (
	exitFailed = 1
	exitUsage  = 2 // the command line is invalid
	exitDenied = 3 // take or hold was denied, or a replay denies more than it may
)

const longHelp = `Operates rate limits that are kept in Postgres.

The database is the one of --database-url or DATABASE_URL. Without these it is the one of the
variables that psql uses too: PGHOST, PGDATABASE, PGUSER and so on, with the password from
PGPASSWORD or ~/.pgpass.

Exit codes: 0 done, 1 failed, 2 the command line makes no sense, 3 denied (take, hold, replay).`

func main() {
	// A reader such as head may close the pipe early. SIGPIPE must not end this process before it has cleaned up.
	signal.Ignore(syscall.SIGPIPE)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	code := run(ctx, os.Args[1:], &cli.App{Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr})
	stop()
	os.Exit(code)
}

// run runs the command, and returns its exit code.
func run(ctx context.Context, args []string, a *cli.App) int {
	root := rootCommand(a)
	root.SetArgs(args)
	root.SetIn(a.Stdin)
	root.SetOut(a.Stdout)
	root.SetErr(a.Stderr)
	cmd, err := root.ExecuteContextC(lockholders.To(ctx, func(sentence string) {
		fmt.Fprintf(a.Stderr, "pgratelimit: %s\n", sentence)
	}))

	failed := new(cli.Failure)
	switch {
	case err == nil:
		return 0
	case errors.Is(err, cli.ErrDenied):
		return exitDenied
	case errors.Is(err, cli.ErrProblems):
		return exitFailed
	case errors.As(err, &failed) && !cli.IsUsage(err):
		fmt.Fprintf(a.Stderr, "%s: %s\n", cmd.CommandPath(), a.Message(failed.Err))
		return exitFailed
	}
	fmt.Fprintf(a.Stderr, "%s: %s; see '%[1]s --help'\n", cmd.CommandPath(), cli.OneLine(err))
	return exitUsage
}

func rootCommand(a *cli.App) *cobra.Command {
	root := &cobra.Command{
		Use:   "pgratelimit",
		Short: "Operates rate limits that are kept in Postgres",
		Long:  longHelp,
		Example: `  pgratelimit demo
  export DATABASE_URL=postgres://me@localhost/app
  pgratelimit migrate up
  pgratelimit take login user:123 --policy "sliding 10/1m"
  pgratelimit doctor`,
		Version:       cli.Version(),
		Args:          cli.KnownCommand,
		RunE:          cli.MissingCommand,
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.SetHelpFunc(a.Help)
	flags := root.PersistentFlags()
	flags.StringVar(&a.DatabaseURL, "database-url", os.Getenv("DATABASE_URL"),
		"connection string of the database; a password is safer in DATABASE_URL, which others cannot see")
	flags.Lookup("database-url").DefValue = "" // help must not show the password
	flags.StringVar(&a.Schema, "schema", "", "schema of the tables and functions (default: found through search_path)")

	addGroup := func(title string, commands ...*cobra.Command) {
		root.AddGroup(&cobra.Group{ID: title, Title: title})
		for _, cmd := range commands {
			cmd.GroupID, cmd.ValidArgsFunction = title, cobra.NoFileCompletions
			root.AddCommand(cmd)
		}
	}
	addGroup("Limits:", keys.LimitsCommand(a), keys.TopCommand(a), keys.PeekCommand(a), keys.ExplainCommand(a),
		keys.TakeCommand(a), keys.ChargeCommand(a), keys.HoldCommand(a), keys.SettleCommand(a), keys.CancelCommand(a),
		keys.ExtendCommand(a), keys.SlotsCommand(a), keys.RefundCommand(a), keys.GrantCommand(a), keys.ResetCommand(a))
	addGroup("Policies:", policies.PolicyCommand(a), policies.BanCommand(a), policies.UnbanCommand(a))
	addGroup("The database:", upkeep.MigrateCommand(a), upkeep.SweepCommand(a), doctor.Command(a), shard.Command(a))
	addGroup("A service:", serve.Command(a))
	addGroup("Trying it out:", replay.Command(a), demo.Command(a))
	root.AddCommand(manCommand())
	return root
}

// manCommand returns the command that writes a manual page for each command. It is for packagers, so help does not
// show it.
func manCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "man FOLDER", Short: "Write the manual pages into a folder", Hidden: true, Args: cobra.ExactArgs(1),
	}
	cmd.RunE = cli.Action(func(_ context.Context, args []string) error {
		if err := os.MkdirAll(args[0], 0o755); err != nil {
			return err
		}
		cmd.Root().DisableAutoGenTag = true // the date of a build tells nobody anything
		return doc.GenManTree(cmd.Root(), &doc.GenManHeader{Source: "pgratelimit " + cli.Version()}, args[0])
	})
	return cmd
}
