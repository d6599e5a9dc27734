package door

import (
	"context"

	"github.com/pgratelimit/ratelimit/internal/keeper"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/wire"
)

// ears are the clients of a service that have places in line. While there are any, one connection to Postgres listens
// for all of them. Server.mu protects the fields.
type ears struct {
	peers     map[*peer]bool
	listening bool
	stop      context.CancelFunc // nil while nobody listens
}

// listen tells a client of places in line that become slots, or no longer.
func (s *server) listen(p *peer, on bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := &s.ears
	switch {
	case !on:
		delete(e.peers, p)
		if len(e.peers) == 0 && e.stop != nil {
			e.stop()
			*e = ears{}
		}
		return
	case e.peers == nil:
		e.peers = map[*peer]bool{}
		var ctx context.Context
		ctx, e.stop = context.WithCancel(context.Background())
		s.gone.Go(func() { s.hear(ctx) })
	case e.listening:
		p.tell(frameListens, 1, nil)
	}
	e.peers[p] = true
}

// hear listens until ctx ends, or until the connection is lost. Then the clients ask again later.
func (s *server) hear(ctx context.Context) {
	tell := func(kind byte, id uint64, payload []byte) {
		for p := range s.ears.peers {
			p.tell(kind, id, payload)
		}
	}
	ready := func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if ctx.Err() == nil {
			s.ears.listening = true
			tell(frameListens, 1, nil)
		}
	}
	heard := func(told keeper.Told) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if ctx.Err() == nil {
			tell(frameSlot, 0, wire.AppendInt(wire.AppendText(nil, told.ID), told.Fence))
		}
	}
	_ = s.engine.Listen(ctx, ready, heard)
	s.mu.Lock()
	defer s.mu.Unlock()
	if ctx.Err() == nil {
		s.ears.stop()
		tell(frameListens, 0, nil)
		s.ears = ears{}
	}
}

// ear is a caller of Listen.
type ear struct {
	ready func()
	heard func(keeper.Told)
	lost  chan struct{} // closed when nothing more will be heard
}

// Listen tells of places in line that have become slots: see keeper.Config. It ends when the service does not listen,
// or when the connection to it is lost.
func (c *Client) Listen(ctx context.Context, ready func(), heard func(keeper.Told)) error {
	e := &ear{ready: ready, heard: heard, lost: make(chan struct{})}
	c.mu.Lock()
	l := c.link
	if l == nil {
		c.mu.Unlock()
		return serviceError(errNoLink, pg.ErrUnavailable)
	}
	begun := l.listens
	if l.ears[e] = true; len(l.ears) == 1 {
		l.listen(true)
	}
	c.mu.Unlock()
	if begun {
		ready()
	}
	select {
	case <-e.lost:
		return serviceError(errLost, pg.ErrUnavailable)
	case <-ctx.Done():
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !l.ears[e] {
		return ctx.Err()
	}
	if delete(l.ears, e); len(l.ears) == 0 {
		l.listens = false
		l.listen(false)
	}
	return ctx.Err()
}

// listen asks the service to tell of slots, or not to. The caller holds Client.mu.
func (l *link) listen(on bool) {
	id := uint64(0)
	if on {
		id = 1
	}
	l.waiting = appendFrame(l.waiting, frameListen, id, nil)
	l.start()
}

// deafen ends all callers of Listen. The caller holds Client.mu.
func (l *link) deafen() {
	for e := range l.ears {
		close(e.lost)
	}
	clear(l.ears)
	l.listens = false
}

// hear handles what the service tells of slots.
func (l *link) hear(f frame) {
	c, m := l.client, f.message
	told := keeper.Told{ID: m.Text(), Fence: m.Int()}
	c.mu.Lock()
	var all []*ear
	for e := range l.ears {
		all = append(all, e)
	}
	switch {
	case f.kind == frameListens && f.id == 0:
		l.deafen()
	case f.kind == frameListens:
		l.listens = len(all) > 0
	}
	c.mu.Unlock()
	for _, e := range all {
		switch {
		case f.kind == frameListens && f.id != 0:
			e.ready()
		case f.kind == frameSlot && m.Ended():
			e.heard(told)
		}
	}
}
