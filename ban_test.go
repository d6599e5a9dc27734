package ratelimit_test

import (
	"errors"
	"log/slog"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestBanConfig(t *testing.T) {
	t.Parallel()

	p, err := ratelimit.NewPolicies(pgtest.New(t).Pool, ratelimit.PoliciesConfig{Logger: slog.Default()})
	require.NoError(t, err)
	good := &ratelimit.Ban{Denials: 1, Within: 1, First: time.Millisecond}
	db := unusedPool(t)
	try := func(ban *ratelimit.Ban, p *ratelimit.Policies) error {
		_, err := ratelimit.New(db, ratelimit.Config{Name: "login", Policy: ratelimit.FixedWindow{Limit: 1, Window: time.Hour}, Policies: p, Ban: ban})
		return err
	}
	require.NoError(t, try(good, p))
	require.NoError(t, try(nil, nil))
	require.Error(t, try(&ratelimit.Ban{}, p))
	for field, change := range map[string]func(*ratelimit.Ban){
		"Config.Ban.Denials":       func(b *ratelimit.Ban) { b.Denials = 0 },
		"Config.Ban.Within":        func(b *ratelimit.Ban) { b.Within = 0 },
		"Config.Ban.First":         func(b *ratelimit.Ban) { b.First = time.Millisecond - 1 },
		"Config.Ban.Longest":       func(b *ratelimit.Ban) { b.Longest = 1 },
		"Config.Ban.ForgivenAfter": func(b *ratelimit.Ban) { b.ForgivenAfter = math.MaxInt64 },
	} {
		bad := *good
		change(&bad)
		config, ok := errors.AsType[*ratelimit.ConfigError](try(&bad, p))
		require.True(t, ok, field)
		require.Equal(t, field, config.Field)
	}
	require.ErrorContains(t, try(good, nil), "needs Config.Policies")
}
