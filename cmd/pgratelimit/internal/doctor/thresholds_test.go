package doctor

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/policies"
)

// In a real database, it would take too long to create these cases.
func TestDoctorsThresholds(t *testing.T) {
	t.Parallel()

	session, mend := "session 7 (report, idle in transaction)", "end it: SELECT pg_terminate_backend(7)"
	require.Equal(t, cli.Fine, JudgeHorizon(LongTime-1, &session, &mend, true).Level)
	long := JudgeHorizon(LongTime, &session, &mend, false)
	require.Equal(t, cli.Warning, long.Level)
	require.Equal(t, mend, long.Do)
	require.Contains(t, long.Found, "open for 5m0s")
	require.Contains(t, long.Found, "pg_read_all_stats")

	for age, want := range map[int64]cli.Level{200_000_000: cli.Fine, 220_000_001: cli.Warning, 1_600_000_000: cli.Warning, 1_600_000_001: cli.Problem} {
		require.Equal(t, want, TableHealth{XidAge: age}.JudgeAge(200_000_000).Level, age)
	}
	of := func(age, multi, holder int64) cli.Finding {
		return JudgeAges([]IDAge{
			{"transaction ids", "template1", age, 200_000_000, holder, "prepared transaction 'x'", "`ROLLBACK PREPARED 'x'`"},
			{"multixact ids", "app", multi, 400_000_000, holder, "prepared transaction 'x'", "`ROLLBACK PREPARED 'x'`"},
		})
	}
	require.Equal(t, cli.Fine, of(220_000_000, 440_000_000, 220_000_000).Level)
	require.Empty(t, of(220_000_000, 440_000_000, 220_000_000).Do)
	require.Equal(t, cli.Warning, of(220_000_001, 0, 0).Level)
	require.Equal(t, "in database template1, as a superuser, `VACUUM`", of(220_000_001, 0, 0).Do)
	require.Equal(t, cli.Problem, of(1_600_000_001, 440_000_001, 0).Level)
	require.Equal(t, cli.Problem, of(0, 1_600_000_001, 0).Level)
	held := of(220_000_001, 0, 200_000_001)
	require.Contains(t, held.Found, "prepared transaction 'x' holds VACUUM back, for 200000001 transactions")
	require.Equal(t, "end what holds VACUUM back: `ROLLBACK PREPARED 'x'`; then in database template1, as a superuser, `VACUUM`", held.Do)
	for hot, want := range map[int64]cli.Level{950: cli.Fine, 949: cli.Warning} {
		require.Equal(t, want, TableHealth{Updated: 1000, Hot: hot}.JudgeHOT().Level)
		require.Equal(t, cli.Fine, TableHealth{Updated: 999, Hot: 0}.JudgeHOT().Level)
	}
	for dead, want := range map[int64]cli.Level{FewDead: cli.Fine, FewDead + 1: cli.Warning} {
		require.Equal(t, want, TableHealth{Dead: dead, Live: 100}.JudgeDead().Level)
		require.Equal(t, cli.Fine, TableHealth{Dead: dead, Live: dead}.JudgeDead().Level)
	}
	now := time.Now()
	for age, want := range map[time.Duration]cli.Level{LateVacuum: cli.Fine, LateVacuum + 1: cli.Warning} {
		vacuumed := now.Add(-age)
		require.Equal(
			t,
			want,
			TableHealth{Dead: FewDead + 1, Autovacuum: true, Now: now, Vacuumed: &vacuumed}.JudgeVacuum().Level,
		)
		require.Equal(
			t,
			cli.Fine,
			TableHealth{Dead: FewDead, Autovacuum: true, Now: now, Vacuumed: &vacuumed}.JudgeVacuum().Level,
		)
	}
	require.Equal(t, cli.Warning, TableHealth{Dead: FewDead + 1, Autovacuum: true}.JudgeVacuum().Level)
	require.Equal(t, cli.Fine, TableHealth{Autovacuum: true}.JudgeVacuum().Level)

	for live, want := range map[int64]cli.Level{MostPolicies: cli.Fine, MostPolicies + 1: cli.Warning} {
		off := policies.ModeOff
		f := Server{Schema: "public"}.JudgePolicies([]FoundPolicies{{Mode: &off, Count: live + 1, Live: live, Ended: 1}}, nil)
		require.Equal(t, want, f.Level)
		require.Equal(t, want == cli.Warning, strings.Contains(f.Do, "GROUP BY"))
	}
	for num, want := range map[int]cli.Level{OldestVersion: cli.Fine, OldestVersion - 1: cli.Warning} {
		f, err := (&Examination{Server: Server{VersionNum: num}}).CheckServer(t.Context())
		require.NoError(t, err)
		require.Equal(t, want, f.Level)
	}
}
