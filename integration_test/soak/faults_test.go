package soak

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// soakFault is a fault that the soak causes. The function happen ends what it begins, even if the context ends.
type soakFault struct {
	name   string
	crash  bool // whether the server loses unwritten data
	happen func(ctx context.Context, rng *rand.Rand) error
}

// soakEvent is a fault that has happened.
type soakEvent struct {
	At    float64 `json:"at_s"`
	Took  float64 `json:"took_s"`
	Fault string  `json:"fault"`
	crash bool
}

func (s *soak) faults() []soakFault {
	return []soakFault{
		{"kill -9", true, func(context.Context, *rand.Rand) error { return s.restart(true, s.server.Kill) }},
		{"immediate shutdown", true, func(ctx context.Context, _ *rand.Rand) error {
			return s.restart(
				true,
				func() error { return s.server.Stop(context.WithoutCancel(ctx), pgserver.Immediate) },
			)
		}},
		{"fast shutdown", false, func(ctx context.Context, _ *rand.Rand) error {
			return s.restart(false, func() error { return s.server.Stop(context.WithoutCancel(ctx), pgserver.Fast) })
		}},
		{"frozen server", false, s.freeze},
		{"connections terminated", false, s.terminate},
		{"long foreign transaction", false, s.foreignTransaction},
		{"hot rows held", false, s.holdHotRows},
		{"rows held", false, s.holdRows},
		{"impatient callers", false, s.impatientCallers},
	}
}

// happen makes all faults happen in random order, again and again until the time is over. Each fault happens at least
// once. So both halves of a long soak have the same number of each fault.
func (s *soak) happen(ctx context.Context, faults []soakFault, until time.Time) {
	rng := s.rng(0)
	var background sync.WaitGroup
	defer background.Wait()
	pause := max(min(time.Until(until)/20, 2*time.Second), time.Millisecond)
	for first := true; len(faults) > 0 && (first || time.Now().Before(until)); first = false {
		for _, i := range rng.Perm(len(faults)) {
			if !soakWait(ctx, pause/2+time.Duration(rng.Int64N(int64(pause)))) || !first && time.Now().After(until) {
				return
			}
			f, stream := faults[i], s.rng(rng.Uint64())
			happen := func() {
				began := time.Now()
				if err := f.happen(ctx, stream); err != nil {
					s.violate("%s: %v", f.name, err)
				}
				s.mu.Lock()
				defer s.mu.Unlock()
				s.events = append(s.events, soakEvent{
					At: began.Sub(s.began).Seconds(), Took: time.Since(began).Seconds(), Fault: f.name, crash: f.crash,
				})
			}
			if f.name == "long foreign transaction" { // this fault is long, so other faults happen meanwhile
				background.Go(happen)
			} else {
				happen()
			}
		}
	}
}

func (s *soak) faultCounts() map[string]int {
	counts := map[string]int{}
	for _, f := range s.faults() {
		counts[f.name] = 0
	}
	for _, e := range s.events {
		counts[e.Fault]++
	}
	return counts
}

// restart ends the server and starts it again. After a crash, a new life begins while no call can run.
func (s *soak) restart(crash bool, end func() error) error {
	if err := end(); err != nil {
		return err
	}
	if crash {
		s.life.Add(1)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	return s.server.Restart(ctx)
}

// freeze stops the server for a moment, which may be longer than the callers wait.
func (s *soak) freeze(ctx context.Context, rng *rand.Rand) error {
	if err := s.server.Freeze(); err != nil {
		return err
	}
	soakWait(ctx, time.Duration(rng.Int64N(int64(1500*time.Millisecond))))
	return s.server.Thaw()
}

// terminate ends about half of all connections.
func (s *soak) terminate(ctx context.Context, rng *rand.Rand) error {
	return s.eventually(ctx, func(ctx context.Context) error {
		rows, err := s.extra.Query(
			ctx,
			"SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() ORDER BY pid",
		)
		if err != nil {
			return err
		}
		pids, err := pgx.CollectRows(rows, pgx.RowTo[int32])
		if err != nil {
			return err
		}
		rng.Shuffle(len(pids), func(i, j int) { pids[i], pids[j] = pids[j], pids[i] })
		_, err = s.extra.Exec(
			ctx,
			"SELECT pg_terminate_backend(pid) FROM pg_catalog.unnest($1::integer[]) AS pid",
			pids[:(len(pids)+1)/2],
		)
		return err
	})
}

// foreignTransaction holds back VACUUM while other faults happen, or until one of them ends the transaction.
func (s *soak) foreignTransaction(ctx context.Context, rng *rand.Rand) error {
	var tx pgx.Tx
	err := s.eventually(ctx, func(ctx context.Context) (err error) {
		if tx, err = s.extra.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}); err != nil {
			return err
		}
		if _, err = tx.Exec(ctx, "SELECT pg_current_xact_id()"); err != nil {
			_ = tx.Rollback(ctx)
		}
		return err
	})
	if err != nil {
		return err
	}
	soakWait(ctx, time.Second+time.Duration(rng.Int64N(int64(5*time.Second))))
	short, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_ = tx.Rollback(short) // a fault may have terminated the transaction
	return nil
}

// holdHotRows holds hot rows in callers' transactions, for longer than other callers wait for the rows.
func (s *soak) holdHotRows(ctx context.Context, rng *rand.Rand) error {
	var holders sync.WaitGroup
	for pool := range s.pools {
		l := s.accounts[rng.IntN(len(s.accounts))]
		a, stream := l.accounts[rng.IntN(soakHotAccounts)], s.rng(rng.Uint64())
		if a.use.TryRLock() {
			holders.Go(func() {
				defer a.use.RUnlock()
				length := time.Duration(stream.Int64N(int64(time.Second)))
				s.askInTransaction(
					context.WithoutCancel(ctx),
					a,
					pool,
					stream,
					func() { soakWait(context.WithoutCancel(ctx), length) },
				)
			})
		}
	}
	holders.Wait()
	return nil
}

// holdRows holds rows that only this fault uses, in callers' transactions. The transactions have just created some of
// the rows. Some rows are held briefly, and some until every caller has an answer.
func (s *soak) holdRows(ctx context.Context, rng *rand.Rand) error {
	ctx = context.WithoutCancel(ctx)
	var holders sync.WaitGroup
	for i, kind := range []struct{ exists, long bool }{{true, true}, {true, false}, {false, true}, {false, false}} {
		l := s.accounts[rng.IntN(len(s.accounts))]
		pool, stream := i%len(s.pools), s.rng(rng.Uint64())
		a := newAccount(l, soakAccounts+int(s.heldAccounts.Add(1)))
		holders.Go(func() { s.holdRow(ctx, a, pool, stream, kind.exists, kind.long) })
	}
	holders.Wait()
	return nil
}

func (s *soak) holdRow(ctx context.Context, a *soakAccount, pool int, rng *rand.Rand, exists, long bool) {
	const callersOfPool = 2
	var crowd sync.WaitGroup
	var granted atomic.Int64
	ask := func(pool int) {
		from := s.life.Load()
		result, err := a.of.limiters[pool].Allow(ctx, a.key)
		outcome := s.outcomeOf(result, err)
		a.note(outcome, 1, from, s.life.Load())
		if outcome == soakAcknowledged {
			granted.Add(1)
		}
	}
	if exists {
		s.waitFor(ctx, "a row is made", func() bool { ask(pool); return granted.Load() > 0 })
		granted.Store(0)
	}
	s.waitFor(ctx, "a row is held", func() (locked bool) {
		committed := s.askInTransaction(ctx, a, pool, rng, func() {
			locked = true
			for pool := range s.pools {
				for range callersOfPool {
					crowd.Go(func() { ask(pool) })
				}
			}
			if long {
				crowd.Wait()
			} else {
				soakWait(ctx, 20*time.Millisecond)
			}
		})
		// The transaction committed, so it held the row all the time.
		if committed && long && granted.Load() > 0 {
			s.violate("%s, %s: %d were granted while somebody held the row", a.of.Name, a.key, granted.Load())
		}
		return locked
	})
	crowd.Wait()
	s.audit(ctx, a)
}

// waitFor repeats the function try until it returns true. It fails if that takes too long.
func (s *soak) waitFor(ctx context.Context, what string, try func() bool) {
	for deadline := time.Now().Add(time.Minute); !try(); soakWait(ctx, 20*time.Millisecond) {
		if time.Now().After(deadline) {
			s.violate("what does not happen: %s", what)
			return
		}
	}
}

// attack creates decoys of everything that the functions, the limiters' statements and the sweeper's statements call,
// as a role that may only create objects in the schema. If a decoy runs, it fails, and no fault explains its error.
func (s *soak) attack() {
	s.t.Helper()
	db := &pgtest.DB{Pool: s.extra, URL: s.server.URL()}
	db.SomeDecoys(s.t, "public", pgtest.Statements(s.t, "../..")...)
	_, err := s.extra.Exec(s.t.Context(), "SELECT cardinality(ARRAY['a'])")
	require.ErrorContains(s.t, err, "decoy public.cardinality(text[]) was run by") // shows that the decoys work
}

// impatientCallers makes many calls for hot keys at once, and cancels the calls.
func (s *soak) impatientCallers(ctx context.Context, rng *rand.Rand) error {
	var callers sync.WaitGroup
	for pool := range s.pools {
		l := s.accounts[rng.IntN(len(s.accounts))]
		a := l.accounts[rng.IntN(soakHotAccounts)]
		if !a.use.TryRLock() {
			continue
		}
		callers.Go(func() {
			defer a.use.RUnlock()
			var crowd sync.WaitGroup
			defer crowd.Wait()
			for range 200 {
				crowd.Go(func() {
					from := s.life.Load()
					short, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Millisecond)
					defer cancel()
					result, err := l.limiters[pool].Allow(short, a.key)
					a.note(s.outcomeOf(result, err), 1, from, s.life.Load())
				})
			}
		})
	}
	callers.Wait()
	return nil
}

// eventually repeats the function try until the database answers.
func (s *soak) eventually(ctx context.Context, try func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	for {
		err := try(ctx)
		if err == nil || !soakWait(ctx, 20*time.Millisecond) {
			return err
		}
	}
}
