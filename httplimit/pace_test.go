package httplimit

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/ratelimittest"
)

// every50ms lets one pass every 50 ms.
func every50ms() ratelimit.Policy {
	return ratelimit.TokenBucket{Capacity: 1, Refill: 20, Every: time.Second}
}

// pacing returns transports of several processes.
func pacing(t *testing.T, processes int, api *api, maxDelay time.Duration) []*Transport {
	t.Helper()
	db := ratelimittest.NewDB()
	transports := make([]*Transport, processes)
	for i := range transports {
		transports[i] = &Transport{Limiter: waiter(t, db, every50ms()), Base: api, MaxDelay: maxDelay}
	}
	return transports
}

func send(t *testing.T, transport *Transport, ctx context.Context) error { //nolint:revive // as in net/http
	t.Helper()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://api.example.com", strings.NewReader("text"))
	require.NoError(t, err)
	response, err := transport.RoundTrip(r)
	if err == nil {
		err = response.Body.Close()
	}
	return err
}

// Transports of three processes send one request every 50 ms. A sliding window would send them all at once.
func TestTransportPacesAllProcesses(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		api := newAPI(nil)
		transports := pacing(t, 3, api, time.Second)
		errs := make([]error, 22)
		testkit.Together(len(errs), func(i int) { errs[i] = send(t, transports[i%3], t.Context()) })
		sent := api.times()
		for i, at := range sent {
			require.Equal(t, time.Duration(i)*50*time.Millisecond, at)
		}
		// There are 20 places within a second, and one is ready at once.
		require.Len(t, sent, 21)
		errs = slices.DeleteFunc(errs, func(err error) bool { return err == nil })
		require.Equal(t, []error{&PaceError{RetryAfter: 50 * time.Millisecond, MaxDelay: time.Second}}, errs)
		require.EqualError(t, errs[0], "httplimit: no place is ready within the Transport's MaxDelay of 1s: try again in 50ms")
	})
}

// A request whose context ends before its place is ready gives the place back.
func TestTransportGivesAPlaceBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		api := newAPI(nil)
		transports := pacing(t, 2, api, time.Second)
		require.NoError(t, send(t, transports[0], t.Context()))
		ctx, cancel := context.WithCancel(t.Context())
		left := testkit.Later(func() (bool, error) { return false, send(t, transports[0], ctx) })
		synctest.Wait()
		cancel()
		_, err := left()
		require.ErrorIs(t, err, context.Canceled)
		require.NoError(t, send(t, transports[1], t.Context()))
		require.Equal(t, []time.Duration{0, 50 * time.Millisecond}, api.times())
	})
}

// A request with an early deadline books no place, and fails at once.
func TestTransportBooksNoPlaceAfterTheDeadline(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		api := newAPI(nil)
		transports := pacing(t, 2, api, time.Second)
		require.NoError(t, send(t, transports[0], t.Context()))
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
		defer cancel()
		deadline, _ := ctx.Deadline()
		require.Equal(t, &ratelimit.WaitError{RetryAfter: 50 * time.Millisecond, Deadline: deadline}, send(t, transports[1], ctx))
		require.NoError(t, send(t, transports[1], t.Context()))
		require.Equal(t, []time.Duration{0, 50 * time.Millisecond}, api.times())
	})
}

// A request whose place becomes ready during a pause gets another place after the pause.
func TestTransportPacesAfterAPause(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		api := newAPI(retryAfter(1, http.StatusTooManyRequests, "Retry-After", "2"))
		transport := pacing(t, 1, api, time.Second)[0]
		testkit.Together(3, func(int) {
			if err := send(t, transport, t.Context()); err != nil {
				t.Error(err)
			}
		})
		sent := api.times()
		require.Len(t, sent, 4)
		require.GreaterOrEqual(t, sent[1], 2*time.Second)
		require.GreaterOrEqual(t, sent[2]-sent[1], 50*time.Millisecond)
		require.GreaterOrEqual(t, sent[3]-sent[2], 50*time.Millisecond)
	})
}

// onlyWaits hides the method Reserve.
type onlyWaits struct{ Waiter }

func TestTransportThatCannotPace(t *testing.T) {
	t.Parallel()
	bucket := waiter(t, ratelimittest.NewDB(), every50ms())
	for want, transport := range map[string]*Transport{
		"MaxDelay is -1s, and must be at least 0":     {Limiter: bucket, MaxDelay: -time.Second},
		"has no method Reserve, which MaxDelay needs": {Limiter: onlyWaits{bucket}, MaxDelay: time.Second},
		`the policy "fixed 1000/1s" has no places`:    {Limiter: waiter(t, ratelimittest.NewDB(), plenty()), MaxDelay: time.Second},
	} {
		transport.Base = newAPI(nil)
		require.ErrorContains(t, send(t, transport, t.Context()), want)
	}
}
