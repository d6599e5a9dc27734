package faults

import (
	"context"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// leasesInMix returns the load on one more key, beside a mix. Leased units are not decided in the order of the calls,
// so leaseJudge judges them.
func leasesInMix() leaseWork {
	return leaseWork{Names: []string{"sliding"}, Limit: 600, Window: time.Second}
}

// takeLeased takes from the leased key, by any kind of call, and sometimes refunds the take.
func (w worker) takeLeased(ctx context.Context, random *rand.Rand, uses *[]leaseUse) (err error) {
	const key = "sliding"
	use := leaseUse{Policy: key, N: 1 + random.Int64N(2), Call: time.Now().UnixMicro()}
	var result ratelimit.Result
	switch draw := random.IntN(20); {
	case draw == 0:
		var results ratelimit.Results
		if results, err = ratelimit.AllowAll(ctx, w.leased.Request(key, use.N)); err == nil {
			result = results.Each[0]
		}
	case draw == 1 && pgtest.Shards() == 0:
		err = pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) (err error) {
			result, err = w.leased.WithTx(tx).AllowN(ctx, key, use.N)
			return err
		})
	case draw == 2:
		_, err = w.leased.Peek(ctx, key)
	default:
		result, err = w.leased.AllowN(ctx, key, use.N)
	}
	use.Return = time.Now().UnixMicro()
	if err != nil || !result.Allowed {
		return err
	}
	if random.IntN(10) == 0 {
		use.back = true
		_, err = w.leased.Refund(ctx, result)
	}
	use.learn(result)
	*uses = append(*uses, use)
	return err
}

// requireLeasesInMix checks that at most the policy's limit was taken, and that a part of it was leased.
func requireLeasesInMix(t *testing.T, uses []leaseUse) {
	t.Helper()
	require.NoError(t, leaseJudge{leaseWork: leasesInMix()}.judge(uses))
	require.True(t, slices.ContainsFunc(uses, func(u leaseUse) bool { return u.Leased }))
}
