package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/schollz/progressbar/v3"
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

// width returns the number of columns of a terminal, or 0 if the stream is not a terminal.
func width(stream any) int {
	file, ok := stream.(*os.File)
	if !ok {
		return 0
	}
	columns, _, err := term.GetSize(int(file.Fd()))
	if err != nil {
		return 0
	}
	if columns == 0 { // the terminal does not report its width
		return PageWidth
	}
	return columns
}

func IsTerminal(stream any) bool {
	file, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(file.Fd()))
}

// WatchUsage describes the flag --watch.
const WatchUsage = "show them again every 2s until it is interrupted"

// refreshEvery is the pause between two outputs with --watch.
const refreshEvery = 2 * time.Second

// Show reads and shows something. If watch is true, Show does so again and again until ctx ends. On a terminal, it
// clears the screen between reading and showing, so that the last output stays until there is a new one.
func (a *App) Show(ctx context.Context, watch bool, read func() (show func() error, err error)) error {
	ticker := time.NewTicker(refreshEvery)
	defer ticker.Stop()
	for {
		show, err := read()
		if err == nil {
			if watch && IsTerminal(a.Stdout) && !a.JSON {
				fmt.Fprint(a.Stdout, "\x1b[H\x1b[J")
			}
			err = show()
		}
		switch {
		case !watch:
			return err
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// Bar shows the progress of a command, from the first update on. Errors of the bar are ignored.
type Bar struct {
	Shown       *progressbar.ProgressBar // nil if no terminal would show the bar
	description string
}

// NewBar returns a Bar. NewBar shows nothing if standard error is not a terminal.
func (a *App) NewBar(description string) Bar {
	if a.JSON || !IsTerminal(a.Stderr) {
		return Bar{}
	}
	return Bar{description: description, Shown: progressbar.NewOptions64(1,
		progressbar.OptionSetWriter(a.Stderr),
		progressbar.OptionSetDescription(description),
		progressbar.OptionSetWidth(40),
		progressbar.OptionSetElapsedTime(false),
		progressbar.OptionThrottle(50*time.Millisecond),
		progressbar.OptionClearOnFinish(),
	)}
}

// Update shows how much is done. If total is 0, there is nothing to do, and Update shows nothing. If total is negative,
// nobody knows how much there is, and Update shows how many megabytes are done.
func (b Bar) Update(done, total int64) {
	if b.Shown == nil {
		return
	}
	if total < 0 {
		if b.Shown.GetMax64() != total {
			b.Shown.ChangeMax64(-1)
		}
		b.Shown.Describe(fmt.Sprintf("%s: %.1f MB", b.description, float64(done)/1e6))
		_ = b.Shown.Set64(done)
		return
	}
	if total > 0 {
		b.Shown.ChangeMax64(max(done, total))
		_ = b.Shown.Set64(done)
	}
}

func (b Bar) Remove() {
	if b.Shown != nil && b.Shown.IsStarted() {
		_ = b.Shown.Clear()
	}
}
