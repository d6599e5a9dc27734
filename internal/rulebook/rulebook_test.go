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
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/rulebook"
)

// until is the time when a rule ends.
type until int64

const always = until(math.MaxInt64)

type rule = rulebook.Rule[until]

// oracle finds a rule in the simplest way.
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

// After each change, the book and the oracle find the same rule for every key.
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

// Look-ups find the next shorter prefix when the rule of the longest prefix has ended.
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
		require.Same(t, rules[511], page.Find(key, counts(now))) // the longest prefix has the rule that ends last
		require.Same(t, oracle(rules, "api", key[:now+1]+"y", false, now), page.Find(key[:now+1]+"y", counts(now)))
	}
	require.Nil(t, page.Find(key, counts(512)))
	require.Nil(t, page.Find("y", counts(0)))
}

// Update leaves out rules beyond the limit, and counts them. A rule that replaces another needs no additional room.
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

	// With all = true, the order of the new rules decides which rules stay.
	require.Equal(t, 2, book.Update([]*rule{rules[4], rules[3], rules[2], rules[1], rules[0]}, nil, true, 3))
	require.Nil(t, book.Page("api").Find("0", everyRule))
	require.NotNil(t, book.Page("api").Find("4", everyRule))
	require.Equal(t, 2, book.Update(rules, nil, true, 3))

	changed := *rules[0]
	require.Equal(t, 1, book.Update([]*rule{&changed, rules[3]}, nil, false, 3))
	require.Same(t, &changed, book.Page("api").Find("0", everyRule))

	// A weak rule makes room only for a rule that is not weak.
	weak, strong := *rules[0], *rules[4]
	weak.Weak = true
	book.Update([]*rule{&weak}, nil, false, 3)
	other := *rules[3]
	other.Weak = true
	require.Equal(t, 1, book.Update([]*rule{&other}, nil, false, 3))
	require.Nil(t, book.Page("api").Find("3", everyRule))
	require.Equal(t, 1, book.Update([]*rule{&strong}, nil, false, 3))
	require.Same(t, &strong, book.Page("api").Find("4", everyRule))
	require.Nil(t, book.Page("api").Find("0", everyRule))
	require.Equal(t, []int64{4}, book.IDs(func(r *rule) bool { return r == &strong }))
	book.Update([]*rule{rules[0]}, []int64{4}, false, 3)

	require.Zero(t, book.Update([]*rule{rules[3]}, []int64{1}, false, 3))
	require.NotNil(t, book.Page("api").Find("3", everyRule))
	require.Zero(t, book.Update(rules[:2], nil, true, 3))
	require.Equal(t, 2, book.Len())
}

// A full book refuses new rules without a search through its rules. A search for each new rule would take longer than
// filling the book did.
func TestFullBookIsNotSearched(t *testing.T) {
	t.Parallel()

	const limit = 200_000
	rules := func(first, n int64, weak bool) (list []*rule) {
		for id := first; id < first+n; id++ {
			list = append(list, &rule{ID: id, Name: "api", Target: rulebook.Key, Text: fmt.Sprint(id), Weak: weak})
		}
		return list
	}
	var book rulebook.Book[until]
	begin := time.Now()
	require.Zero(t, book.Update(append(rules(0, limit-2, false), rules(limit, 2, true)...), nil, true, limit))
	filled := time.Since(begin)
	for _, weak := range []bool{true, false} {
		begin = time.Now()
		require.Equal(t, 1000, book.Update(rules(limit+10, 1000, weak), nil, false, limit))
		require.Less(t, time.Since(begin), filled) // filling the book added 200 times as many rules
	}
	require.Nil(t, book.Rule(limit)) // the book dropped its weak rules for other rules
	require.Nil(t, book.Rule(limit+1))
	require.NotNil(t, book.Rule(limit+10))
	require.Equal(t, limit, book.Len())
}

// While a rule is replaced again and again, a look-up always finds its old or new version.
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

// A look-up always finds a rule that moves between a key, its prefixes and all keys, whether or not its id changes.
func TestNoMomentWithoutARuleThatMoves(t *testing.T) {
	t.Parallel()

	var book rulebook.Book[until]
	var others []*rule // many rules make a change slow
	for id := range int64(2000) {
		others = append(others, &rule{ID: 1000 + id, Name: "api", Target: rulebook.Prefix, Text: fmt.Sprint("other", id)})
	}
	book.Update(others, nil, true, 10_000)
	put := func(id int64) *rule {
		r := &rule{ID: id % 3, Name: "api", Target: rulebook.Target(rand.IntN(3))}
		if r.Target != rulebook.Everybody {
			r.Text = "key"
		}
		return r
	}
	book.Update([]*rule{put(0)}, nil, false, 10_000)
	page := book.Page("api")
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
	for id := range int64(1000) {
		if id%2 == 0 {
			book.Update([]*rule{put(id / 2)}, nil, false, 10_000)
		} else {
			next := put(id/2 + 1)
			book.Update([]*rule{next}, []int64{id / 2 % 3}, false, 10_000)
		}
	}
	done.Store(true)
	readers.Wait()
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
