package ratelimit_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
)

func TestPolicyTextIsReadAndWritten(t *testing.T) {
	t.Parallel()

	for text, want := range limitertest.PolicyTexts() {
		require.Equal(t, text, want.String())
		got, err := ratelimit.ParsePolicy(text)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	for text, want := range limitertest.OtherPolicyTexts() {
		got, err := ratelimit.ParsePolicy(text)
		require.NoError(t, err)
		require.Equal(t, want, got.String())
	}
}

// ParsePolicy reads the text of every policy that New accepts.
func TestEveryPolicyIsReadAsItWasWritten(t *testing.T) {
	t.Parallel()

	r := rand.New(rand.NewPCG(1, 2))
	for range 20_000 {
		want := limitertest.RandomPolicy(r)
		if r.IntN(4) == 0 {
			want = ratelimit.All(want, limitertest.RandomPolicy(r), limitertest.RandomPolicy(r))
		}
		got, err := ratelimit.ParsePolicy(want.String())
		require.NoError(t, err, want)
		require.Equal(t, want, got)
	}
	for seconds := range 3 * 24 * 60 * 6 { // with any number of trailing zeros
		want := ratelimit.FixedWindow{Limit: 1, Window: time.Duration(seconds+1) * 10 * time.Second}
		got, err := ratelimit.ParsePolicy(want.String())
		require.NoError(t, err, want)
		require.Equal(t, want, got)
	}
}

func TestPolicyTextThatIsNotAccepted(t *testing.T) {
	t.Parallel()

	for text, words := range limitertest.UnreadablePolicyTexts() {
		policy, err := ratelimit.ParsePolicy(text)
		require.Nil(t, policy, text)
		var policyErr *ratelimit.PolicyError
		require.ErrorAs(t, err, &policyErr, text)
		require.Equal(t, text, policyErr.Text)
		require.ErrorContains(t, err, words)
		require.ErrorContains(t, err, ratelimit.PolicyForms())
	}

	for text, field := range limitertest.ImpossiblePolicyTexts() {
		policy, err := ratelimit.ParsePolicy(text)
		require.Nil(t, policy, text)
		var configErr *ratelimit.ConfigError
		require.ErrorAs(t, err, &configErr, text)
		require.Equal(t, "Config."+field, configErr.Field, text)
		require.ErrorAs(t, err, new(*ratelimit.PolicyError))
	}
}

// ParsePolicy accepts the forms that its errors show.
func TestThePolicyFormsAreAccepted(t *testing.T) {
	t.Parallel()

	for _, text := range []string{"fixed 100/1m", "sliding 100/1m", "log 100/1m", "bucket 20 5/10s"} {
		_, err := ratelimit.ParsePolicy(text + "," + text)
		require.NoError(t, err)
		require.Contains(t, ratelimit.PolicyForms(), `"`+text+`"`)
		_, err = ratelimit.ParsePolicy(text)
		require.NoError(t, err)
	}
	_, err := ratelimit.ParsePolicy("fixed 1/1m,")
	require.ErrorContains(t, err, "is empty")
	_, err = ratelimit.ParsePolicy(
		"fixed 1/1m,fixed 1/1m,fixed 1/1m,fixed 1/1m,fixed 1/1m,fixed 1/1m,fixed 1/1m,fixed 1/1m,fixed 1/1m",
	)
	require.ErrorContains(t, err, "needs 2 to 8")
}

func FuzzParsePolicy(f *testing.F) {
	for _, text := range limitertest.FuzzedPolicyTexts() {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		policy, err := ratelimit.ParsePolicy(text)
		if err != nil {
			require.Nil(t, policy)
			require.ErrorAs(t, err, new(*ratelimit.PolicyError))
			return
		}
		require.NoError(t, ratelimit.ValidatePolicy(policy))
		again, err := ratelimit.ParsePolicy(policy.String())
		require.NoError(t, err)
		require.Equal(t, policy, again)
		require.LessOrEqual(t, len(policy.String()), 100)
	})
}
