package soak

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// soakAccount is a key whose window outlasts the soak, with what its callers know. Its row must always agree with that:
//
//	durable, synchronous commit   acknowledged ≤ row ≤ acknowledged + unknown
//	durable                       the same, but a crash may have taken what was acknowledged before it
//	ephemeral                     the same, in each life of the server
//
// And the acknowledged units never exceed the limit.
type soakAccount struct {
	of                 *soakLimiter
	number, generation int

	use sync.RWMutex // calls share it, and the audit has it alone
	key string

	mu           sync.Mutex
	acknowledged int64
	unknown      int64                  // units that may have been taken, or may still be
	lives        map[int64]*soakTakings // the same numbers for each life of the server
	// takes are the latest takes that refunds can give back, even those from before the last reset.
	takes    []soakTake
	refunded int64 // the sum of all requested refunds
	epoch    int   // how often the key was reset
}

// soakTake is a take that a refund may give back.
type soakTake struct {
	result ratelimit.Result
	n      int64
	pool   int
	life   int64 // the server's life
	epoch  int   // the account's epoch
}

// soakTakings counts the units taken in one life of the server. If a call began in one life and was acknowledged in
// another, its life is unknown. So the call's units are unknown in both lives.
type soakTakings struct {
	acknowledged, unknown int64
	returned              int64 // by refunds acknowledged in this life; a crash may forget them
}

func newAccount(of *soakLimiter, number int) *soakAccount {
	a := &soakAccount{of: of, number: number, lives: map[int64]*soakTakings{}}
	a.key = a.name()
	return a
}

func (a *soakAccount) name() string { return fmt.Sprintf("account:%d:%d", a.number, a.generation) }

// in returns the account's takings in a life.
func (a *soakAccount) in(life int64) *soakTakings {
	if a.lives[life] == nil {
		a.lives[life] = &soakTakings{}
	}
	return a.lives[life]
}

// least returns the smallest possible usage for a call that begins now, and the sum of all refunds requested so far.
func (a *soakAccount) least(life int64) (least, refunded int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.of.SynchronousCommit:
		return a.acknowledged, a.refunded
	case a.forgets():
		return a.in(
			life,
		).acknowledged - a.unknown, a.refunded // a refund from an earlier life may still arrive
	}
	return a.in(life).acknowledged, a.refunded
}

// forgets tells whether a crash loses some acknowledged units but keeps the rows.
func (a *soakAccount) forgets() bool { return a.of.Durable && !a.of.SynchronousCommit }

// keep stores a take for a later refund.
func (a *soakAccount) keep(take soakTake) {
	const most = 40
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.takes) == most {
		a.takes = slices.Delete(a.takes, 0, 1)
	}
	take.epoch = a.epoch
	a.takes = append(a.takes, take)
}

// beginRefund records that a part of a take will be given back. From now on it is unknown whether that part still
// counts. A take from before the last reset does not count, so a refund of it must change nothing.
func (a *soakAccount) beginRefund(take soakTake, n, from int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.refunded += n
	a.doubt(take, n, from)
}

// doubt moves n from the acknowledged units to the unknown ones. A negative n moves them back.
func (a *soakAccount) doubt(take soakTake, n, from int64) {
	if take.epoch != a.epoch {
		return
	}
	a.acknowledged, a.unknown = a.acknowledged-n, a.unknown+n
	in := a.in(take.life)
	in.acknowledged, in.unknown = in.acknowledged-n, in.unknown+n
	if a.forgets() && from != take.life { // the crash may have lost this take, and kept the row
		a.in(from).acknowledged -= n
	}
}

// endRefund records the outcome of a refund.
func (a *soakAccount) endRefund(take soakTake, outcome soakOutcome, n, from, to int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if outcome == soakNothing {
		a.doubt(take, -n, from)
		return
	}
	if take.epoch != a.epoch {
		return
	}
	if a.forgets() {
		for life := from + 1; life <= to; life++ {
			a.in(life).acknowledged -= n
		}
	}
	if outcome == soakUnknown || from != to && !a.of.SynchronousCommit {
		return
	}
	a.unknown -= n
	a.in(to).returned += n
	if to == take.life {
		a.in(to).unknown -= n
	}
}

// soakOutcome is what a caller knows about its request.
type soakOutcome int

const (
	soakNothing soakOutcome = iota // the request was denied, failed, or was rolled back
	soakAcknowledged
	soakUnknown
)

// outcomeOf interprets a limiter's answer, and reports an error that no fault explains.
func (s *soak) outcomeOf(result ratelimit.Result, err error) soakOutcome {
	s.calls.Add(1)
	switch {
	case errors.Is(err, ratelimit.ErrKeyHeld) && !errors.Is(err, ratelimit.ErrOutcomeUnknown):
		s.held.Add(1)
		return soakNothing
	case err == nil && result.Allowed:
		s.granted.Add(1)
		return soakAcknowledged
	case err == nil:
		s.denied.Add(1)
		return soakNothing
	case errors.Is(err, ratelimit.ErrOutcomeUnknown),
		errors.Is(err, context.Canceled),
		errors.Is(err, context.DeadlineExceeded) && !isStoreError(err):
		s.doubtful.Add(1)
		return soakUnknown
	case errors.Is(err, ratelimit.ErrUnavailable), errors.Is(err, ratelimit.ErrTimeout):
		s.failed.Add(1)
		return soakNothing
	}
	s.violate("an error that nothing explains: %v", err)
	return soakUnknown
}

func isStoreError(err error) bool {
	_, ok := errors.AsType[*ratelimit.StoreError](err)
	return ok
}

// note records the outcome of a call for n units, which began in the server's life from and ended in its life to.
func (a *soakAccount) note(outcome soakOutcome, n, from, to int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch outcome {
	case soakAcknowledged:
		a.acknowledged += n
	case soakUnknown:
		a.unknown += n
	}
	switch {
	case outcome == soakAcknowledged && from == to:
		a.in(to).acknowledged += n
	case outcome != soakNothing:
		for life := from; life <= to; life++ {
			a.in(life).unknown += n
		}
	}
}

// audit compares an account with its row while nobody uses the account, and then resets the account.
func (s *soak) audit(ctx context.Context, a *soakAccount) {
	a.use.Lock()
	defer a.use.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	ctx = context.WithoutCancel(ctx) // an audit that has begun is finished, even if the soak ends

	taken, life, ok := s.read(ctx, a)
	if !ok {
		return
	}
	s.audits.Add(1)
	least, most := a.in(life).acknowledged, a.acknowledged+a.unknown
	switch {
	case a.of.SynchronousCommit:
		least = a.acknowledged
	case !a.of.Durable:
		most = a.in(life).acknowledged + a.in(life).unknown
	default:
		for earlier, takings := range a.lives {
			if earlier != life {
				most += takings.returned
			}
		}
	}
	if taken < least || taken > most || taken > soakLimit {
		s.violate(
			"%s, %s: the row says that %d were taken, the callers that it must be %d to %d, of %d",
			a.of.Name,
			a.key,
			taken,
			least,
			most,
			soakLimit,
		)
	}
	for _, takings := range a.lives {
		if takings.acknowledged > soakLimit || a.of.SynchronousCommit && a.acknowledged > soakLimit {
			s.violate(
				"%s, %s: acknowledged %d, and %d in all lives of the server, of %d",
				a.of.Name,
				a.key,
				takings.acknowledged,
				a.acknowledged,
				soakLimit,
			)
		}
	}

	certain := a.unknown == 0
	for deadline := time.Now().Add(time.Minute); ; {
		_, err := s.extra.Exec(
			ctx,
			"SELECT rate_limit_reset($1::text, $2::text, $3::boolean, 250, NULL::boolean)",
			a.of.Name,
			a.key,
			a.of.Durable,
		)
		if err == nil {
			break
		}
		if certain = false; time.Now().After(deadline) {
			s.violate("an account cannot be reset: %v", err)
			return
		}
		soakWait(ctx, 20*time.Millisecond)
	}
	if !certain { // running calls may still arrive, so their key is not used any more
		s.mu.Lock()
		s.archived[soakRowID{a.of.Name, a.key}] = a.unknown
		s.mu.Unlock()
		a.generation++
		a.key = a.name()
	}
	a.acknowledged, a.unknown, a.lives = 0, 0, map[int64]*soakTakings{}
	a.epoch++
}

// read reads an account's row, and the server's life at that time. For a bucket it rounds to whole units, because the
// refill during the soak adds a part of a token.
func (s *soak) read(ctx context.Context, a *soakAccount) (taken, life int64, ok bool) {
	table := pgtest.Table(a.of.Durable)
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); soakWait(ctx, 20*time.Millisecond) {
		life, taken = s.life.Load(), 0
		short, cancel := context.WithTimeout(ctx, 5*time.Second)
		err := s.extra.QueryRow(short, "SELECT CASE algorithm WHEN 3 THEN (count + scale / 2) / scale ELSE count END FROM "+table+" WHERE prefix = $1 AND key = $2",
			a.of.Name, a.key).
			Scan(&taken)
		cancel()
		if (err == nil || errors.Is(err, pgx.ErrNoRows)) && life == s.life.Load() {
			return taken, life, true
		}
	}
	s.violate("an account cannot be read")
	return 0, 0, false
}

// soakRegular is a key with short windows, and the units granted in each life of the server.
type soakRegular struct {
	of  *soakLimiter
	key string

	mu    sync.Mutex
	lives map[int64]*soakGrants
}

// soakGrants are the grants of a key. first and last are times of the database's clock.
type soakGrants struct {
	total       int64
	first, last time.Time
	partial     bool // whether the first grant may be in the middle of a window
}

func newRegular(of *soakLimiter, key string) *soakRegular {
	return &soakRegular{of: of, key: key, lives: map[int64]*soakGrants{}}
}

func (r *soakRegular) in(life int64) *soakGrants {
	if r.lives[life] == nil {
		r.lives[life] = &soakGrants{partial: r.of.Durable && len(r.lives) > 0}
	}
	return r.lives[life]
}

func (r *soakRegular) note(outcome soakOutcome, n int64, at time.Time, from, to int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if outcome == soakAcknowledged && from == to {
		r.in(to).add(n, at)
	} else if outcome != soakNothing {
		for life := from; life <= to; life++ {
			r.in(life).partial = true
		}
	}
}

func (g *soakGrants) add(n int64, at time.Time) {
	if g.total == 0 || at.Before(g.first) {
		g.first = at
	}
	if g.total == 0 || at.After(g.last) {
		g.last = at
	}
	g.total += n
}

// most returns the most that a policy grants from the first to the last grant of g.
func (g *soakGrants) most(policy ratelimit.Policy) int64 {
	span, limit, window := g.last.Sub(g.first), int64(soakRegularLimit), soakWindow
	if fixed, ok := policy.(ratelimit.FixedWindow); ok {
		limit, window = fixed.Limit, fixed.Window
	}
	windows := int64(span/window) + 1 // each window begins at least its length after the previous one
	if g.partial {
		windows++
	}
	if bucket, ok := policy.(ratelimit.TokenBucket); ok {
		return bucket.Capacity + int64(span)*bucket.Refill/int64(bucket.Every)
	}
	return windows * limit
}

// judge compares a key's grants with its policy.
func (s *soak) judge(r *soakRegular) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for life, g := range r.lives {
		if most := g.most(r.of.Policy); g.total > most {
			s.violate(
				"%s, %s: granted %d in life %d of the server, of at most %d from %s to %s",
				r.of.Name,
				r.key,
				g.total,
				life,
				most,
				g.first.Format(time.RFC3339Nano),
				g.last.Format(time.RFC3339Nano),
			)
		}
	}
}
