// Package keeper renews the slots of a process, and tells their holders when a slot is lost. It also renews the places
// that the process has in waiting lines: a place becomes a slot without a new id, so both are called slots here.
//
// A slot ends at a time of the database's clock, which a process cannot read exactly. But if a statement that was sent
// at the local time t has made the slot last for 30 s, then the slot ends 30 s after t or later, because the database
// has executed the statement after t. So the keeper counts the 30 s from t by the local monotonic clock, and ends the
// slot's context a tenth earlier. The tenth is for clocks of different speed, and for the holder, who has to stop.
package keeper

import (
	"context"
	"errors"
	"sync"
	"time"
)

var (
	// ErrLost is the cause of the context's end if the slot was not renewed in time, or if the database has it no more.
	ErrLost = errors.New("ratelimit: the slot is lost")
	// ErrReleased is the cause of the context's end if the holder has released the slot.
	ErrReleased = errors.New("ratelimit: the slot is released")
)

const (
	// pollPeriod is the pause between two questions for places in line while the keeper does not listen.
	pollPeriod = 500 * time.Millisecond
	// lookPeriod is that pause while the keeper listens. A question also hands over slots that have ended, because a
	// holder that dies announces nothing.
	lookPeriod = 5 * time.Second
	// retryListening is the pause before the keeper tries to listen again.
	retryListening = 5 * time.Second
)

// Told is what the database says of a slot.
type Told struct {
	ID      string
	Waiting bool  // the slot is a place in line
	Fence   int64 // if it is not
}

// Place is a slot to renew.
type Place struct {
	ID    string
	Limit int64 // the limit of its key now
}

// Config says how a Keeper reaches the database. The functions are called concurrently.
type Config struct {
	// Renew makes the slots last for ttl from now, and returns those that still exist. Places in line are served by
	// the given limits from now on. Beside an error, Renew returns those that it has renewed all the same.
	Renew func(ctx context.Context, places []Place, ttl time.Duration) ([]Told, error)
	// Listen calls ready when it has begun to listen, and then heard for each place that becomes a slot. It returns if
	// it cannot listen, or when ctx ends. If it is nil, the keeper asks twice a second.
	Listen func(ctx context.Context, ready func(), heard func(Told)) error
	// Told is told of each renewal. The keeper repeats a renewal that has failed.
	Told func(Renewal)
}

// Renewal describes a renewal that has ended.
type Renewal struct {
	Slots    int // slots and places in line that were to be renewed
	TTL      time.Duration
	Lost     int // those that the database has no more, or has in line again
	Failures int // how many renewals in a row have failed, with this one; after a success, how many had failed before
	Err      error
}

// Keeper keeps the slots of a process. It has goroutines only while it has slots.
type Keeper struct {
	config Config

	mu        sync.Mutex
	slots     map[string]*Slot
	groups    map[time.Duration]*group
	listening bool
	stop      context.CancelFunc // ends the goroutine that listens, or nil
}

// New returns a Keeper without slots.
func New(config Config) *Keeper {
	return &Keeper{config: config, slots: map[string]*Slot{}, groups: map[time.Duration]*group{}}
}

// group has the slots of one ttl. One statement renews all of them, three times in each ttl.
type group struct {
	ttl   time.Duration
	slots map[string]*Slot
	next  time.Time     // when all are renewed
	asked time.Time     // when the database was last asked for the places in line; zero to ask at once
	fails int           // how many renewals in a row have failed
	poke  chan struct{} // something of the above has changed
}

// Slot is a slot or a place in line that is kept. All methods are safe for concurrent use.
type Slot struct {
	id     string
	strict bool // whether a failed renewal ends it
	limit  func() int64
	keeper *Keeper
	group  *group
	ctx    context.Context //nolint:containedctx // the slot ends it
	end    context.CancelCauseFunc
	timer  *time.Timer   // ends it at the time until; nil while it is expected
	got    chan struct{} // closed when it is no place in line any more

	// Keeper.mu protects the rest.
	expected bool      // the statement that makes it has not been answered yet
	until    time.Time // its local deadline
	waiting  bool
	gotten   time.Time // when this process heard that it is no place in line; zero for a place
	fence    int64
}

// margin is how much earlier than its end a slot is lost for its holder.
func margin(ttl time.Duration) time.Duration { return ttl / 10 }

// Expect returns a slot that a statement is about to make. The keeper hears of it from now on, because another process
// may hand the slot over before this process has read the statement's answer. Call Confirm or Drop after the statement.
// The function limit returns the limit of the slot's key, which a policy can change.
func (k *Keeper) Expect(id string, ttl time.Duration, strict bool, limit func() int64) *Slot {
	s := &Slot{id: id, strict: strict, limit: limit, keeper: k, got: make(chan struct{}), expected: true, waiting: true}
	s.ctx, s.end = context.WithCancelCause(context.Background())
	k.mu.Lock()
	defer k.mu.Unlock()
	if s.group = k.groups[ttl]; s.group == nil {
		s.group = &group{
			ttl: ttl, slots: map[string]*Slot{}, next: time.Now().Add(ttl / 3), poke: make(chan struct{}, 1),
		}
		k.groups[ttl] = s.group
		go k.renew(s.group)
	}
	k.slots[id], s.group.slots[id] = s, s
	return s
}

// Confirm keeps the slot from now on. The statement that has made it was sent at the time sent.
func (s *Slot) Confirm(told Told, sent time.Time) {
	k, ttl := s.keeper, s.group.ttl
	k.mu.Lock()
	defer k.mu.Unlock()
	s.expected = false
	s.until = sent.Add(ttl - margin(ttl))
	s.timer = time.AfterFunc(time.Until(s.until), func() { s.Drop(ErrLost) })
	if s.out(told); k.slots[s.id] != s {
		return
	}
	if due := sent.Add(ttl / 3); due.Before(s.group.next) { // the answer was slow
		s.group.next = due
		s.group.wake()
	}
	if !s.waiting {
		return
	}
	if k.stop == nil && k.config.Listen != nil {
		var ctx context.Context
		ctx, k.stop = context.WithCancel(context.Background())
		go k.listen(ctx)
	}
	if !k.listening {
		s.group.wake()
	}
}

// Context ends when the slot ends. Its cause is ErrLost, ErrReleased, or what was passed to Drop.
func (s *Slot) Context() context.Context { return s.ctx }

// Got is closed when a place in line becomes a slot.
func (s *Slot) Got() <-chan struct{} { return s.got }

// Fence returns the slot's fence. It is 0 for a place in line.
func (s *Slot) Fence() int64 {
	s.keeper.mu.Lock()
	defer s.keeper.mu.Unlock()
	return s.fence
}

// Drop ends the slot's context, and stops renewing it. Only the first call has an effect, and returns true.
func (s *Slot) Drop(cause error) bool {
	s.keeper.mu.Lock()
	defer s.keeper.mu.Unlock()
	return s.drop(cause)
}

func (s *Slot) drop(cause error) bool {
	k := s.keeper
	if k.slots[s.id] != s {
		return false
	}
	s.end(cause)
	if s.timer != nil {
		s.timer.Stop()
	}
	delete(k.slots, s.id)
	delete(s.group.slots, s.id)
	if len(s.group.slots) == 0 {
		delete(k.groups, s.group.ttl)
		s.group.wake()
	}
	if len(k.slots) == 0 && k.stop != nil {
		k.stop()
		k.stop, k.listening = nil, false
	}
	return true
}

func (g *group) wake() {
	select {
	case g.poke <- struct{}{}:
	default: // it is awake already
	}
}

// renew renews the slots of a group until there are none.
func (k *Keeper) renew(g *group) {
	for {
		slots, wait, ended := k.due(g)
		if ended {
			return
		}
		if len(slots) == 0 {
			timer := time.NewTimer(wait)
			select {
			case <-timer.C:
			case <-g.poke:
			}
			timer.Stop()
			continue
		}
		sent := time.Now()
		ctx, cancel := context.WithTimeout(context.Background(), g.ttl/3)
		places := make([]Place, len(slots))
		for i, s := range slots {
			places[i] = Place{s.id, s.limit()}
		}
		told, err := k.config.Renew(ctx, places, g.ttl)
		cancel()
		k.config.Told(k.apply(g, places, told, sent, err))
	}
}

// due returns the slots to renew now. If there are none, it returns how long to wait for the next ones.
func (k *Keeper) due(g *group) (slots []*Slot, wait time.Duration, ended bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.groups[g.ttl] != g {
		return nil, 0, true
	}
	now := time.Now()
	all := !now.Before(g.next)
	if all {
		g.next = now.Add(g.ttl / 3)
	}
	wait = g.next.Sub(now)
	for _, s := range g.slots {
		if s.expected {
			continue
		}
		if all {
			slots = append(slots, s)
		} else if s.waiting {
			period := pollPeriod
			if k.listening {
				period = lookPeriod
			}
			rest := g.asked.Add(period).Sub(now)
			if rest <= 0 {
				slots = append(slots, s)
			}
			wait = min(wait, max(rest, 0))
		}
	}
	if len(slots) > 0 {
		g.asked = now
	}
	return slots, wait, false
}

// apply applies the answer to a renewal that was sent at the time sent.
func (k *Keeper) apply(g *group, places []Place, told []Told, sent time.Time, err error) Renewal {
	k.mu.Lock()
	defer k.mu.Unlock()
	renewal := Renewal{Slots: len(places), TTL: g.ttl, Err: err}
	exists := make(map[string]bool, len(told))
	for _, t := range told {
		exists[t.ID] = true
		if s := g.slots[t.ID]; s != nil && !s.expected {
			if t.Waiting && !s.waiting && sent.After(s.gotten) { // a failover has undone that the place became a slot
				s.drop(ErrLost)
				renewal.Lost++
				continue
			}
			s.until = sent.Add(g.ttl - margin(g.ttl))
			s.timer.Reset(time.Until(s.until))
			s.out(t)
		}
	}
	for _, p := range places {
		switch s := g.slots[p.ID]; {
		case s == nil || exists[p.ID]:
		case err == nil:
			s.drop(ErrLost)
			renewal.Lost++
		case s.strict && !s.waiting:
			s.drop(errors.Join(ErrLost, err))
		}
	}
	if err == nil {
		renewal.Failures, g.fails = g.fails, 0
		return renewal
	}
	g.fails++
	g.next = time.Now().Add(g.ttl / 30) // try again soon
	renewal.Failures = g.fails
	return renewal
}

// out makes a place in line a slot, if the database has done so. If this process was paused meanwhile, the slot may
// have ended, although the timer has not run yet.
func (s *Slot) out(told Told) {
	switch {
	case !s.waiting || told.Waiting:
	case !s.expected && !time.Now().Before(s.until):
		s.drop(ErrLost)
	default:
		s.waiting, s.fence, s.gotten = false, told.Fence, time.Now()
		close(s.got)
	}
}

// listen hears of places that become slots, until ctx ends.
func (k *Keeper) listen(ctx context.Context) {
	ready := func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		if ctx.Err() != nil {
			return
		}
		k.listening = true
		for _, g := range k.groups { // something may have been announced before
			g.asked = time.Time{}
			g.wake()
		}
	}
	heard := func(told Told) {
		k.mu.Lock()
		defer k.mu.Unlock()
		if s := k.slots[told.ID]; s != nil {
			s.out(told)
		}
	}
	for ctx.Err() == nil {
		_ = k.config.Listen(ctx, ready, heard) // the polls that replace it fail loudly if the database is away
		k.mu.Lock()
		if ctx.Err() == nil {
			k.listening = false
			for _, g := range k.groups {
				g.wake()
			}
		}
		k.mu.Unlock()
		timer := time.NewTimer(retryListening)
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}
