package policies

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

func TestWhenARowIsInForce(t *testing.T) {
	t.Parallel()

	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	begin := func(from, until string) (row PolicyRow, err error) {
		var moments [2]*moment
		for i, text := range []string{from, until} {
			if text != "" {
				moments[i], err = readMoment(text)
				require.NoError(t, err)
			}
		}
		err = row.begin(moments[0], moments[1], now)
		return row, err
	}
	day := func(d, hour int) *time.Time { return new(time.Date(2100, 1, d, hour, 0, 0, 0, time.UTC)) }
	for _, test := range []struct {
		from, until string
		begins      *time.Time
		ends        *time.Time
	}{
		{"", "", &now, nil},
		{"", "1d2h", &now, new(now.Add(26 * time.Hour))},
		{"1d", "2h", new(now.Add(24 * time.Hour)), new(now.Add(26 * time.Hour))}, // two hours after the beginning
		{"2100-01-02", "2100-01-02T18:00:00+01:00", day(2, 0), day(2, 17)},
		{"2100-01-02 10:00", "2100-01-03 10:00:00+02:00", day(2, 10), day(3, 8)},
		{"2100-01-02 10:00:00", "1h", day(2, 10), day(2, 11)},
	} {
		row, err := begin(test.from, test.until)
		require.NoError(t, err)
		require.Equal(t, test.begins, row.ValidFrom)
		require.Equal(t, test.ends, row.ValidUntil)
	}

	for _, test := range [][3]string{
		{"2001-01-01", "", "--from, 2001-01-01 00:00:00Z, is not later than now, 2026-01-02 03:04:05Z"},
		{"0001-01-01", "", "--from, 0001-01-01 00:00:00Z, is not later than now"}, // Go's zero time
		{"", "0001-01-01", "--until, 0001-01-01 00:00:00Z, is not later than the beginning, 2026-01-02 03:04:05Z"},
		{"", "2001-01-01 10:00", "--until, 2001-01-01 10:00:00Z, is not later than"},
		{"", "2000-01-01 10:00:00+02:00", "--until, 2000-01-01 08:00:00Z, is not later than"},
		{"2100-01-02", "2100-01-01", "--until, 2100-01-01 00:00:00Z, is not later than the beginning, 2100-01-02 00:00:00Z"},
	} {
		_, err := begin(test[0], test[1])
		require.ErrorContains(t, err, test[2])
		require.True(t, cli.IsUsage(err))
	}
}
