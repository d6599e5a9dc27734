// Package cli is what the commands share: output, questions, flags, errors, and access to the database or its shards.
package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// App is what all commands share.
type App struct {
	Stdin          io.Reader
	Stdout, Stderr io.Writer

	DatabaseURL string
	Connection  string // of the shard at place; empty for the database of databaseURL
	Place       int
	Schema      string
	JSON        bool
	Timeout     time.Duration
}

// KnownCommand refuses what is no command, and says which one may be meant.
func KnownCommand(cmd *cobra.Command, args []string) error {
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

func MissingCommand(*cobra.Command, []string) error { return errors.New("a command is missing") }

// Action makes a command of run. Whatever run returns is a failure, unless isUsage says otherwise. All other
// errors that cobra returns are about the command line.
func Action(run func(ctx context.Context, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		err := run(cmd.Context(), args)
		if err != nil && cmd.Context().Err() != nil && !errors.Is(err, ErrInterrupted) {
			err = ErrInterrupted // whatever error that has led to
		}
		if err != nil {
			return &Failure{err}
		}
		return nil
	}
}

func (a *App) AddJSON(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&a.JSON, "json", false, "print JSON")
}

func (a *App) AddTimeout(cmd *cobra.Command) {
	cmd.Flags().DurationVar(&a.Timeout, "timeout", 10*time.Second,
		"longest time that the database may take for one statement")
	cmd.PreRunE = func(*cobra.Command, []string) error {
		if a.Timeout < time.Millisecond {
			return fmt.Errorf("--timeout is %v, and must be at least 1ms", a.Timeout)
		}
		return nil
	}
}

// Print writes all that a command has to say at once, as JSON if that was asked for. Tabs of the text become
// columns, which on a terminal fit into it.
func (a *App) Print(value any, text func(w io.Writer)) error {
	var out bytes.Buffer
	if a.JSON {
		encoder := json.NewEncoder(&out)
		encoder.SetEscapeHTML(false)
		encoder.SetIndent("", "  ")
		if err := encoder.Encode(value); err != nil {
			return err
		}
	} else {
		var raw bytes.Buffer
		text(&raw)
		out.WriteString(Layout(raw.String(), width(a.Stdout)))
	}
	_, err := a.Stdout.Write(out.Bytes())
	return err
}

// Command is a command line of this command for the same schema, between backquotes.
func (a *App) Command(line string) string {
	if a.Schema != "" {
		line += " --schema '" + strings.ReplaceAll(a.Schema, "'", `'\''`) + "'"
	}
	return "`pgratelimit " + line + "`"
}
