package main

import (
	"time"

	"github.com/schollz/progressbar/v3"
)

// bar shows how far a command is, from its first update on. If it cannot be drawn, that is no reason to stop.
type bar struct {
	shown *progressbar.ProgressBar // nil if nobody would see it
}

// newBar returns a bar that a person at a terminal sees.
func (a *app) newBar(description string) bar {
	if a.json || !isTerminal(a.stderr) {
		return bar{}
	}
	return bar{progressbar.NewOptions64(1,
		progressbar.OptionSetWriter(a.stderr),
		progressbar.OptionSetDescription(description),
		progressbar.OptionSetWidth(40),
		progressbar.OptionSetElapsedTime(false),
		progressbar.OptionThrottle(50*time.Millisecond),
		progressbar.OptionClearOnFinish(),
	)}
}

func (b bar) update(done, total int64) {
	if b.shown != nil && total > 0 { // otherwise there is nothing to do
		b.shown.ChangeMax64(max(done, total))
		_ = b.shown.Set64(done)
	}
}

func (b bar) remove() {
	if b.shown != nil && b.shown.IsStarted() {
		_ = b.shown.Clear()
	}
}
