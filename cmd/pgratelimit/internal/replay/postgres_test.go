package replay

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// A log that is sent to Postgres gets the same answer for each line as in a replay.
func TestReplayAnswersLikePostgres(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for i, text := range []string{
		"fixed 5/10s", "sliding 5/10s", "bucket 5 2/3s", "log 5/10s", "every 5/10s", "every 5/minute Asia/Kolkata",
		"sliding 3/2s + bucket 8 1/2s + every 20/minute", "fixed 6/7s, log 9/20s",
	} {
		t.Run(text, func(t *testing.T) {
			t.Parallel()
			dice := rand.New(rand.NewPCG(9, uint64(i)))
			log, at := "time,key,cost\n", limitertest.C0
			for range 400 {
				at += dice.Int64N(1_500_000)
				if dice.IntN(40) == 0 {
					at += 30_000_000
				}
				log += fmt.Sprintf("%d,key %d,%d\n", at-dice.Int64N(2_000_000), dice.IntN(3), 1+dice.IntN(3)*dice.IntN(3))
			}
			policy, err := ParsePolicy(text)
			require.NoError(t, err)
			parsed, err := ratelimit.ParsePolicy(policy.Text)
			require.NoError(t, err)
			var now time.Time
			limiter := limitertest.New(t, db.Pool, ratelimit.Config{
				Name: fmt.Sprintf("replay %d", i), Policy: parsed, NoDenialCache: true,
			}, ratelimit.ClientConfig{Test: ratelimit.TestConfig{Now: func() time.Time { return now }}})

			r, keys := newRun(policy), newKeyring()
			in := Input{
				Files: []string{"-"}, Stdin: strings.NewReader(log), Progress: func(int64) {}, Tolerance: 1_000_000,
			}
			lines, err := in.each(t.Context(), keys, func(q request) {
				now = time.UnixMicro(q.at)
				want, err := limiter.AllowN(t.Context(), keys.names[q.key], q.cost)
				if !errors.As(err, new(*ratelimit.CostError)) { // a cost above the limit, which a replay denies
					require.NoError(t, err)
				}
				require.Equal(t, want.Allowed, r.decide(q), "%+v", q)
			})
			require.NoError(t, err)
			require.EqualValues(t, 400, lines.Read)
			require.Positive(t, lines.Late)
			require.Greater(t, r.denied, int64(40))
			require.Greater(t, r.allowed, int64(40))
		})
	}
}
