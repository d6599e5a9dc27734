package model_test

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
)

// bytesDice returns dice that throw a fuzzer's bytes. The result more tells whether any bytes are left. After the last
// byte, each throw is 0.
func bytesDice(b []byte) (d modeltest.Dice, more func() bool) {
	d = func(n int64) int64 {
		if n <= 1<<8 {
			if len(b) == 0 {
				return 0
			}
			throw := int64(b[0]) % n
			b = b[1:]
			return throw
		}
		var wide [8]byte
		b = b[copy(wide[:], b):]
		return int64(binary.LittleEndian.Uint64(wide[:]) % uint64(n))
	}
	return d, func() bool { return len(b) > 0 }
}

// seen counts the cases of a walk, so that a test can check that the walk has seen all of them.
type seen struct{ granted, denied, never, peeked, refunded, renewed, stale, credited, charged, refused, spent, ahead, healed, expired, changed, clamped int }

// walkModel makes one request after another, at clocks and costs drawn from d, and checks each decision. One step in 32
// first draws another policy. The first call of draw returns the policy with which the walk begins.
func walkModel(d modeltest.Dice, more func() bool, draw func() model.Rules) (seen, error) {
	var count seen
	var s model.State
	var last model.Decision
	var takes []model.Take
	p := draw()
	clock := d.Magnitude(0, 1<<52)
	for more() {
		if d(32) == 0 {
			p = draw()
			count.changed++
		}
		clock = d.Clock(p, s, clock, last)
		if d(12) == 0 {
			next, got, err := checkedGrant(p, s, clock, d.Magnitude(1, model.MaxCredit))
			if err != nil {
				return count, err
			}
			s, last = next, got
			count.credited++
			continue
		}
		if d(8) == 0 {
			_, _, fits := model.Charge(p, s, clock, 0)
			n := []int64{fits, fits + 1, d.Magnitude(1, max(fits, 1)), d.Magnitude(1, p.Numbers().Limit)}[d(4)]
			next, got, err := checkCharge(p, s, clock, n)
			if err != nil {
				return count, err
			}
			if got.Granted == 1 && n > 0 {
				_, charged, _ := model.Charge(p, s, clock, n)
				takes = append(takes, charged.Taken)
				count.charged++
			} else {
				count.refused++
			}
			s, last = next, got
			continue
		}
		if d(4) == 0 {
			next, got, err := checkRefund(p, s, clock, d.Refund(takes, p, clock))
			if err != nil {
				return count, err
			}
			switch {
			case next != s && got.ResetAfter == 0:
				count.renewed++
			case next != s:
				count.refunded++
			default:
				count.stale++
			}
			s, last = next, got
			continue
		}
		n := d.Cost(p.Numbers().Limit, peek(p, s, clock).Remaining)
		if err := checkElement(p, s, clock, n, 1+d(4)); err != nil {
			return count, err
		}
		next, got, err := checkDecision(p, s, clock, n)
		if err != nil {
			return count, err
		}
		if got.Granted == 1 {
			_, d := p.Decide(s, clock, n)
			takes = append(takes, d.Taken)
		}
		switch {
		case n == 0:
			count.peeked++
		case got.Granted == 1:
			count.granted++
			if modeltest.CreditOf(p, next, clock) < modeltest.CreditOf(p, s, clock) {
				count.spent++
			}
		case got.RetryAfter == model.Never:
			count.never++
		default:
			count.denied++
			if clock+got.RetryAfter == s.ExpiresAt && s.ExpiresAt < s.WindowStart+longestWait(p) {
				count.clamped++
			}
			if next != s {
				count.healed++
			}
		}
		switch {
		case s == model.State{}:
		case clock < s.WindowStart:
			count.ahead++
		case clock >= s.ExpiresAt:
			count.expired++
		}
		s, last = next, got
	}
	return count, nil
}

// testModelProperties makes many walks. Each walk begins without a row.
func testModelProperties(t *testing.T, draw func(modeltest.Dice) model.Rules) {
	t.Helper()
	d := modeltest.RandomDice(t)
	var total seen
	for range 1000 {
		left := 40
		count, err := walkModel(d, func() bool { left--; return left >= 0 }, func() model.Rules {
			p := draw(d)
			require.True(t, modeltest.InRange(p))
			return p
		})
		require.NoError(t, err)
		total.granted += count.granted
		total.denied += count.denied
		total.never += count.never
		total.peeked += count.peeked
		total.refunded += count.refunded
		total.renewed += count.renewed
		total.stale += count.stale
		total.credited += count.credited
		total.charged += count.charged
		total.refused += count.refused
		total.spent += count.spent
		total.ahead += count.ahead
		total.healed += count.healed
		total.expired += count.expired
		total.changed += count.changed
		total.clamped += count.clamped
	}
	t.Logf("seen: %+v", total)
	for what, count := range map[string]int{
		"grants": total.granted, "denials": total.denied, "costs above the limit": total.never, "Peeks": total.peeked,
		"rows ahead of the clock": total.ahead, "rows pulled back": total.healed, "expired rows": total.expired,
		"changes of policy": total.changed, "waits until a row of an older policy expires": total.clamped,
		"refunds": total.refunded, "refunds of everything": total.renewed, "refunds of nothing": total.stale, "Grants": total.credited, "charges": total.charged,
		"charges that are too large": total.refused, "requests that spent credit": total.spent,
	} {
		require.Greater(t, count, 20, "the walks have seen too few %s", what)
	}
}

// fuzzModel makes a walk from the fuzzer's bytes. Each draw takes one of the policies.
func fuzzModel(t *testing.T, steps []byte, policies ...model.Rules) {
	t.Helper()
	for _, p := range policies {
		if !modeltest.InRange(p) {
			t.Skip("outside the exact range")
		}
	}
	d, more := bytesDice(steps)
	next := -1
	_, err := walkModel(d, more, func() model.Rules {
		next++
		return policies[next%len(policies)]
	})
	require.NoError(t, err)
}

// fuzzWindows fuzzes a policy with a limit and a window, and a change to another limit and window.
func fuzzWindows(f *testing.F, policy func(limit int64, window time.Duration) model.Rules) {
	f.Helper()
	f.Add(int64(10), minute, int64(20), minute, []byte("a request at each of some clocks, at some costs"))
	f.Add(
		int64(2048),
		int64(model.MaxSpan),
		int64(1),
		int64(1),
		[]byte("\x00\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f"),
	)
	f.Add(
		int64(model.MaxProduct),
		int64(1),
		int64(2048),
		int64(model.MaxSpan),
		[]byte("\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8\xf7\xf6\xf5\xf4\xf3\xf2\xf1\xf0"),
	)
	f.Add(int64(1), int64(3), int64(3), int64(1), []byte("the clock steps back and the policy changes"))
	f.Fuzz(func(t *testing.T, limit, window, limit2, window2 int64, steps []byte) {
		fuzzModel(t, steps, policy(limit, model.Duration(window)), policy(limit2, model.Duration(window2)))
	})
}
