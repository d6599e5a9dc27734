package wire_test

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/internal/wire"
)

// read reads a value of each type.
func read(m *wire.Reader) []any {
	return []any{
		m.Int(), m.Int(), m.Int16(), m.Bool(), m.Bool(), m.Byte(), m.Text(), m.Text(), m.Bytes(), m.Uint(), m.Take(2),
		m.Count(), m.Byte(), m.Byte(),
	}
}

func TestRoundTrip(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("é", 100)
	b := wire.AppendInt(nil, math.MinInt64)
	b = wire.AppendInt(b, math.MaxInt64)
	b = wire.AppendInt(b, math.MinInt16)
	b = wire.AppendBool(wire.AppendBool(b, true), false)
	b = append(b, 'x')
	b = wire.AppendText(wire.AppendText(b, ""), long)
	b = wire.AppendText(b, []byte{0, 255})
	b = binary.AppendUvarint(b, math.MaxUint64)
	b = append(b, "ab"...)
	b = append(wire.AppendInt(b, 2), 1, 2)

	m := wire.Read(b)
	require.Equal(t, []any{
		int64(math.MinInt64), int64(math.MaxInt64), int16(math.MinInt16), true, false, byte('x'), "", long, []byte{0, 255},
		uint64(math.MaxUint64), []byte("ab"), 2, byte(1), byte(2),
	}, read(m))
	require.True(t, m.Ended())

	for n := range b {
		m := wire.Read(b[:n])
		read(m)
		require.True(t, m.Bad(), "%d bytes", n)
		require.False(t, m.Ended())
		require.Zero(t, m.Int())
		require.Empty(t, m.Rest())
	}
	m = wire.Read(append(b, 0))
	read(m)
	require.False(t, m.Ended(), "something follows")
}

func TestBrokenMessages(t *testing.T) {
	t.Parallel()
	endless := []byte(strings.Repeat("\xff", 11)) // a varint of more than 64 bits
	for name, test := range map[string]struct {
		message []byte
		read    func(m *wire.Reader) any
	}{
		"an endless number":      {endless, func(m *wire.Reader) any { return m.Int() }},
		"an endless count":       {endless, func(m *wire.Reader) any { return m.Uint() }},
		"an endless text":        {endless, func(m *wire.Reader) any { return m.Text() }},
		"a number above 16 bits": {wire.AppendInt(nil, math.MaxInt16+1), func(m *wire.Reader) any { return m.Int16() }},
		"a number below 16 bits": {wire.AppendInt(nil, math.MinInt16-1), func(m *wire.Reader) any { return m.Int16() }},
		"a negative count":       {wire.AppendInt(nil, -1), func(m *wire.Reader) any { return m.Count() }},
		"more than there is":     {append(wire.AppendInt(nil, 3), 1, 2), func(m *wire.Reader) any { return m.Count() }},
		"a text of 2^64 bytes":   {binary.AppendUvarint(nil, math.MaxUint64), func(m *wire.Reader) any { return m.Text() }},
	} {
		m := wire.Read(test.message)
		require.Zero(t, test.read(m), name)
		require.True(t, m.Bad(), name)
	}
}

func TestRandomBytes(t *testing.T) {
	t.Parallel()
	source := rand.New(rand.NewPCG(testkit.Seed(t, "RATELIMIT_TEST_SEED"), 0))
	for range 10_000 {
		b := make([]byte, source.IntN(40))
		for i := range b {
			b[i] = byte(source.Uint32())
		}
		m := wire.Read(b)
		read(m)
		require.LessOrEqual(t, len(m.Rest()), len(b))
	}
}
