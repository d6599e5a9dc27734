// Package deadline makes contexts with deadlines for statements, which nearly always end before them.
package deadline

import (
	"context"
	"slices"
	"sync"
	"time"
)

// Group makes contexts that share a timer. Go wakes a thread for each timer that is set. A group sets its timer only if
// no earlier time is set, which is once in a while. The zero Group is ready to use, also by several goroutines at once.
type Group struct {
	mu    sync.Mutex
	timer *time.Timer
	due   time.Time // when the timer fires; zero if it is not set
	open  []*groupContext
}

// Context returns a context that ends at a time with [context.DeadlineExceeded]. The cancel function ends it earlier,
// with [context.Canceled], and must be called.
func (g *Group) Context(at time.Time) (context.Context, context.CancelFunc) {
	c := &groupContext{group: g, at: at, done: make(chan struct{})}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open = append(g.open, c)
	g.set(at)
	return c, c.cancel
}

// set makes the timer fire at a time or earlier. The caller holds g.mu.
func (g *Group) set(at time.Time) {
	switch {
	case !g.due.IsZero() && !at.Before(g.due):
		return
	case g.timer == nil:
		g.timer = time.AfterFunc(time.Until(at), g.tick)
	default:
		g.timer.Reset(time.Until(at))
	}
	g.due = at
}

// tick ends the contexts whose time has come.
func (g *Group) tick() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.due = time.Time{}
	now := time.Now()
	for _, c := range slices.Clone(g.open) {
		if c.at.After(now) {
			g.set(c.at)
		} else {
			c.end(context.DeadlineExceeded)
		}
	}
}

// groupContext is a context of a group. The group's mutex guards err and after.
type groupContext struct {
	group *Group
	at    time.Time
	done  chan struct{}
	err   error
	after []*func()
}

func (c *groupContext) Deadline() (time.Time, bool) { return c.at, true }
func (c *groupContext) Done() <-chan struct{}       { return c.done }
func (c *groupContext) Value(any) any               { return nil }

func (c *groupContext) Err() error {
	c.group.mu.Lock()
	defer c.group.mu.Unlock()
	return c.err
}

// AfterFunc is called by [context.AfterFunc], which would otherwise start a goroutine that waits for Done.
func (c *groupContext) AfterFunc(f func()) (stop func() bool) {
	c.group.mu.Lock()
	defer c.group.mu.Unlock()
	if c.err != nil {
		go f()
		return func() bool { return false }
	}
	c.after = append(c.after, &f)
	return func() bool {
		c.group.mu.Lock()
		defer c.group.mu.Unlock()
		i := slices.Index(c.after, &f)
		if i >= 0 {
			c.after = slices.Delete(c.after, i, i+1)
		}
		return i >= 0
	}
}

func (c *groupContext) cancel() {
	c.group.mu.Lock()
	defer c.group.mu.Unlock()
	c.end(context.Canceled)
}

// end ends the context, unless it has ended. The caller holds c.group.mu.
func (c *groupContext) end(err error) {
	if c.err != nil {
		return
	}
	c.err = err
	close(c.done)
	for _, f := range c.after {
		go (*f)()
	}
	c.after = nil
	c.group.open = slices.DeleteFunc(c.group.open, func(o *groupContext) bool { return o == c })
}
