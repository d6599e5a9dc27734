package sql_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// TestSlotsEqualTheModel compares random histories of slots and tickets with the model: requests with and without
// waiting, releases, renewals, resets, and changes of the policy. After each step it compares the list, the fences, and
// the sum in the row with the list.
func TestSlotsEqualTheModel(t *testing.T) {
	t.Parallel()
	pool, seed := pgtest.New(t).Pool, limitertest.Seed(t)
	seen := map[string]int{}
	wanted := []string{
		"acquired", "acquired, handed over", "denied", "denied by the line", "queued", "too large",
		"released", "released, handed over", "released ticket", "stale release", "renewed", "renewed, handed over", "lost",
		"ended ticket", "handed over to the group with least", "weighted head blocks", "set back", "far back", "limit",
		"algorithm", "reset", "peek", "never fits any more", "several at once",
		"renewed with a larger limit",
	}
	for story := uint64(0); story < uint64(12*limitertest.Rounds(t)) || lacks(seen, wanted) != nil; story++ {
		require.Less(t, story, uint64(1_000), "%v were never seen", lacks(seen, wanted))
		k := newSlotKey(pool, rand.New(rand.NewPCG(seed, story)), story)
		require.NoError(t, k.play(t.Context(), seen), "%s=%d, story %d", modeltest.SeedVariable, seed, story)
	}
	t.Logf("%v", seen)
}

// slotKey is a key with slots in the database, and its model.
type slotKey struct{ heldKey }

func newSlotKey(pool *pgxpool.Pool, r *rand.Rand, story uint64) *slotKey {
	k := &slotKey{}
	k.heldKey = heldKey{
		pool: pool, r: r, name: fmt.Sprint("slots ", story), durable: r.IntN(2) == 0, clock: 1<<50 + r.Int64N(1<<50),
		fences: map[int64]int64{}, next: int64(story+1) << 16, // a renewal finds slots by their ids only
	}
	k.p = k.draw()
	return k
}

func (k *slotKey) draw() model.Rules {
	if k.r.IntN(8) == 0 {
		k.code = modeltest.OneOf(k.r, algorithm.All()).Code
		return k.heldKey.draw()
	}
	return model.Concurrency{Limit: 1 + k.r.Int64N(6)}
}

// learn notes which fence of the database is a fence of the model. The fences of both must ascend alike.
func (h *heldKey) learn(fence, is int64) error {
	for other, otherIs := range h.fences {
		if (other < fence) != (otherIs < is) || (other == fence) != (otherIs == is) {
			return &difference{text: fmt.Sprintf("fence %d is %d, and %d is %d", fence, is, other, otherIs)}
		}
	}
	h.fences[fence] = is
	return nil
}

// play plays a history. It returns the first difference from the model.
func (k *slotKey) play(ctx context.Context, seen map[string]int) error {
	for step := range 50 {
		if k.r.IntN(10) == 0 {
			before := k.p.Numbers().Algorithm
			k.p, k.takes = k.draw(), nil
			if k.p.Numbers().Algorithm == before {
				seen["limit"]++
			} else {
				seen["algorithm"]++
			}
		}
		k.at = 0
		switch dice := k.r.IntN(16); {
		case dice < 5 && len(k.key.Holds) > 0: // about the end of a hold
			hold := modeltest.OneOf(k.r, k.key.Holds)
			k.at, k.clock = hold.ID, hold.End+k.r.Int64N(3)-1
		case dice < 12:
			k.clock += k.r.Int64N(3e6)
		case dice == 12:
			k.clock -= k.r.Int64N(2e7)
			seen["set back"]++
		case dice == 13 && k.r.IntN(8) == 0:
			k.clock -= model.Micros(model.MaxHold) + k.r.Int64N(1e6)
			seen["far back"]++
		}
		k.clock = min(max(k.clock, 1), 1<<55)
		before := fmt.Sprintf("step %d at %d, %T%+v, from %+v", step, k.clock, k.p, k.p, k.key)
		var what string
		var err error
		if p, ok := k.p.(model.Concurrency); ok || k.r.IntN(2) == 0 {
			what, err = k.slotStep(ctx, p, ok, seen)
		} else {
			what, err = k.step(ctx, modeltest.Dice(k.r.Int64N), map[string]int{})
			what = "rate: " + what
		}
		if err == nil {
			err = k.compareStored(ctx)
		}
		if err != nil {
			return fmt.Errorf("%s, %s: %w", what, before, err)
		}
		seen[what]++
	}
	return nil
}

// anyID returns the id of a hold, slot or ticket of the key, or an unknown one.
func (k *slotKey) anyID() int64 {
	if k.at > 0 && k.r.IntN(3) > 0 {
		return k.at
	}
	if len(k.key.Holds) == 0 || k.r.IntN(12) == 0 {
		return k.next + 7
	}
	return modeltest.OneOf(k.r, k.key.Holds).ID
}

// toldSlot is the answer of rate_limit_slots. Log is the fence of the database.
type toldSlot struct {
	Granted, Remaining int64
	RetryAfter         *int64
	ResetAfter, Held   int64
	Log                []int64
}

func (d toldSlot) String() string {
	text, _ := json.Marshal(d)
	return string(text)
}

// toldOf is the answer of the model. The fence is the model's.
func toldOf(d model.Decision, h *model.Hold) toldSlot {
	told := toldSlot{Granted: d.Granted, Remaining: d.Remaining, ResetAfter: d.ResetAfter, Held: d.Held}
	if d.RetryAfter != model.Never {
		told.RetryAfter = &d.RetryAfter
	}
	if h != nil {
		told.Log = []int64{0, h.Fence, h.End}
		if h.Status == model.Live {
			told.Log[0] = 1
		}
	}
	return told
}

// askSlot acquires a slot, or releases one if ttl is nil.
func (k *slotKey) askSlot(ctx context.Context, limit, cost int64, ttl *int64, id int64, wish any) (toldSlot, error) {
	var object *string
	if wish != nil {
		text, err := json.Marshal(wish)
		if err != nil {
			return toldSlot{}, err
		}
		object = new(string(text))
	}
	rows, err := k.pool.Query(ctx, `
		SELECT granted, coalesce(remaining, -1), retry_after_us, coalesce(reset_after_us, -1), coalesce(held, -1), log
		FROM rate_limit_slots($1, $2, $3, $4, $5, $6, $7::uuid[], $8::jsonb[], now => $9)`,
		[]string{k.name}, []string{"key"}, []bool{k.durable}, []int64{limit}, []int64{cost}, []*int64{ttl},
		[]string{holdID(id)}, []*string{object}, time.UnixMicro(k.clock))
	if err != nil {
		return toldSlot{}, err
	}
	return pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[toldSlot])
}

// compareSlot compares an answer with the model's. next is the key after it.
func (k *slotKey) compareSlot(got, want toldSlot) error {
	if len(want.Log) > 0 && len(got.Log) == len(want.Log) {
		if err := k.learn(want.Log[1], got.Log[1]); err != nil {
			return err
		}
		want.Log[1] = got.Log[1]
	}
	if !reflect.DeepEqual(want, got) {
		return &difference{text: fmt.Sprintf("SQL\n%v\nmodel\n%v", got, want)}
	}
	return nil
}

// handedOver returns the slots of next that were tickets of k, and notes what is special about them.
func handedOver(k, next model.Key, clock int64, seen map[string]int) (n int) {
	for _, was := range k.Holds {
		i := slices.IndexFunc(next.Holds, func(h model.Hold) bool { return h.ID == was.ID })
		if was.Status == model.Waiting && i < 0 && was.End <= clock {
			seen["ended ticket"]++
		}
		if was.Status != model.Waiting || i < 0 || next.Holds[i].Status != model.Live {
			continue
		}
		n++
		for _, h := range next.Holds {
			if h.Status == model.Waiting && h.Fence < was.Fence && h.Group != was.Group {
				seen["handed over to the group with least"]++
			}
		}
	}
	if n > 1 {
		seen["several at once"]++
	}
	return n
}

func (k *slotKey) slotStep(ctx context.Context, p model.Concurrency, ok bool, seen map[string]int) (what string, err error) {
	dice := k.r.IntN(20)
	if !ok { // the policy is another one by now; renewals and releases go on
		p, dice = model.Concurrency{Limit: 1 + k.r.Int64N(6)}, 12+k.r.IntN(6)
	}
	switch {
	case dice < 12:
		return k.acquire(ctx, p, seen)
	case dice < 15:
		id := k.anyID()
		next, was, wrong := k.key.Release(k.clock, id)
		_, d := next.Decide(p, k.clock, 0)
		d.Granted, d.RetryAfter = 1, 0
		want := toldOf(d, &was)
		switch {
		case wrong != nil:
			what, want.Granted, want.Log = "stale release", -3, nil
		case was.Status == model.Waiting:
			what = "released ticket"
		default:
			what = "released"
		}
		got, err := k.askSlot(ctx, p.Limit, 0, nil, id, nil)
		if err != nil {
			return what, err
		}
		if handedOver(k.key, next, k.clock, seen) > 0 {
			seen["released, handed over"]++
		}
		if wrong == nil {
			k.key, k.exists = next, true
		}
		return what, k.compareSlot(got, want)
	case dice < 18:
		ids := []int64{k.anyID(), k.anyID(), k.anyID()}[:1+k.r.IntN(3)]
		ttl := 1000 + k.r.Int64N(1e7)
		if k.r.IntN(8) == 0 {
			ttl = model.Micros(model.MaxHold)
		}
		limits, limit := map[int64]int64{}, int64(0) // the same limit for all, or none
		if k.r.IntN(2) == 0 {
			limit = 1 + k.r.Int64N(8)
		}
		for _, id := range ids {
			limits[id] = limit
		}
		return k.renew(ctx, limits, ttl, seen)
	case dice < 19:
		var existed bool
		row := k.pool.QueryRow(ctx, "SELECT rate_limit_reset($1, 'key', $2)", k.name, k.durable)
		if err := row.Scan(&existed); err != nil || existed != k.exists {
			return "reset", fmt.Errorf("existed %v: %w", existed, err)
		}
		k.key, k.stored, k.exists = k.key.Reset(), 0, false
		return "reset", nil
	}
	_, want := k.state().Decide(p, k.clock, 0)
	q := k.request(0)
	got, err := k.ask(ctx, q, nil, nil)
	if err == nil && ([3]int64{got.Remaining, got.ResetAfter, got.Held} != [3]int64{want.Remaining, want.ResetAfter, want.Held} ||
		*got.RetryAfter != want.RetryAfter) {
		err = &difference{text: fmt.Sprintf("peek: SQL\n%v\nmodel\n%+v", got, want)}
	}
	return "peek", err
}

func (k *slotKey) acquire(ctx context.Context, p model.Concurrency, seen map[string]int) (what string, err error) {
	w := model.Want{
		ID: k.next, Units: 1 + k.r.Int64N([]int64{max(p.Limit/2, 1), p.Limit}[k.r.IntN(2)]), TTL: 1000 + k.r.Int64N(2e7),
		Group: []string{"", "a", "b"}[k.r.IntN(3)], Weight: 1 + k.r.Int64N(3), Wait: k.r.IntN(3) > 0,
	}
	switch k.r.IntN(12) {
	case 0:
		w.TTL = model.Micros(model.MaxHold)
	case 1:
		w.Units = 1 + k.r.Int64N(p.Limit+1)
	}
	k.next++
	line := slices.ContainsFunc(k.key.Holds, func(h model.Hold) bool { return h.Status == model.Waiting && h.End > k.clock })
	next, answer := k.key.Acquire(p, k.clock, w)
	d, h := answer.Decision, answer.Hold
	switch {
	case w.Units > p.Limit:
		what = "too large"
	case d.Granted == 1:
		what = "acquired"
	case h != nil:
		what = "queued"
	case line:
		what = "denied by the line"
	default:
		what = "denied"
	}
	got, err := k.askSlot(ctx, p.Limit, w.Units, &w.TTL, w.ID,
		map[string]any{"holder": "h", "group": w.Group, "weight": w.Weight, "wait": w.Wait})
	if err != nil {
		return what, err
	}
	if h != nil && h.Status == model.Waiting && next.Held(k.clock) < p.Limit {
		seen["weighted head blocks"]++
	}
	for _, h := range next.Holds {
		if h.Status == model.Waiting && h.Units > h.Limit {
			seen["never fits any more"]++
		}
	}
	if handedOver(k.key, next, k.clock, seen) > 0 {
		seen["acquired, handed over"]++
	}
	if h != nil {
		k.key, k.exists = next, true
	} else if !k.exists { // a denial may make an empty row before it knows
		if err := k.pool.QueryRow(ctx, "SELECT EXISTS (SELECT FROM "+pgtest.Table(k.durable)+" WHERE prefix = $1)", k.name).
			Scan(&k.exists); err != nil {
			return what, err
		}
	}
	return what, k.compareSlot(got, toldOf(d, h))
}

func (k *slotKey) renew(
	ctx context.Context, limits map[int64]int64, ttl int64, seen map[string]int,
) (what string, err error) {
	next, live := k.key.Renew(k.clock, limits, ttl)
	var ids []string
	var numbers []int64 // nil if the limits stay
	for id, limit := range limits {
		ids = append(ids, holdID(id))
		if limit > 0 {
			numbers = append(numbers, limit)
		}
	}
	for _, h := range k.key.Holds {
		if h.Status == model.Waiting && limits[h.ID] > h.Limit {
			seen["renewed with a larger limit"]++
		}
	}
	rows, err := k.pool.Query(ctx,
		"SELECT slot::text, waiting, fence, ends_us FROM rate_limit_renew_all($1::uuid[], $2, now_us => $3, limits => $4)",
		ids, ttl, k.clock, numbers)
	if err != nil {
		return "renew", err
	}
	type renewed struct {
		Slot    string
		Waiting bool
		Fence   int64
		EndsAt  int64
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[renewed])
	if err != nil {
		return "renew", err
	}
	what = "renewed"
	if len(live) == 0 {
		what = "lost"
	}
	is := map[string]renewed{}
	for _, g := range got {
		is[g.Slot] = g
	}
	should := map[string]renewed{}
	for _, h := range live {
		id := holdID(h.ID)
		if err := k.learn(h.Fence, is[id].Fence); err != nil {
			return what, err
		}
		should[id] = renewed{id, h.Status == model.Waiting, is[id].Fence, h.End}
	}
	if !reflect.DeepEqual(should, is) {
		return what, &difference{text: fmt.Sprintf("renewed: SQL\n%v\nmodel\n%v", is, should)}
	}
	// A key none of whose slots was live at the last write is not touched.
	touched := slices.ContainsFunc(k.key.Holds, func(h model.Hold) bool {
		return h.Fence > 0 && slices.Contains(ids, holdID(h.ID)) && (h.Status == model.Live || h.Status == model.Waiting)
	})
	if touched {
		if handedOver(k.key, next, k.clock, seen) > 0 {
			seen["renewed, handed over"]++
		}
		k.key, k.exists = next, true
	}
	return what, nil
}

// The comparison with the model notices mistakes in the functions for slots.
func TestMistakesInSlotsDifferFromTheModel(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")
	const (
		one, line       = "_rate_limit_slot_ephemeral", "_rate_limit_write_line_ephemeral"
		handOver, renew = "_rate_limit_hand_over_ephemeral", "_rate_limit_renew_ephemeral"
		after           = "_rate_limit_slots_after_ephemeral"
	)
	for _, c := range []struct {
		function     string
		right, wrong string
	}{
		// More units are live than the limit.
		{one, "NOT line AND cost <= max_count - coalesce(s.held, 0)", "NOT line"},
		{handOver, "EXIT WHEN NOT found OR units > room;", "EXIT WHEN NOT found OR room < 1;"},
		{one, "s.held := coalesce(s.held, 0) + cost;", ""},
		{handOver, "s.held := coalesce(s.held, 0) + units;", ""},
		{one, "IF found AND status = 0 THEN", "IF found THEN"},
		{line, "coalesce(max_count, h.max_count)", "h.max_count"},
		{line, "IF differs OR last > longest THEN", "IF last > longest THEN"},
		// A slot or a ticket that has ended is live again.
		{renew, "AND h.ends_at > clock AND (", "AND ("},
		{renew, "(was, one.name, one.key, clock);", "(s, one.name, one.key, clock);"},
		{one, "(was, name, key, clock);", "(s, name, key, clock);"},
		{renew, "AND h.ends_at > clock AND", "AND h.ends_at >= clock AND"},
		{line, "h.status = 3 AND h.ends_at <= clock;", "h.status = 3 AND h.ends_at < clock;"},
		{line, "IF first <= clock THEN", "IF first < clock THEN"},
		{line, "SET ends_at = least(h.ends_at, longest),", "SET ends_at = h.ends_at,"},
		{line, "IF differs OR last > longest THEN", "IF differs THEN"},
		{one, "h.fence > 0 AND h.ends_at > clock", "h.fence > 0 AND h.ends_at >= clock"},
		{one, "h.status = 0 AND s.held IS NOT NULL", "h.status IN (0, 1) AND s.held IS NOT NULL"},
		// A renewal shortens a slot, or forgets a ticket.
		{renew, "greatest(h.ends_at, clock + ttl_us)", "clock + ttl_us"},
		{renew, "h.status IN (0, 3)", "h.status = 0"},
		{line, "coalesce(s.held, 0) < most", "s.held < most"},
		{renew, "OR EXISTS (", "OR false AND EXISTS ("},
		{renew, "d.held_next <= clock OR", ""},
		{renew, "OR d.held_until > clock + 86400000000", ""},
		// A renewal does not bring the new limit.
		{renew, "max_count = coalesce(e.max_count, h.max_count)", "max_count = h.max_count"},
		{renew, "OR h.max_count <> e.max_count", ""},
		// The fences do not ascend, or a place is not one.
		{handOver, "SET status = 0, fence =", "SET status = 0, fence = h.fence + 0 *"},
		// The line is not fair, or stands still.
		{one, "IF tickets AND ttl_us IS NOT NULL THEN", "IF false THEN"},
		{one, "IF tickets OR status = 3 OR", "IF status = 3 OR"},
		{handOver, "h.line_group = w.line_group", "false"},
		{handOver, "::float8 / w.weight, w.fence", "::float8, w.fence"},
		{handOver, "ORDER BY h.line_group, h.fence", "ORDER BY h.line_group, h.fence DESC"},
		{handOver, "h.units <= h.max_count", "true"},
		{one, "AND h.ends_at > clock AND h.units <= max_count", "AND h.ends_at > clock"},
		{handOver, "EXIT WHEN NOT found OR units > room;", "EXIT;"},
		{renew, "SET held = s.held", "SET held = d.held"},
		// The ends of the slots in the row are not those of the list.
		{one, "s.held_next := least(s.held_next, ends);", "s.held_next := coalesce(s.held_next, ends);"},
		{one, "s.held_until := greatest(s.held_until, ends);", "s.held_until := ends;"},
		{one, "ends IN (s.held_next, s.held_until)", "ends = s.held_until"},
		{renew, "SET held_next = n.first,", "SET held_next = d.held_next,"},
		{renew, "held_until = n.last", "held_until = d.held_until"},
		{one, "OR s.held_until > clock + 86400000000 THEN", "THEN"},
		// A settlement or a reset does not know slots.
		{"rate_limit_reset", "AND h.status = 3;", "AND h.status = 3 AND false;"},
		{"_rate_limit_beside_ephemeral", "AND h.fence = 0", ""},
		// The wait is too short or too long.
		{after, "CASE WHEN first IS NOT NULL THEN coalesce(s.held_next, first) - clock END", "0"},
		{after, "e.free >= s.held", "e.free > s.held"},
		{one, "(s.held, s.held_next, s.held_until) IS DISTINCT FROM (was.held, was.held_next, was.held_until)",
			"s.held IS DISTINCT FROM was.held"},
		{line, "SELECT min(h.ends_at), max(h.ends_at) INTO", "SELECT min(h.ends_at), min(h.ends_at) INTO"},
	} {
		t.Run(fmt.Sprintf("%s: %s, not %s", c.function, c.wrong, c.right), func(t *testing.T) {
			t.Parallel()
			db, seed := pgtest.New(t), limitertest.Seed(t)
			if c.function == "rate_limit_reset" {
				pgtest.Rewrite(t, db.Pool, c.function, c.right, c.wrong)
			} else {
				pgtest.RewriteTwins(t, db.Pool, c.function, c.right, c.wrong)
			}
			for story := uint64(0); ; story++ {
				require.Less(t, story, uint64(1_000), "the model does not tell the mistake")
				k := newSlotKey(db.Pool, rand.New(rand.NewPCG(seed, story)), story)
				err := k.play(t.Context(), map[string]int{})
				if d, found := errors.AsType[*difference](err); !found {
					require.NoError(t, err)
				} else if d.element == 0 { // not an error of Postgres
					t.Logf("history %d tells it", story)
					return
				}
			}
		})
	}
}
