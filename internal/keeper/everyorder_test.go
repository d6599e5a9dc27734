package keeper_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/keeper"
	"github.com/pgratelimit/ratelimit/internal/model"
)

// This file tries every order of what can happen to a few processes with slots of one key. Statements are late, lost,
// executed without an answer, or executed long after the sender gave up. Processes pause and crash. Notifications are
// late or lost. An operator takes slots away. The database is model.Key, and the processes follow the rules of the
// Keeper.
//
// A statement or a notification that is lost is one that never arrives. A process that pauses is one that does nothing
// for a while. When it wakes after its deadline, its timer may run late: only then does it not count as a believer. A
// process that crashes never wakes.
//
// All times are relative to now, so there are few worlds, and time has no bound. A tick is 10 by the database's clock.
// The clock of the first process is slow by a tenth.

const (
	tick       = 10
	life       = 2 * tick // the ttl of slots
	processes  = 3
	requests   = 2 // of a process
	everybody  = processes * requests
	near       = processes - 1 // the statements of this process take no time
	nobody     = 0
	noDeadline = -1
)

// What a process knows of its slot.
const (
	asked   = iota // a statement that makes it is on its way
	waiting        // a place in line
	held
)

// Kinds of statements.
const (
	none = iota
	acquire
	acquireOrWait
	renew
	release
)

// Answers to statements.
const (
	noAnswer = iota // the statement is on its way
	denied
	isWaiting
	isHeld
)

// statement is a statement on its way to the database, or its answer on its way back.
type statement struct {
	kind, id, sent, answer, fence int8
	early                         bool // it was sent before the process heard that its place is a slot
}

// process is a process. It knows at most one slot.
type process struct {
	id               int8 // of its slot, or nobody
	knows            int8
	deadline         int8
	fence            int8
	made             int8      // how many requests it has made
	now              statement // it waits for the answer to this one
	left             statement // nobody waits for the answer to this one
	announced, place int8      // a notification on its way: the id and the fence
}

// place is a slot or a ticket in the database.
type place struct{ id, units, end, status, fence, limit int8 }

// world is a state of everything. It is comparable.
type world struct {
	places    [everybody]place
	fence     int8  // the last fence or place in line
	largest   int8  // the largest fence of a slot
	ever      uint8 // what was a slot or a ticket
	dead      uint8 // what is so no more
	taken     uint8 // what an operator has taken away
	takes     int8  // how often an operator did so
	processes [processes]process
}

// bounds say how much is tried.
type bounds struct {
	processes int
	limit     int64
	units     [processes]int64 // of each process's requests
	requests  [processes]int8  // how many
	takes     int8             // of an operator
	tries     bool             // whether processes also ask without standing in line
}

// mistakes are what the controls do wrong.
type mistakes struct {
	deadlineFromAnswer       bool // the process counts its time from the answer, instead of from the sending
	deadlineFromNotification bool
	noMargin                 bool
	renewalRevives           bool // a renewal revives a slot that has ended
	releaseByKey             bool // a release frees a slot of the key, and not the one with the id
	placeIsFence             bool // a ticket that becomes a slot keeps its number
	ticketsNeverEnd          bool
	noHandOver               bool // a release does not serve the line
}

// search visits all worlds.
type search struct {
	bounds
	mistakes

	seen map[world]bool
}

func bit(id int8) uint8 { return 1 << (id - 1) }

// key returns the key of the model.
func (w *world) key() model.Key {
	k := model.Key{Fence: int64(w.fence), Holds: make([]model.Hold, 0, everybody+1)}
	for _, p := range w.places {
		if p.id != nobody {
			k.Holds = append(k.Holds, model.Hold{
				ID: int64(p.id), Units: int64(p.units), End: int64(p.end), Status: model.HoldStatus(p.status),
				Ticket: model.Ticket{Fence: int64(p.fence), Weight: 1, Limit: int64(p.limit)},
			})
		}
	}
	return k
}

// find returns the index of a slot or a ticket, or -1.
func (w *world) find(id int8) int {
	return slices.IndexFunc(w.places[:], func(p place) bool { return p.id == id })
}

// lives returns whether p is a slot or a ticket that has not ended.
func (p place) lives() bool {
	return p.id != nobody && p.end > 0 && (p.status == int8(model.Live) || p.status == int8(model.Waiting))
}

// store stores the key that a statement has changed, and announces the tickets that have become slots.
func (s *search) store(w *world, k model.Key) error {
	was := *w
	w.places, w.fence = [everybody]place{}, int8(k.Fence)
	for i, h := range k.Holds {
		p := place{int8(h.ID), int8(h.Units), int8(h.End), int8(h.Status), int8(h.Fence), int8(h.Limit)}
		j := was.find(p.id)
		waited := j >= 0 && was.places[j].status == int8(model.Waiting)
		if p.status == int8(model.Live) && (j < 0 || waited) {
			if waited && s.placeIsFence {
				p.fence = was.places[j].fence
			}
			if waited {
				of := &w.processes[(p.id-1)/requests]
				of.announced, of.place = p.id, p.fence
			}
			if p.fence <= w.largest {
				return fmt.Errorf("the fence %d comes after %d", p.fence, w.largest)
			}
			w.largest = p.fence
		}
		w.places[i] = p
	}
	for _, p := range w.places {
		if p.lives() && p.status == int8(model.Waiting) && k.Held(0)+slices.Max(s.units[:]) <= s.limit {
			return fmt.Errorf("%d waits beside free units", p.id)
		}
	}
	return nil
}

// checkEnd returns an error if nobody could get a slot after all have died.
func (s *search) checkEnd(w *world) error {
	want := model.Want{ID: 99, Units: s.limit, TTL: life, Weight: 1}
	_, a := w.key().Acquire(model.Concurrency{Limit: s.limit}, life, want)
	if a.Decision.Granted == 0 {
		return fmt.Errorf("the dead keep the slots: %+v", a.Decision)
	}
	return nil
}

// check returns an error if a promise is broken.
func (s *search) check(w *world) error {
	var live, believed int64
	var now uint8
	for _, p := range w.places {
		if p.lives() {
			now |= bit(p.id)
			if p.status == int8(model.Live) {
				live += int64(p.units)
			}
		}
	}
	if w.dead&now != 0 {
		return fmt.Errorf("what has ended lives again: %b", w.dead&now)
	}
	w.ever |= now
	w.dead = w.ever &^ now
	if live > s.limit {
		return fmt.Errorf("%d units are live", live)
	}
	for i := range s.processes {
		p := &w.processes[i]
		if p.id == nobody || p.knows != held || p.deadline <= 0 || w.taken&bit(p.id) != 0 {
			continue
		}
		believed += s.units[i]
		j := w.find(p.id)
		if j < 0 || !w.places[j].lives() || w.places[j].status != int8(model.Live) || w.places[j].fence != p.fence {
			return fmt.Errorf("process %d believes in slot %d with the fence %d", i, p.id, p.fence)
		}
	}
	if believed > s.limit {
		return fmt.Errorf("processes believe in %d units", believed)
	}
	return nil
}

// tidy forgets what makes no difference any more.
func (w *world) tidy() {
	var known uint8
	for i := range w.processes {
		p := &w.processes[i]
		if p.id != nobody {
			known |= bit(p.id)
		}
		if p.announced != p.id || p.knows == held {
			p.announced, p.place = nobody, 0
		}
		switch t := &p.now; {
		case t.id != p.id && t.answer == noAnswer && t.kind != none:
			p.abandon()
		case t.id != p.id:
			*t = statement{}
		case t.answer == isHeld && p.knows == held:
			t.fence = 0
		}
		for _, t := range []statement{p.now, p.left} {
			if t.kind != none {
				known |= bit(t.id)
			}
		}
	}
	kept := w.places[:0]
	for _, p := range w.places {
		switch {
		case p.lives():
			known |= bit(p.id)
			kept = append(kept, p)
		case p.id != nobody && known&bit(p.id) != 0:
			kept = append(kept, place{id: p.id, units: p.units, status: int8(model.Ended), fence: p.fence, limit: p.limit})
		}
	}
	clear(w.places[len(kept):])
	w.ever, w.dead, w.taken = w.ever&known, w.dead&known, w.taken&known

	// Only the order of the fences matters.
	var rank [64]int8
	each := func(do func(fence *int8)) {
		do(&w.fence)
		do(&w.largest)
		for i := range w.places {
			do(&w.places[i].fence)
		}
		for i := range w.processes {
			p := &w.processes[i]
			do(&p.fence)
			do(&p.place)
			do(&p.now.fence)
		}
	}
	each(func(fence *int8) { rank[*fence] = 1 })
	rank[0] = 0
	for i, last := 1, int8(0); i < len(rank); i++ {
		if rank[i] > 0 {
			last++
			rank[i] = last
		}
	}
	each(func(fence *int8) { *fence = rank[*fence] })
}

// drop makes the process forget its slot.
func (p *process) drop() { p.id, p.knows, p.deadline, p.fence = nobody, asked, noDeadline, 0 }

// until sets the deadline after a statement, as the Keeper does.
func (s *search) until(p *process, sent int8) {
	margin := int8(keeper.Margin(life))
	if s.noMargin {
		margin = 0
	}
	if s.deadlineFromAnswer {
		sent = 0
	}
	p.deadline = max(sent+life-margin, 0)
}

// out makes a place a slot.
func (p *process) out(fence int8) {
	if p.knows != held {
		p.knows, p.fence = held, fence
		p.now.early = p.now.kind != none
	}
}

// abandon stops waiting for an answer. If a statement was abandoned before, it is lost.
func (p *process) abandon() { p.left, p.now = statement{kind: p.now.kind, id: p.now.id}, statement{} }

// execute lets the database execute a statement of a process.
func (s *search) execute(w *world, t *statement, units int64) error {
	k, id := w.key(), int64(t.id)
	next := k
	t.answer = denied
	told := func(h model.Hold) {
		if t.answer, t.fence = isHeld, int8(h.Fence); h.Status == model.Waiting {
			t.answer, t.fence = isWaiting, 0
		}
	}
	switch t.kind {
	case acquire, acquireOrWait:
		ttl := int64(life)
		if s.ticketsNeverEnd {
			ttl = 5 * life
		}
		after, a := k.Acquire(model.Concurrency{Limit: s.limit}, 0,
			model.Want{ID: id, Units: units, TTL: ttl, Weight: 1, Wait: t.kind == acquireOrWait})
		if next = after; a.Hold != nil {
			told(*a.Hold)
		}
	case renew:
		i := w.find(t.id)
		if s.renewalRevives && i >= 0 && k.Holds[i].Status != model.Waiting {
			k.Holds[i].Status, k.Holds[i].End = model.Live, life
		}
		var live []model.Hold
		if next, live = k.Renew(0, map[int64]int64{id: s.limit}, life); len(live) > 0 {
			told(live[0])
		}
	case release:
		i := slices.IndexFunc(k.Holds, func(h model.Hold) bool { return h.Status == model.Live })
		if s.releaseByKey && i >= 0 {
			id = k.Holds[i].ID
		}
		after, _, err := k.Release(0, id)
		if next = after; err == nil {
			t.answer = isHeld
		}
		if err == nil && s.noHandOver {
			next = k
			next.Holds = slices.DeleteFunc(slices.Clone(k.Holds), func(h model.Hold) bool { return h.ID == id })
		}
	}
	wrote := t.answer != denied
	if !wrote {
		return nil
	}
	return s.store(w, next)
}

// hear lets a process hear the answer to a statement.
func (s *search) hear(p *process, t statement) error {
	switch {
	case p.id != t.id:
	case t.answer == denied:
		p.drop()
	case t.answer == isWaiting && p.knows == held && !t.early:
		return fmt.Errorf("slot %d is lost for nothing", p.id) // the Keeper drops it
	default:
		if p.knows == asked {
			p.knows = waiting
		}
		if t.answer == isHeld {
			p.out(t.fence)
		}
		s.until(p, t.sent)
	}
	return nil
}

// try is told of a step: the world after it, a promise that it has broken, what it is, of which process and statement.
type try func(next *world, err error, what string, i int, t statement)

// steps calls try for each step that is possible in a world.
func (s *search) steps(from *world, try try) {
	next := *from
	for i := range next.places {
		next.places[i].end = max(next.places[i].end-tick, 0)
	}
	for i := range s.processes {
		p, passed := &next.processes[i], int8(tick)
		if i == 0 {
			passed -= tick / 10
		}
		if p.now.kind != none {
			p.now.sent = max(p.now.sent-passed, int8(keeper.Margin(life))-life)
		}
		if p.deadline != noDeadline {
			p.deadline = max(p.deadline-passed, 0)
		}
	}
	try(&next, nil, "tick", 0, statement{})
	if from.takes < s.takes {
		for _, h := range from.places {
			if k, _, err := from.key().Release(0, int64(h.id)); h.id != nobody && err == nil {
				next := *from
				next.takes++
				next.taken |= bit(h.id)
				try(&next, s.store(&next, k), "an operator takes a slot away", 0, statement{id: h.id})
			}
		}
	}
	for i := range s.processes {
		s.stepsOf(i, from, try)
	}
}

func (s *search) stepsOf(i int, from *world, try try) {
	do := func(what string, t statement, change func(w *world, p *process) error) {
		next := *from
		p := &next.processes[i]
		err := change(&next, p)
		if i == near && err == nil && p.left.kind != none {
			t := p.left
			p.left = statement{}
			err = s.execute(&next, &t, s.units[i])
		}
		if i == near && err == nil && p.now.kind != none {
			err = s.execute(&next, &p.now, s.units[i])
			t := p.now
			if p.now = (statement{}); err == nil {
				err = s.hear(p, t)
			}
		}
		try(&next, err, what, i, t)
	}
	now := &from.processes[i]
	if now.left.kind != none {
		do("'s statement, which was abandoned, is executed", now.left, func(w *world, p *process) error {
			t := p.left
			p.left = statement{}
			return s.execute(w, &t, s.units[i])
		})
	}
	if now.deadline == 0 {
		do("'s slot ends", statement{}, func(_ *world, p *process) error {
			p.drop()
			return nil
		})
	}
	switch t := now.now; {
	case t.kind == none:
	case t.answer == noAnswer:
		do("'s statement is executed", t, func(w *world, p *process) error { return s.execute(w, &p.now, s.units[i]) })
		do("gives up", t, func(_ *world, p *process) error {
			if p.abandon(); t.kind != renew {
				p.drop() // the release that follows does nothing or is lost, or else the answer is, as below
			}
			return nil
		})
	default:
		do("hears", t, func(_ *world, p *process) error {
			p.now = statement{}
			return s.hear(p, t)
		})
		do("does not hear", t, func(_ *world, p *process) error {
			p.now = statement{}
			if t.kind != renew {
				p.left = statement{kind: release, id: t.id}
				p.drop()
			}
			return nil
		})
	}
	if now.announced != nobody {
		do("hears of its place", statement{}, func(_ *world, p *process) error {
			if p.id == p.announced {
				p.out(p.place)
				if s.deadlineFromNotification {
					s.until(p, 0)
				}
			}
			p.announced, p.place = nobody, 0
			return nil
		})
	}
	if now.id == nobody && now.now.kind == none && now.made < s.requests[i] {
		for kind := range int8(2) {
			if acquire+kind == acquire && !s.tries {
				continue
			}
			do("asks", statement{kind: acquire + kind}, func(_ *world, p *process) error {
				p.made++
				p.id = int8(i*requests) + p.made
				p.now = statement{kind: acquire + kind, id: p.id}
				return nil
			})
		}
	}
	if now.id != nobody && now.deadline > 0 && now.now.kind == none {
		do("renews", statement{}, func(_ *world, p *process) error {
			p.now = statement{kind: renew, id: p.id}
			return nil
		})
	}
	if now.id != nobody && now.knows != asked {
		do("releases", statement{}, func(_ *world, p *process) error {
			p.now, p.left = statement{}, statement{kind: release, id: p.id}
			p.drop()
			return nil
		})
	}
}

// run visits every world that can be reached. It returns the first broken promise, with the steps to it.
func (s *search) run() error {
	type node struct {
		at     world
		before int
	}
	var start world
	for i := range start.processes {
		start.processes[i].drop()
	}
	nodes := []node{{start, -1}}
	s.seen = map[world]bool{start: true}
	for i := 0; i < len(nodes); i++ {
		at := nodes[i].at
		failed := s.checkEnd(&at)
		s.steps(&at, func(next *world, err error, what string, by int, t statement) {
			if err == nil {
				err = s.check(next)
			}
			if next.tidy(); err != nil && failed == nil {
				failed = fmt.Errorf("%w after: process %d %s %+v", err, by, what, t)
			} else if !s.seen[*next] {
				s.seen[*next] = true
				nodes = append(nodes, node{*next, i})
			}
		})
		if failed == nil {
			continue
		}
		var path []string
		for ; i >= 0; i = nodes[i].before {
			path = append(path, fmt.Sprintf("%+v", nodes[i].at))
		}
		slices.Reverse(path)
		return fmt.Errorf("%w\n%s", failed, strings.Join(path, "\n"))
	}
	return nil
}

// In every order of what can happen, slots keep their promises:
//
//   - Unless an operator took its slot away, a process that has not reached its deadline has a live slot.
//   - So all these processes together have at most the limit.
//   - A slot or a ticket that has ended is never live again, and a process loses no slot for nothing.
//   - Fences ascend.
//   - After each write, nobody waits beside free units, and if all die, everything is free after one ttl.
func TestSlotsInEveryOrder(t *testing.T) {
	t.Parallel()
	everyOrder(t, []bounds{
		{processes: 2, limit: 1, units: [processes]int64{1, 1}, requests: [processes]int8{2, 1}},
		{processes: 2, limit: 1, units: [processes]int64{1, 1}, requests: [processes]int8{1, 1}, takes: 2, tries: true},
		{processes: 2, limit: 2, units: [processes]int64{1, 2}, requests: [processes]int8{1, 1}, takes: 1, tries: true},
	})
}

// TestSlotsInEveryOrder has no more than two processes.
func TestThoroughSlotsInEveryOrder(t *testing.T) {
	t.Parallel()
	everyOrder(t, []bounds{
		{processes: 3, limit: 1, units: [processes]int64{1, 1, 1}, requests: [processes]int8{1, 1, 1}},
		{processes: 3, limit: 1, units: [processes]int64{1, 1, 1}, requests: [processes]int8{1, 0, 2}, takes: 1, tries: true},
		{processes: 3, limit: 2, units: [processes]int64{1, 1, 2}, requests: [processes]int8{1, 0, 2}, tries: true},
	})
}

func everyOrder(t *testing.T, all []bounds) {
	t.Helper()
	for _, b := range all {
		s := search{bounds: b}
		require.NoError(t, s.run(), "%+v", b)
		t.Logf("%+v: %d worlds", b, len(s.seen))
		require.Greater(t, len(s.seen), 2_000)
	}
}

// The search notices these mistakes of the database and of processes.
func TestMistakesInOrdersOfSlots(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		mistakes

		want string
	}{
		{mistakes{deadlineFromAnswer: true}, "believes in slot"},
		{mistakes{deadlineFromNotification: true}, "believes in slot"},
		{mistakes{noMargin: true}, "believes in slot"},
		{mistakes{renewalRevives: true}, "what has ended lives again"},
		{mistakes{releaseByKey: true}, "believes in slot"},
		{mistakes{placeIsFence: true}, "with the fence"},
		{mistakes{ticketsNeverEnd: true}, "the dead keep the slots"},
		{mistakes{noHandOver: true}, "waits beside free units"},
	} {
		s := search{mistakes: c.mistakes, bounds: bounds{
			processes: 3, limit: 1, units: [processes]int64{1, 1, 1}, requests: [processes]int8{1, 1, 1}, tries: true,
		}}
		err := s.run()
		require.ErrorContains(t, err, c.want, "%+v", c.mistakes)
		t.Logf("%+v: %d worlds, %.300s", c.mistakes, len(s.seen), err)
	}
}
