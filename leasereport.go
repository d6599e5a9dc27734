package ratelimit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pg"
)

const (
	maxReportedLeases = 100
	// leaseReportPause is how long none is sent after one has failed. Where the function is missing, each costs the
	// server a line in its log.
	leaseReportPause = time.Minute
)

// leaseReport tells the database what this process holds, for `pgratelimit leases`. No decision depends on it, and no
// call waits for it. A reportPeriod after something was taken ahead, the timer of leases sends a report, and then one
// in each period until nothing is held. The last one says so. nil reports nothing.
type leaseReport struct {
	database *database
	timeout  time.Duration
	logger   *slog.Logger // nil: slog.Default

	mu       sync.Mutex
	due      time.Duration // when the next one leaves, by the clock of leases; 0: never
	earliest time.Duration // when one may leave again after one has failed

	sending sync.Mutex // from the look at what is held until the database has it; guards what follows
	process string     // who reports; "" before the first report
	told    bool       // the database may have rows of this process
	failing string     // the kind of the last error, until it works again
}

// newLeaseReport returns nil if there is nobody to report to, or the clock is that of a test.
func newLeaseReport(d *database, config *ClientConfig) *leaseReport {
	if d.memory != nil || d.clock != nil || !d.pooled() {
		return nil
	}
	return &leaseReport{database: d, timeout: min(config.Timeout, reportPeriod/2), logger: config.Logger}
}

// processName tells clients apart. The random number is there because a process may have several, and because
// processes in containers may share host and process id.
func processName() string {
	host, _ := os.Hostname() // the rest will have to do
	host = strings.Map(func(r rune) rune {
		if r <= ' ' || r > '~' {
			return '?' // not every encoding has all characters
		}
		return r
	}, host)
	//nolint:gosec // it need not be hard to guess
	return fmt.Sprintf("%s/%d/%06x", host[:min(len(host), 64)], os.Getpid(), rand.Uint32N(1<<24))
}

// expect is for when something was taken ahead. It returns when a report is due, or 0 if that was known before.
func (r *leaseReport) expect(now time.Duration) (due time.Duration) {
	if r == nil {
		return 0
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.due != 0 {
		return 0
	}
	r.due = max(now+reportPeriod, r.earliest)
	return r.due
}

// turn tells whether a report is due, and else when the next one is, or never.
func (r *leaseReport) turn(now time.Duration) (due bool, next time.Duration) {
	if r == nil {
		return false, model.Never
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.due == 0 || now < r.due {
		return false, cmp.Or(r.due, model.Never)
	}
	r.due = 0
	return true, model.Never
}

// tell sends a report, and has the timer send the next one.
func (ls *leases) tell() {
	r := ls.report
	holds, err := r.send(ls)
	now := ls.now().elapsed
	if err != nil {
		r.mu.Lock()
		r.earliest = now + leaseReportPause
		r.mu.Unlock()
	}
	if !holds {
		return
	}
	if due := r.expect(now); due != 0 {
		ls.wakeAt(due, now)
	}
}

// tellReturned reports at once that nothing is held any more. It returns when that has ended, or ctx has.
func (ls *leases) tellReturned(ctx context.Context) {
	if ls.report == nil {
		return
	}
	done := make(chan struct{})
	go func() {
		_, _ = ls.report.send(ls)
		close(done)
	}()
	select {
	case <-done:
	case <-ctx.Done():
	}
}

// send reports what is held, and tells whether that is anything. If it is nothing, and the database was told so before,
// there is nothing to report. An error is logged already.
func (r *leaseReport) send(ls *leases) (holds bool, err error) {
	r.sending.Lock()
	defer r.sending.Unlock()
	all := ls.largest()
	if len(all) == 0 && !r.told {
		return false, nil
	}
	pool, ok := r.database.db.(*pgxpool.Pool)
	if ok && len(all) > 0 && pool.Stat().AcquiredConns() == pool.Stat().MaxConns() {
		return true, nil // the callers need them all
	}
	r.process = cmp.Or(r.process, processName())
	n := len(all)
	names, keys, durables := make([]string, n), make([]string, n), make([]bool, n)
	units, ends := make([]int64, n), make([]int64, n)
	for i, h := range all {
		names[i], keys[i], durables[i] = h.space.name, h.key, h.space.durable
		units[i], ends[i] = h.units, model.MicrosUp(h.lasts)
	}
	ctx, cancel := context.WithTimeout(context.Background(), r.timeout)
	defer cancel()
	d := r.database
	err = query(ctx, d.db, true, pg.Qualify(reportLeasesStatement, d.schema),
		[]any{r.process, names, keys, durables, units, ends}, []any{nil}, func() error { return nil })
	err = d.explainVersion(ctx, d.db, err)
	r.told = n > 0 // also after an error, which may have come after the commit
	r.note(ctx, err)
	return n > 0, err
}

// note logs an error, but for an outage, which the calls of this process meet too, or a pool that was closed.
func (r *leaseReport) note(ctx context.Context, err error) {
	kind := ErrorKind(err)
	if err != nil && kind != r.failing && !errors.Is(err, ErrUnavailable) {
		cmp.Or(r.logger, slog.Default()).LogAttrs(ctx, slog.LevelWarn,
			"ratelimit: what leases hold cannot be reported, which changes no decision; "+
				"further failures are not logged until it works again", slog.Any("error", err))
	}
	r.failing = kind
}

// holding is what is left of a lease.
type holding struct {
	space *keyspace
	key   string
	units int64
	lasts time.Duration // from now
}

// largest returns the leases of which most is left.
func (ls *leases) largest() (all []holding) {
	shards := ls.shards.Load()
	if shards == nil {
		return nil
	}
	now := ls.now()
	for i := range shards {
		s := &shards[i]
		s.mu.Lock()
		for k, e := range s.keys {
			if left := e.left(now); left > 0 {
				all = append(all, holding{k.space, k.key, left, e.lasts - now.since(e.asked)})
			}
		}
		s.mu.Unlock()
	}
	slices.SortFunc(all, func(a, b holding) int { return cmp.Compare(b.units, a.units) })
	return all[:min(len(all), maxReportedLeases)]
}
