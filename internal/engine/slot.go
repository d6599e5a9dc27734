package engine

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/keeper"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pg"
)

// SlotWish describes a slot that is asked for. Its JSON is an argument of rate_limit_slots.
type SlotWish struct {
	Holder string `json:"holder,omitempty"`
	Group  string `json:"group,omitempty"`
	Weight int    `json:"weight,omitempty"` // of the group; 0 means 1
	Wait   bool   `json:"wait,omitempty"`   // stand in line if there is no slot
}

// SlotPlace is the row that a slot belongs to.
type SlotPlace struct {
	Space     *Space
	Rules     model.Rules
	Name, Key string
}

// Acquired is the answer to a request for a slot. Told.ID is "" if there is neither a slot nor a place in line.
type Acquired struct {
	Outcome

	Told  keeper.Told
	Place SlotPlace
	// Undecided receives a value when the database has decided a request whose caller has given up. It is nil for
	// other requests.
	Undecided <-chan struct{}
}

// Acquire asks for a slot of the cost of an ask, which lasts for ttl microseconds. The id must be new. One rule of the
// ask's policy has slots. TakeRates takes from the others.
func (e *Engine) Acquire(
	ctx context.Context, a *Ask, id string, ttl int64, wish SlotWish,
) (acquired Acquired, err error) {
	details, err := json.Marshal(wish)
	if err != nil {
		return Acquired{}, err
	}
	r := e.Request(a)
	r.Parts = slices.DeleteFunc(r.Parts, func(p Part) bool { return !p.Rules.Numbers().HasSlots() })
	p := &r.Parts[0]
	p.Slot, p.TTL, p.Wish = id, ttl, string(details)
	acquired.Place = SlotPlace{p.Space, p.Rules, p.Name, p.Key}
	if err := e.submit(ctx, nil, r); err != nil {
		if ctx.Err() != nil {
			acquired.Undecided = r.Done
		}
		return acquired, err
	}
	acquired.Outcome = p.Outcome(r.place)
	if log := p.Decision.State.Log; len(log) == 8*3 {
		acquired.Told = keeper.Told{ID: id, Waiting: log.Entry(0) == 0, Fence: log.Entry(1)}
	}
	e.Requests.Put(r)
	return acquired, nil
}

// TakeRates takes the cost of an ask from the rules of its policy that have no slots, or from none of them. slot is the
// outcome of the rule with slots. The result is the outcome of all rules. A Cost of 0 looks.
func (e *Engine) TakeRates(ctx context.Context, a *Ask, slot Outcome) (Outcome, error) {
	r := e.Request(a)
	r.Parts = slices.DeleteFunc(r.Parts, func(p Part) bool { return p.Rules.Numbers().HasSlots() })
	if err := e.submit(ctx, nil, r); err != nil {
		return Outcome{}, err
	}
	if r.place > r.Parts[0].Decision.Granted { // then the caller gives the slot back
		slot.Remaining += a.Cost
		slot.Held -= a.Cost
	}
	each, rates := make([]Outcome, len(a.Policy.Rules)), r.Parts
	for i, rules := range a.Policy.Rules {
		if each[i] = slot; !rules.Numbers().HasSlots() {
			each[i], rates = rates[0].Outcome(r.place), rates[1:]
		}
	}
	e.Requests.Put(r)
	return outcomeOfAll(each), nil
}

// Release frees a slot, or leaves the line. It returns false if the database has it no more.
func (e *Engine) Release(ctx context.Context, at SlotPlace, id string) (known bool, err error) {
	r := e.Requests.Get(at.Space, nil)
	r.Parts = append(r.Parts, Part{Space: at.Space, Rules: at.Rules, Name: at.Name, Key: at.Key, Slot: id})
	if err := e.submit(ctx, nil, r); err != nil {
		return false, err
	}
	known = r.Parts[0].Decision.Granted == 1
	e.Requests.Put(r)
	return known, nil
}

// renewSlots makes slots and places in line last for ttl from now. Beside an error, it returns those that it has
// renewed all the same.
func (e *Engine) renewSlots(ctx context.Context, places []keeper.Place, ttl time.Duration) ([]keeper.Told, error) {
	patience := LockTimeout(min(e.Batcher.Held.Patience(), ttl/30))
	told, err := e.Database.renew(ctx, places, ttl, patience)
	if len(places) == 1 || !pg.LockTimeout(err) {
		return told, err
	}
	// Another transaction has locked the row of a key. The slots of all other keys must not end with it. So only when
	// they are renewed does a statement wait for the locked rows again.
	told, locked, err := e.renewUnlocked(ctx, places, ttl)
	for _, p := range locked {
		one, err2 := e.Database.renew(ctx, []keeper.Place{p}, ttl, patience)
		told, err = append(told, one...), errors.Join(err, err2)
	}
	return told, err
}

// renewUnlocked renews those slots whose rows are locked only briefly, and returns the others. It cuts them in half
// again and again, so it waits several times for each locked row, but not for long.
func (e *Engine) renewUnlocked(
	ctx context.Context, places []keeper.Place, ttl time.Duration,
) (told []keeper.Told, locked []keeper.Place, err error) {
	told, err = e.Database.renew(ctx, places, ttl, LockTimeout(briefly))
	switch {
	case !pg.LockTimeout(err):
		return told, nil, err
	case len(places) == 1:
		return nil, places, nil
	}
	half := len(places) / 2
	told, locked, err = e.renewUnlocked(ctx, places[:half], ttl)
	told2, locked2, err2 := e.renewUnlocked(ctx, places[half:], ttl)
	return append(told, told2...), append(locked, locked2...), errors.Join(err, err2)
}

// briefly is how long a renewal waits for a row beside rows that are locked for longer.
const briefly = 3 * time.Millisecond

// renew is renewSlots in one statement, on a pool or in memory: other clients have no slots.
func (d *Database) renew(
	ctx context.Context, places []keeper.Place, ttl time.Duration, lockTimeout *int32,
) (told []keeper.Told, err error) {
	if d.memory != nil {
		return d.renewInMemory(places, ttl), nil
	}
	ids, limits := make([]string, len(places)), make([]int64, len(places))
	for i, p := range places {
		ids[i], limits[i] = p.ID, p.Limit
	}
	const flush = true // a renewal that a crash loses would end a slot while its holder believes in it
	var t keeper.Told
	err = whileSplit(ctx, true, func() error {
		told = nil
		return pg.Query(ctx, d.asked, true, Text("renew", d.schema),
			[]any{ids, model.Micros(ttl), lockTimeout, flush, microsOf(d.now()), limits},
			[]any{&t.ID, &t.Waiting, &t.Fence}, func() error {
				told = append(told, t)
				return nil
			})
	})
	return told, d.explain(ctx, d.asked, nil, err)
}

// errShards is the error for listening at a proxy. The shards send the notifications, and the proxy does not hear them.
var errShards = errors.New("ratelimit: a proxy for shards hears no notifications of its shards")

// errPool is the error for listening without a pool, which says how to connect.
var errPool = errors.New("ratelimit: only a *pgxpool.Pool says how to make a connection that listens")

// newKeeper returns the keeper of the engine's slots.
func (e *Engine) newKeeper() *keeper.Keeper {
	config := keeper.Config{Renew: e.renewSlots, Told: e.slotsRenewed, Listen: e.Listen}
	if e.Database.door != nil {
		config.Listen = e.Database.door.Listen
	}
	return keeper.New(config)
}

// Listen tells of places in line that have become slots: see keeper.Config.
func (e *Engine) Listen(ctx context.Context, ready func(), heard func(keeper.Told)) error {
	pool, ok := e.Database.DB.(*pgxpool.Pool)
	if !ok {
		return errPool
	}
	var proxy bool
	name := pg.Qualify("rate_limit_shards()", e.Settings.Schema)
	err := pg.Query(ctx, pool, true, "SELECT pg_catalog.to_regprocedure($1) IS NOT NULL",
		[]any{name}, []any{&proxy}, func() error { return nil })
	if err == nil && proxy {
		err = errShards
	}
	if err != nil {
		return err
	}
	return keeper.ListenOn(pool)(ctx, ready, heard)
}

// slotsRenewed logs the first of several renewals that fail, and the first one that succeeds again.
func (e *Engine) slotsRenewed(r keeper.Renewal) {
	logger := e.Settings.Logger
	if logger == nil {
		logger = slog.Default()
	}
	switch {
	case r.Err != nil && r.Failures == 1:
		logger.Warn("ratelimit: slots could not be renewed; trying again until they end",
			"slots", r.Slots, "ttl", r.TTL, "error", r.Err)
	case r.Err == nil && r.Failures > 0:
		logger.Info("ratelimit: slots are renewed again", "slots", r.Slots, "failures", r.Failures)
	}
	if r.Lost > 0 {
		logger.Warn("ratelimit: slots are lost: they had ended, or somebody has taken them away", "slots", r.Lost)
	}
	if e.Settings.Hooks.Renewal != nil {
		e.Settings.Hooks.Renewal(r)
	}
}
