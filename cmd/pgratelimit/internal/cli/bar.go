package cli

import (
	"time"

	"github.com/schollz/progressbar/v3"
)

// Bar shows the progress of a command, from the first update on. Errors of the bar are ignored.
type Bar struct {
	Shown *progressbar.ProgressBar // nil if no terminal would show the bar
}

// NewBar returns a Bar. NewBar shows nothing if standard error is not a terminal.
func (a *App) NewBar(description string) Bar {
	if a.JSON || !IsTerminal(a.Stderr) {
		return Bar{}
	}
	return Bar{progressbar.NewOptions64(1,
		progressbar.OptionSetWriter(a.Stderr),
		progressbar.OptionSetDescription(description),
		progressbar.OptionSetWidth(40),
		progressbar.OptionSetElapsedTime(false),
		progressbar.OptionThrottle(50*time.Millisecond),
		progressbar.OptionClearOnFinish(),
	)}
}

func (b Bar) Update(done, total int64) {
	if b.Shown != nil && total > 0 { // the total is 0 if there is nothing to do
		b.Shown.ChangeMax64(max(done, total))
		_ = b.Shown.Set64(done)
	}
}

func (b Bar) Remove() {
	if b.Shown != nil && b.Shown.IsStarted() {
		_ = b.Shown.Clear()
	}
}
