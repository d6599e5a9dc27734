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
	first    decision // the same before anything of the statement was taken; see compareAll
}

// modelRequest takes from all of its parts, or from none, count times one after the other.
type modelRequest struct {
	parts []modelPart
	count int64
	moved bool // a row that refuses it is written, because the clock has left it behind
}

func (m rows) state(p modelPart) state {
	if row := m[p.durable][p.id]; row.algorithm == algorithm(p.policy) {
		return row.state
	}
	return state{}
}

func (m rows) clone() rows { return rows{false: maps.Clone(m[false]), true: maps.Clone(m[true])} }

func (m rows) decideAll(r *modelRequest, clock int64) {
	fits := func() bool {
		for _, p := range r.parts {
			if _, d := p.policy.decide(m.state(p), clock, p.cost); d.granted == 0 {
				return false
			}
		}
		return true
	}
	granted := int64(0)
	for ; granted < r.count && fits(); granted++ {
		for _, p := range r.parts {
			next, _ := p.policy.decide(m.state(p), clock, p.cost)
			m[p.durable][p.id] = storedRow{algorithm(p.policy), next}
		}
	}
	for i := range r.parts {
		p := &r.parts[i]
		current := m.state(*p)
		_, p.decision = p.policy.decide(current, clock, 0)
		next, asked := p.policy.decide(current, clock, p.cost)
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

// The function of several limits against the models: random requests, and after each statement every column and every row.
func TestAllEqualsModels(t *testing.T) {
	t.Parallel()

	pool := pgtest.New(t).Pool
	seed := testSeed(t)
	var granted, refused, halfRefused, looks int
	for story := range uint64(150) {
		r := rand.New(rand.NewPCG(seed, story))
		space := fmt.Sprintf("%d ", story)
		model := rows{false: {}, true: {}}
		policies := map[string]Policy{"a": randomPolicy(r), "b": randomPolicy(r), "c": randomPolicy(r)}
		clock := int64(1)<<50 + r.Int64N(1<<51)
		var goals []int64
		made := map[bool]map[rowID]bool{false: {}, true: {}} // empty, for a request that was then refused by what those before it took
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
			look := r.IntN(10) == 0
			requests := make([]modelRequest, 1+r.IntN(5))
			for i := range requests {
				requests[i] = randomRequest(r, policies, space, look)
			}
			for i := range requests {
				before := model.clone()
				before.decideAll(&requests[i], clock)
				for j := range requests[i].parts {
					p := &requests[i].parts[j]
					p.first = p.decision
					if p.first.granted > 0 || requests[i].moved {
						made[p.durable][p.id] = true
					}
				}
			}
			for i := range requests {
				model.decideAll(&requests[i], clock)
				all := true
				for _, p := range requests[i].parts {
					if p.decision.retryAfter != never {
						goals = append(goals, clock+p.decision.retryAfter)
					}
					goals = append(goals, clock+p.decision.resetAfter)
					all = all && p.decision.retryAfter != 0
				}
				switch {
				case look:
					looks++
				case requests[i].parts[0].decision.granted > 0:
					granted++
				case all:
					refused++
				default:
					halfRefused++
				}
			}
			compareAll(t, pool, title, requests, clock)
			compareRows(t, pool, title, space, model, made)
		}
	}
	for _, n := range []int{granted, refused, halfRefused, looks} {
		require.Greater(t, n, 150, "granted %d, refused by all %d, by some %d, looks %d", granted, refused, halfRefused, looks)
	}
}

func randomRequest(r *rand.Rand, policies map[string]Policy, space string, look bool) modelRequest {
	request := modelRequest{count: 1}
	if r.IntN(4) == 0 {
		request.count = 1 + r.Int64N(5)
	}
	for range 1 + r.IntN(4) {
		name := string('a' + rune(r.IntN(3)))
		p := modelPart{
			id:      rowID{space + name, [...]string{"x", "y", "Y", "ä", "x:1"}[r.IntN(5)]},
			durable: r.IntN(4) == 0,
			policy:  policies[name],
		}
		if !look {
			p.cost = max(randomCost(r, p.policy.limit()), 1)
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

// compareAll compares every decision. A request that is refused may have been refused before the others of the statement took
// anything: where rows are missing, the function looks first.
func compareAll(t *testing.T, pool *pgxpool.Pool, title string, requests []modelRequest, clock int64) {
	t.Helper()
	answer, err := pool.Query(t.Context(), allStatement, append(allArrays(requests), nil, nil, time.UnixMicro(clock))...)
	require.NoError(t, err, title)
	got := map[int64]decision{}
	var ord int64
	var retryAfter *int64
	var d decision
	var log []int64
	_, err = pgx.ForEachRow(answer, []any{&ord, &d.granted, &d.remaining, &retryAfter, &d.resetAfter, &d.decidedAt,
		&d.state.count, &d.state.prevCount, &d.state.windowStart, &d.state.credit, &d.state.scale, &d.state.expiresAt, &log}, func() error {
		d.retryAfter = never
		if retryAfter != nil {
			d.retryAfter = *retryAfter
		}
		d.decidedAt = d.decidedAt.UTC()
		got[ord] = d
		return nil
	})
	require.NoError(t, err, "%s\n%v", title, requests)
	ord = 0
	for i, request := range requests {
		var is, want, first []decision
		for _, p := range request.parts {
			ord++
			is, want, first = append(is, got[ord]), append(want, p.decision), append(first, p.first)
			for _, d := range []*decision{&is[len(is)-1], &want[len(is)-1], &first[len(is)-1]} {
				d.state = used(d.state, algorithm(p.policy))
				d.state.log = newEntries(nil)
			}
		}
		if !slices.Equal(is, first) || first[0].granted > 0 {
			require.Equal(t, want, is, "%s, request %d of %+v", title, i, requests)
		}
	}
	require.Len(t, got, int(ord), title)
}

func compareRows(t *testing.T, pool *pgxpool.Pool, title, space string, model rows, made map[bool]map[rowID]bool) {
	t.Helper()
	for durable, want := range model {
		found, err := pool.Query(context.Background(), "SELECT "+rowColumns+" FROM "+table(durable)+" WHERE starts_with(prefix, $1)", space)
		require.NoError(t, err)
		seen := 0
		for found.Next() {
			id, row, err := scanRow(found)
			require.NoError(t, err)
			if row == (storedRow{}) {
				require.Contains(t, made[durable], id, title)
				continue
			}
			expected := want[id]
			row.state, expected.state = used(row.state, row.algorithm), used(expected.state, expected.algorithm)
			require.Equal(t, expected, row, "%s, %v", title, id)
			seen++
		}
		require.NoError(t, found.Err())
		require.Equal(t, len(want), seen, "%s: rows in %s", title, strings.TrimSpace(table(durable)))
	}
}
