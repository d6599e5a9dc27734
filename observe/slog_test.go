package observe_test

import (
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/observe"
)

func tell(o *ratelimit.Observer) {
	o.Decision(ratelimit.DecisionEvent{
		Limiter: "login", Cost: 2, Latency: 3 * time.Millisecond, Result: ratelimit.Result{Source: ratelimit.SourceFallback},
	})
	o.Decision(ratelimit.DecisionEvent{Limiter: "login", Cost: 1, Err: errors.New("broken")})
	o.Decision(ratelimit.DecisionEvent{
		Limiter: "login", Cost: 1, Result: ratelimit.Result{Allowed: true, Shadow: &ratelimit.Result{}},
	})
	o.Statement(ratelimit.StatementEvent{Limiter: "login", Size: 5, Queued: 7, Latency: time.Millisecond})
	o.Statement(ratelimit.StatementEvent{Shard: 3, Size: 40, Latency: time.Millisecond})
	o.Lease(ratelimit.LeaseEvent{Limiter: "login", Taken: 3, Returned: 2, Stranded: 1})
}

func logged(level slog.Level) string {
	var text strings.Builder
	tell(observe.Slog(slog.New(slog.NewTextHandler(&text, &slog.HandlerOptions{
		Level: level,
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		},
	}))))
	return text.String()
}

func TestSlog(t *testing.T) {
	t.Parallel()
	require.Equal(t, strings.TrimLeft(`
level=DEBUG msg="ratelimit: decision" limiter=login outcome=denied source=fallback cost=2 latency=3ms
level=DEBUG msg="ratelimit: decision" limiter=login outcome=error source=database cost=1 latency=0s error=broken
level=DEBUG msg="ratelimit: decision" limiter=login outcome=allowed source=database cost=1 latency=0s shadow=denied
level=DEBUG msg="ratelimit: statement" limiter=login size=5 queued=7 latency=1ms
level=DEBUG msg="ratelimit: statement" limiter="" size=40 queued=0 latency=1ms shard=3
level=DEBUG msg="ratelimit: lease" limiter=login taken=3 returned=2 stranded=1
`, "\n"), logged(slog.LevelDebug))
}

// At slog's default level the observer logs nothing. The client logs an outage once.
func TestSlogAtTheDefaultLevel(t *testing.T) {
	t.Parallel()
	require.Empty(t, logged(slog.LevelInfo))
	require.Nil(t, observe.Slog(slog.Default()).Breaker)
}
