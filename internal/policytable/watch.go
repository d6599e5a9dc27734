package policytable

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
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/forget"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/rulebook"
)

const (
	// Run polls this often, with and without notifications.
	listenPeriod, pollPeriod = time.Second, 500 * time.Millisecond
	// sweepPeriod is how often ended rows are dropped.
	sweepPeriod = time.Minute
	// againPerRow is the pause between two full reads, for each row. It means at most 200 rows a second and process, so
	// that a hundred processes do not overload Postgres.
	againPerRow = 5 * time.Millisecond
	// gatherTime is how long consecutive changes are gathered, so that a thousand changes cost a process four queries a
	// second. The first change after a pause is read at once.
	gatherTime = 250 * time.Millisecond
	// hearing is how long our own notification may take. If it does not arrive, something between us and Postgres drops
	// notifications. Run tries to listen again after retryListening.
	hearing, retryListening = 3 * time.Second, 10 * time.Minute
	// MostHeard is the limit for notifications between two answers, in bytes. Processes send far less, but any role
	// that may log in can send more. Above the limit, Run polls twice a second for floodPause, and does not listen.
	MostHeard, floodPause = 1 << 20, time.Minute
	// loadTimeout limits one query. Reading a million rows takes two seconds.
	loadTimeout = 20 * time.Second
	// checkTimeout limits a query on a connection that has answered before. It detects a dead connection.
	checkTimeout = 3 * time.Second
)

// maxPolicyText is longer than any policy that the database accepts.
const maxPolicyText = 4096

// These are the times of a row without a beginning, and of one without an end.
const (
	AlwaysBegun = math.MinInt64
	NoEnd       = math.MaxInt64
)

// Run keeps the table up to date until the context ends. After any error it tries again. A second Run waits until the
// first one ends.
func (t *Table) Run(ctx context.Context) {
	if t.turn.Take(ctx) != nil {
		return
	}
	defer t.turn.Pass()
	t.Mu.Lock()
	t.Running = true
	t.Mu.Unlock()
	defer func() {
		t.Mu.Lock()
		t.Running, t.status.Listening = false, false
		t.Mu.Unlock()
	}()
	var helpers sync.WaitGroup
	defer helpers.Wait()
	helpers.Go(func() { t.ban(ctx) })
	helpers.Go(func() { t.tell(ctx) })
	helpers.Go(func() { t.report(ctx) })
	for deaf, flooded := false, false; ctx.Err() == nil; {
		began := time.Now()
		err := t.listen(ctx)
		flooded = flooded && time.Since(began) < floodPause
		switch {
		case ctx.Err() != nil:
		case errors.Is(err, errFlood):
			if !flooded {
				t.log(ctx, slog.LevelWarn, "ratelimit: more notifications arrive than processes send each other, so "+
					"for a minute changes of policies are asked for twice a second; any role that may log in can send "+
					"notifications on the channel "+forget.Channel)
			}
			flooded = true
			t.pollAlone(ctx)
		case errors.Is(err, errDeaf):
			if !deaf {
				t.log(ctx, slog.LevelInfo, "ratelimit: no notifications arrive, so changes of policies are asked for "+
					"twice a second; a pooler in transaction mode does that", slog.Any("error", err))
			}
			deaf = true
			t.poll(ctx, t.db, retryListening)
		default:
			_ = t.Load(ctx, t.db, time.Second)
			sleep(ctx, pollPeriod)
		}
	}
}

// errDeaf says that listening is not possible.
var errDeaf = errors.New("ratelimit: cannot listen")

// errFlood says that there were too many notifications.
var errFlood = errors.New("ratelimit: too many notifications")

// ifRefused adds errDeaf if the database refused a statement, but not if it was away.
func ifRefused(err error) error {
	_, answered := errors.AsType[*pgconn.PgError](err)
	if answered && (!pg.IsAway(err) || errors.Is(err, pg.ErrReadOnly)) {
		return fmt.Errorf("%w: %w", errDeaf, err)
	}
	return err
}

// poll queries repeatedly until the context ends. On our own connection, it also ends with the connection.
func (t *Table) poll(ctx context.Context, db pg.DB, lasts time.Duration) {
	conn, own := db.(*pgx.Conn)
	for began := time.Now(); time.Since(began) < lasts && ctx.Err() == nil; {
		if err := t.Load(ctx, db, loadTimeout); err != nil && own && conn.IsClosed() {
			return
		}
		sleep(ctx, pollPeriod)
	}
}

// pollAlone polls for floodPause on our own connection, because the application may use all connections of the pool.
func (t *Table) pollAlone(ctx context.Context) {
	conn, err := t.connect(ctx, func(*pgconn.PgConn, *pgconn.Notification) {})
	if err != nil {
		t.poll(ctx, t.db, floodPause)
		return
	}
	defer closeSoon(ctx, conn)
	t.poll(ctx, conn, floodPause)
}

func closeSoon(ctx context.Context, conn *pgx.Conn) {
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = conn.Close(closing)
}

// Mailbox holds the notifications since the last query.
type Mailbox struct {
	Payloads []string
	size     int
	Flood    func() // called once there are too many
}

// Put is the connection's handler for notifications.
func (m *Mailbox) Put(_ *pgconn.PgConn, n *pgconn.Notification) {
	const overhead = 64 // of a notification
	if n.Channel != forget.Channel {
		return // the application's AfterConnect already listens
	}
	if m.size += len(n.Payload) + overhead; m.size > MostHeard {
		m.Payloads = nil
		m.Flood()
		return
	}
	m.Payloads = append(m.Payloads, n.Payload)
}

// listen listens until an error. It returns errDeaf if a new attempt would soon fail again, and errFlood after too many
// notifications.
func (t *Table) listen(ctx context.Context) error {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	box := Mailbox{Flood: func() { end(errFlood) }}
	conn, err := t.connect(ctx, box.Put)
	if err != nil {
		return err
	}
	defer func() {
		t.setListening(false)
		closeSoon(ctx, conn)
	}()
	if _, err := conn.Exec(ctx, "LISTEN "+forget.Channel); err != nil {
		return ifRefused(pg.Translate(err, true)) // for example on a standby
	}
	// The answer has all earlier changes, and notifications announce all later ones.
	hello := "hello " + strconv.FormatUint(rand.Uint64(), 36)
	first, greeted, heard := true, time.Time{}, false
	sent := make(chan error, 1)
	var greeting sync.WaitGroup
	defer greeting.Wait()
	defer end(nil)
	for {
		timeout := loadTimeout
		if !first {
			timeout = checkTimeout // there are few changes to read
		}
		// This query covers all notifications until now.
		if slices.Contains(box.Payloads, hello) {
			heard = true
			t.setListening(true)
		}
		t.hear(box.Payloads)
		box.Payloads, box.size = nil, 0
		if err := t.Load(ctx, conn, timeout); err != nil {
			return cmp.Or(context.Cause(ctx), err)
		}
		loaded := time.Now()
		greet := func() { greeting.Go(func() { sent <- t.notify(ctx, hello) }) }
		if first {
			// Notifications may have been missed, so remembered denials may be outdated.
			t.forgetIf(func(string, string) bool { return true })
			// Another connection sends it, as other processes do. Nothing waits until it is sent.
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
			default: // this says nothing about notifications
				greet()
			}
		default:
		}
		waited := !greeted.IsZero() && time.Since(greeted) > hearing
		if !heard && waited && !slices.Contains(box.Payloads, hello) {
			return fmt.Errorf("%w: a notification of its own has not come back", errDeaf)
		}
		period := listenPeriod
		if !heard {
			period = pollPeriod
		}
		if len(box.Payloads) == 0 {
			if err := next(ctx, conn, period); ctx.Err() != nil || err != nil && conn.IsClosed() {
				return cmp.Or(context.Cause(ctx), err)
			}
		}
		if since := time.Since(loaded); since < gatherTime {
			sleep(ctx, gatherTime-since)
		}
	}
}

// next waits for a notification, at most for the period.
func next(ctx context.Context, conn *pgx.Conn, period time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, period)
	defer cancel()
	return conn.PgConn().WaitForNotification(ctx)
}

func (t *Table) setListening(listening bool) {
	t.Mu.Lock()
	defer t.Mu.Unlock()
	t.status.Listening = listening
}

// connect opens our own connection with the pool's settings. hear gets its notifications.
func (t *Table) connect(ctx context.Context, hear pgconn.NotificationHandler) (*pgx.Conn, error) {
	pool, ok := t.db.(*pgxpool.Pool)
	if !ok {
		return nil, fmt.Errorf("%w: %T is no *pgxpool.Pool", errDeaf, t.db)
	}
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	config := pool.Config()
	if config.BeforeConnect != nil {
		if err := config.BeforeConnect(ctx, config.ConnConfig); err != nil {
			return nil, err
		}
	}
	// A wait that ends without a notification must keep the connection open.
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
	if err == nil { // reading all rows may take longer than the application allows its statements
		_, err = conn.Exec(ctx, "SET statement_timeout = 0")
	}
	if err != nil {
		_ = conn.Close(ctx)
		return nil, err
	}
	return conn, nil
}

func (t *Table) notify(ctx context.Context, payload string) error {
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	return pg.Query(ctx, t.db, false, "SELECT pg_catalog.pg_notify('rate_limit'::pg_catalog.text, $1::pg_catalog.text)",
		[]any{payload}, []any{nil}, func() error { return nil })
}

// Load reads the changes and stores them. From time to time it reads all rows. Logical replication and restored dumps
// write rows without an entry in the history.
func (t *Table) Load(ctx context.Context, db pg.DB, timeout time.Duration) error {
	t.Mu.Lock()
	known, knownAt := t.Version, t.versionAt
	t.Mu.Unlock()
	if err := t.loadSince(ctx, db, known, knownAt, timeout); err != nil || known == nil {
		return err
	}
	t.Mu.Lock()
	rows, now := t.Book.Len()+t.status.NoRoom, time.Now()
	due := now.Sub(t.CompleteAt) > max(listenPeriod, time.Duration(rows)*t.PerRow) ||
		t.status.NoRoom > 0 && t.Book.Len() < t.config.MaxRows
	if due {
		t.CompleteAt = now // set after errors too, or connections that die soon would only ever read all rows
	}
	t.Mu.Unlock()
	if !due {
		return nil
	}
	return t.loadSince(ctx, db, nil, 0, loadTimeout)
}

// loadSince reads the changes since a version, or all rows if it is nil.
func (t *Table) loadSince(ctx context.Context, db pg.DB, known *int64, knownAt int64, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	asked := time.Now()
	a, err := t.ask(ctx, db, known, knownAt)
	if err != nil {
		t.note(ctx, err)
		return err
	}
	// The clock was read before the answer arrived, so it is late, and no ban ends early.
	t.Clock.Store(&DatabaseClock{Micros: a.clock, At: time.Now()})
	changed := a.removed
	told := make(map[int64]bool, len(a.rules))
	for i, r := range a.rules {
		told[r.ID] = true
		r.Value.Learnt = a.clock
		if known := t.Book.Rule(r.ID); known != nil && saysTheSame(known, r) {
			a.rules[i] = known
		} else if known != nil {
			changed = append(changed, r.ID)
		}
	}
	if a.complete {
		changed = append(changed, t.Book.IDs(func(r *Row) bool { return !told[r.ID] && r.Value.Until > a.clock })...)
	}
	t.Mu.Lock()
	full := t.status.NoRoom > 0
	t.Mu.Unlock()
	if now := a.clock; full || now-t.swept > sweepPeriod.Microseconds() {
		t.swept = now
		ended := t.Book.IDs(func(r *Row) bool { return r.Value.Until <= now })
		t.Book.Update(nil, ended, false, t.config.MaxRows)
	}
	noRoom := t.Book.Update(a.rules, a.removed, a.complete, t.config.MaxRows)

	t.Mu.Lock()
	t.Version = new(a.version) // a copy, or the whole answer would stay in memory
	t.versionAt, t.asked = a.changed, asked
	for _, id := range changed {
		delete(t.Shadows, id) // they counted for another policy
	}
	before, logged := t.status, map[int64]bool(nil)
	if a.complete {
		logged, t.unreadable = t.unreadable, map[int64]bool{}
		t.status.NoRoom, t.CompleteAt = 0, asked
	}
	for _, id := range a.removed {
		delete(t.unreadable, id)
	}
	for _, r := range a.rules {
		delete(t.unreadable, r.ID)
	}
	for id := range a.unreadable {
		t.unreadable[id] = true
	}
	t.status.Unreadable = len(t.unreadable)
	t.status.NoRoom = max(t.status.NoRoom, noRoom) // the next full read corrects it
	after := t.status
	t.Mu.Unlock()

	for id, err := range a.unreadable {
		if !logged[id] {
			t.log(ctx, slog.LevelWarn, "ratelimit: a policy cannot be read, and is passed over", slog.Int64("id", id),
				slog.Any("error", err))
		}
	}
	if after.NoRoom > 0 && before.NoRoom == 0 {
		t.log(ctx, slog.LevelError, "ratelimit: there are more policies than this process may hold; some are left out",
			slog.Int("left_out", after.NoRoom), slog.Int("max_rows", t.config.MaxRows))
	}
	t.note(ctx, nil)
	return nil
}

// note stores whether the database could be queried, and logs a change.
func (t *Table) note(ctx context.Context, err error) {
	if err != nil && ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return // Run ends
	}
	t.Mu.Lock()
	before := t.status.Err
	t.status.Err = err
	t.Mu.Unlock()
	switch {
	case err != nil:
		t.failed.Store(&err)
		if before == nil || pg.KindOf(before) != pg.KindOf(err) {
			t.log(ctx, slog.LevelWarn, "ratelimit: policies cannot be read, and what was known last stays in force; "+
				"further failures are not logged until it works again", slog.Any("error", err))
		}
		return
	case before != nil:
		t.log(ctx, slog.LevelInfo, "ratelimit: policies can be read again")
	}
	t.failed.Store(nil)
	select {
	case <-t.Ready:
	default:
		close(t.Ready)
	}
}

// policyAnswer is an answer of rate_limit_policies.
type policyAnswer struct {
	version, changed, clock int64
	complete                bool
	rules                   []*Row
	removed                 []int64
	unreadable              map[int64]error // by the id
}

func (t *Table) ask(ctx context.Context, db pg.DB, known *int64, knownAt int64) (*policyAnswer, error) {
	a := &policyAnswer{unreadable: map[int64]error{}}
	var row *int64
	var removed bool
	var name, mode, policy string
	var automatic bool
	var key, prefix *string
	var from, until *int64
	read := map[nameAndText]*model.Policy{} // most rows share a few texts
	names := map[string]string{}
	targets := []any{
		&a.version, &a.changed, &a.complete, &a.clock, &row, &removed, &name, &key, &prefix, &mode, &policy,
		&from, &until, &automatic,
	}
	args := []any{known, knownAt}
	err := pg.Query(ctx, db, true, pg.Qualify(policiesStatement, t.config.Schema), args, targets, func() error {
		if row == nil {
			return nil
		}
		id := *row
		if removed {
			a.removed = append(a.removed, id)
			return nil
		}
		if same, ok := names[name]; ok {
			name = same // otherwise each row would keep its own copy of the name
		}
		names[name] = name
		r := &Row{
			ID: id, Name: name, From: math.MinInt64, Weak: automatic,
			Value: Ruling{Mode: Mode(mode), From: AlwaysBegun, Until: NoEnd},
		}
		if from != nil {
			r.From = *from
		}
		if r.From > a.clock {
			r.Value.From = r.From
		}
		if until != nil {
			r.Value.Until = *until
		}
		switch {
		case key != nil:
			r.Target, r.Text = rulebook.Key, *key
		case prefix != nil:
			r.Target, r.Text = rulebook.Prefix, *prefix
		}
		r.Shadow = r.Value.Mode == modeShadow
		var err error
		if r.Value.Policy, err = t.readPolicy(r, policy, read); err != nil {
			a.unreadable[id] = err
		} else if r.Value.Until > a.clock {
			a.rules = append(a.rules, r)
			return nil
		}
		a.removed = append(a.removed, id) // its old content no longer holds
		return nil
	})
	return a, pg.ExplainVersion(ctx, db, t.config.Schema, err)
}

// nameAndText are the same for rows that share a policy.
type nameAndText struct {
	name, text string
	shadow     bool
}

// readPolicy parses a row's policy.
func (t *Table) readPolicy(r *Row, text string, read map[nameAndText]*model.Policy) (*model.Policy, error) {
	switch r.Value.Mode {
	case ModeOff, modeDeny:
		return nil, nil //nolint:nilnil // a row of this mode has none
	case ModeEnforce, modeShadow:
	default:
		return nil, fmt.Errorf("ratelimit: the mode %q is not known", r.Value.Mode)
	}
	if len(text) > maxPolicyText {
		return nil, fmt.Errorf("ratelimit: the text of the policy has %d bytes", len(text))
	}
	of := nameAndText{r.Name, text, r.Shadow}
	if policy := read[of]; policy != nil {
		return policy, nil
	}
	policy, err := t.config.Read(r.Name, text, r.Shadow)
	read[of] = policy
	return policy, err
}

func (t *Table) log(ctx context.Context, level slog.Level, message string, attributes ...slog.Attr) {
	cmp.Or(t.config.Logger, slog.Default()).LogAttrs(context.WithoutCancel(ctx), level, message, attributes...)
}

func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
