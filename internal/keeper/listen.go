package keeper

import (
	"context"
	"crypto/rand"
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit/internal/pg"
)

// Channel is the channel of the notifications about places in line that have become slots. The payload is the id, a
// space and the fence, such as "0b0e5ee2-6a4d-4f0c-9d0c-1d2f7f0a6b1c 42". Any role that may log in can send others.
const Channel = "rate_limit_slot"

// patience is how long a connection, or a notification of one's own, may take to come.
const patience = 5 * time.Second

// ErrDeaf means that notifications do not arrive. A pooler in transaction mode drops them.
var ErrDeaf = errors.New("ratelimit: a notification of its own has not come back")

// ListenOn returns a function for Config.Listen. It opens a connection beside those of the pool db. It says that it is
// ready when a notification of its own has come back.
func ListenOn(db pg.DB) func(ctx context.Context, ready func(), heard func(Told)) error {
	return func(ctx context.Context, ready func(), heard func(Told)) error {
		hello, greeted := "hello "+rand.Text(), false
		soon, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		conn, err := pg.ConnectBeside(soon, db, func(_ *pgconn.PgConn, n *pgconn.Notification) {
			switch told, ok := parse(n.Payload); {
			case n.Channel != Channel:
			case ok:
				heard(told)
			case n.Payload == hello:
				greeted = true
			}
		})
		if err != nil {
			return err
		}
		defer func() {
			closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
			defer cancel()
			_ = conn.Close(closing)
		}()
		if _, err := conn.Exec(soon, "LISTEN "+Channel); err != nil {
			return err // a standby refuses LISTEN, for example
		}
		// Another connection sends it, as other processes do.
		err = pg.Query(soon, db, false, "SELECT pg_catalog.pg_notify($1::pg_catalog.text, $2::pg_catalog.text)",
			[]any{Channel, hello}, []any{nil}, func() error { return nil })
		for err == nil && !greeted {
			err = conn.PgConn().WaitForNotification(soon)
		}
		if err != nil {
			return errors.Join(ErrDeaf, err)
		}
		for ready(); err == nil; {
			err = conn.PgConn().WaitForNotification(ctx)
		}
		return err
	}
}

// parse reads a notification.
func parse(payload string) (Told, bool) {
	id, text, _ := strings.Cut(payload, " ")
	fence, err := strconv.ParseInt(text, 10, 64)
	return Told{ID: id, Fence: fence}, err == nil
}
