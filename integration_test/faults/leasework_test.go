package faults

import (
	"context"
	"encoding/gob"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
)

// leaseWork describes what each of several processes with leases does. All processes use the same keys.
type leaseWork struct {
	URL     string
	Names   []string // the names of the policies; see policy
	Limit   int64
	Window  time.Duration
	Length  time.Duration // Lease.MaxLength
	Pace    time.Duration // the time after which callers change to other keys, and misfortunes begin and end
	Callers int
	Gap     time.Duration // the pause between two calls of a caller
	Timeout time.Duration
	Refunds bool // whether to refund some takes
	Seed    uint64
	Mistake leaseMistake
}

// leaseMistake is a deliberate mistake of a process.
type leaseMistake string

const (
	// The process spends units of leases after the end of their window.
	survivesItsWindow leaseMistake = "survives its window"
	// The clock that ends leases and sets DecidedAt stands still while the process is frozen.
	wrongClock leaseMistake = "wrong clock"
)

// refundedCost is the cost of takes that are refunded. No other request has this cost.
const refundedCost = 7

// policy returns the policy with a name.
func (w leaseWork) policy(name string) ratelimit.Policy {
	switch name {
	case "fixed":
		return ratelimit.FixedWindow{Limit: w.Limit, Window: w.Window}
	case "sliding":
		return ratelimit.SlidingWindow{Limit: w.Limit, Window: w.Window}
	case "bucket":
		return ratelimit.TokenBucket{Capacity: w.Limit, Refill: w.Limit, Every: w.Window}
	case "calendar": // a test with this policy uses withMonths
		return ratelimit.CalendarWindow{Limit: w.Limit, Unit: ratelimit.CalendarMonth}
	}
	return ratelimit.All(w.parts(name)...)
}

// parts returns the policies of the rows behind a policy name.
func (w leaseWork) parts(name string) []ratelimit.Policy {
	if name == "all" {
		return []ratelimit.Policy{
			ratelimit.SlidingWindow{Limit: w.Limit, Window: w.Window},
			ratelimit.FixedWindow{Limit: 2 * w.Limit, Window: 3 * w.Window},
			ratelimit.CalendarWindow{Limit: 2 * w.Limit, Unit: ratelimit.CalendarMonth},
		}
	}
	return []ratelimit.Policy{w.policy(name)}
}

// leaseUse is a process's report to its parent: a request was allowed, a take may be refunded soon, or the process has
// ended.
type leaseUse struct {
	Policy       string // also the key
	N            int64
	Leased       bool
	DecidedAt    int64                // microseconds since 1970, by the database's clock
	Call, Return int64                // microseconds since 1970, by this machine's clock
	In           []int64              // the windows of the rows
	ID           int64                // unique within the process
	BackOf       int64                // if not 0, the request with this ID may have been refunded
	Statements   int64                // statements of the process so far
	Ended        bool                 // the process has returned all leases, and sends no more reports
	Lease        ratelimit.LeaseEvent // the sums, in the last report

	process int
	back    bool // whether the take may have been refunded
}

// learn stores the content of a result.
func (u *leaseUse) learn(result ratelimit.Result) {
	u.Leased, u.DecidedAt = result.Source == ratelimit.SourceLease, result.DecidedAt.UnixMicro()
	for _, part := range partsOf(result) {
		u.In = append(u.In, part.In)
	}
}

// leaseProcess is the state that the callers of a process share.
type leaseProcess struct {
	leaseWork

	limiters   map[string]*ratelimit.Limiter
	statements atomic.Int64

	mu    sync.Mutex // guards the fields below
	tell  *gob.Encoder
	ids   int64
	lease ratelimit.LeaseEvent
	kept  []leaseUse // leased units that the process keeps by mistake
	awake time.Time  // the time of the last call
}

// leaseWorkVariable is the environment variable with the work of a child process of this test binary.
const leaseWorkVariable = "RATELIMIT_TEST_LEASES"

// leaseInChild does the work of a child process until its standard input ends. It reports each decision on its standard
// output. It returns the exit code.
func leaseInChild(text string) int {
	p := &leaseProcess{tell: gob.NewEncoder(os.Stdout), limiters: map[string]*ratelimit.Limiter{}, awake: time.Now()}
	err := json.Unmarshal([]byte(text), &p.leaseWork)
	if err == nil {
		ctx, cancel := context.WithCancel(context.Background())
		go func() {
			_, _ = io.Copy(io.Discard, os.Stdin)
			cancel()
		}()
		err = p.run(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func (p *leaseProcess) run(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, p.URL)
	if err != nil {
		return err
	}
	defer pool.Close()
	client, err := ratelimit.NewClient(pool, ratelimit.ClientConfig{
		Timeout: p.Timeout, Logger: slog.New(slog.DiscardHandler),
		Observer: &ratelimit.Observer{
			Statement: func(ratelimit.StatementEvent) { p.statements.Add(1) },
			Lease:     p.observe,
		},
	})
	if err != nil {
		return err
	}
	for _, name := range p.Names {
		p.limiters[name], err = client.Limiter(ratelimit.Config{
			Name: name, Policy: p.policy(name), Lease: &ratelimit.Lease{MaxShare: 0.1, MaxLength: p.Length},
		})
		if err != nil {
			return err
		}
	}
	var callers sync.WaitGroup
	errs := make([]error, p.Callers)
	for i := range errs {
		callers.Go(func() { errs[i] = p.call(ctx, rand.New(rand.NewPCG(p.Seed, uint64(i)))) })
	}
	callers.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	returned := client.ReturnLeases(context.Background())
	if returned != nil && !leaseFails(returned) {
		return returned
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.tell.Encode(leaseUse{Ended: true, Statements: p.statements.Load(), Lease: p.lease})
}

func (p *leaseProcess) observe(e ratelimit.LeaseEvent) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lease.Taken += e.Taken
	p.lease.Returned += e.Returned
	p.lease.Stranded += e.Stranded
}

// leaseFails tells whether an error comes from a database that cannot be reached.
func leaseFails(err error) bool {
	return errors.Is(err, ratelimit.ErrUnavailable) || errors.Is(err, ratelimit.ErrTimeout) ||
		errors.Is(err, ratelimit.ErrKeyHeld)
}

// draw returns a policy's name. Most calls use one of two names. The two names change after a while, so that their keys
// have room again when the names return.
func (p *leaseProcess) draw(random *rand.Rand, now int64) string {
	names := int64(len(p.Names))
	if random.IntN(5) == 0 {
		return p.Names[random.Int64N(names)]
	}
	slice := now / (p.Pace.Microseconds() * 3 / 4)
	return p.Names[(slice+random.Int64N(2)*(1+slice/names))%names]
}

// call runs one caller.
func (p *leaseProcess) call(ctx context.Context, random *rand.Rand) error {
	for ctx.Err() == nil {
		use := leaseUse{Call: time.Now().UnixMicro(), N: 1}
		use.Policy = p.draw(random, use.Call)
		switch {
		case p.Refunds && random.IntN(20) == 0:
			use.N = refundedCost
		case random.IntN(10) == 0:
			use.N = 1 + random.Int64N(refundedCost-1)
		}
		limiter := p.limiters[use.Policy]
		result, err := limiter.AllowN(context.Background(), use.Policy, use.N)
		use.Return = time.Now().UnixMicro()
		switch {
		case err != nil && !leaseFails(err):
			return err
		case err == nil && result.Allowed:
			id, err := p.report(use, result)
			if err == nil && p.Refunds && use.N == refundedCost {
				err = p.refund(limiter, result, id)
			}
			if err != nil {
				return err
			}
		}
		if p.Gap > 0 {
			pause(ctx, time.Duration(random.Int64N(int64(2*p.Gap))))
		}
	}
	return nil
}

// report tells the parent that a request was allowed.
func (p *leaseProcess) report(use leaseUse, result ratelimit.Result) (id int64, err error) {
	use.learn(result)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ids++
	use.ID, use.Statements = p.ids, p.statements.Load()
	if p.Mistake != "" {
		return use.ID, p.mistake(use)
	}
	return use.ID, p.tell.Encode(use)
}

// mistake is like report, but for a process that keeps leased units longer than it may.
func (p *leaseProcess) mistake(use leaseUse) error {
	now := time.UnixMicro(use.Return)
	frozen := now.Sub(p.awake) > p.Pace/2
	p.awake = now
	window := p.Window.Microseconds()
	var left []leaseUse
	for _, kept := range p.kept {
		switch {
		case p.Mistake == survivesItsWindow && use.Return >= kept.In[0]+window:
			kept.Call, kept.DecidedAt, kept.Return = use.Return, use.Return, use.Return
		case p.Mistake == wrongClock && (frozen || use.Return < kept.Return+window/20):
			if !frozen {
				left = append(left, kept)
				continue
			}
			kept.Call, kept.Return = use.Return, use.Return
		case p.Mistake == wrongClock: // the process has kept the units for as long as it may
		default:
			left = append(left, kept)
			continue
		}
		if err := p.tell.Encode(kept); err != nil {
			return err
		}
	}
	p.kept = left
	if use.Leased && use.ID%4 == 0 {
		p.kept = append(p.kept, use)
		return nil
	}
	return p.tell.Encode(use)
}

// refund refunds a take. It tells the parent first, because this process may be killed right after the refund.
func (p *leaseProcess) refund(limiter *ratelimit.Limiter, result ratelimit.Result, id int64) error {
	p.mu.Lock()
	p.ids++
	err := p.tell.Encode(leaseUse{ID: p.ids, BackOf: id, Statements: p.statements.Load()})
	p.mu.Unlock()
	if err != nil {
		return err
	}
	if _, err = limiter.Refund(context.Background(), result); err != nil && !leaseFails(err) {
		return err
	}
	return nil
}
