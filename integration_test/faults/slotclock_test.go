package faults

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// The clock of the server is set back and forward while slots are held. Setting it back ends no slot, and lets nobody
// in. Setting it forward ends all slots for the database: the next in line gets a slot with a larger fence, and the
// former holder learns of its loss.
func TestSlotsWhileTheServersClockIsSet(t *testing.T) {
	t.Parallel()
	found, _ := filepath.Glob("/usr/lib/*/faketime/libfaketime.so.1")
	if len(found) == 0 {
		t.Skip("libfaketime: install it (Debian: libfaketime)")
	}
	eachTable(t, func(t *testing.T, durable bool) {
		dir := t.TempDir()
		for _, folder := range []string{filepath.Dir(dir), dir} {
			require.NoError(t, os.Chmod(folder, 0o755)) //nolint:gosec // the server's user reads a file in it
		}
		file := filepath.Join(dir, "clock")
		set := func(offset string) {
			t.Helper()
			require.NoError(t, os.WriteFile(file+".new", []byte(offset+"\n"), 0o644)) //nolint:gosec // as above
			require.NoError(t, os.Rename(file+".new", file))
		}
		set("+0")
		server, pool := newServer(t, pgserver.Config{Env: []string{
			"LD_PRELOAD=" + found[0], "FAKETIME_TIMESTAMP_FILE=" + file, "FAKETIME_NO_CACHE=1", "FAKETIME_DONT_FAKE_MONOTONIC=1",
		}})
		clock := func() (at time.Time) {
			require.NoError(t, pool.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&at))
			return at
		}
		newProcess := func() *ratelimit.Limiter {
			return limitertest.New(t, newPool(t, server.URL(), nil), ratelimit.Config{
				Name: "jobs", Policy: ratelimit.Concurrency{Limit: 1}, Durable: durable,
			})
		}
		acquire := func(l *ratelimit.Limiter) (*ratelimit.Slot, error) {
			return l.Acquire(t.Context(), "key", ratelimit.SlotOptions{TTL: 10 * time.Second})
		}
		held, err := acquire(newProcess())
		require.NoError(t, err)
		for _, offset := range []string{"-1h", "-30d", "+1h", "+40d"} {
			next := testkit.Later(func() (*ratelimit.Slot, error) { return acquire(newProcess()) })
			other := newProcess()
			for waiting := false; !waiting; { // until the next caller stands in line
				require.NoError(t, pool.QueryRow(t.Context(), "SELECT EXISTS (SELECT FROM "+
					pgtest.Table(durable)+"_hold WHERE status = 3)").Scan(&waiting))
			}
			before := clock()
			set(offset)
			if back := clock().Before(before); back {
				result, err := other.TryAcquire(t.Context(), "key", ratelimit.SlotOptions{})
				require.NoError(t, err)
				require.False(t, result.Allowed)
				require.NoError(t, held.Context(t.Context()).Err())
				require.NoError(t, held.Release(t.Context()))
			} else {
				<-held.Context(t.Context()).Done()
				require.ErrorIs(t, held.Release(t.Context()), ratelimit.ErrSlotLost)
			}
			got, err := next()
			require.NoError(t, err)
			require.Greater(t, got.Fence(), held.Fence())
			held = got
		}
		require.NoError(t, held.Release(t.Context()))
	})
}
