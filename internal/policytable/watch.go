package policytable

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit/internal/pg"
)

// Channel is the channel of all notifications between processes: about changed policies, and about denials to forget.
const Channel = "rate_limit"

const (
	// listenPeriod is the pause between two queries while Run listens, and pollPeriod while Run does not listen.
	listenPeriod, pollPeriod = time.Second, 500 * time.Millisecond
	// gatherTime is the shortest time between two queries. So even a thousand changes cost a process at most four
	// queries a second. The first change after a pause is read at once.
	gatherTime = 250 * time.Millisecond
	// patience is how long a query may take on a connection that has answered before, because a slower connection is
	// probably dead. This process's own notification may take as long to come back. If it does not come back, a pooler
	// drops notifications. Run tries to listen again after retryListening.
	patience, retryListening = 3 * time.Second, 10 * time.Minute
	// MostHeard is the largest number of bytes of notifications between two queries. Processes send far less, but any
	// role that may log in can send more. Above MostHeard, Run polls for floodPause, and does not listen.
	MostHeard, floodPause = 1 << 20, time.Minute
)

// Run keeps the table up to date until the context ends. After an error it tries again. A second Run waits until the
// first Run ends.
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
					"notifications on the channel "+Channel)
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
			_ = t.ReadChanges(ctx, t.db, t.Patience)
			sleep(ctx, pollPeriod)
		}
	}
}

// errDeaf means that this process cannot listen.
var errDeaf = errors.New("ratelimit: cannot listen")

// errFlood means that there were too many notifications.
var errFlood = errors.New("ratelimit: too many notifications")

// ifRefused adds errDeaf to err if the database refused a statement, but not if the database was away.
func ifRefused(err error) error {
	_, answered := errors.AsType[*pgconn.PgError](err)
	if answered && (!pg.IsAway(err) || errors.Is(err, pg.ErrReadOnly)) {
		return fmt.Errorf("%w: %w", errDeaf, err)
	}
	return err
}

// poll repeats the query until the context ends or the given duration has passed. On a *pgx.Conn, it also ends when the
// connection closes.
func (t *Table) poll(ctx context.Context, db pg.DB, lasts time.Duration) {
	conn, own := db.(*pgx.Conn)
	for began := time.Now(); time.Since(began) < lasts && ctx.Err() == nil; {
		if err := t.ReadChanges(ctx, db, readTimeout); err != nil && own && conn.IsClosed() {
			return
		}
		sleep(ctx, pollPeriod)
	}
}

// pollAlone polls for floodPause on a new connection, because the application may use all connections of the pool.
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
	Flood    func() // called once when there are too many notifications
}

// Put is the connection's handler of notifications.
func (m *Mailbox) Put(_ *pgconn.PgConn, n *pgconn.Notification) {
	const overhead = 64 // estimated bytes of a notification beside its payload
	if n.Channel != Channel {
		return // the application's AfterConnect listens on another channel
	}
	if m.size += len(n.Payload) + overhead; m.size > MostHeard {
		m.Payloads = nil
		m.Flood()
		return
	}
	m.Payloads = append(m.Payloads, n.Payload)
}

// listen listens until there is an error. It returns errDeaf if a new attempt would soon fail too, and errFlood after
// too many notifications.
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
	if _, err := conn.Exec(ctx, "LISTEN "+Channel); err != nil {
		return ifRefused(pg.Translate(err, true)) // a standby refuses LISTEN, for example
	}
	// The first query reads all earlier changes, and notifications announce all later changes.
	hello := "hello " + strconv.FormatUint(rand.Uint64(), 36)
	first, greeted, heard := true, time.Time{}, false
	sent := make(chan error, 1)
	var greeting sync.WaitGroup
	defer greeting.Wait()
	defer end(nil)
	for {
		timeout := readTimeout
		if !first {
			timeout = t.Patience // there are few changes to read
		}
		// The following query covers all notifications so far.
		if slices.Contains(box.Payloads, hello) {
			heard = true
			t.setListening(true)
		}
		t.hearForgotten(box.Payloads)
		box.Payloads, box.size = nil, 0
		if err := t.ReadChanges(ctx, conn, timeout); err != nil {
			return cmp.Or(context.Cause(ctx), err)
		}
		read := time.Now()
		greet := func() { greeting.Go(func() { sent <- t.notify(ctx, hello) }) }
		if first {
			// Notifications may have been missed before, so remembered denials may be outdated.
			t.forgetIf(func(string, string) bool { return true })
			// Another connection sends hello, as other processes do. The loop does not wait for this statement.
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
			default: // the error says nothing about notifications
				greet()
			}
		default:
		}
		waited := !greeted.IsZero() && time.Since(greeted) > t.Patience
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
		if since := time.Since(read); since < gatherTime {
			sleep(ctx, gatherTime-since)
		}
	}
}

// next waits for a notification, for at most the duration period.
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

// connect opens a connection for notifications. The function hear gets them.
func (t *Table) connect(ctx context.Context, hear pgconn.NotificationHandler) (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	conn, err := pg.ConnectBeside(ctx, t.db, hear)
	if errors.Is(err, pg.ErrNoPool) {
		err = fmt.Errorf("%w: %w", errDeaf, err)
	}
	return conn, err
}

func (t *Table) notify(ctx context.Context, payload string) error {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	return pg.Query(ctx, t.db, false, notifyStatement,
		[]any{payload}, []any{nil}, func() error { return nil })
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
