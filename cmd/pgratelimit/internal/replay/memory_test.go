package replay

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
)

// A log with ever new keys uses bounded memory. 100,000 keys take about 20 MB, and all keys of this log would take ten
// times as much.
func TestMemoryIsBounded(t *testing.T) { //nolint:paralleltest // it measures the heap, which all tests share
	const lines, most = 1_000_000, 100_000
	out, in := io.Pipe()
	go func() {
		w := bufio.NewWriter(in)
		_, _ = w.WriteString("time,key\n") // a pipe fails only if the reader has left
		for i := range lines {
			fmt.Fprintf(w, "%d,session %d\n", 1_700_000_000_000_000+int64(i)*1000, i)
		}
		_ = w.Flush()
		_ = in.Close()
	}()
	p, err := ParsePolicy("sliding 3/10s")
	require.NoError(t, err)
	other, err := ParsePolicy("log 2/10s")
	require.NoError(t, err)
	all := &replayed{
		keys: newKeyring(), runs: []*run{newRun(p, nil), newRun(other, nil)}, changes: make([]comparison, 2), compares: true,
		maxKeys: most, keep: 5,
	}
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before, largest, n := heap(), int64(0), 0
	input := Input{Files: []string{"-"}, Stdin: out, Progress: func(int64) {}, Tolerance: 1e6}
	_, err = input.each(t.Context(), all.keys, func(q request) {
		all.decide(q)
		if n++; n%(most/2) == 0 {
			largest = max(largest, heap()-before)
		}
	})
	require.NoError(t, err)
	require.Less(t, largest, int64(60<<20))
	require.LessOrEqual(t, len(all.keys.names), 2*most)
	require.EqualValues(t, lines, all.keys.count())
	require.EqualValues(t, lines, all.runs[0].allowed)
}

// To forget idle keys changes no decision, no sum, and not the keys that the report names.
func TestForgettingChangesNoDecision(t *testing.T) {
	t.Parallel()
	dice := rand.New(rand.NewPCG(11, 12))
	var log bytes.Buffer
	log.WriteString("time,key,cost\n")
	at := int64(1_700_000_000_000)
	for i := range 60_000 {
		at += dice.Int64N(20)
		key := fmt.Sprint("session ", i/20-dice.IntN(5)) // a session ends, and never comes back
		if dice.IntN(10) == 0 {
			key = fmt.Sprint("regular ", int(dice.ExpFloat64()*2))
		}
		fmt.Fprintf(&log, "%d,%s,%d\n", at-dice.Int64N(3000), key, 1+dice.Int64N(2))
	}
	replay := func(maxKeys int) *Report {
		o := options{
			Input:   Input{Files: []string{"-"}, Stdin: bytes.NewReader(log.Bytes()), Progress: func(int64) {}, Tolerance: 2e6, MaxBad: 1},
			maxKeys: maxKeys, number: 4, showKeys: true,
		}
		var policies []Policy
		for _, text := range []string{"sliding 10/1s + log 40/9s", "fixed 6/1s", "bucket 20 1/1s"} {
			p, err := ParsePolicy(text)
			require.NoError(t, err)
			policies = append(policies, p)
		}
		report, err := o.replay(t.Context(), &policies[0], policies[1:], nil)
		require.NoError(t, err)
		return report
	}
	whole, small := replay(1_000_000), replay(500)
	require.Zero(t, whole.KeysForgotten)
	require.Greater(t, small.KeysForgotten, int64(2000))
	require.Less(t, small.Keys, whole.Keys+100)
	require.Equal(t, whole.Lines, small.Lines)
	for i, p := range small.Policies {
		want := whole.Policies[i]
		require.Positive(t, p.Denied)
		require.Equal(t, want.Most[:2], p.Most[:2])
		for j := range p.Most { // keys that were denied as often may change places
			require.Equal(t, want.Most[j].Denied, p.Most[j].Denied)
		}
		require.Equal(t, want.Over, p.Over)
		require.Equal(t, want.Allowed, p.Allowed)
		if i > 0 {
			require.Equal(t, want.Change.Most[:2], p.Change.Most[:2])
			require.Equal(t, want.Change.NowDenied, p.Change.NowDenied)
			require.Equal(t, want.Change.NowAllowed, p.Change.NowAllowed)
		}
	}
}
