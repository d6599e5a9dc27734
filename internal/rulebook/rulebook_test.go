package rulebook_test

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/rulebook"
)

// until is when a rule ends.
type until int64

const always = until(math.MaxInt64)

type rule = rulebook.Rule[until]

// oracle is the precedence, said plainly.
func oracle(rules []*rule, name, key string, shadow bool, now int64) *rule {
	var best *rule
	rank := func(r *rule) int {
		switch r.Target {
		case rulebook.Key:
			return 1000
		case rulebook.Prefix:
			return 1 + len(r.Text)
		default:
			return 0
		}
	}
	for _, r := range rules {
		applies := r.Name == name && r.Shadow == shadow && counts(now)(r) &&
			(r.Target == rulebook.Everybody || r.Target == rulebook.Key && r.Text == key ||
				r.Target == rulebook.Prefix && strings.HasPrefix(key, r.Text))
		if applies && (best == nil || cmp.Or(rank(r)-rank(best), cmp.Compare(r.From, best.From), cmp.Compare(r.ID, best.ID)) > 0) {
			best = r
		}
	}
	return best
}

func counts(now int64) func(*rule) bool {
	return func(r *rule) bool { return r.From <= now && now < int64(r.Value) }
}

func everyRule(*rule) bool { return true }

func text(n int) string {
	var s strings.Builder
	for range n {
		s.WriteByte("ab\x00\xff"[rand.IntN(4)])
	}
	return s.String()
}

func random(id int64) *rule {
	r := &rule{
		ID: id, Name: []string{"login", "api"}[rand.IntN(2)], Target: rulebook.Target(rand.IntN(3)),
		Shadow: rand.IntN(4) == 0, From: math.MinInt64, Value: always,
	}
	if r.Target != rulebook.Everybody {
		r.Text = text(1 + rand.IntN(5))
	}
	if rand.IntN(2) == 0 {
		r.From, r.Value = rand.Int64N(10), until(10+rand.Int64N(10))
	}
	return r
}

// Whatever happens to the book, it finds what the oracle finds among the rules that are left.
func TestFindsWhatTheOracleFinds(t *testing.T) {
	t.Parallel()

	found := map[rulebook.Target]int{}
	for range 200 {
		var book rulebook.Book[until]
		var all []*rule
		for range 20 {
			whole := rand.IntN(5) == 0
			if whole {
				all = nil
			}
			var removed []int64
			all = slices.DeleteFunc(all, func(r *rule) bool {
				if rand.IntN(3) > 0 {
					return false
				}
				removed = append(removed, r.ID)
				return true
			})
			var rules []*rule
			ids := map[int64]bool{}
			for range rand.IntN(20) {
				r := random(rand.Int64N(60))
				if ids[r.ID] || slices.Contains(removed, r.ID) {
					continue
				}
				ids[r.ID] = true
				rules = append(rules, r)
				all = slices.DeleteFunc(all, func(old *rule) bool { return old.ID == r.ID })
				all = append(all, r)
			}
			require.Zero(t, book.Update(rules, removed, whole, 1000))
			require.Equal(t, len(all), book.Len())
			for range 100 {
				name, key, now := []string{"login", "api"}[rand.IntN(2)], text(1+rand.IntN(7)), rand.Int64N(20)
				page := book.Page(name)
				want := oracle(all, name, key, false, now)
				require.Same(t, want, page.Find(key, counts(now)), "%q of %s at %d", key, name, now)
				require.Same(t, oracle(all, name, key, true, now), page.Shadow(key, counts(now)))
				if want != nil {
					found[want.Target]++
				}
			}
			require.Equal(t, !slices.ContainsFunc(all, func(r *rule) bool { return r.Name == "api" }), book.Page("api").Empty())
		}
	}
	for target := rulebook.Everybody; target <= rulebook.Key; target++ {
		require.Greater(t, found[target], 1000)
	}
}

// Prefixes that begin with each other, as many as a key can have, are found one after the other.
func TestNestedPrefixes(t *testing.T) {
	t.Parallel()

	var book rulebook.Book[until]
	var rules []*rule
	key := strings.Repeat("x", 512)
	for id := range int64(512) {
		rules = append(rules, &rule{
			ID: id, Name: "api", Target: rulebook.Prefix, Text: key[:id+1], From: math.MinInt64, Value: until(id + 1),
		})
	}
	book.Update(rules, nil, true, 1000)
	page := book.Page("api")
	for now := range int64(512) {
		require.Same(t, rules[511], page.Find(key, counts(now))) // the longest one, which lasts longest
		require.Same(t, oracle(rules, "api", key[:now+1]+"y", false, now), page.Find(key[:now+1]+"y", counts(now)))
	}
	require.Nil(t, page.Find(key, counts(512)))
	require.Nil(t, page.Find("y", counts(0)))
}

// Rules beyond the limit are left out, and counted. A changed rule needs no more room.
func TestLimit(t *testing.T) {
	t.Parallel()

	var book rulebook.Book[until]
	var rules []*rule
	for id := range int64(5) {
		rules = append(rules, &rule{
			ID: id, Name: "api", Target: rulebook.Key, Text: fmt.Sprint(id),
		})
	}
	require.Equal(t, 2, book.Update(rules, nil, false, 3))
	require.Equal(t, 3, book.Len())
	require.NotNil(t, book.Page("api").Find("2", everyRule))
	require.Nil(t, book.Page("api").Find("3", everyRule))

	changed := *rules[0]
	require.Equal(t, 1, book.Update([]*rule{&changed, rules[3]}, nil, false, 3))
	require.Same(t, &changed, book.Page("api").Find("0", everyRule))

	require.Zero(t, book.Update([]*rule{rules[3]}, []int64{1}, false, 3))
	require.NotNil(t, book.Page("api").Find("3", everyRule))
	require.Zero(t, book.Update(rules[:2], nil, true, 3))
	require.Equal(t, []string{"api"}, book.Names())
	require.Equal(t, 2, book.Len())
}

// While a rule is replaced again and again, it always holds in one form or the other.
func TestNoMomentWithoutARule(t *testing.T) {
	t.Parallel()

	var book rulebook.Book[until]
	for target, text := range map[rulebook.Target]string{rulebook.Everybody: "", rulebook.Prefix: "k", rulebook.Key: "key"} {
		put := func(id int64) *rule {
			return &rule{
				ID: id, Name: fmt.Sprint(target), Target: target, Text: text,
			}
		}
		book.Update([]*rule{put(0)}, nil, true, 10)
		page := book.Page(fmt.Sprint(target))
		var done atomic.Bool
		var readers sync.WaitGroup
		for range 2 {
			readers.Go(func() {
				for !done.Load() {
					if page.Find("key", everyRule) == nil {
						t.Error("there was no rule")
						return
					}
				}
			})
		}
		for id := range int64(2000) {
			book.Update([]*rule{put(id + 1)}, []int64{id}, id%3 == 0, 10)
		}
		done.Store(true)
		readers.Wait()
	}
}

func BenchmarkFind(b *testing.B) {
	var book rulebook.Book[until]
	var rules []*rule
	for id := range int64(101_000) {
		r := &rule{
			ID: id, Name: "api", Target: rulebook.Key, Text: fmt.Sprintf("customer:%d", id),
		}
		if id >= 100_000 {
			r.Target, r.Text = rulebook.Prefix, fmt.Sprintf("tenant:%d:", id)
		}
		rules = append(rules, r)
	}
	book.Update(rules, nil, true, 1_000_000)
	page := book.Page("api")
	for name, format := range map[string]string{"key": "customer:%d", "prefix": "tenant:100%d:user", "none": "user:%d"} {
		keys := make([]string, 1024)
		for i := range keys {
			keys[i] = fmt.Sprintf(format, rand.IntN(999))
		}
		if name == "key" {
			for i := range keys {
				keys[i] = fmt.Sprintf(format, rand.IntN(100_000))
			}
		}
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				page.Find(keys[i%len(keys)], everyRule)
				i++
			}
		})
	}
}
