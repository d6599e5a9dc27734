// Package cli has what all commands share: output, questions, flags, errors, and access to the database or shards.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// App has the streams and flags that all commands share.
type App struct {
	Stdin          io.Reader
	Stdout, Stderr io.Writer

	DatabaseURL string
	Connection  string // the connection string of the shard at Place, or "" for the database of DatabaseURL
	Place       int
	Schema      string
	JSON        bool
	Timeout     time.Duration
}

// KnownCommand returns an error for an unknown command, and suggests similar commands.
func KnownCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	cmd.SuggestionsMinimumDistance = 2 // how many letters may differ in a suggestion
	text := fmt.Sprintf("unknown command %q", args[0])
	if meant := slices.Sorted(slices.Values(cmd.SuggestionsFor(args[0]))); len(meant) > 0 {
		text += ", did you mean " + strings.Join(meant, " or ") + "?"
	}
	return errors.New(text)
}

func MissingCommand(*cobra.Command, []string) error { return errors.New("a command is missing") }

// Action returns a function for a cobra command. The function calls run, and turns all errors of run into Failures,
// except for usage errors. All other errors that cobra reports are errors in the command line.
func Action(run func(ctx context.Context, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		err := run(cmd.Context(), args)
		if err != nil && cmd.Context().Err() != nil && !errors.Is(err, ErrInterrupted) {
			err = ErrInterrupted // any error may be the result of an interruption
		}
		if err != nil {
			return &Failure{err}
		}
		return nil
	}
}

// OnDatabase is like Action, but also passes the database to run.
func (a *App) OnDatabase(
	run func(ctx context.Context, db DB, args []string) error,
) func(*cobra.Command, []string) error {
	return Action(func(ctx context.Context, args []string) error {
		return a.WithPool(ctx, func(db DB) error { return run(ctx, db, args) })
	})
}

func (a *App) AddJSON(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&a.JSON, "json", false, "print JSON")
}

// Finish adds the flags that almost all commands have, and keeps the shell from completing file names.
func (a *App) Finish(cmd *cobra.Command) *cobra.Command {
	cmd.ValidArgsFunction = cobra.NoFileCompletions
	a.AddJSON(cmd)
	cmd.Flags().DurationVar(&a.Timeout, "timeout", 10*time.Second,
		"longest time that the database may take for one statement")
	cmd.PreRunE = func(*cobra.Command, []string) error {
		if a.Timeout < time.Millisecond {
			return fmt.Errorf("--timeout is %v, and must be at least 1ms", a.Timeout)
		}
		return nil
	}
	return cmd
}

// Print writes a command's output. With --json, this is the argument value as JSON, and otherwise what the function
// text writes. In the text, tabs separate columns. Print aligns the columns, and makes the table fit into the terminal.
func (a *App) Print(value any, text func(w io.Writer)) error {
	if a.JSON {
		encoder := json.NewEncoder(a.Stdout)
		encoder.SetEscapeHTML(false)
		encoder.SetIndent("", "  ")
		return encoder.Encode(value)
	}
	var raw strings.Builder
	text(&raw)
	_, err := io.WriteString(a.Stdout, Layout(raw.String(), width(a.Stdout)))
	return err
}

// Command returns a command line of pgratelimit in backquotes, with the --schema of this command.
func (a *App) Command(line string) string {
	if a.Schema != "" {
		line += " --schema '" + strings.ReplaceAll(a.Schema, "'", `'\''`) + "'"
	}
	return "`pgratelimit " + line + "`"
}
