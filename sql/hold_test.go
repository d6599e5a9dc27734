package sql_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
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
	"github.com/pgratelimit/ratelimit/internal/shardkey"
)

// The results of rate_limit_all for a hold that is not known, and for an extension of a hold that has ended.
const (
	unknownHold = -3
	endedHold   = -4
)

// TestHoldsEqualTheModel compares random histories of holds, settlements, extensions, takes, charges, refunds, grants,
// resets and changes of policy with the model, for each algorithm. After each step it compares the list of the holds,
// and the sum in the row with the list.
func TestHoldsEqualTheModel(t *testing.T) {
	t.Parallel()
	pool, seed := pgtest.New(t).Pool, limitertest.Seed(t)
	for _, a := range algorithm.All() {
		t.Run(a.Word, func(t *testing.T) {
			t.Parallel()
			seen := map[string]int{}
			wanted := []string{
				"hold", "take", "peek", "charge", "refund", "grant", "reset", "policy", "denied beside holds", "held beside holds",
				"settle", "late", "repeated", "unknown", "too large", "extend", "ended", "several at once", "moved",
			}
			if a.Code == algorithm.TokenBucket {
				wanted = append(wanted, seenOfReservations...)
			}
			for story := uint64(0); story < uint64(6*limitertest.Rounds(t)) || lacks(seen, wanted) != nil; story++ {
				require.Less(t, story, uint64(1_000), "%v were never seen", lacks(seen, wanted))
				h := newHeldKey(pool, rand.New(rand.NewPCG(seed, uint64(a.Code)<<32|story)), a.Code, fmt.Sprintf("%s %d", a.Word, story))
				require.NoError(t, h.play(t.Context(), seen), "%s=%d, story %d", modeltest.SeedVariable, seed, story)
			}
			t.Logf("%v", seen)
		})
	}
}

// lacks returns what random histories have not seen yet.
func lacks(seen map[string]int, wanted []string) (missing []string) {
	for _, what := range wanted {
		if seen[what] == 0 {
			missing = append(missing, what)
		}
	}
	return missing
}

// heldKey is a key in the database, and its model.
type heldKey struct {
	pool    *pgxpool.Pool
	r       *rand.Rand
	code    int16 // nearly all policies have this algorithm
	name    string
	durable bool

	p      model.Rules
	clock  int64
	last   model.Decision
	takes  []model.Take
	next   int64 // the id of the next hold
	at     int64 // the hold that ends or is forgotten about now, or 0
	key    model.Key
	stored int16           // the algorithm of the row
	exists bool            // whether there is a row
	fences map[int64]int64 // the fences of the model, in the database
}

func newHeldKey(pool *pgxpool.Pool, r *rand.Rand, code int16, name string) *heldKey {
	h := &heldKey{pool: pool, r: r, code: code, name: name, durable: r.IntN(2) == 0, clock: 1<<50 + r.Int64N(1<<50)}
	h.p = h.draw()
	return h
}

// draw draws a policy, often with a limit of a few units and a window of about the length of the holds.
func (h *heldKey) draw() model.Rules {
	code := h.code
	if h.r.IntN(12) == 0 {
		code = modeltest.OneOf(h.r, algorithm.All()).Code
	}
	for {
		p := modeltest.RandomPolicy(h.r)
		n := p.Numbers()
		if n.Algorithm != code {
			continue
		}
		if h.r.IntN(2) == 0 && code != algorithm.CalendarWindow {
			n.Limit, n.Span = 1+h.r.Int64N(20), time.Duration(1+h.r.Int64N(1e6))*time.Millisecond
			n.Refill = min(n.Refill, 1+h.r.Int64N(20))
		}
		if p = model.Of(n); modeltest.InRange(p) {
			return p
		}
	}
}

// holdID returns an id that names the shard of the key "key", as ids do.
func holdID(id int64) string {
	return fmt.Sprintf("%08x-%04x-4000-8000-00000000%04x", id>>16, id&0xffff, shardkey.Number("key")&0xffff)
}

// state is the row as the policy sees it.
func (h *heldKey) state() model.Key {
	k := h.key
	if h.stored != h.p.Numbers().Algorithm {
		k.State = model.State{}
	}
	return k
}

func keyChanged(k, next model.Key) bool {
	return k.State != next.State || !reflect.DeepEqual(k.Holds, next.Holds) && len(k.Holds)+len(next.Holds) > 0
}

// write makes next the key's model. The row is made if it is missing.
func (h *heldKey) write(next model.Key) {
	before := h.state()
	if h.exists = true; next.State != before.State {
		h.stored, h.key.State = h.p.Numbers().Algorithm, next.State
	}
	h.key.Holds = next.Holds
}

// toldHeld is the row that rate_limit_all returns.
type toldHeld struct {
	Granted, Remaining   int64
	RetryAfter           *int64
	ResetAfter           int64
	Count, PrevCount     int64
	WindowStart, Credit  int64
	Scale                int64
	ExpiresAt            int64
	Used                 *int64
	Late                 *bool
	SettledAt            *int64
	Spent, Since, In, At int64
	Held                 int64
}

// ask sends one request.
func (h *heldKey) ask(ctx context.Context, q modeltest.Request, ttl *int64, hold *string) (toldHeld, error) {
	requests := []modeltest.Request{q}
	args := append(limitertest.AllArrays(requests), nil, nil, time.UnixMicro(h.clock))
	args = append(append(args, allRefunds(requests)...), false, allZones(requests), nil, allCharges(requests), nil, nil, nil)
	if ttl != nil || hold != nil {
		args[21], args[22] = []*int64{ttl}, []*string{hold}
	}
	if q.Delay != nil {
		args[23] = []*int64{q.Delay}
	}
	rows, err := h.pool.Query(ctx, `
		SELECT granted, remaining, retry_after_us, reset_after_us, count, prev_count, window_start, credit, coalesce(scale, 0),
			expires_at, answer[1], answer[2] = 1, answer[3], taken_spent, coalesce(taken_since, 0), taken_in,
			coalesce(taken_at, 0), held
		FROM (SELECT *, CASE WHEN $23::uuid[] IS NOT NULL THEN log END AS answer
			FROM rate_limit_all($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20,
				$21, $22, $23::uuid[], $24)) AS a`, args...)
	if err != nil {
		return toldHeld{}, err
	}
	return pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[toldHeld])
}

func (h *heldKey) request(cost int64) modeltest.Request {
	return modeltest.Request{Count: 1, Parts: []modeltest.Part{
		{ID: modeltest.RowID{Name: h.name, Key: "key"}, Durable: h.durable, Policy: h.p, Cost: cost},
	}}
}

// play plays a history. It returns the first difference from the model.
func (h *heldKey) play(ctx context.Context, seen map[string]int) error {
	for step := range 60 {
		if h.r.IntN(16) == 0 {
			h.p, h.takes = h.draw(), nil
			seen["policy"]++
		} else if h.r.IntN(10) == 0 {
			h.p = modeltest.ChangedPolicy(h.r, h.p)
		}
		dice := modeltest.Dice(h.r.Int64N)
		if h.r.IntN(3) > 0 {
			h.clock = dice.Clock(h.p, h.state().State, h.clock, h.last)
		}
		h.at = 0
		if len(h.key.Holds) > 0 && h.r.IntN(4) == 0 {
			hold := modeltest.OneOf(h.r, h.key.Holds)
			h.at, h.clock = hold.ID, hold.End
			switch {
			case h.r.IntN(2) == 0:
			case hold.Status == model.Settled:
				h.clock = hold.At + model.Micros(model.SettledKept)
			default:
				h.clock = hold.End + model.Micros(model.HoldsKept)
			}
			h.clock += h.r.Int64N(3) - 1
		}
		h.clock = min(max(h.clock, 1), 1<<55)
		before := fmt.Sprintf("step %d at %d, %T%+v, from %+v", step, h.clock, h.p, h.p, h.key)
		what, err := h.step(ctx, dice, seen)
		if err == nil {
			err = h.compareStored(ctx)
		}
		if err != nil {
			return fmt.Errorf("%s, %s: %w", what, before, err)
		}
		seen[what]++
	}
	return nil
}

func (h *heldKey) step(ctx context.Context, dice modeltest.Dice, seen map[string]int) (what string, err error) {
	k := h.state()
	limit := h.p.Numbers().Limit
	held := k.Held(h.clock)
	cost := dice.Cost(limit, h.last.Remaining)
	var want model.Decision
	var settlement model.Settlement
	q := h.request(cost)
	var ttl *int64
	var hold *string
	next := k
	wrote := false
	some := func() int64 {
		if h.at > 0 && h.r.IntN(2) == 0 {
			return h.at
		}
		if len(k.Holds) == 0 || h.r.IntN(12) == 0 {
			return h.next + 7
		}
		return modeltest.OneOf(h.r, k.Holds).ID
	}
	switch h.r.IntN(19) {
	case 16, 17, 18:
		bucket, ok := h.p.(model.TokenBucket)
		if !ok {
			return "", nil
		}
		what = "reserve"
		cost = max(cost, 1)
		q = h.request(cost)
		longest := 12 * modeltest.Reach(h.p)
		q.Delay = new([]int64{0, dice.Magnitude(1, longest), longest, longest}[h.r.IntN(4)])
		var readyAfter int64
		next, want, readyAfter = k.Reserve(bucket, h.clock, cost, *q.Delay)
		wrote = want.Granted > 0 || keyChanged(k, next)
		switch {
		case want.Granted == 0 && cost <= limit:
			what = "reserve denied"
			if held > 0 {
				seen["reserve denied beside holds"]++
			}
			if want.RetryAfter == model.Never {
				seen["reserve never"]++
			}
			if wrote {
				seen["reserve moved"]++
			}
		case want.Granted == 1 && readyAfter > 0:
			what = "reserve later"
			if held > 0 {
				seen["reserve later beside holds"]++
			}
		}
		if want.Granted > 0 {
			want.RetryAfter = readyAfter
			h.takes = append(h.takes, want.TakenBy(h.p, cost, 1))
		}
	case 0, 1, 2, 3, 4:
		if what = "take"; cost == 0 {
			what = "peek"
		}
		if cost > 0 && h.r.IntN(3) == 0 {
			q.Count = 1 + h.r.Int64N(4)
		}
		granted, credit := int64(0), modeltest.CreditOf(h.p, k.State, h.clock)
		for range q.Count {
			var after model.Key
			after, want = next.Decide(h.p, h.clock, cost)
			granted += want.Granted
			if !keyChanged(next, after) {
				break
			}
			next, wrote = after, true
		}
		want.Granted = granted
		want.Taken.Spent = credit - modeltest.CreditOf(h.p, next.State, h.clock)
		if granted > 1 {
			seen["several at once"]++
		}
		if granted == 0 && wrote {
			seen["moved"]++
		}
		if 0 < cost && cost <= limit && held > 0 && granted == 0 {
			seen["denied beside holds"]++
		}
		if granted > 0 {
			h.takes = append(h.takes, want.TakenBy(h.p, cost, granted))
		}
	case 5, 6, 7, 8:
		what = "hold"
		cost = max(cost, 1)
		q = h.request(cost)
		ttl, hold = new(dice.Magnitude(1000, model.Micros(model.MaxHold))), new(holdID(h.next))
		if h.r.IntN(2) == 0 {
			ttl = new(min(max(dice.Magnitude(1, 2*modeltest.Reach(h.p)), 1000), model.Micros(model.MaxHold)))
		}
		next, want = k.Hold(h.p, h.clock, h.next, cost, *ttl)
		wrote = want.Granted > 0 || keyChanged(k, next)
		h.next++
		if want.Granted > 0 && held > 0 {
			seen["held beside holds"]++
		}
	case 9, 10, 11:
		what = "settle"
		id := some()
		_, _, fits := k.Charge(h.p, h.clock, 0)
		used := []int64{0, 1, fits, fits + 1, dice.Magnitude(0, limit), dice.Magnitude(0, limit)}[h.r.IntN(6)]
		q = h.request(used)
		q.Charge, hold = true, new(holdID(id))
		next, settlement, err = k.Settle(h.p, h.clock, id, used)
		_, want = next.Decide(h.p, h.clock, 0)
		want.Granted = 1
		switch {
		case errors.Is(err, model.ErrHoldUnknown):
			want.Granted, what = unknownHold, "unknown"
		case errors.Is(err, model.ErrOwesTooMuch):
			want.Granted, what = 0, "too large"
		case !keyChanged(k, next):
			what = "repeated"
		case settlement.Late:
			what = "late"
		}
		wrote = keyChanged(k, next)
	case 12:
		what = "extend"
		id := some()
		ttl, hold = new(dice.Magnitude(1000, model.Micros(model.MaxHold))), new(holdID(id))
		q = h.request(0)
		next, err = k.Extend(h.p, h.clock, id, *ttl)
		_, want = next.Decide(h.p, h.clock, 0)
		want.Granted, want.RetryAfter = 1, 0
		wrote = err == nil
		switch {
		case errors.Is(err, model.ErrHoldUnknown):
			want.Granted, what = unknownHold, "unknown"
		case errors.Is(err, model.ErrHoldEnded):
			want.Granted, what = endedHold, "ended"
		}
	case 13:
		what = "charge"
		q = h.request(modeltest.RandomCharge(h.r, h.p, k.State, h.clock))
		q.Charge = true
		next, want, _ = k.Charge(h.p, h.clock, q.Parts[0].Cost)
		_, peek := next.Decide(h.p, h.clock, 0)
		want.RetryAfter = peek.RetryAfter
		wrote = keyChanged(k, next)
	case 14:
		if len(h.takes) > 0 && h.r.IntN(2) == 0 {
			what = "refund"
			if bucket, ok := h.p.(model.TokenBucket); ok && k.State.Count > bucket.Full() {
				seen["refund while it owes"]++
			}
			var refund []model.Take
			cost, _, refund = modeltest.RandomRefund(h.r, h.p, h.takes, -1, 1)
			q = h.request(cost)
			q.Parts[0].Refund = refund
			e := modeltest.Element{Cost: cost, Count: 1, Refund: refund}
			take := refund[0]
			take.Units, take.Spent = -e.Cost, min(max(take.Spent, 0), -e.Cost)
			next, want = k.Refund(h.p, h.clock, take)
			wrote = keyChanged(k, next)
		} else {
			what = "grant"
			cost = dice.Magnitude(1, min(limit, model.MaxCredit))
			q = h.request(-cost)
			next, want = k.Grant(h.p, h.clock, cost)
			wrote = true
		}
	case 15:
		what = "reset"
		if h.r.IntN(2) > 0 {
			return "", nil
		}
		var existed bool
		row := h.pool.QueryRow(ctx, "SELECT rate_limit_reset($1, 'key', $2)", h.name, h.durable)
		if err := row.Scan(&existed); err != nil || existed != h.exists {
			return what, fmt.Errorf("existed %v: %w", existed, err)
		}
		h.key, h.stored, h.exists = h.key.Reset(), 0, false
		return what, nil
	}
	h.last = want
	if cost > 0 && what == "take" && h.r.IntN(2) == 0 { // by the function of the algorithm
		c := callOf("", modeltest.Step{
			Policy: h.p, Durable: h.durable, Name: h.name, Clock: h.clock,
			Elements: []modeltest.Element{{Key: "key", Cost: cost, Count: q.Count}},
		})
		if err := c.Query(ctx, h.pool, false); err != nil {
			return what, &difference{element: -1, text: err.Error()}
		}
		if wrote {
			h.write(next)
		}
		d := c.Into[0].Decision
		got := [4]int64{d.Granted, d.Remaining, d.RetryAfter, d.ResetAfter}
		if told := [4]int64{want.Granted, want.Remaining, want.RetryAfter, want.ResetAfter}; told != got {
			return what, &difference{text: fmt.Sprintf("%+v by the function of the algorithm: SQL\n%v\nmodel\n%v", q, got, told)}
		}
		return what, nil
	}
	got, err := h.ask(ctx, q, ttl, hold)
	if err != nil {
		return what, &difference{element: -1, text: err.Error()}
	}
	if wrote {
		h.write(next)
	}
	if want.Granted < 0 {
		if got.Granted != want.Granted {
			return what, &difference{text: fmt.Sprintf("granted %d, not %d", got.Granted, want.Granted)}
		}
		return what, nil
	}
	s := want.State
	told := toldHeld{
		Granted: want.Granted, Remaining: want.Remaining, ResetAfter: want.ResetAfter, Count: s.Count, PrevCount: s.PrevCount,
		WindowStart: s.WindowStart, Credit: s.Credit, Scale: s.Scale, ExpiresAt: s.ExpiresAt,
		Spent: got.Spent, Since: got.Since, In: got.In, At: got.At, Held: next.Held(h.clock),
	}
	if want.RetryAfter != model.Never {
		told.RetryAfter = &want.RetryAfter
	}
	if (what == "take" || q.Delay != nil) && want.Granted > 0 {
		told.Spent, told.Since, told.In, told.At = want.Taken.Spent, want.Taken.Since, want.Taken.In, want.Taken.At
	}
	if what == "settle" || what == "late" || what == "repeated" {
		told.Used, told.Late, told.SettledAt = &settlement.Used, &settlement.Late, &settlement.At
	}
	if !reflect.DeepEqual(told, got) {
		return what, &difference{text: fmt.Sprintf("%+v, ttl %v: SQL\n%s\nmodel\n%s", q, ttl, got, told)}
	}
	return what, nil
}

func (d toldHeld) String() string {
	type plain toldHeld
	show := func(p *int64) any {
		if p == nil {
			return nil
		}
		return *p
	}
	return fmt.Sprintf("%+v retry %v used %v settled %v", plain(d), show(d.RetryAfter), show(d.Used), show(d.SettledAt))
}

// compareStored compares the row and the list of the holds with the model, and the sum in the row with the list. It
// deletes the holds that the model has forgotten, as the sweeper would.
func (h *heldKey) compareStored(ctx context.Context) error {
	table := pgtest.Table(h.durable)
	rows, err := h.pool.Query(ctx, "SELECT "+pgtest.RowColumns+" FROM "+table+" WHERE prefix = $1", h.name)
	if err != nil {
		return err
	}
	stored, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (modeltest.Row, error) {
		_, is, err := pgtest.ScanRow(row)
		return is, err
	})
	if err != nil {
		return err
	}
	var want []modeltest.Row
	if h.exists {
		want = append(want, modeltest.Row{Algorithm: h.stored, State: h.key.State})
	}
	if len(stored)+len(want) > 0 && !reflect.DeepEqual(want, stored) {
		return &difference{text: fmt.Sprintf("row: SQL\n%+v\nmodel\n%+v", stored, want)}
	}
	type listed struct {
		ID     string
		Units  int64
		EndsAt int64
		Status int16
		Used   int64
		Late   bool
		At     int64
		model.Ticket
	}
	rows, err = h.pool.Query(ctx, `SELECT id::text, units, ends_at, status, coalesce(used, 0), coalesce(late, false),
		coalesce(settled_at, 0), fence, coalesce(line_group, ''), coalesce(weight, 0),
		CASE WHEN status = 3 THEN max_count ELSE 0 END FROM `+table+"_hold WHERE prefix = $1 ORDER BY id", h.name)
	if err != nil {
		return err
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[listed])
	if err != nil {
		return err
	}
	is, should := map[string]listed{}, map[string]listed{}
	for _, l := range list {
		is[l.ID] = l
	}
	for _, m := range h.key.Holds {
		ticket := m.Ticket
		if ticket.Fence > 0 {
			fence := is[holdID(m.ID)].Fence
			if err := h.learn(ticket.Fence, fence); err != nil {
				return err
			}
			ticket.Fence = fence
		}
		if m.Status != model.Waiting {
			ticket.Limit = 0
		}
		should[holdID(m.ID)] = listed{holdID(m.ID), m.Units, m.End, int16(m.Status), m.Used, m.Late, m.At, ticket}
	}
	for id, l := range is {
		if _, known := should[id]; !known && l.Status != 0 &&
			(l.Status != int16(model.Waiting) || l.EndsAt <= h.clock-model.Micros(model.HoldsKept)) { // it is forgotten
			delete(is, id)
			if _, err := h.pool.Exec(ctx, "DELETE FROM "+table+"_hold WHERE prefix = $1 AND id = $2::uuid", h.name, id); err != nil {
				return err
			}
		}
	}
	if !reflect.DeepEqual(should, is) {
		return &difference{text: fmt.Sprintf("list: SQL\n%+v\nmodel\n%+v", is, should)}
	}
	return sumsDiffer(ctx, h.pool, h.durable, h.name)
}

// sumsDiffer returns an error if the sum in a row is not that of the key's live holds.
func sumsDiffer(ctx context.Context, db pgtest.Querier, durable bool, name string) error {
	var wrong *string
	table := pgtest.Table(durable)
	err := db.QueryRow(ctx, `
		SELECT string_agg(concat_ws(' ', key, d.held, l.held, d.held_next, l.held_next, d.held_until, l.held_until), '; ')
		FROM (SELECT key, held, held_next, held_until FROM `+table+` WHERE prefix = $1 AND held IS NOT NULL) AS d
		FULL JOIN (
			SELECT key, sum(units)::bigint AS held, min(ends_at) AS held_next, max(ends_at) AS held_until
			FROM `+table+`_hold WHERE prefix = $1 AND status = 0 GROUP BY key
		) AS l USING (key)
		WHERE (d.held, d.held_next, d.held_until) IS DISTINCT FROM (l.held, l.held_next, l.held_until)`, name).Scan(&wrong)
	if err == nil && wrong != nil {
		return &difference{text: "the sums of rows and lists differ: " + *wrong}
	}
	return err
}

// The comparison with the model notices mistakes in the functions for holds.
func TestMistakesInHoldsDifferFromTheModel(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")
	const (
		live, beside, earliest = "_rate_limit_live_ephemeral", "_rate_limit_beside_ephemeral", "_rate_limit_earliest_ephemeral"
		write, note, all       = "_rate_limit_write_holds_ephemeral", "_rate_limit_note_ends_ephemeral", "rate_limit_all"
	)
	for _, c := range []struct {
		function     string
		right, wrong string
	}{
		// A settlement counts twice.
		{beside, "IF NOT known OR status = 2 OR", "IF NOT known OR"},
		{write, "AND h.status < 2;", "AND h.status < 2 AND false;"},
		// A hold outlives its end, or ends too early.
		{live, "IF s.held_next <= clock THEN", "IF false THEN"},
		{live, "h.ends_at BETWEEN s.held_next AND clock", "h.ends_at BETWEEN s.held_next AND clock - 1"},
		{live, "h.ends_at > clock", "h.ends_at >= clock"},
		{beside, "status = 0 AND ends > clock AND", "status = 0 AND"},
		{"_rate_limit_forgotten", "ends_at <= clock - 86400000000", "ends_at < clock - 86400000000"},
		{"_rate_limit_forgotten", "settled_at <= clock - 3600000000", "settled_at < clock - 3600000000"},
		// A clock that is set back revives a hold.
		{note, "IF was.held_next <= clock OR was.held IS NULL THEN", "IF false THEN"},
		{note, "SET ends_at = longest", "SET ends_at = h.ends_at"},
		{beside, "least(s.held_next, longest)", "s.held_next"},
		{beside, "OR (s.held_until > longest) IS TRUE)", ")"},
		{all, "s.held_until := clock + 86400000000;", ""},
		{"rate_limit_reset", "SET status = 1", "SET status = 0"},
		// The sum drifts.
		{beside, "s.held := s.held - units;", "s.held := s.held - cost;"},
		{beside, "s.held := coalesce(s.held, 0) + cost;", "s.held := coalesce(s.held, 0) + cost + 1;"},
		{beside, "AND h.id <> hold;", ";"},
		{beside, "IF ends = s.held_next OR ends = s.held_until THEN", "IF ends = s.held_until THEN"},
		{beside, "s.held_next := least(s.held_next, clock + ttl_us);", "s.held_next := coalesce(s.held_next, clock + ttl_us);"},
		{beside, "s.held_until := greatest(s.held_until, clock + ttl_us);\n        END IF;", "s.held_until := clock + ttl_us;\n        END IF;"},
		{all, "was.held := s.held;", ""},
		{all, "held_until = n.held_until", "held_until = d.held_until"},
		// A request is admitted beside holds, or denied.
		{beside, "greatest(s.remaining - coalesce(s.held, 0), 0) / cost", "greatest(s.remaining, 0) / cost"},
		{"rate_limit_take_fixed_window", "AND d.held IS NULL", ""},
		{"_rate_limit_left_ephemeral", "AND d.held IS NULL", ""},
		{"_rate_limit_no_row", "held, held_next, held_until,", "NULL, NULL, NULL,"},
		// A hold counts as usage, or a settlement does not.
		{all, "(ttls_us[i] IS NOT NULL OR s.granted = 0 OR costs[i] = 0)", "(s.granted = 0 OR costs[i] = 0)"},
		{all, "IF NOT (s.moved OR gives) AND", "IF NOT gives AND"},
		{beside, "ARRAY[cost, (NOT live)::int, clock]", "ARRAY[cost + 1, (NOT live)::int, clock]"},
		{beside, "ARRAY[cost, (NOT live)::int, clock]", "ARRAY[cost, 0, clock]"},
		{beside, "WHEN NOT live THEN -4", "WHEN false THEN -4"},
		// The wait is too short or too long.
		{earliest, "low := middle;", "high := middle;"},
		{earliest, "FOR i IN greatest(low, first) ..", "FOR i IN greatest(high, first) .."},
		{earliest, ".. least(high, last) LOOP", ".. least(low, last) LOOP"},
		{earliest, "ARRAY[by_credit, coalesce", "ARRAY[coalesce"},
		{earliest, "sum(h.units) OVER", "sum(h.units + 1) OVER"},
		{"_rate_limit_fits_after", "wait := greatest(wait, after);", ""},
		{"_rate_limit_fits_after", "clock + wait < expires_at", "true"},
		{"_rate_limit_fits_after", "s.credit := s.credit - by_credit;", ""},
		{beside, "s.reset_after_us := greatest(s.reset_after_us, s.held_until - clock);", ""},
	} {
		t.Run(fmt.Sprintf("%s: %s, not %s", c.function, c.wrong, c.right), func(t *testing.T) {
			t.Parallel()
			db, seed := pgtest.New(t), limitertest.Seed(t)
			switch c.function {
			case live, beside, earliest, write, note, "_rate_limit_left_ephemeral", "rate_limit_take_fixed_window":
				pgtest.RewriteTwins(t, db.Pool, c.function, c.right, c.wrong)
			default:
				pgtest.Rewrite(t, db.Pool, c.function, c.right, c.wrong)
			}
			for story := uint64(0); ; story++ {
				require.Less(t, story, uint64(3_000), "the model does not tell the mistake")
				r := rand.New(rand.NewPCG(seed, story))
				code := modeltest.OneOf(r, algorithm.All()).Code
				if c.function == "rate_limit_take_fixed_window" {
					code = algorithm.FixedWindow
				}
				err := newHeldKey(db.Pool, r, code, fmt.Sprint(story)).play(t.Context(), map[string]int{})
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

// A request of several parts holds all of them or none, and settles all of them or none. Several requests of one call
// are decided one after the other. The parts are compared with the model.
func TestHoldsOfSeveralKeysEqualTheModel(t *testing.T) {
	t.Parallel()
	pool, seed := pgtest.New(t).Pool, limitertest.Seed(t)
	seen := map[string]int{}
	wanted := []string{"take 1 true", "take 0 true", "hold 1 true", "hold 0 true", "settle 1 true", "settle 0 true", "late"}
	for story := uint64(0); story < uint64(10*limitertest.Rounds(t)) || lacks(seen, wanted) != nil; story++ {
		require.Less(t, story, uint64(1_000), "%v were never seen", lacks(seen, wanted))
		r := rand.New(rand.NewPCG(seed, story))
		title := fmt.Sprintf("%s=%d, story %d", modeltest.SeedVariable, seed, story)
		type one struct {
			part modeltest.Part
			key  model.Key
		}
		var all []*one
		for _, name := range []string{"a", "b", "c"} {
			n := modeltest.RandomPolicy(r).Numbers()
			for n.Algorithm == algorithm.CalendarWindow {
				n = modeltest.RandomPolicy(r).Numbers()
			}
			n.Limit, n.Span, n.Refill = 1+r.Int64N(30), time.Duration(1+r.Int64N(1e5))*time.Millisecond, min(n.Refill, 1+r.Int64N(20))
			id := modeltest.RowID{Name: fmt.Sprintf("%d %s", story, name), Key: fmt.Sprintf("{%d}", story)}
			all = append(all, &one{part: modeltest.Part{ID: id, Policy: model.Of(n), Durable: r.IntN(2) == 0}})
		}
		clock := int64(1)<<50 + r.Int64N(1<<50)
		ids := map[int64][]*one{}
		next := int64(1)
		for range 25 {
			clock += r.Int64N(3e7)
			var requests []modeltest.Request
			var ttls []*int64
			var holds []*string
			type told struct{ granted, remaining, held int64 }
			var want []told
			for range 1 + r.IntN(3) {
				var parts []*one
				for _, i := range r.Perm(3)[:1+r.IntN(3)] {
					parts = append(parts, all[i])
				}
				q := modeltest.Request{Count: 1}
				var ttl *int64
				var hold *string
				what := [...]string{"take", "hold", "hold", "settle"}[r.IntN(4)]
				id := next
				if what == "settle" {
					if id = 1 + r.Int64N(next); ids[id] == nil {
						continue
					}
					parts, hold, q.Charge = ids[id], new(holdID(id)), true
				} else if what == "hold" {
					next++
					ttl, hold = new(1000+r.Int64N(6e7)), new(holdID(id))
				}
				after, granted := make([]model.Key, len(parts)), int64(1)
				for i, o := range parts {
					p := o.part
					p.Cost = 1 + r.Int64N(max(p.Policy.Numbers().Limit/2, 1))
					var d model.Decision
					switch what {
					case "take":
						after[i], d = o.key.Decide(p.Policy, clock, p.Cost)
						granted = min(granted, d.Granted)
					case "hold":
						after[i], d = o.key.Hold(p.Policy, clock, id, p.Cost, *ttl)
						granted = min(granted, d.Granted)
					default:
						if p.Cost = r.Int64N(2 * p.Policy.Numbers().Limit); r.IntN(10) == 0 {
							p.Cost = 12 * p.Policy.Numbers().Limit
						}
						k, s, err := o.key.Settle(p.Policy, clock, id, p.Cost)
						if after[i] = k; err != nil {
							require.ErrorIs(t, err, model.ErrOwesTooMuch, title)
							granted = 0
						} else if s.Late {
							seen["late"]++
						}
					}
					q.Parts = append(q.Parts, p)
					ttls, holds = append(ttls, ttl), append(holds, hold)
				}
				for i, o := range parts {
					if granted == 1 {
						o.key = after[i]
					}
					_, d := o.key.Decide(o.part.Policy, clock, 0)
					want = append(want, told{granted, d.Remaining, o.key.Held(clock)})
				}
				if what == "hold" && granted == 1 {
					ids[id] = parts
				}
				requests = append(requests, q)
				seen[fmt.Sprint(what, " ", granted, len(parts) > 1)]++
			}
			if len(requests) == 0 {
				continue
			}
			args := append(limitertest.AllArrays(requests), nil, nil, time.UnixMicro(clock), nil, nil, nil, nil, false, nil, nil,
				allCharges(requests), ttls, holds)
			rows, err := pool.Query(t.Context(), `SELECT granted, remaining, held FROM rate_limit_all($1, $2, $3, $4, $5, $6, $7, $8,
				$9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23::uuid[]) ORDER BY ord`, args...)
			require.NoError(t, err, title)
			got, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (is told, err error) {
				return is, row.Scan(&is.granted, &is.remaining, &is.held)
			})
			require.NoError(t, err, title)
			require.Equal(t, want, got, "%s: %+v", title, requests)
			for _, o := range all {
				require.NoError(t, sumsDiffer(t.Context(), pool, o.part.Durable, o.part.ID.Name), "%s: %+v, %v: %v", title, requests, want, holds)
			}
		}
	}
	t.Logf("%v", seen)
}
