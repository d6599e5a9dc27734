package main

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// workers returns the pools and limiters of workers with jobs of two tenants. The first tenant has its jobs first.
func workers(t *testing.T, n, jobs int) (pools []*pgxpool.Pool, limiters []*ratelimit.Limiter) {
	t.Helper()
	pgtest.NotThroughProxy(t, "a table of the application")
	db := pgtest.New(t)
	for range n {
		pool := db.NewPool(t, nil)
		limiter, err := newLimiter(pool)
		require.NoError(t, err)
		pools, limiters = append(pools, db.Pool), append(limiters, limiter)
	}
	pgtest.Exec(t, db.Pool, createJobs)
	pgtest.Exec(t, db.Pool, "INSERT INTO jobs (tenant) SELECT 'tenant:' || (i - 1) / $1 FROM generate_series(1, 2 * $1::int) AS i", jobs)
	return pools, limiters
}

// Twelve workers run each job once, and never more than five of a tenant at a time. They pass a tenant that is full.
func TestAtMostFiveJobsOfATenant(t *testing.T) {
	t.Parallel()
	pools, limiters := workers(t, 12, 20)
	running := map[string]*atomic.Int64{"tenant:0": {}, "tenant:1": {}}
	started := make(chan job, 40)
	finish := make(chan struct{})
	run := func(_ context.Context, j job) error {
		defer running[j.tenant].Add(-1)
		if now := running[j.tenant].Add(1); now > 5 {
			t.Error("too many: ", now)
		}
		started <- j
		<-finish
		return nil
	}
	done := make(chan error, 12)
	for i := range 12 {
		go func() { done <- work(t.Context(), pools[i], limiters[i], run) }()
	}
	of := map[string]int{}
	ids := map[int64]bool{}
	for range 10 { // nobody has finished yet
		j := <-started
		of[j.tenant]++
		ids[j.id] = true
	}
	require.Equal(t, map[string]int{"tenant:0": 5, "tenant:1": 5}, of)
	for range 2 { // two workers find both tenants full
		require.NoError(t, <-done)
	}
	close(finish)
	for range 10 {
		require.NoError(t, <-done)
	}
	// The last job may be left, if its tenant was full when a worker had claimed it.
	require.NoError(t, work(t.Context(), pools[0], limiters[0], run))
	for range 30 {
		ids[(<-started).id] = true
	}
	require.Len(t, ids, 40)
	require.Empty(t, started)
	require.Zero(t, pgtest.Scalar[int](t, pools[0], "SELECT count(*)::int FROM jobs"))
}

// A worker whose tenants are full asks again, until all jobs have run.
func TestWorkUntilDone(t *testing.T) {
	t.Parallel()
	pools, limiters := workers(t, 1, 1)
	db := pools[0]
	all, err := limiters[0].Acquire(t.Context(), "tenant:0", ratelimit.SlotOptions{N: 5})
	require.NoError(t, err)
	before := pgtest.Scalar[string](t, db, "SELECT due::text FROM jobs WHERE tenant = 'tenant:0'")
	var ran []string // by the only worker
	ended := testkit.Later(func() (any, error) {
		return nil, workUntilDone(t.Context(), db, limiters[0], 1, func(_ context.Context, j job) error {
			ran = append(ran, j.tenant)
			return nil
		})
	})
	testkit.WaitUntil(t, func() bool { // the worker has given the job back
		return pgtest.Scalar[bool](t, db, "SELECT due <= now() AND due > $1::timestamptz FROM jobs WHERE tenant = 'tenant:0'", before)
	})
	require.NoError(t, all.Release(t.Context()))
	_, err = ended()
	require.NoError(t, err)
	require.Equal(t, []string{"tenant:1", "tenant:0"}, ran)
	require.Zero(t, pgtest.Scalar[int](t, db, "SELECT count(*)::int FROM jobs"))

	pgtest.Exec(t, db, "DROP TABLE jobs")
	require.ErrorContains(t, workUntilDone(t.Context(), db, limiters[0], 2, nil), "42P01")
}

// The job of a worker that has died is not lost. Its slot and its claim end by themselves, and another worker runs it.
// A worker that comes back does not delete the job.
func TestAWorkerDies(t *testing.T) {
	t.Parallel()
	pools, limiters := workers(t, 2, 1)
	db := pools[0]
	fault := errors.New("no answer")
	started, back := make(chan job), make(chan struct{})
	first := testkit.Later(func() (any, error) {
		return nil, work(t.Context(), db, limiters[0], func(_ context.Context, j job) error {
			started <- j
			<-back
			return nil
		})
	})
	j := <-started
	require.Equal(t, "tenant:0", j.tenant)
	require.NoError(t, limiters[1].Reset(t.Context(), j.tenant)) // as if it had ended
	pgtest.Exec(t, db, "UPDATE jobs SET due = now() WHERE id = $1", j.id)
	var ran []string
	require.NoError(t, work(t.Context(), db, limiters[1], func(_ context.Context, again job) error {
		ran = append(ran, fmt.Sprint(again.tenant, again.id == j.id))
		return fault // so it stays claimed
	}))
	require.Equal(t, []string{"tenant:0true", "tenant:1false"}, ran)
	close(back)
	_, err := first()
	require.NoError(t, err)
	require.Equal(t, 2, pgtest.Scalar[int](t, db, "SELECT count(*)::int FROM jobs WHERE due > now()"))
}
