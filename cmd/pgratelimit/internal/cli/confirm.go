package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"
)

func AddYes(cmd *cobra.Command, yes *bool) {
	cmd.Flags().BoolVarP(yes, "yes", "y", false, "do not ask")
}

// Confirm asks the user a question at the terminal. Confirm returns an error if the answer is not yes.
func (a *App) Confirm(ctx context.Context, question string, yes bool) error {
	if yes {
		return nil
	}
	if !IsTerminal(a.Stdin) {
		return Usage(errors.New("standard input is no terminal, so nobody can answer; " +
			"--yes does it without a question"))
	}
	fmt.Fprintf(a.Stderr, "%s [y/N] ", question)
	answers := make(chan string, 1)
	go func() {
		answer, _ := bufio.NewReader(a.Stdin).ReadString('\n') // after an error, the answer is empty, which means no
		answers <- answer
	}()
	select {
	case answer := <-answers:
		switch strings.ToLower(strings.TrimSpace(answer)) {
		case "y", "yes":
			return nil
		}
		return errors.New("nothing was done")
	case <-ctx.Done():
		fmt.Fprintln(a.Stderr)
		return ctx.Err()
	}
}

// IsTerminal tells whether a stream is a terminal.
func IsTerminal(stream any) bool {
	file, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(file.Fd()))
}
