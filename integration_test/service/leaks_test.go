package service

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// metrics returns what /metrics says.
func (s *instance) metrics(t *testing.T) map[string]float64 {
	t.Helper()
	dial := dialer([]*instance{s}, func(s *instance) string { return s.http })
	conn, err := dial(t.Context())
	require.NoError(t, err)
	defer conn.Close()
	_, err = fmt.Fprint(conn, "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	require.NoError(t, err)
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	defer response.Body.Close()
	values := map[string]float64{}
	for lines := bufio.NewScanner(response.Body); lines.Scan(); {
		if name, value, ok := strings.Cut(lines.Text(), " "); ok && name != "#" {
			values[name], _ = strconv.ParseFloat(value, 64)
		}
	}
	return values
}

// After many requests with ever new keys on each door, a service has as many goroutines as before, and its heap does not
// grow.
func TestNothingLeaks(t *testing.T) {
	t.Parallel()
	const at = 32 // once on each door
	third := testkit.Rounds(t, "REQUESTS", 20_000) / 3 / at
	s := start(t, pgtest.New(t).URL, rules(1, ""), patient...)
	all := callers(t, how{limit: 1}, s)
	var asked atomic.Int64
	measure := func() (goroutines, heap float64) {
		t.Helper()
		testkit.Together(len(all)*at, func(i int) {
			for range third {
				key := fmt.Sprintf("%s %d", personal, asked.Add(1)/2) // about every other request is denied
				if _, err := all[i%len(all)].ask(context.Background(), key); err != nil {
					t.Error(err)
				}
			}
		})
		const collections = "go_gc_duration_seconds_count"
		m := s.metrics(t)
		before := m[collections]
		// The page itself needs memory, so garbage is collected at some time.
		testkit.WaitUntil(t, func() bool {
			m = s.metrics(t)
			return m[collections] >= before+2
		})
		// The next collection begins when the heap is about twice as large as the last one left it.
		return m["go_goroutines"], m["go_memstats_next_gc_bytes"] / 2
	}
	_, first := measure()
	before, second := measure()
	after, last := measure()
	t.Logf("heap: %.0f, %.0f, %.0f bytes; goroutines: %.0f, %.0f", first, second, last, before, after)
	require.NotZero(t, last)
	require.Less(t, last-second, 50*float64(third*at)) // 50 bytes for a request on one door
	require.Less(t, after, before+10)
}
