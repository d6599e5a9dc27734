package shards_test

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/shardkey"
	"github.com/pgratelimit/ratelimit/internal/shards"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// The database and the client compute the same shard for a key with any characters, braces and collation. The ids of the
// key's holds name this shard.
func TestHashIsThatOfTheClient(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	require.NoError(t, shards.Own(t.Context(), connect(t, db), "public", shards.Identity{Place: 0, Shards: 4, Cluster: "test"}))
	pgtest.Exec(t, db.Pool, "CREATE COLLATION loose (provider = icu, locale = 'und-u-ks-level1', deterministic = false)")

	random := rand.New(rand.NewPCG(testkit.Seed(t, "RATELIMIT_TEST_SEED"), 0))
	pieces := []string{"{", "}", "{", "}", "a", "user:", `\`, "'", "\n", " ", "ä", "ß", "語", "🦊", "e\u0301", "\u202e", "\ufeff"}
	keys := make([]string, 20_000)
	for i := range keys {
		var key strings.Builder
		for range random.IntN(12) {
			if random.IntN(4) == 0 {
				key.WriteRune(rune(1 + random.IntN(0xd7ff))) // less than the first surrogate
			} else {
				key.WriteString(pieces[random.IntN(len(pieces))])
			}
		}
		keys[i] = key.String()
	}
	want := make([]int, len(keys))
	for n := 2; n <= 1024; n *= 8 {
		for i, key := range keys {
			want[i] = shardkey.Of(key, n)
		}
		for _, collation := range []string{"", ` COLLATE "C"`, " COLLATE loose"} {
			found := pgtest.Scalar[[]int](t, db.Pool, "SELECT array_agg(_rate_limit_shard(key"+collation+
				", $2) ORDER BY i) FROM unnest($1::text[]) WITH ORDINALITY AS u (key, i)", keys, n)
			require.Len(t, found, len(want))
			for i, key := range keys {
				if want[i] != found[i] { // calling require for each key would take seconds
					require.Equal(t, want[i], found[i], "%q", key)
				}
			}
			held := pgtest.Scalar[[]int](t, db.Pool, "SELECT array_agg(('x' || right(_rate_limit_hold_id(key"+collation+
				")::text, 4))::bit(16)::integer & ($2 - 1) ORDER BY i) FROM unnest($1::text[]) WITH ORDINALITY AS u (key, i)", keys, n)
			require.True(t, slices.Equal(found, held))
		}
	}
}
