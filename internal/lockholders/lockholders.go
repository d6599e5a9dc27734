// Package lockholders tells who holds the lock that a session waits for, so that no command waits in silence. It prints
// no statements, because they may contain keys.
package lockholders

import (
	"context"
	_ "embed"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// every is the wait before the first message, and the time between the next messages.
const every = time.Second

// Migrations is the advisory lock of the migrations: "ratelimt" in ASCII. goose's default, 4097083626, fits into 32
// bits, and so do the ids of tools that hash with CRC-32. So an application's own migrations never wait for ours.
const Migrations int64 = 0x726174656c696d74

//go:embed holders.sql
var holdersSQL string

// Holder is a session or a prepared transaction that holds a lock.
type Holder struct {
	PID         int32
	Prepared    string // the name of a prepared transaction; empty for a session
	Application string
	State       string // empty if this role may not see it
	// the beginning of its transaction, or else of its idle time; nil if this role may not see it
	Since *time.Time
}

// Name is the holder's name in a sentence.
func (h Holder) Name() string {
	if h.Prepared != "" {
		return "prepared transaction " + strconv.QuoteToGraphic(h.Prepared)
	}
	return fmt.Sprintf("process %d", h.PID)
}

func (h Holder) String() string {
	var about []string
	if h.Prepared == "" {
		application := "no application_name"
		if h.Application != "" {
			application = "application " + strconv.QuoteToGraphic(h.Application)
		}
		about = append(about, application)
		if h.State != "" {
			about = append(about, h.State)
		}
	}
	since := "since when only members of pg_read_all_stats see"
	if h.Since != nil {
		since = "since " + h.Since.UTC().Format("2006-01-02 15:04:05Z")
	}
	return h.Name() + " (" + strings.Join(append(about, since), ", ") + ")"
}

// End is the statement that ends the holder's session or transaction.
func (h Holder) End() string {
	if h.Prepared != "" {
		return "ROLLBACK PREPARED '" + strings.ReplaceAll(h.Prepared, "'", "''") + "'"
	}
	return fmt.Sprintf("SELECT pg_terminate_backend(%d)", h.PID)
}

// Holders returns the sessions that a session waits for, and those that hold an advisory lock. A pid of 0 means no
// session, and nil means no advisory lock. Afterwards, the search_path of tx is pg_catalog.
func Holders(ctx context.Context, tx pgx.Tx, pid uint32, advisory *int64) ([]Holder, error) {
	// If Postgres estimates catalog queries as expensive, its JIT compiler would take seconds.
	for _, setting := range []string{"SET LOCAL search_path = pg_catalog, pg_temp", "SET LOCAL jit = off"} {
		if _, err := tx.Exec(ctx, setting); err != nil {
			return nil, err
		}
	}
	rows, err := tx.Query(ctx, holdersSQL, int64(pid), advisory)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[Holder])
}

// Text lists the holders, or is empty if there are none.
func Text(holders []Holder) string {
	texts := make([]string, len(holders))
	for i, holder := range holders {
		texts[i] = holder.String()
	}
	return strings.Join(texts, "; ")
}

type sayKey struct{}

// To returns a context in which Say and Watch pass their messages to the function say, one sentence each. If the
// context already has such a function, it stays. Without a function, Say and Watch log warnings to slog.Default().
func To(ctx context.Context, say func(sentence string)) context.Context {
	if ctx.Value(sayKey{}) != nil {
		return ctx
	}
	return context.WithValue(ctx, sayKey{}, say)
}

// Say reports who holds the lock that a session waits for.
func Say(ctx context.Context, holders []Holder) {
	ends := make([]string, len(holders))
	for i, holder := range holders {
		ends[i] = holder.End()
	}
	sentence := fmt.Sprintf("waiting for a lock of %s; if that does not end by itself, this ends it, and rolls back "+
		"what it has not committed: %s", Text(holders), strings.Join(ends, "; "))
	if say, ok := ctx.Value(sayKey{}).(func(string)); ok {
		say(sentence)
		return
	}
	slog.Default().WarnContext(ctx, "ratelimit: "+sentence)
}

// Watch reports who holds the lock whenever the connection's session has waited for a second, until stop is called. It
// asks on another connection, which it opens when needed. If it cannot open a connection, it says nothing.
func Watch(ctx context.Context, conn *pgx.Conn, pid uint32) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	config := conn.Config()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		watch(ctx, config, pid)
	}()
	return func() {
		cancel()
		<-ended
	}
}

func watch(ctx context.Context, config *pgx.ConnConfig, pid uint32) {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	var other *pgx.Conn
	defer func() {
		if other != nil {
			_ = other.Close(context.WithoutCancel(ctx))
		}
	}()
	for said := ""; ; {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if other == nil || other.IsClosed() {
			// because there may be a pooler in between
			config.Tracer, config.DefaultQueryExecMode = nil, pgx.QueryExecModeExec
			var err error
			if other, err = pgx.ConnectConfig(ctx, config); err != nil {
				other = nil
				continue
			}
		}
		var holders []Holder
		err := pgx.BeginTxFunc(ctx, other, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) (err error) {
			holders, err = Holders(ctx, tx, pid, nil)
			return err
		})
		if text := Text(holders); err == nil && text != said {
			if said = text; text != "" {
				Say(ctx, holders)
			}
		}
	}
}
