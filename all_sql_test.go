package ratelimit

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// modelPart is a part of a request of rate_limit_all, with the decision that the models make.
type modelPart struct {
	id       rowID
	durable  bool
	policy   Policy
	cost     int64
	decision decision
}

// modelRequest takes from all of its parts, or from none, count times one after the other.
type modelRequest struct {
	parts []modelPart
	above bool // costs below 0 are grants
	count int64
	moved bool // a row that refuses it is written, because the clock has left it behind
}

func (m rows) state(p modelPart) state {
	if row := m[p.durable][p.id]; row.algorithm == algorithm(p.policy) {
		return row.state
	}
	return state{}
}

func (m rows) has(p modelPart) bool {
	_, ok := m[p.durable][p.id]
	return ok
}

func (m rows) clone() rows { return rows{false: maps.Clone(m[false]), true: maps.Clone(m[true])} }

// decideAll has the model make the decisions of a statement. Where rows are missing the function looks first: what is refused then,
// is refused, what gives back to nothing has done so, and rows are made for the others.
func (m rows) decideAll(requests []modelRequest, clock int64) {
	lacks := slices.ContainsFunc(requests, func(r modelRequest) bool {
		return slices.ContainsFunc(r.parts, func(p modelPart) bool {
			return p.cost != 0 && !m.has(p)
		})
	})
	seen := m.clone()
	for i := range requests {
		r := &requests[i]
		if lacks {
			seen.clone().decideRequest(r, clock)
			givesBack := r.parts[0].cost < 0 && !r.above
			if r.parts[0].decision.granted == 0 && !r.moved || givesBack && !slices.ContainsFunc(r.parts, seen.has) {
				continue
			}
			for _, p := range r.parts {
				if !m.has(p) {
					m[p.durable][p.id] = storedRow{}
				}
			}
		}
		m.decideRequest(r, clock)
	}
}

func (m rows) decideRequest(r *modelRequest, clock int64) {
	decide := func(p modelPart, cost int64) (state, decision) {
		return step{policy: p.policy, clock: clock, above: r.above}.decide(m.state(p), cost)
	}
	fits := func() bool {
		for _, p := range r.parts {
			if _, d := decide(p, p.cost); d.granted == 0 {
				return false
			}
		}
		return true
	}
	granted := int64(0)
	for ; granted < r.count && fits(); granted++ {
		for _, p := range r.parts {
			if next, _ := decide(p, p.cost); next != m.state(p) { // as it is when there was nothing to give back
				m[p.durable][p.id] = storedRow{algorithm(p.policy), next}
			}
		}
	}
	for i := range r.parts {
		p := &r.parts[i]
		current := m.state(*p)
		_, p.decision = decide(*p, 0)
		next, asked := decide(*p, p.cost)
		p.decision.granted, p.decision.retryAfter = granted, 0
		if granted < r.count && asked.granted == 0 {
			p.decision.retryAfter = asked.retryAfter // it is this part that refuses
			if next != current {
				m[p.durable][p.id] = storedRow{algorithm(p.policy), next}
				p.decision.state = next
				r.moved = true
			}
		}
		p.decision.decidedAt = time.UnixMicro(clock).UTC()
	}
}

// The function of several limits against the models: random requests, beside those for a single limit of the same rows, and after each
// statement every column and every row.
func TestAllEqualsModels(t *testing.T) {
	t.Parallel()

	pool := pgtest.New(t).Pool
	seed := testSeed(t)
	var granted, refused, halfRefused, looks, refunds, grants int
	for story := range uint64(250) {
		r := rand.New(rand.NewPCG(seed, story))
		space := fmt.Sprintf("%d ", story)
		model := rows{false: {}, true: {}}
		policies := map[string]Policy{"a": randomPolicy(r), "b": randomPolicy(r), "c": randomPolicy(r)}
		clock := int64(1)<<50 + r.Int64N(1<<51)
		var goals []int64
		for step := range 20 {
			title := fmt.Sprintf("%s=%d, story %d, step %d", seedVariable, seed, story, step)
			name := string('a' + rune(r.IntN(3)))
			switch r.IntN(10) {
			case 0:
				policies[name] = randomPolicy(r)
			case 1:
				policies[name] = changedPolicy(r, policies[name])
			}
			clock = nextClock(r, clock, policies[name], goals)
			goals = goals[:0]
			look, above := r.IntN(10) == 0, r.IntN(6) == 0
			requests := make([]modelRequest, 1+r.IntN(5))
			for i := range requests {
				requests[i] = randomRequest(r, policies, space, look, above)
			}
			if r.IntN(5) == 0 {
				compareOne(t, pool, title, requests[0].parts[0], above, clock, model)
				compareRows(t, pool, title, space, model)
				continue
			}
			model.decideAll(requests, clock)
			for _, request := range requests {
				all := true
				for _, p := range request.parts {
					if p.decision.retryAfter != never {
						goals = append(goals, clock+p.decision.retryAfter)
					}
					goals = append(goals, clock+p.decision.resetAfter)
					all = all && p.decision.retryAfter != 0
				}
				switch {
				case look:
					looks++
				case request.parts[0].cost < 0 && above:
					grants++
				case request.parts[0].cost < 0:
					refunds++
				case request.parts[0].decision.granted > 0:
					granted++
				case all:
					refused++
				default:
					halfRefused++
				}
			}
			compareAll(t, pool, title, requests, clock)
			compareRows(t, pool, title, space, model)
		}
	}
	for _, n := range []int{granted, refused, halfRefused, looks, refunds, grants} {
		require.Greater(t, n, 150, "granted %d, refused by all %d, by some %d, looks %d, refunds %d, grants %d", granted, refused, halfRefused, looks, refunds, grants)
	}
}

func randomRequest(r *rand.Rand, policies map[string]Policy, space string, look, above bool) modelRequest {
	request := modelRequest{above: above, count: 1}
	if r.IntN(4) == 0 {
		request.count = 1 + r.Int64N(5)
	}
	gives := r.IntN(3) == 0
	for range 1 + r.IntN(4) {
		name := string('a' + rune(r.IntN(3)))
		p := modelPart{
			id:      rowID{space + name, [...]string{"x", "y", "Y", "ä", "x:1"}[r.IntN(5)]},
			durable: r.IntN(4) == 0,
			policy:  policies[name],
		}
		switch cost := randomCost(r, p.policy.limit()); {
		case look:
		case !gives:
			p.cost = max(cost, 1)
		case cost < 0:
			p.cost = cost
		default:
			p.cost = -max(cost, 1)
		}
		if !slices.ContainsFunc(request.parts, func(q modelPart) bool { return q.id == p.id && q.durable == p.durable }) {
			request.parts = append(request.parts, p)
		}
	}
	return request
}

// allArrays are the arguments of rate_limit_all from $1 to $10.
func allArrays(requests []modelRequest) []any {
	var owners []int32
	var names, keys []string
	var durables []bool
	var algorithms []int16
	var limits, spans, refills, costs, counts []int64
	for i, request := range requests {
		for _, p := range request.parts {
			numbers := columnsOf(p.policy)
			owners, names, keys = append(owners, int32(i)), append(names, p.id.name), append(keys, p.id.key)
			durables, algorithms = append(durables, p.durable), append(algorithms, numbers.algorithm)
			limits, spans, refills = append(limits, numbers.limit), append(spans, numbers.span), append(refills, numbers.refill)
			costs, counts = append(costs, p.cost), append(counts, request.count)
		}
	}
	return []any{owners, names, keys, durables, algorithms, limits, spans, refills, costs, counts}
}

// compareOne asks what a part does of its row alone, by the function of its algorithm, and compares the decision.
func compareOne(t *testing.T, pool *pgxpool.Pool, title string, p modelPart, above bool, clock int64, model rows) {
	t.Helper()
	one := step{policy: p.policy, durable: p.durable, name: p.id.name, clock: clock, above: above, elements: []element{{key: p.id.key, cost: p.cost, count: 1}}}
	model.decide(one)
	batch := &pgx.Batch{}
	queueStep(batch, "", one)
	var got decision
	args := batch.QueuedQueries[0].Arguments
	require.NoError(t, queryDecisions(t.Context(), pool, false, batch.QueuedQueries[0].SQL, args, func(_ int64, d decision) { got = d }), title)
	want := one.elements[0].decision
	got.state, want.state, got.decidedAt = state{}, state{}, got.decidedAt.UTC()
	require.Equal(t, want, got, "%s: %v", title, one)
}

// compareAll compares every decision.
func compareAll(t *testing.T, pool *pgxpool.Pool, title string, requests []modelRequest, clock int64) {
	t.Helper()
	got := map[int64]decision{}
	args := append(allArrays(requests), nil, nil, time.UnixMicro(clock), requests[0].above)
	err := queryDecisions(t.Context(), pool, false, allStatement, args, func(ord int64, d decision) { got[ord] = d })
	require.NoError(t, err, "%s\n%v", title, requests)
	ord := int64(0)
	for i, request := range requests {
		for j, p := range request.parts {
			ord++
			is, want := got[ord], p.decision
			is.decidedAt = is.decidedAt.UTC()
			for _, d := range []*decision{&is, &want} {
				d.state = used(d.state, algorithm(p.policy))
				d.state.log = newEntries(nil)
			}
			require.Equal(t, want, is, "%s, request %d, part %d of %+v", title, i, j, requests)
		}
	}
	require.Len(t, got, int(ord), title)
}

func compareRows(t *testing.T, pool *pgxpool.Pool, title, space string, model rows) {
	t.Helper()
	for durable, want := range model {
		found, err := pool.Query(context.Background(), "SELECT "+rowColumns+" FROM "+table(durable)+" WHERE starts_with(prefix, $1)", space)
		require.NoError(t, err)
		seen := 0
		for found.Next() {
			id, row, err := scanRow(found)
			require.NoError(t, err)
			expected, ok := want[id]
			require.True(t, ok, "%s, %v", title, id)
			row.state, expected.state = used(row.state, row.algorithm), used(expected.state, expected.algorithm)
			require.Equal(t, expected, row, "%s, %v", title, id)
			seen++
		}
		require.NoError(t, found.Err())
		require.Equal(t, len(want), seen, "%s: rows in %s", title, strings.TrimSpace(table(durable)))
	}
}
