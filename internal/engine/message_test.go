package engine_test

import (
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/wire"
)

// messages are an engine, and a service that takes its messages.
type messages struct {
	*engine.Engine
	*engine.Intake
}

func newMessages(t *testing.T) messages {
	t.Helper()
	e := limitertest.EngineOf(limitertest.NewClient(t, limitertest.NewModelDB(), ratelimit.ClientConfig{}))
	return messages{e, e.NewIntake(&engine.Spaces{}, func(algorithm.Numbers) bool { return true })}
}

// sends returns the message of a request, and requires that the service reads the same part from it.
func (m messages) sends(t *testing.T, of model.Policy, change func(p *engine.Part)) []byte {
	t.Helper()
	space := &engine.Space{Engine: m.Engine, Name: "login", Durable: true}
	r := m.Engine.Request(&engine.Ask{Space: space, Policy: &of, Key: "user:123"})
	change(&r.Parts[0])
	message := r.AppendMessage(nil)
	got := m.Intake.Request(wire.Read(message))
	require.NotNil(t, got)
	require.Equal(t, space.Name, got.Space.Name)
	require.Equal(t, space.Durable, got.Space.Durable)
	want := r.Parts[0]
	want.Space = got.Space
	require.Equal(t, want, got.Parts[0])
	return message
}

// A field of algorithm.Numbers that does not travel would make a service decide by another policy.
func TestAllNumbersTravel(t *testing.T) {
	t.Parallel()
	m := newMessages(t)
	travelled := map[string]bool{}
	for text, policy := range limitertest.PolicyTexts() {
		for _, rules := range limitertest.Model(policy).Rules {
			m.sends(t, *model.NewPolicy(rules), func(*engine.Part) {})
			numbers := reflect.ValueOf(rules.Numbers())
			for field, value := range numbers.Fields() {
				travelled[field.Name] = travelled[field.Name] || !value.IsZero()
			}
		}
		require.NotEmpty(t, travelled, text)
	}
	for field := range reflect.TypeFor[algorithm.Numbers]().Fields() {
		require.True(t, travelled[field.Name], "PolicyTexts has no policy with a %s", field.Name)
	}
}

// A message that is cut off is refused, and random ones do no harm.
func TestMessagesThatAreCutOff(t *testing.T) {
	t.Parallel()
	m := newMessages(t)
	const id = "00000000-0000-4000-8000-000000000000"
	bucket := *limitertest.Model(ratelimit.TokenBucket{Capacity: 20, Refill: 5, Every: time.Second})
	slots := *limitertest.Model(ratelimit.Concurrency{Limit: 5})
	var all [][]byte
	for _, message := range []struct {
		policy model.Policy
		change func(p *engine.Part)
	}{
		{bucket, func(p *engine.Part) { p.Cost = 3 }},
		{bucket, func(p *engine.Part) { p.Cost, p.Charge = 3, true }},
		{bucket, func(p *engine.Part) { p.Cost, p.Delay = 3, new(int64(1000)) }},
		{bucket, func(p *engine.Part) {
			p.Cost, p.Refund = -3, &model.Take{Units: 3, Spent: 1, Since: 4, In: 5, At: 6, Ended: 7}
		}},
		{bucket, func(p *engine.Part) { p.Cost, p.Hold, p.TTL = 3, id, 60_000_000 }},
		{slots, func(p *engine.Part) { p.Cost, p.Slot, p.Wish, p.TTL = 3, id, "{}", 60_000_000 }},
	} {
		all = append(all, m.sends(t, message.policy, message.change))
	}
	source := rand.New(rand.NewPCG(limitertest.Seed(t), 0))
	for _, message := range all {
		for n := range message {
			require.Nil(t, m.Intake.Request(wire.Read(message[:n])), "%d of %d bytes", n, len(message))
		}
		require.Nil(t, m.Intake.Request(wire.Read(append(message, 0))))
		for range 1000 {
			broken := append([]byte(nil), message...)
			for range 1 + source.IntN(3) {
				broken[source.IntN(len(broken))] = byte(source.Uint32())
			}
			m.Intake.Request(wire.Read(broken))
		}
	}
}

func TestAnswersThatAreCutOff(t *testing.T) {
	t.Parallel()
	m := newMessages(t)
	policy := limitertest.Model(ratelimit.SlidingLog{Limit: 5, Window: time.Minute})
	ask := engine.Ask{Space: &engine.Space{Engine: m.Engine, Name: "login"}, Policy: policy, Key: "user:123", Cost: 2}
	decided := m.Engine.Request(&ask)
	decided.Parts[0].Decision = model.Decision{
		Granted: 1, Remaining: 3, RetryAfter: 4, ResetAfter: 5, DecidedAt: time.UnixMicro(6),
		State: model.State{Count: 2, Log: "entries"}, Taken: model.Take{Units: 2, At: 6},
	}
	answer := decided.AppendAnswer(nil)
	got := m.Engine.Request(&ask)
	got.Arrive(wire.Read(answer))
	require.NoError(t, got.TripError())
	require.Equal(t, decided.Parts[0].Decision, got.Parts[0].Decision)
	for n := range answer {
		got := m.Engine.Request(&ask)
		got.Arrive(wire.Read(answer[:n]))
		require.ErrorIs(t, got.TripError(), engine.ErrUnlikeAnswer)
	}
	source := rand.New(rand.NewPCG(limitertest.Seed(t), 1))
	for range 1000 {
		broken := append([]byte(nil), answer...)
		broken[source.IntN(len(broken))] = byte(source.Uint32())
		m.Engine.Request(&ask).Arrive(wire.Read(broken))
	}
}
