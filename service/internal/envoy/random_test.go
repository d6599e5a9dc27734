package envoy_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/ratelimittest"
	"github.com/pgratelimit/ratelimit/service/internal/envoy"
)

const seedVariable = "RATELIMIT_TEST_SEED"

// dice makes random configurations and requests from a few keys and values, so that the same limits meet often.
type dice struct{ *rand.Rand }

func (r dice) one(in ...string) string { return in[r.IntN(len(in))] }
func (r dice) in(n int) bool           { return r.IntN(n) == 0 }

func (r dice) key() string   { return r.one("a", "b", "c") }
func (r dice) value() string { return r.one("", "x", "xy", "x/y", "xxy", "yx", "z,=% ", "x*") }
func (r dice) unit() string {
	return r.one("second", "minute", "HOUR", "hour", "day", "Week", "month", "year", "month", "week")
}

func (r dice) rules(depth int, names []string) (rules []map[string]any) {
	known := map[string]bool{}
	for range 1 + r.IntN(5) {
		rule := map[string]any{"key": r.key()}
		if value := r.one("", "", "x", "xy", "x*", "*y", "x*y", "*", "x**", "*x*", "z*"); value != "" {
			rule["value"] = value
		}
		name := fmt.Sprint(rule["key"], rule["value"])
		if known[name] {
			continue
		}
		known[name] = true
		if !r.in(6) {
			rule["rate_limit"] = r.limit(names)
		}
		if value, _ := rule["value"].(string); strings.Contains(value, "*") && r.in(2) {
			rule["share_threshold"] = true
		}
		if r.in(5) {
			rule["shadow_mode"] = true
		}
		if r.in(4) {
			rule["quota_mode"] = true
		}
		if depth < 3 && r.in(2) {
			rule["descriptors"] = r.rules(depth+1, names)
		}
		rules = append(rules, rule)
	}
	return rules
}

func (r dice) limit(names []string) map[string]any {
	if r.in(12) {
		return map[string]any{"unlimited": true}
	}
	limit := map[string]any{"unit": r.unit(), "requests_per_unit": r.IntN(6)}
	if r.in(20) {
		limit["requests_per_unit"] = uint32(1<<32 - 1)
	}
	name := ""
	if r.in(3) {
		name = r.one(names...)
		limit["name"] = name
	}
	if other := r.one(names...); r.in(5) && other != name {
		limit["replaces"] = []map[string]any{{"name": other}}
	}
	return limit
}

func (r dice) files(t testing.TB) map[string][]byte {
	files := map[string][]byte{}
	for _, domain := range []string{"one", "two"} {
		content, err := yaml.Marshal(map[string]any{
			"domain": domain, "descriptors": r.rules(1, []string{"n1", "n2", "n3"}),
		})
		require.NoError(t, err)
		files[domain+".yaml"] = content
	}
	return files
}

func (r dice) request(at int64) modelRequest {
	q := modelRequest{Unix: at, Domain: r.one("one", "one", "one", "two", "two", "three")}
	if r.in(4) {
		q.Hits = uint32(r.IntN(4))
	}
	for range 1 + r.IntN(4) {
		d := modelDescriptor{}
		for range 1 + r.IntN(3) {
			d.Entries = append(d.Entries, [2]string{r.key(), r.value()})
		}
		switch {
		case r.in(4):
			hits := uint64(r.IntN(5))
			d.Hits = &hits
		case r.in(40):
			hits := r.Uint64()
			d.Hits = &hits
		}
		d.Negative = r.in(10)
		if r.in(6) {
			d.Limit = []string{fmt.Sprint(r.IntN(6)), r.unit()}
		}
		q.Descriptors = append(q.Descriptors, d)
		if r.in(3) { // the same once more, perhaps with another limit or number of hits
			d.Negative = false
			if r.in(2) {
				d.Limit = []string{fmt.Sprint(r.IntN(6)), r.unit()}
			}
			q.Descriptors = append(q.Descriptors, d)
		}
	}
	return q
}

// story asks the server and the model the same, and returns the first difference, or "".
func (r dice) story(t testing.TB, db ratelimit.DBTX, files map[string][]byte, m *model, requests int) string {
	at := &clock{now: time.Unix(1_795_700_000, 0)}
	server := newServer(t, db, at, load(t, files), envoy.Options{})
	for i := range requests {
		at.now = at.now.Add(time.Duration(r.IntN(400)) * time.Millisecond)
		if r.in(10) {
			at.now = at.now.Add(time.Duration(r.Int64N(int64(72 * time.Hour)))) // into other windows
		}
		q := r.request(at.now.Unix())
		want, got := m.answer(q), ask(t.Context(), t, server, q)
		if fmt.Sprint(want) != fmt.Sprint(got) {
			return fmt.Sprintf("request %d: %+v\nmodel  %+v\nserver %+v", i, q, want, got)
		}
	}
	return ""
}

func TestRandomRequestsAreAnsweredAsByTheModel(t *testing.T) {
	t.Parallel()
	seed := testkit.Seed(t, seedVariable)
	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	for round := range testkit.Rounds(t, "RATELIMIT_TEST_ROUNDS", 3) * 5 {
		t.Run(fmt.Sprint(round), func(t *testing.T) {
			r := dice{rand.New(rand.NewPCG(seed, uint64(round)))}
			files := r.files(t)
			pgtest.Exec(t, db.Pool, "TRUNCATE rate_limit_ephemeral")
			difference := r.story(t, pool, files, newModel(t, files), 150)
			require.Empty(t, difference, "%s", files)
		})
	}
}

// In memory, many more requests take less time.
func TestRandomRequestsInMemoryAreAnsweredAsByTheModel(t *testing.T) {
	t.Parallel()
	seed := testkit.Seed(t, seedVariable)
	for round := range testkit.Rounds(t, "RATELIMIT_TEST_ROUNDS", 3) * 50 {
		r := dice{rand.New(rand.NewPCG(seed, uint64(round)))}
		files := r.files(t)
		difference := r.story(t, ratelimittest.NewDB(), files, newModel(t, files), 150)
		require.Empty(t, difference, "round %d: %s", round, files)
	}
}

// The comparison notices each mistake that a model can make.
func TestMistakesInTheModelAreNoticed(t *testing.T) {
	t.Parallel()
	seed := testkit.Seed(t, seedVariable)
	for _, mistake := range mistakes {
		t.Run(string(mistake), func(t *testing.T) {
			t.Parallel()
			for round := uint64(0); ; round++ {
				require.Less(t, round, uint64(2000), "nothing was noticed")
				r := dice{rand.New(rand.NewPCG(seed, round))}
				files := r.files(t)
				m := newModel(t, files)
				m.mistake = mistake
				if r.story(t, ratelimittest.NewDB(), files, m, 150) != "" {
					return
				}
			}
		})
	}
}
