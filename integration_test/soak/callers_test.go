package soak

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
)

// call runs one caller of a process. The caller does one thing after another until the context ends.
func (s *soak) call(ctx context.Context, pool int, rng *rand.Rand) {
	for soakWait(ctx, time.Duration(rng.Int64N(int64(soakThinkTime)))) {
		switch choice := rng.IntN(100); {
		case choice < 50:
			s.useAccount(ctx, pool, rng)
		case choice < 60:
			s.takeRegular(ctx, s.leased, pool, 1+rng.Int64N(3))
		case choice < 90:
			l := s.passing[rng.IntN(len(s.passing))]
			s.useRegular(ctx, l.regulars[rng.IntN(len(l.regulars))], pool, rng)
		default:
			s.visit(ctx, pool, rng)
		}
	}
}

// visit makes a few requests for a new key. Nobody uses the key again.
func (s *soak) visit(ctx context.Context, pool int, rng *rand.Rand) {
	l := s.passing[rng.IntN(len(s.passing))]
	r := newRegular(l, fmt.Sprintf("visitor:%d", s.visitors.Add(1)))
	for range 1 + rng.IntN(3) {
		s.useRegular(ctx, r, pool, rng)
	}
	s.judge(r)
}

func (s *soak) useRegular(ctx context.Context, r *soakRegular, pool int, rng *rand.Rand) {
	s.takeRegular(ctx, r, pool, soakCost(rng))
}

func (s *soak) takeRegular(ctx context.Context, r *soakRegular, pool int, n int64) {
	from := s.life.Load()
	result, err := r.of.limiters[pool].AllowN(context.WithoutCancel(ctx), r.key, n)
	if result.Source == ratelimit.SourceLease {
		s.leasedDecisions.Add(1)
	}
	r.note(s.outcomeOf(result, err), n, result.DecidedAt, from, s.life.Load())
}

// soakCost returns a cost, which is 1 most of the time.
func soakCost(rng *rand.Rand) int64 {
	if rng.IntN(5) > 0 {
		return 1
	}
	return 1 + rng.Int64N(soakRegularLimit)
}

// useAccount makes one call for an account, unless the account is being audited.
func (s *soak) useAccount(ctx context.Context, pool int, rng *rand.Rand) {
	l := s.accounts[rng.IntN(len(s.accounts))]
	a := l.accounts[rng.IntN(soakHotAccounts)]
	if rng.IntN(2) == 0 {
		a = l.accounts[soakHotAccounts+rng.IntN(soakAccounts-soakHotAccounts)]
	}
	if !a.use.TryRLock() {
		return
	}
	denied := s.ask(context.WithoutCancel(ctx), a, pool, rng)
	a.use.RUnlock()
	if denied && rng.IntN(10) == 0 {
		s.audit(ctx, a)
	}
}

// ask makes a request for an account that is in use, and returns whether the request was denied.
func (s *soak) ask(ctx context.Context, a *soakAccount, pool int, rng *rand.Rand) (denied bool) {
	limiter, n := a.of.limiters[pool], soakCost(rng)
	from := s.life.Load()
	least, refunded := a.least(from)
	var result ratelimit.Result
	var err error
	switch rng.IntN(20) {
	case 0:
		n = 0
		result, err = limiter.Peek(ctx, a.key)
	case 1, 2:
		s.askInTransaction(ctx, a, pool, rng, func() {})
		return false
	case 4, 5:
		s.giveBack(ctx, a, rng)
		return false
	case 3: // the caller leaves before the answer
		impatient, cancel := context.WithTimeout(ctx, time.Duration(rng.Int64N(int64(5*time.Millisecond))))
		defer cancel()
		result, err = limiter.AllowN(impatient, a.key, n)
	default:
		result, err = limiter.AllowN(ctx, a.key, n)
	}
	outcome, to := s.outcomeOf(result, err), s.life.Load()
	a.note(outcome, n, from, to)
	if outcome == soakAcknowledged && n > 0 && from == to {
		a.keep(soakTake{result: result, n: n, pool: pool, life: to})
	}
	// The answer must include all units acknowledged before the call, except those given back meanwhile. A remembered
	// denial may lack later takes of other callers.
	_, refundedSince := a.least(to)
	if most := soakLimit - least + refundedSince - refunded - n; err == nil && from == to &&
		(n == 0 || result.Allowed) &&
		result.Remaining > most {
		s.violate(
			"%s, %s: %d remain after a call for %d, and at most %d can",
			a.of.Name,
			a.key,
			result.Remaining,
			n,
			most,
		)
	}
	return err == nil && !result.Allowed
}

// giveBack refunds a take, or a part of a take, from an account that is in use.
func (s *soak) giveBack(ctx context.Context, a *soakAccount, rng *rand.Rand) {
	a.mu.Lock()
	if len(a.takes) == 0 {
		a.mu.Unlock()
		return
	}
	at := rng.IntN(len(a.takes))
	take := a.takes[at]
	a.takes = slices.Delete(a.takes, at, at+1)
	stale := take.epoch != a.epoch
	a.mu.Unlock()

	limiter, n, from := a.of.limiters[take.pool], take.n, s.life.Load()
	if rng.IntN(4) == 0 {
		n = 1 + rng.Int64N(n)
	}
	a.beginRefund(take, n, from)
	result, err := limitertest.AsResult(limiter.RefundN(ctx, take.result, n))
	outcome := s.outcomeOf(result, err)
	a.endRefund(take, outcome, n, from, s.life.Load())
	if outcome != soakAcknowledged {
		return
	}
	s.refunds.Add(1)
	if stale {
		s.staleRefunds.Add(1)
	}
	if _, err := limiter.RefundN(ctx, take.result, take.n-n+1); !errors.Is(err, ratelimit.ErrInvalidCost) &&
		!errors.Is(err, ratelimit.ErrNothingToRefund) {
		s.violate(
			"%s, %s: %d of a take of %d were given back, and then %d: %v",
			a.of.Name,
			a.key,
			n,
			take.n,
			take.n-n+1,
			err,
		)
	}
}

// askInTransaction takes from an account in a caller's transaction. The transaction holds the row while the function
// hold runs, and then commits or rolls back. askInTransaction returns whether it committed.
func (s *soak) askInTransaction(
	ctx context.Context,
	a *soakAccount,
	pool int,
	rng *rand.Rand,
	hold func(),
) (committed bool) {
	n, commit, from := soakCost(rng), rng.IntN(2) == 0, s.life.Load()
	levels := []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}
	options := pgx.TxOptions{IsoLevel: levels[rng.IntN(len(levels))]}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	tx, err := s.pools[pool].BeginTx(ctx, options)
	if err != nil {
		return false
	}
	defer tx.Rollback(ctx)
	result, err := a.of.limiters[pool].WithTx(tx).AllowN(ctx, a.key, n)
	if err != nil && soakSQLState(err) == "40001" { // expected at these isolation levels
		return false
	}
	if s.outcomeOf(result, err) != soakAcknowledged {
		return false // a transaction takes nothing before its commit
	}
	hold()
	if !commit {
		s.rolledBack.Add(1)
		return false
	}
	outcome := soakAcknowledged
	if err := tx.Commit(ctx); errors.Is(err, pgx.ErrTxCommitRollback) || soakSQLState(err) == "40001" {
		outcome = soakNothing
	} else if err != nil {
		outcome = soakUnknown
	}
	to := s.life.Load()
	a.note(outcome, n, from, to)
	if outcome != soakAcknowledged {
		return false
	}
	if from == to {
		a.keep(soakTake{result: result, n: n, pool: pool, life: to})
	}
	return true
}

// soakSQLState returns the SQLSTATE of an error. It returns "" if the error does not come from the database.
func soakSQLState(err error) string {
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		return pgErr.Code
	}
	return ""
}
