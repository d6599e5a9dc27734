// Command pgratelimit shows rate limits that are kept in Postgres; see its help.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/pgratelimit/ratelimit/internal/pgserver"
)

const usage = `pgratelimit shows rate limits that are kept in Postgres.

Usage:
  pgratelimit demo [--serve]
  pgratelimit --help

The demo puts a limit of 10 requests a minute in front of a small web server, and
shows what happens to 15 requests, and why. It takes a few seconds.

It uses the Postgres of DATABASE_URL if that is set, in a schema of its own. Else it
starts one, from the Postgres programs of this machine or with Docker. Either way it
leaves nothing behind.

Flags of demo:
  --serve  keep the web server running afterwards, to try it with curl, until Ctrl-C

Examples:
  pgratelimit demo
  pgratelimit demo --serve
  DATABASE_URL=postgres://me@localhost/app pgratelimit demo
`

func main() {
	// A reader of our output that has seen enough, like head, must not end us before we have cleaned up.
	signal.Ignore(syscall.SIGPIPE)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run returns the exit code: 0, 1 for a failure, or 2 for a command line that makes no sense.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	opts := demoOptions{databaseURL: os.Getenv("DATABASE_URL")}
	err := parse(args, &opts)
	switch {
	case errors.Is(err, flag.ErrHelp):
		fmt.Fprint(stdout, usage)
		return 0
	case err != nil:
		fmt.Fprintf(stderr, "pgratelimit: %v\n\n%s", err, usage)
		return 2
	}

	if err := runDemo(ctx, stdout, opts); err != nil {
		fmt.Fprintf(stderr, "pgratelimit demo: %s\n", message(err))
		return 1
	}
	return 0
}

// message is an error in one line: pgx for one has a line for each address that it has tried. But a list of ways to get
// a Postgres stays a list.
func message(err error) string {
	if errors.Is(err, pgserver.ErrNotFound) {
		return err.Error()
	}
	return strings.NewReplacer(":\n\t", ": ", "\n\t", "; ", "\n", "; ").Replace(err.Error())
}

// parse returns flag.ErrHelp if help is what was asked for.
func parse(args []string, opts *demoOptions) error {
	global := flag.NewFlagSet("pgratelimit", flag.ContinueOnError)
	demo := flag.NewFlagSet("pgratelimit demo", flag.ContinueOnError)
	demo.BoolVar(&opts.serve, "serve", false, "")
	for _, flags := range []*flag.FlagSet{global, demo} {
		flags.SetOutput(io.Discard) // run prints errors and usage, each to where it belongs
	}

	if err := global.Parse(args); err != nil {
		return err
	}
	switch command := global.Arg(0); command {
	case "demo":
	case "help":
		return flag.ErrHelp
	case "":
		return errors.New("a command is missing")
	default:
		return fmt.Errorf("there is no command %q", command)
	}
	if err := demo.Parse(global.Args()[1:]); err != nil {
		return err
	}
	if demo.NArg() > 0 {
		return fmt.Errorf("demo takes no argument, and got %q", demo.Arg(0))
	}
	return nil
}
