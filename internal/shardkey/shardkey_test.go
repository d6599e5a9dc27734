package shardkey_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/shardkey"
)

func TestTag(t *testing.T) {
	t.Parallel()
	for key, tag := range map[string]string{
		"user:1": "user:1", "{user:1}:day": "user:1", "a{b}c": "b", "a{b}{c}": "b", "{{a}": "{a", "a{b{c}": "b{c",
		"{}x": "{}x", "a{}{b}": "a{}{b}", "a{b": "a{b", "a}b": "a}b", "}a{b": "}a{b", "}{a}": "a", "": "", "{": "{", "{é}": "é",
	} {
		require.Equal(t, tag, shardkey.Tag(key), key)
	}
}

// The hashes are the first 32 bits of `printf %s KEY | sha256sum`.
func TestOf(t *testing.T) {
	t.Parallel()
	for key, hash := range map[string]uint32{
		"user:1": 0xabc3a47b, "a": 0xca978112, "ключ": 0x1de36a32, "🦊": 0x0a9f72e8, "}a{b": 0x6db03a3b,
	} {
		for shards := 1; shards <= 1024; shards *= 2 {
			require.EqualValues(t, hash%uint32(shards), shardkey.Of(key, shards), key)
		}
	}
	require.Equal(t, shardkey.Of("user:1", 1024), shardkey.Of("a{user:1}b", 1024))
}

// When the number of shards doubles, from n to 2n, a key of shard i was on shard i % n before.
func TestShardsAreDivided(t *testing.T) {
	t.Parallel()
	for i := range 1000 {
		key := fmt.Sprint("user:", i)
		for shards := 2; shards <= 1024; shards *= 2 {
			require.Equal(t, shardkey.Of(key, shards/2), shardkey.Of(key, shards)%(shards/2))
		}
	}
}

func TestValid(t *testing.T) {
	t.Parallel()
	var valid []int
	for shards := -4; shards <= 4096; shards++ {
		if shardkey.Valid(shards) {
			valid = append(valid, shards)
		}
	}
	require.Equal(t, []int{2, 4, 8, 16, 32, 64, 128, 256, 512, 1024}, valid)
}

var sink int

func BenchmarkOf(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		sink = shardkey.Of("user:123456789:2001:db8::ff00:42:8329", 16)
	}
}

// With four shards, no shard has more than 102 % of the mean number of keys.
func TestShardsAreEven(t *testing.T) {
	t.Parallel()
	const keys, shards = 100_000, 4
	random := rand.New(rand.NewPCG(1, 2))
	for name, key := range map[string]func(i int) string{
		"numbers":        func(i int) string { return fmt.Sprint("user:", i) },
		"random numbers": func(int) string { return fmt.Sprint("user:", random.Uint64()) },
		"addresses":      func(i int) string { return fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255) },
		"tags":           func(i int) string { return fmt.Sprintf("{tenant %d}:minute", i) },
	} {
		var counts [shards]int
		for i := range keys {
			counts[shardkey.Of(key(i), shards)]++
		}
		require.LessOrEqual(t, slices.Max(counts[:]), keys/shards*102/100, name)
	}
}
