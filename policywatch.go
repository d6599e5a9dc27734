package ratelimit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/forget"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/rulebook"
)

const (
	// Run asks this often where it listens, and where it does not.
	listenPeriod, pollPeriod = time.Second, 500 * time.Millisecond
	// sweepPeriod is how often rows that have ended are dropped.
	sweepPeriod = time.Minute
	// againPerRow is how often all rows are read again, for each of them: at most 200 rows a second and process, so
	// that a hundred processes do not keep Postgres busy with it.
	againPerRow = 5 * time.Millisecond
	// gatherTime is how long changes that follow one another are gathered, so that a thousand of them cost a process
	// four questions a second. A change after a pause is asked for at once.
	gatherTime = 250 * time.Millisecond
	// hearing is how long a notification of our own may take. If it does not come, something between us and Postgres
	// keeps notifications back, and retryListening is how long that is taken for granted.
	hearing, retryListening = 3 * time.Second, 10 * time.Minute
	// mostHeard is how much may be notified between two answers, in bytes. It is far more than processes tell each
	// other, but any role that may log in can send more. Then Run asks twice a second for floodPause, and does not
	// listen.
	mostHeard, floodPause = 1 << 20, time.Minute
	// loadTimeout is for one question. A million rows take two seconds.
	loadTimeout = 20 * time.Second
	// checkTimeout is for one on a connection that has answered before. A connection that has died is found out by it.
	checkTimeout = 3 * time.Second
)

// maxPolicyText is longer than any policy that the database accepts.
const maxPolicyText = 4096

const alwaysBegun, noEnd = math.MinInt64, math.MaxInt64

// Run keeps the policies up to date until the context ends. It needs rights that deploy/grants.sql gives to
// applications: EXECUTE on rate_limit_policies, on rate_limit_report for shadows, and on rate_limit_ban for bans.
// Whatever fails is tried again, and logged when it begins and when it is over. What is known stays in force after the
// end. A second Run waits for the end of the first.
func (p *Policies) Run(ctx context.Context) {
	if p.turn.Take(ctx) != nil {
		return
	}
	defer p.turn.Pass()
	p.mu.Lock()
	p.running = true
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		p.running, p.status.Listening = false, false
		p.mu.Unlock()
	}()
	var helpers sync.WaitGroup
	defer helpers.Wait()
	helpers.Go(func() { p.ban(ctx) })
	helpers.Go(func() { p.tell(ctx) })
	helpers.Go(func() { p.report(ctx) })
	for deaf, flooded := false, false; ctx.Err() == nil; {
		began := time.Now()
		err := p.listen(ctx)
		flooded = flooded && time.Since(began) < floodPause
		switch {
		case ctx.Err() != nil:
		case errors.Is(err, errFlood):
			if !flooded {
				p.log(ctx, slog.LevelWarn, "ratelimit: more notifications arrive than processes send each other, so "+
					"for a minute changes of policies are asked for twice a second; any role that may log in can send "+
					"notifications on the channel "+forget.Channel)
			}
			flooded = true
			p.pollAlone(ctx)
		case errors.Is(err, errDeaf):
			if !deaf {
				p.log(ctx, slog.LevelInfo, "ratelimit: no notifications arrive, so changes of policies are asked for "+
					"twice a second; a pooler in transaction mode does that", slog.Any("error", err))
			}
			deaf = true
			p.poll(ctx, p.db, retryListening)
		default:
			_ = p.load(ctx, p.db, time.Second)
			sleep(ctx, pollPeriod)
		}
	}
}

// errDeaf tells that there is no way to listen.
var errDeaf = errors.New("ratelimit: cannot listen")

// errFlood tells that too much was notified.
var errFlood = errors.New("ratelimit: too many notifications")

// ifRefused says errDeaf too if the database has refused a statement, rather than been away.
func ifRefused(err error) error {
	if _, answered := errors.AsType[*pgconn.PgError](err); answered && (!isAway(err) || errors.Is(err, ErrReadOnly)) {
		return fmt.Errorf("%w: %w", errDeaf, err)
	}
	return err
}

// poll asks again and again, for as long as that says. On a connection of our own it ends with that.
func (p *Policies) poll(ctx context.Context, db DBTX, lasts time.Duration) {
	conn, own := db.(*pgx.Conn)
	for began := time.Now(); time.Since(began) < lasts && ctx.Err() == nil; {
		if err := p.load(ctx, db, loadTimeout); err != nil && own && conn.IsClosed() {
			return
		}
		sleep(ctx, pollPeriod)
	}
}

// pollAlone polls for floodPause, on a connection of our own, because the application may hold all those of the pool.
func (p *Policies) pollAlone(ctx context.Context) {
	conn, err := p.connect(ctx, func(*pgconn.PgConn, *pgconn.Notification) {})
	if err != nil {
		p.poll(ctx, p.db, floodPause)
		return
	}
	defer closeSoon(ctx, conn)
	p.poll(ctx, conn, floodPause)
}

func closeSoon(ctx context.Context, conn *pgx.Conn) {
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = conn.Close(closing)
}

// mailbox holds what has been notified since the last question.
type mailbox struct {
	payloads []string
	size     int
	flood    func() // called once there is too much
}

func (m *mailbox) put(_ *pgconn.PgConn, n *pgconn.Notification) {
	const overhead = 64 // of a notification
	if n.Channel != forget.Channel {
		return // the application's AfterConnect listens
	}
	if m.size += len(n.Payload) + overhead; m.size > mostHeard {
		m.payloads = nil
		m.flood()
		return
	}
	m.payloads = append(m.payloads, n.Payload)
}

// listen listens until it fails. It returns errDeaf if there is no point in trying again soon, and errFlood if too much
// is notified.
func (p *Policies) listen(ctx context.Context) error {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	box := mailbox{flood: func() { end(errFlood) }}
	conn, err := p.connect(ctx, box.put)
	if err != nil {
		return err
	}
	defer func() {
		p.setListening(false)
		closeSoon(ctx, conn)
	}()
	if _, err := conn.Exec(ctx, "LISTEN "+forget.Channel); err != nil {
		return ifRefused(pg.Translate(err, true)) // such as on a standby
	}
	// What changed before this is in the answer, and what changes later is told.
	hello := "hello " + strconv.FormatUint(rand.Uint64(), 36)
	first, greeted, heard := true, time.Time{}, false
	sent := make(chan error, 1)
	var greeting sync.WaitGroup
	defer greeting.Wait()
	defer end(nil)
	for {
		timeout := loadTimeout
		if !first {
			timeout = checkTimeout // there is little to tell
		}
		// The question tells of all that has been notified until now.
		if slices.Contains(box.payloads, hello) {
			heard = true
			p.setListening(true)
		}
		p.hear(box.payloads)
		box.payloads, box.size = nil, 0
		if err := p.load(ctx, conn, timeout); err != nil {
			return cmp.Or(context.Cause(ctx), err)
		}
		loaded := time.Now()
		greet := func() { greeting.Go(func() { sent <- p.notify(ctx, hello) }) }
		if first {
			// What is remembered of denials may be over by what nobody has heard.
			p.forgetIf(func(denialKey) bool { return true })
			// Another connection sends it, as others will send theirs. Nothing waits for it.
			greet()
		}
		first = false
		select {
		case err := <-sent:
			switch err = ifRefused(err); {
			case err == nil:
				greeted = time.Now()
			case errors.Is(err, errDeaf):
				return err
			default: // which says nothing about notifications
				greet()
			}
		default:
		}
		waited := !greeted.IsZero() && time.Since(greeted) > hearing
		if !heard && waited && !slices.Contains(box.payloads, hello) {
			return fmt.Errorf("%w: a notification of its own has not come back", errDeaf)
		}
		period := listenPeriod
		if !heard {
			period = pollPeriod
		}
		if len(box.payloads) == 0 {
			if err := next(ctx, conn, period); ctx.Err() != nil || err != nil && conn.IsClosed() {
				return cmp.Or(context.Cause(ctx), err)
			}
		}
		if since := time.Since(loaded); since < gatherTime {
			sleep(ctx, gatherTime-since)
		}
	}
}

// next waits for a notification, and not longer than the period.
func next(ctx context.Context, conn *pgx.Conn, period time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, period)
	defer cancel()
	return conn.PgConn().WaitForNotification(ctx)
}

func (p *Policies) setListening(listening bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.status.Listening = listening
}

// connect opens a connection of our own, as the pool would. hear gets what is notified on it.
func (p *Policies) connect(ctx context.Context, hear pgconn.NotificationHandler) (*pgx.Conn, error) {
	pool, ok := p.db.(*pgxpool.Pool)
	if !ok {
		return nil, fmt.Errorf("%w: %T is no *pgxpool.Pool", errDeaf, p.db)
	}
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	config := pool.Config()
	if config.BeforeConnect != nil {
		if err := config.BeforeConnect(ctx, config.ConnConfig); err != nil {
			return nil, err
		}
	}
	// A wait that ends without a notification must not end the connection.
	config.ConnConfig.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.DeadlineContextWatcherHandler{Conn: conn.Conn()}
	}
	config.ConnConfig.OnNotification = hear
	conn, err := pgx.ConnectConfig(ctx, config.ConnConfig)
	if err != nil {
		return nil, err
	}
	if config.AfterConnect != nil {
		err = config.AfterConnect(ctx, conn)
	}
	if err == nil { // all rows may take longer than the application's statements may
		_, err = conn.Exec(ctx, "SET statement_timeout = 0")
	}
	if err != nil {
		_ = conn.Close(ctx)
		return nil, err
	}
	return conn, nil
}

func (p *Policies) notify(ctx context.Context, payload string) error {
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	return query(ctx, p.db, false, "SELECT pg_catalog.pg_notify('rate_limit'::pg_catalog.text, $1::pg_catalog.text)",
		[]any{payload}, []any{nil}, func() error { return nil })
}

// load asks what has changed, and notes it. Now and then it asks for all rows too. Logical replication and restored
// dumps write rows that the history says nothing of.
func (p *Policies) load(ctx context.Context, db DBTX, timeout time.Duration) error {
	p.mu.Lock()
	known, knownAt := p.version, p.versionAt
	p.mu.Unlock()
	if err := p.loadSince(ctx, db, known, knownAt, timeout); err != nil || known == nil {
		return err
	}
	p.mu.Lock()
	rows, now := p.book.Len()+p.status.NoRoom, time.Now()
	due := now.Sub(p.completeAt) > max(listenPeriod, time.Duration(rows)*p.perRow) ||
		p.status.NoRoom > 0 && p.book.Len() < p.config.MaxRows
	if due {
		p.completeAt = now // also if it fails, or connections that die soon would be asked for nothing else
	}
	p.mu.Unlock()
	if !due {
		return nil
	}
	return p.loadSince(ctx, db, nil, 0, loadTimeout)
}

// loadSince asks what has changed since a version, or for all rows if it is nil.
func (p *Policies) loadSince(ctx context.Context, db DBTX, known *int64, knownAt int64, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	asked := time.Now()
	a, err := p.ask(ctx, db, known, knownAt)
	if err != nil {
		p.note(ctx, err)
		return err
	}
	// The clock was read before the answer came, so it is behind. Then no ban ends early.
	p.clock.Store(&databaseClock{micros: a.clock, at: time.Now()})
	changed := a.removed
	told := make(map[int64]bool, len(a.rules))
	for i, r := range a.rules {
		told[r.ID] = true
		r.Value.learnt = a.clock
		if known := p.book.Rule(r.ID); known != nil && saysTheSame(known, r) {
			a.rules[i] = known
		} else if known != nil {
			changed = append(changed, r.ID)
		}
	}
	if a.complete {
		changed = append(changed, p.book.IDs(func(r *rule) bool { return !told[r.ID] && r.Value.until > a.clock })...)
	}
	p.mu.Lock()
	full := p.status.NoRoom > 0
	p.mu.Unlock()
	if now := a.clock; full || now-p.swept > sweepPeriod.Microseconds() {
		p.swept = now
		ended := p.book.IDs(func(r *rule) bool { return r.Value.until <= now })
		p.book.Update(nil, ended, false, p.config.MaxRows)
	}
	noRoom := p.book.Update(a.rules, a.removed, a.complete, p.config.MaxRows)

	p.mu.Lock()
	p.version = new(a.version) // a copy, or all of the answer would stay in memory
	p.versionAt, p.asked = a.changed, asked
	for _, id := range changed {
		delete(p.shadows, id) // they counted for another policy
	}
	before, logged := p.status, map[int64]bool(nil)
	if a.complete {
		logged, p.unreadable = p.unreadable, map[int64]bool{}
		p.status.NoRoom, p.completeAt = 0, asked
	}
	for _, id := range a.removed {
		delete(p.unreadable, id)
	}
	for _, r := range a.rules {
		delete(p.unreadable, r.ID)
	}
	for id := range a.unreadable {
		p.unreadable[id] = true
	}
	p.status.Unreadable = len(p.unreadable)
	p.status.NoRoom = max(p.status.NoRoom, noRoom) // the next complete answer tells it exactly
	after := p.status
	p.mu.Unlock()

	for id, err := range a.unreadable {
		if !logged[id] {
			p.log(ctx, slog.LevelWarn, "ratelimit: a policy cannot be read, and is passed over", slog.Int64("id", id),
				slog.Any("error", err))
		}
	}
	if after.NoRoom > 0 && before.NoRoom == 0 {
		p.log(ctx, slog.LevelError, "ratelimit: there are more policies than this process may hold; some are left out",
			slog.Int("left_out", after.NoRoom), slog.Int("max_rows", p.config.MaxRows))
	}
	p.note(ctx, nil)
	return nil
}

// note remembers whether the database could be asked, and logs when that changes.
func (p *Policies) note(ctx context.Context, err error) {
	if err != nil && ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return // Run ends
	}
	p.mu.Lock()
	before := p.status.Err
	p.status.Err = err
	p.mu.Unlock()
	switch {
	case err != nil:
		p.failed.Store(&err)
		if before == nil || ErrorKind(before) != ErrorKind(err) {
			p.log(ctx, slog.LevelWarn, "ratelimit: policies cannot be read, and what was known last stays in force; "+
				"further failures are not logged until it works again", slog.Any("error", err))
		}
		return
	case before != nil:
		p.log(ctx, slog.LevelInfo, "ratelimit: policies can be read again")
	}
	p.failed.Store(nil)
	select {
	case <-p.ready:
	default:
		close(p.ready)
	}
}

// policyAnswer is what rate_limit_policies has returned.
type policyAnswer struct {
	version, changed, clock int64
	complete                bool
	rules                   []*rule
	removed                 []int64
	unreadable              map[int64]error // by the id
}

func (p *Policies) ask(ctx context.Context, db DBTX, known *int64, knownAt int64) (*policyAnswer, error) {
	a := &policyAnswer{unreadable: map[int64]error{}}
	var row *int64
	var removed bool
	var name, mode, policy string
	var automatic bool
	var key, prefix *string
	var from, until *int64
	read := map[nameAndText]sharedPolicy{} // most rows have one of a few texts
	names := map[string]string{}
	targets := []any{
		&a.version, &a.changed, &a.complete, &a.clock, &row, &removed, &name, &key, &prefix, &mode, &policy,
		&from, &until, &automatic,
	}
	args := []any{known, knownAt}
	err := query(ctx, db, true, pg.Qualify(policiesStatement, p.config.Schema), args, targets, func() error {
		if row == nil {
			return nil
		}
		id := *row
		if removed {
			a.removed = append(a.removed, id)
			return nil
		}
		if same, ok := names[name]; ok {
			name = same // or each row would keep a name of its own
		}
		names[name] = name
		r := &rule{
			ID: id, Name: name, From: math.MinInt64, Weak: automatic,
			Value: ruling{mode: ruleMode(mode), from: alwaysBegun, until: noEnd},
		}
		if from != nil {
			r.From = *from
		}
		if r.From > a.clock {
			r.Value.from = r.From
		}
		if until != nil {
			r.Value.until = *until
		}
		switch {
		case key != nil:
			r.Target, r.Text = rulebook.Key, *key
		case prefix != nil:
			r.Target, r.Text = rulebook.Prefix, *prefix
		}
		r.Shadow = r.Value.mode == modeShadow
		if err := r.Value.readPolicy(name, policy, read); err != nil {
			a.unreadable[id] = err
		} else if r.Value.until > a.clock {
			a.rules = append(a.rules, r)
			return nil
		}
		a.removed = append(a.removed, id) // what it said before holds no longer
		return nil
	})
	return a, (&database{schema: p.config.Schema}).explainVersion(ctx, db, err)
}

// nameAndText are what rows have in common that share a policy: a limiter's name, and the text of the policy.
type nameAndText struct{ name, text string }

// readPolicy reads the text of a row's policy.
func (v *ruling) readPolicy(name, text string, read map[nameAndText]sharedPolicy) error {
	switch v.mode {
	case modeOff, modeDeny:
		return nil
	case modeEnforce, modeShadow:
	default:
		return fmt.Errorf("ratelimit: the mode %q is not known", v.mode)
	}
	if len(text) > maxPolicyText {
		return fmt.Errorf("ratelimit: the text of the policy has %d bytes", len(text))
	}
	shared, ok := read[nameAndText{name, text}]
	if !ok {
		policy, err := ParsePolicy(text)
		if err != nil {
			return err
		}
		shared = sharedPolicy{policy, new(atomic.Pointer[Limiter])}
		read[nameAndText{name, text}] = shared
	}
	v.sharedPolicy = shared
	if v.mode == modeShadow {
		name += shadowSuffix
	}
	return validateName(name, shared.policy)
}

func (p *Policies) log(ctx context.Context, level slog.Level, message string, attributes ...slog.Attr) {
	cmp.Or(p.config.Logger, slog.Default()).LogAttrs(context.WithoutCancel(ctx), level, message, attributes...)
}

func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
