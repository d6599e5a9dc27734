// Command pgratelimit operates rate limits that are kept in Postgres. Its help describes it.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit/internal/lockwait"
)

// Exit codes.
const (
	exitFailed = 1
	exitUsage  = 2 // the command line makes no sense
	exitDenied = 3 // of take
)

const longHelp = `Operates rate limits that are kept in Postgres.

The database is the one of --database-url or DATABASE_URL. Without these it is the one of the
variables that psql uses too: PGHOST, PGDATABASE, PGUSER and so on, with the password from
PGPASSWORD or ~/.pgpass.

Exit codes: 0 done, 1 failed, 2 the command line makes no sense, 3 denied (take).`

func main() {
	// If a reader of our output, such as head, has seen enough, that must not end this process before it has
	// cleaned up.
	signal.Ignore(syscall.SIGPIPE)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	code := run(ctx, os.Args[1:], &app{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr})
	stop()
	os.Exit(code)
}

// app is what all commands share.
type app struct {
	stdin          io.Reader
	stdout, stderr io.Writer

	databaseURL string
	connection  string // of the shard at place; empty for the database of databaseURL
	place       int
	schema      string
	json        bool
	timeout     time.Duration
}

// run returns the exit code.
func run(ctx context.Context, args []string, a *app) int {
	root := a.rootCommand()
	root.SetArgs(args)
	root.SetIn(a.stdin)
	root.SetOut(a.stdout)
	root.SetErr(a.stderr)
	cmd, err := root.ExecuteContextC(lockwait.To(ctx, func(sentence string) {
		fmt.Fprintf(a.stderr, "pgratelimit: %s\n", sentence)
	}))

	failed := new(failure)
	switch {
	case err == nil:
		return 0
	case errors.Is(err, errDenied):
		return exitDenied
	case errors.Is(err, errProblems):
		return exitFailed
	case errors.As(err, &failed) && !isUsage(err):
		fmt.Fprintf(a.stderr, "%s: %s\n", cmd.CommandPath(), a.message(failed.err))
		return exitFailed
	}
	fmt.Fprintf(a.stderr, "%s: %s; see '%[1]s --help'\n", cmd.CommandPath(), oneLine(err))
	return exitUsage
}

func (a *app) rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "pgratelimit",
		Short: "Operates rate limits that are kept in Postgres",
		Long:  longHelp,
		Example: `  pgratelimit demo
  export DATABASE_URL=postgres://me@localhost/app
  pgratelimit migrate up
  pgratelimit take login user:123 --policy "sliding 10/1m"
  pgratelimit doctor`,
		Version:       version(),
		Args:          knownCommand,
		RunE:          missingCommand,
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.SetHelpFunc(a.help)
	flags := root.PersistentFlags()
	flags.StringVar(&a.databaseURL, "database-url", os.Getenv("DATABASE_URL"),
		"connection string of the database; a password is safer in DATABASE_URL, which others cannot see")
	flags.Lookup("database-url").DefValue = "" // help must not show the password
	flags.StringVar(&a.schema, "schema", "", "schema of the tables and functions (default: found through search_path)")

	for _, group := range []struct {
		title    string
		commands []*cobra.Command
	}{
		{"Limits:", []*cobra.Command{a.limitsCommand(), a.topCommand(), a.peekCommand(), a.explainCommand(),
			a.takeCommand(), a.refundCommand(), a.grantCommand(), a.resetCommand()}},
		{"Policies:", []*cobra.Command{a.policyCommand(), a.banCommand(), a.unbanCommand()}},
		{"The database:", []*cobra.Command{a.migrateCommand(), a.sweepCommand(), a.doctorCommand(), a.shardCommand()}},
		{"Trying it out:", []*cobra.Command{a.demoCommand()}},
	} {
		root.AddGroup(&cobra.Group{ID: group.title, Title: group.title})
		for _, cmd := range group.commands {
			cmd.GroupID = group.title
			root.AddCommand(cmd)
		}
	}
	for _, cmd := range root.Commands() {
		if cmd.ValidArgsFunction == nil {
			cmd.ValidArgsFunction = cobra.NoFileCompletions
		}
	}
	return root
}

// version returns the version of the module that `go install` has built.
func version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}

// knownCommand refuses what is no command, and says which one may be meant.
func knownCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	cmd.SuggestionsMinimumDistance = 2 // wrong letters
	text := fmt.Sprintf("unknown command %q", args[0])
	if meant := cmd.SuggestionsFor(args[0]); len(meant) > 0 {
		text += ", did you mean " + strings.Join(meant, " or ") + "?"
	}
	return errors.New(text)
}

func missingCommand(*cobra.Command, []string) error { return errors.New("a command is missing") }

// action makes a command of run. Whatever run returns is a failure, unless isUsage says otherwise. All other
// errors that cobra returns are about the command line.
func action(run func(ctx context.Context, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		err := run(cmd.Context(), args)
		if err != nil && cmd.Context().Err() != nil && !errors.Is(err, errInterrupted) {
			err = errInterrupted // whatever error that has led to
		}
		if err != nil {
			return &failure{err}
		}
		return nil
	}
}

func (a *app) addJSON(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&a.json, "json", false, "print JSON")
}

func (a *app) addTimeout(cmd *cobra.Command) {
	cmd.Flags().DurationVar(&a.timeout, "timeout", 10*time.Second,
		"longest time that the database may take for one statement")
	cmd.PreRunE = func(*cobra.Command, []string) error {
		if a.timeout < time.Millisecond {
			return fmt.Errorf("--timeout is %v, and must be at least 1ms", a.timeout)
		}
		return nil
	}
}

// print writes all that a command has to say at once, as JSON if that was asked for. Tabs of the text become
// columns, which on a terminal fit into it.
func (a *app) print(value any, text func(w io.Writer)) error {
	var out bytes.Buffer
	if a.json {
		encoder := json.NewEncoder(&out)
		encoder.SetEscapeHTML(false)
		encoder.SetIndent("", "  ")
		if err := encoder.Encode(value); err != nil {
			return err
		}
	} else {
		var raw bytes.Buffer
		text(&raw)
		out.WriteString(layout(raw.String(), width(a.stdout)))
	}
	_, err := a.stdout.Write(out.Bytes())
	return err
}
